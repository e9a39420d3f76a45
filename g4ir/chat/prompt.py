"""A rendered prompt, in which user content never becomes a control token, and its token ids.

A user who types `<turn|>` must not end the turn. Before rendering, a mark is inserted after every
`<` of user content: a character that does not occur in the conversation. Control strings without a
mark in the rendered text are the template's; the others are tokenised in two halves, so that they
never become one token. All other text is tokenised as if in one piece. (Not guarded: a tokenizer's
special tokens without `<`, which no chat format has, such as `[PAD]`.)
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from itertools import chain
from typing import Any

from g4ir.errors import InputError
from g4ir.spec.parts import CHAT_FORMATS

from . import special_tokens as control
from .messages import PARTS, Medium, Message, map_texts

#: replaces invalid UTF-8
REPLACEMENT = "\ufffd"
#: characters that take about 10 ms to tokenise
CHEAP = 1 << 16
#: candidates for the mark: ideographs so rare that no conversation contains all of them; printable,
#: so that Python's repr of a list keeps them
_MARKS = range(0x20000, 0x2A6D7)
_SHAPE = re.compile("<[^<>]*>")
Strings = frozenset[str] | tuple[str, ...]
#: characters that `guard` scans at a time
_BLOCK = 1 << 16


@dataclass(frozen=True)
class Piece:
    """Part of a text: one control token, or text between them."""

    text: str
    control: bool = False


def _pieces(text: str) -> list[Piece]:
    return [Piece(text)] if text else []


#: messages, tools, and options of a template
PromptInputs = tuple[Sequence[Message], Sequence[Any], Mapping[str, Any]]


def guard(inputs: PromptInputs, source: str) -> tuple[PromptInputs, str]:
    """Insert a mark after every `<` in the texts of the inputs; return them and the mark, a
    character that neither the inputs nor the template's source contain. InputError for lone
    surrogates, and if every candidate for the mark occurs."""
    seen = set(source)

    def look(text: str) -> str:
        if not text.isascii():  # in blocks, since `update` holds the GIL
            for start in range(0, len(text), _BLOCK):
                seen.update(text[start : start + _BLOCK])
        return text

    map_texts(inputs, look)
    if bad := next((c for c in seen if "\ud800" <= c <= "\udfff"), None):
        problem = f"a text has a lone surrogate (U+{ord(bad):04X})"
        raise InputError(f"{_locate(inputs, bad)}: {problem}; it is not valid UTF-8")
    mark = next((chr(c) for c in _MARKS if chr(c) not in seen), None)
    if mark is None:
        raise InputError("messages: the conversation has every rare ideograph; leave one out")
    marked: PromptInputs = map_texts(inputs, lambda text: text.replace("<", f"<{mark}"))
    return marked, mark


def _locate(inputs: PromptInputs, character: str) -> str:
    """Return the field of the request that contains a character."""
    messages, tools, options = inputs
    parts = [(f"messages[{i}]", message) for i, message in enumerate(messages)]
    parts += [(f"tools[{i}]", tool) for i, tool in enumerate(tools)]
    parts += [(f"chat_template_kwargs.{name}", {name: v}) for name, v in options.items()]
    for where, part in parts:
        if map_texts(part, lambda text: text.replace(character, "")) != part:
            return where
    return "messages"


@dataclass(frozen=True)
class Prompt:
    """A rendered conversation: `marked` has a mark after each `<` of user content; media in the
    order of their placeholders."""

    marked: str
    mark: str
    media: tuple[Medium, ...] = ()

    @property
    def text(self) -> str:
        """The rendered text, without marks."""
        return self.marked.replace(self.mark, "")

    @property
    def tail(self) -> str:
        """The text from the start of the last turn, or from the end token of the last tool result
        if that is later; it sets the initial state of a `Reader`."""
        start = max(0, *map(self.marked.rfind, (*control.TURNS, control.RESPONSE_END)))
        return self.marked[start:].replace(self.mark, "")

    def pieces(self, controls: Strings = control.CONTROLS) -> list[Piece]:
        """Split the text into the template's control tokens and the text between them."""
        out, start = list[Piece](), 0
        for at, end in [*find(self.marked, controls), (len(self.marked), None)]:
            out += _pieces(self.marked[start:at].replace(self.mark, ""))
            out += [Piece(self.marked[at:end], True)] if end else []
            start = end or at
        return out

    def check_media(self) -> None:
        """Raise InputError unless the template wrote one placeholder for each medium, in order."""
        expected = [m.kind for m in self.media]
        kinds = {holder: kind for kind, holder in control.PLACEHOLDERS.items()}
        written = [kinds[p.text] for p in self.pieces() if p.control and p.text in kinds]
        if written != expected:
            where = self.media[0].where if self.media else "messages"
            wrote, have = (", ".join(kinds) or "no media" for kinds in (written, expected))
            raise InputError(
                f"{where}: the chat template wrote placeholders for {wrote}, and the messages have "
                f"{have}; give media in messages of the user or of tools"
            )


def with_media(text: str, parts: Sequence[Message]) -> Any:
    """Return the content of a message with media: images and videos before the text, audio after
    it, as in training."""
    audio = [p for p in parts if PARTS[p["type"]] == "audio"]
    visual = [p for p in parts if PARTS[p["type"]] != "audio"]
    return [*visual, {"type": "text", "text": text}, *audio] if parts else text


@cache
def _pattern(strings: Strings) -> re.Pattern[str] | None:
    odd = sorted((s for s in strings if s and not _SHAPE.fullmatch(s)), key=len, reverse=True)
    # Many bracketed strings: match the brackets and look the string up, instead of a long
    # alternation.
    shapes = [_SHAPE.pattern] if len(odd) < len(strings) else []
    pattern = "|".join([*map(re.escape, odd), *shapes])
    return re.compile(pattern) if pattern else None


def find(text: str, strings: Strings) -> Iterator[tuple[int, int]]:
    """Yield (start, end) of the non-overlapping occurrences of strings in a text, in order."""
    pattern = _pattern(strings)
    matches = pattern.finditer(text) if pattern else ()
    return (match.span() for match in matches if match[0] in strings)


def text_ids(
    tokenizer: Any, texts: Sequence[str], special: bool = False, label: str = "messages"
) -> list[list[int]]:
    """Return the token ids of each text; `special`: with the special tokens that the tokenizer adds
    (BOS, for some also EOS). Unlike `encode`, `encode_batch_fast` releases the GIL: other threads
    run while a long text is tokenised. InputError, which begins with `label`, if it fails."""
    try:
        return [e.ids for e in tokenizer.encode_batch_fast([*texts], add_special_tokens=special)]
    except BaseException as e:  # a panic of the library is no Exception
        if not isinstance(e, Exception) and type(e).__name__ != "PanicException":
            raise
        raise InputError(f"{label}: tokenizer.json cannot tokenise a text: {e}") from e


class Vocabulary:
    """A tokenizer (library `tokenizers`) with the control tokens of chats. `chat_format` determines
    turn and end tokens; default: the first format whose turn tokens the tokenizer has."""

    def __init__(self, tokenizer: Any, chat_format: str | None = None) -> None:
        self.tokenizer = tokenizer
        #: id of a byte token -> its byte
        self.bytes: dict[int, int] = {}
        for byte in range(256):
            name = f"<0x{byte:02X}>"
            token = tokenizer.token_to_id(name)
            if token is not None and tokenizer.decode([token]) not in ("", name):
                self.bytes[token] = byte
        added = tokenizer.get_added_tokens_decoder().items()
        #: string -> id of each control token: the tokenizer's special tokens, and those of all chat
        #: formats even if not marked special; and the inverse
        chats = set(control.CONTROLS)
        self.controls = {t.content: i for i, t in added if t.special or t.content in chats}
        self.strings = {i: text for text, i in self.controls.items()}
        if chat_format:
            chat_format = control.find_format(chat_format, "".join(self.controls))
        rows = [CHAT_FORMATS[chat_format]] if chat_format else [*CHAT_FORMATS.values()]
        row = next((row for row in rows if self.controls.keys() >= {*row["turn"]}), None)
        #: string that begins a turn; None: the tokenizer has no chat turns
        self.turn: str | None = row["turn"][0] if row else None
        if chat_format:  # the full format's names of tool-call tokens -> ids of this format's
            named = control.aliases(rows[0]).items()
            self.controls |= {full: self.controls[a] for full, a in named if a in self.controls}
        self._names = frozenset(self.controls)
        ends = (self.controls.get(text) for text in (row or rows[0])["ends"])
        #: ids that end an answer
        self.ends = frozenset(i for i in ends if i is not None)
        self._alone: dict[int, str] = {}

    def alone(self, token: int) -> str:
        """Return the text of a single token without context; "" for special tokens."""
        if (text := self._alone.get(token)) is None:
            text = self._alone[token] = self.tokenizer.decode([token])
        return text

    @cached_property
    def longest(self) -> int:
        """Number of characters of the longest token."""
        return max(map(len, self.tokenizer.get_vocab()), default=1)

    def check_length(self, characters: int, limit: int, label: str, cheap: int = CHEAP) -> None:
        """Raise InputError if a text with this number of characters exceeds `limit` tokens even if
        each token is as long as the longest. Texts of up to `cheap` characters pass: tokenising
        them costs little. `label`: begins the message."""
        if characters > cheap and characters > (limit + 1) * self.longest:
            excess = f"{characters} characters do not fit the context of {limit} tokens"
            longest = f"even if each token were as long as the longest ({self.longest} characters)"
            raise InputError(f"{label}: {excess}, {longest}; shorten it")

    @property
    def chats(self) -> bool:
        """Whether the tokenizer has chat turns."""
        return self.turn is not None

    def marks(self, tokens: Sequence[int], system: bool) -> tuple[int, ...]:
        """Return the token indices at which the prefix cache stores a prompt, since other prompts
        are likely to diverge there: after the system turn, if `system`, and at the start of the
        last turn (the answer's)."""
        turn = self.controls.get(self.turn or "")
        turns = [i for i, token in enumerate(tokens) if token == turn]
        return tuple(dict.fromkeys([*turns[1:2] * (system and len(turns) > 2), *turns[-1:]]))

    def encode(self, prompt: Prompt, media: Iterable[Iterable[int | str]] = ()) -> list[int]:
        """Return the token ids of a prompt; no BOS is added.

        `media` are the expansions of the placeholders, in order: ids, and texts, which are
        tokenised with the text around them. A placeholder without expansion stays one token.
        """
        texts, ids, remaining = [""], list[int](), iter(media)  # texts between ids
        for piece in prompt.pieces(self._names):
            parts: Iterable[int | str] = [piece.text]
            if piece.control:
                parts = [self.controls[piece.text]]
                if piece.text in control.PLACEHOLDERS.values():
                    parts = next(remaining, parts)
            for part in parts:
                if isinstance(part, str):
                    texts[-1] += part
                else:
                    ids.append(part)
                    texts.append("")
        first, *after = self._plain(texts)
        return [*first, *chain.from_iterable([i, *more] for i, more in zip(ids, after))]

    def plain(self, text: str) -> list[int]:
        """Tokenise user text: no part of it becomes a control token."""
        return self._plain([text])[0]

    def _plain(self, texts: Iterable[str]) -> list[list[int]]:
        splits = [self._split(text) for text in texts]
        tokenised = iter(text_ids(self.tokenizer, [*chain(*splits)]))
        out = [[i for _ in parts for i in next(tokenised)] for parts in splits]
        wrong = self.strings.keys() - {self.controls.get(control.UNKNOWN)}
        if bad := next((self.strings[i] for i in chain(*out) if i in wrong), None):
            fault = f"encodes a text without {bad} as that token; correct the file"
            raise InputError(f"messages: the engine's tokenizer.json {fault}")
        return out

    def _split(self, text: str) -> list[str]:
        cuts = [at + 1 for at, _ in find(text, self._names)]
        return [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)]) if a < b]

    def decode(self, ids: Iterable[int]) -> str:
        """Return the text without special tokens.

        Byte tokens are decoded here as UTF-8: one that begins or continues no character becomes
        U+FFFD and leaves its neighbours as they are, whereas the library replaces the whole run.
        """
        ids = list(ids)
        text: str = self.tokenizer.decode(ids)
        if REPLACEMENT not in text or self.bytes.keys().isdisjoint(ids):
            return text
        stream = TextStream(self)
        return "".join([*map(stream.push, ids), stream.flush()])


class TextStream:
    """Token ids in, text out as soon as it is final; the pieces concatenate to `decode(ids)`.

    A token's text may depend on the token before it, so a piece is the difference of two
    decodings, with the last piece's tokens as context. Special tokens do not end a character.
    """

    def __init__(self, vocabulary: Vocabulary) -> None:
        self.vocabulary = vocabulary
        self._text = vocabulary.tokenizer.decode
        self._ids: list[int] = []  # the last piece's tokens, then those not yet final
        self._context_size = 0  # how many of them are the last piece's
        self._bytes = b""  # bytes of an incomplete character

    @property
    def cut(self) -> bool:
        """Whether the last byte tokens are an incomplete UTF-8 character."""
        return bool(self._bytes)

    def push(self, token: int) -> str:
        """Return the text that becomes final with this token."""
        byte = self.vocabulary.bytes.get(token)
        if byte is not None:
            return self._byte(token, byte)
        if not self.vocabulary.alone(token):  # special token
            self._ids += [] if self._bytes else [token]
            return ""
        wrong = self._wrong()
        self._ids.append(token)
        # A token that contains U+FFFD itself is not an incomplete character.
        name = self.vocabulary.tokenizer.id_to_token(token) or ""
        return wrong + self._piece(ends=REPLACEMENT in name)

    def _byte(self, token: int, byte: int) -> str:
        self._bytes += bytes([byte])
        self._ids.append(token)
        state = _utf8(self._bytes)
        if state is None:
            return ""
        if state:
            self._bytes = b""
            return self._piece()
        if len(self._bytes) == 1:
            return self._wrong()
        self._bytes, last = self._bytes[:-1], self._ids.pop()
        return self._wrong() + self._byte(last, byte)

    def _wrong(self) -> str:
        """Drop the bytes of an incomplete character; return U+FFFD for it, "" if there is none."""
        if not self._bytes:
            return ""
        self._ids = self._ids[: -len(self._bytes)]
        self._bytes = b""
        return REPLACEMENT

    def flush(self) -> str:
        """Return the buffered text, at the end or before a control token."""
        wrong = self._wrong()
        return (self._piece() if len(self._ids) > self._context_size else "") + wrong

    def _piece(self, ends: bool = True) -> str:
        """Return the text after the last piece. Unless `ends` (the text is known to end with a
        whole character, or no token follows), return "" if it may end within a character, as tokens
        of byte-level vocabularies can."""
        context = self._ids[: self._context_size]
        before = self.vocabulary.alone(context[0]) if len(context) == 1 else self._text(context)
        piece: str = self._text(self._ids)[len(before) :]
        if not ends and piece.endswith(REPLACEMENT):
            return ""
        if piece:
            self._ids = self._ids[self._context_size :]
            self._context_size = len(self._ids)
        return piece


def _utf8(raw: bytes) -> bool | None:
    """Whether the bytes are one UTF-8 character; None: an incomplete one."""
    try:
        raw.decode()
    except UnicodeDecodeError as e:
        return None if e.reason == "unexpected end of data" else False
    return True


class TokenStream:
    """Token ids in, pieces out: control tokens as such, other text as soon as it is certain, never
    part of a character."""

    def __init__(self, vocabulary: Vocabulary, spelled: bool = False) -> None:
        self.vocabulary = vocabulary
        self._text = TextStream(vocabulary)
        #: whether `length` and `start` also count the characters of control tokens
        self._spelled = spelled
        #: number of characters returned so far, and offset of the last token's first character;
        #: byte tokens of one character all have its offset
        self.length = self.start = 0

    def push(self, token: int) -> list[Piece]:
        """Return the pieces that this token completes."""
        before, cut = self.length, self._text.cut
        name = self.vocabulary.strings.get(token)
        if name is None:
            pieces = _pieces(self._text.push(token))
        else:
            pieces = [*self.flush(), Piece(name, True)]
        self.length += sum(len(p.text) for p in pieces if self._spelled or not p.control)
        new = self.length - before
        if name is None and token in self.vocabulary.bytes:
            self.start = self.length - (not self._text.cut) if new else before
        else:  # after an incomplete character, which becomes U+FFFD, if there is one
            self.start = before + min(cut, new)
        return pieces

    def flush(self) -> list[Piece]:
        """Return the buffered text as pieces, at the end."""
        return _pieces(self._text.flush())


def spelled(vocabulary: Vocabulary, ids: list[int]) -> str:
    """Return the text of token ids with control tokens spelled out."""
    decode = vocabulary.tokenizer.decode_batch  # releases the GIL
    text: str = decode([ids], skip_special_tokens=False)[0]
    if REPLACEMENT not in text:
        return text
    stream = TokenStream(vocabulary)
    pieces = [*chain.from_iterable(map(stream.push, ids)), *stream.flush()]
    return "".join(p.text for p in pieces)


class ReasoningBudget:
    """Forces the end of reasoning after `limit` tokens, counted over the full answer.

        budget = ReasoningBudget(vocabulary, 512, inside=reader.thinking)
        token = budget.forced()                 # what must come next, or None: the model is free
        budget.push(token)                      # what came next

    Forces a newline, if there is reasoning and it does not end with one, and the token that closes
    the channel; up to 4 tokens after the limit if the last token is a byte of a character.
    """

    def __init__(self, vocabulary: Vocabulary, limit: int, inside: bool = False) -> None:
        if limit < 0:
            raise InputError(f"thinking budget {limit}: expected 0 or more tokens")
        self.limit, self.used, self.inside = limit, 0, inside
        channel = (control.CHANNEL, control.CHANNEL_END)
        if absent := [text for text in channel if text not in vocabulary.controls]:
            why = "reasoning cannot have a budget; leave it out"
            raise InputError(f"the tokenizer has no {absent[0]}: {why}")
        self._open, self._close = (vocabulary.controls[text] for text in channel)
        newline = vocabulary.plain("\n")
        self._newline = newline[0] if len(newline) == 1 else None
        self._bytes, self._last = vocabulary.bytes, -1

    def push(self, token: int) -> None:
        """Record a token of the answer, forced or not."""
        if token in (self._open, self._close):
            self.inside = token == self._open
        elif self.inside:
            self.used += 1
        self._last = token

    def forced(self) -> int | None:
        """Return the token to force next; None if the model may choose."""
        if not self.inside or self.used < self.limit:
            return None
        cut = self._bytes.get(self._last, 0) >= 0x80  # a byte of a character that may be incomplete
        if cut and self.used < self.limit + 4:  # a character has at most four bytes
            return None
        # No newline if reasoning has just begun or already ends with one.
        needs_newline = self._last not in (-1, self._open, self._newline)
        return self._newline if needs_newline and self._newline is not None else self._close
