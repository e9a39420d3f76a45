"""Requests: what to generate, from flags or from JSON lines, answered one after another.

One row of the engine is in use at a time. What a prompt shares with the tokens that the row still
holds is not computed again (`cached_tokens`): a conversation sent whole each turn costs its new
part only, as far as the rings of sliding layers allow, and up to its first soft token: equal
placeholders do not mean equal media, so those are always computed.

JSON lines are read one by one and answered as they come, and so are files of images, videos and
sounds, so that a long list of requests needs the memory of one: what is wrong in a request is its
own error, and others are answered.

Each setting comes from the first that names it: the request, the flags, the checkpoint's
generation_config.json, the default (greedy). Stop ids add up: those of the request or the flags
and those of the checkpoint.
"""

from __future__ import annotations

import json
import re
import secrets
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, ClassVar

from .errors import G4Error, InputError
from .media import prompt as prompts
from .media.audio import CUT, REFUSE
from .media.choice import (
    AUDIO,
    IMAGE,
    LISTS,
    VIDEO,
    check_budget,
    check_taken,
    check_there,
    placeholders,
)
from .media.soft import Soft, counts
from .sampling import Sampler, Sampling, checked_ids, checked_prompt
from .tensorfile import parse_json
from .units import size_text

if TYPE_CHECKING:
    import torch

    from .engine import Engine

MAX_NEW_TOKENS = 64
#: bytes of one JSON line (eight times a full prompt of the longest context), and of all of them
LINE_BYTES, INPUT_BYTES = 1 << 24, 1 << 36
RAW = "the checkpoint has a chat template; the prompt is taken raw, without the marks of turns"
_BYTE = re.compile(r"<0x[0-9A-F]{2}>")
Told = Callable[[int], None]


def _whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _number(value: Any) -> bool:
    return _whole(value) or isinstance(value, float)


def _ids(value: Any) -> bool:
    return isinstance(value, list) and all(map(_whole, value))


def _text(value: Any) -> bool:
    return isinstance(value, str)


def _paths(value: Any) -> bool:
    return isinstance(value, list) and all(map(_text, value))


#: field of a JSON line -> test of its value, and what is expected
FIELDS: dict[str, tuple[Callable[[Any], bool], str]] = {
    "id": (lambda v: _whole(v) or _text(v), "a string or a whole number"),
    "prompt": (_text, "a string"),
    "tokens": (_ids, "a list of token ids"),
    "max_new_tokens": (_whole, "a whole number"),
    "temperature": (_number, "a number"),
    "top_k": (_whole, "a whole number"),
    "top_p": (_number, "a number"),
    "seed": (_whole, "a whole number"),
    "stop": (_ids, "a list of token ids"),
    "images": (_paths, "a list of paths"),
    "videos": (_paths, "a list of paths"),
    "audio": (_paths, "a list of paths"),
    "image_budget": (_whole, "a whole number"),
    "frames": (_whole, "a whole number"),
    "audio_too_long": (lambda v: v in (CUT, REFUSE), f"{CUT} or {REFUSE}"),
}

#: kind -> (setting, what `Engine.encode` calls it)
MEDIA_SETTINGS = {
    IMAGE: ("image_budget", "budget"), VIDEO: ("frames", "frames"),
    AUDIO: ("audio_too_long", "too_long"),
}  # fmt: skip
#: stands in what a row holds for a soft token: no prompt shares it
_SOFT = -1


@dataclass(frozen=True)
class Medium:
    """A file of a request. `settings` are keywords of `Engine.encode`, `where` is for messages."""

    kind: str
    path: str
    settings: Mapping[str, Any]
    where: str


@dataclass(frozen=True)
class Unread:
    """A request whose media are yet to be read."""

    fields: Mapping[str, Any]
    where: str
    media: tuple[Medium, ...]


@dataclass(frozen=True)
class Request:
    """A checked request. A row ends with one of `stop`, or after `max_new_tokens`. While there
    are media `unread`, its tokens lack what those add."""

    id: int | str | None
    tokens: tuple[int, ...]
    max_new_tokens: int
    sampling: Sampling
    stop: frozenset[int]
    soft: tuple[Soft, ...] = ()
    notes: tuple[str, ...] = ()
    unread: Unread | None = None


@dataclass(frozen=True)
class Failure:
    """What is said of a request in the place of an answer; `line` is its number in the input."""

    id: int | str | None
    error: str
    line: int | None = None
    failed: ClassVar[bool] = True

    def output(self) -> dict[str, Any]:
        """What stdout gets."""
        line = {"line": self.line} if self.line is not None else {}
        return {"id": self.id, **line, "error": self.error}

    def log(self) -> dict[str, Any]:
        """What the log gets."""
        return {"event": "error", **self.output()}


@dataclass(frozen=True)
class Result:
    """An answer and its timing, seconds."""

    failed: ClassVar[bool] = False
    id: int | str | None
    tokens: tuple[int, ...]
    text: str | None
    finish_reason: str  # stop or length
    prompt_tokens: int
    cached_tokens: int
    first_token_s: float
    total_s: float
    soft_tokens: Mapping[str, int] = field(default_factory=dict)  # by kind of media
    encode_s: float = 0.0  # part of first_token_s: reading media, and the towers
    notes: tuple[str, ...] = ()
    seed: int | None = None  # of the draws, where there were any

    def output(self) -> dict[str, Any]:
        """What stdout gets: id where there is one, tokens, text where there is a tokenizer."""
        named = {"id": self.id} if self.id is not None else {}
        text = {"text": self.text} if self.text is not None else {}
        return {**named, "tokens": list(self.tokens), **text, "finish_reason": self.finish_reason}

    def log(self) -> dict[str, Any]:
        """What the log gets; no text of the prompt or the answer.

        tokens_per_second counts the tokens after the first, over the time they took; soft_tokens
        and encode_s come with media, seed where tokens were drawn, notes where there are any.
        """
        media = {"soft_tokens": dict(self.soft_tokens), "encode_s": round(self.encode_s, 6)}
        return {
            "event": "request",
            "id": self.id,
            "prompt_tokens": self.prompt_tokens,
            "cached_tokens": self.cached_tokens,
            "new_tokens": len(self.tokens),
            "time_to_first_token_s": round(self.first_token_s, 6),
            "tokens_per_second": self.tokens_per_second,
            "total_s": round(self.total_s, 6),
            "finish_reason": self.finish_reason,
            **(media if self.soft_tokens else {}),
            **({"seed": self.seed} if self.seed is not None else {}),
            **({"notes": list(self.notes)} if self.notes else {}),
        }

    @property
    def tokens_per_second(self) -> float | None:
        """None where there was one token only."""
        rest, seconds = len(self.tokens) - 1, self.total_s - self.first_token_s
        return round(rest / seconds, 3) if rest and seconds > 0 else None


# --- reading ----------------------------------------------------------------------------------


def read_lines(stream: BinaryIO) -> Iterator[tuple[int, bytes]]:
    """(number, bytes) of every line that is not blank, as soon as it is there. One of more than
    LINE_BYTES, or beyond INPUT_BYTES, is the last; `parse_line` refuses it."""
    total = 0
    for number in count(1):
        line = stream.readline(LINE_BYTES + 1)
        total += len(line)
        if number == 1:
            line = line.removeprefix(b"\xef\xbb\xbf")
        if total > INPUT_BYTES:
            line = line.ljust(LINE_BYTES + 1)
        if line.strip() or len(line) > LINE_BYTES:
            yield number, line
        if not line or len(line) > LINE_BYTES:
            return


def parse_line(line: bytes, where: str) -> dict[str, Any]:
    """The object of one line, whose fields are yet to be checked."""
    if len(line) > LINE_BYTES:
        raise InputError(f"{where}: a line of more than {size_text(LINE_BYTES)}, or input of more "
                         f"than {size_text(INPUT_BYTES)}; what follows is not read")  # fmt: skip
    try:
        value = json.loads(line.decode(), object_pairs_hook=_unique)
    except UnicodeDecodeError as e:
        raise InputError(f"{where}: not UTF-8 at byte {e.start}") from None
    except (ValueError, RecursionError) as e:
        raise InputError(f"{where}: no JSON: {e or 'too deep'}") from None
    if not isinstance(value, dict):
        raise InputError(f'{where}: expected an object such as {{"tokens": [2, 5]}}')
    return value


def checked_fields(value: Mapping[str, Any], where: str) -> dict[str, Any]:
    """The fields of a request; those that are null are left out."""
    for key, item in value.items():
        _check_field(key, item, where)
    fields = {k: v for k, v in value.items() if v is not None}
    if ("prompt" in fields) == ("tokens" in fields):
        raise InputError(f"{where}: give either prompt or tokens")
    return fields


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    out = dict(pairs)
    if len(out) < len(pairs):
        raise ValueError("a key is given twice")
    return out


def _check_field(key: str, value: Any, where: str) -> None:
    if key not in FIELDS:
        raise InputError(f"{where}: unknown field {key[:40]!r}; one of {', '.join(FIELDS)}")
    fits, expected = FIELDS[key]
    if value is not None and not fits(value):
        shown = json.dumps(value)
        raise InputError(f"{where}: {key}: expected {expected}, found {shown[:60]}")


def check_flags(flags: Mapping[str, Any]) -> None:
    """InputError for settings that no engine takes."""
    _sampling_of(Sampling(), flags)
    count = flags.get("max_new_tokens")
    if count is not None and count < 1:
        raise InputError(f"max_new_tokens {count}: expected at least 1")


def _sampling_of(base: Sampling, given: Mapping[str, Any]) -> Sampling:
    """`base` with what is given of temperature, top_k, top_p and seed."""
    names = ("temperature", "top_k", "top_p", "seed")
    found = {k: given[k] for k in names if given.get(k) is not None}
    if found.get("top_k") == 0:  # no limit, as in generation_config.json
        found["top_k"] = None
    return replace(base, **found)


# --- text -------------------------------------------------------------------------------------


class Codec:
    """The checkpoint's own tokenizer, as transformers would use it."""

    def __init__(self, engine: Engine) -> None:
        self.tokenizer = engine.tokenizer()
        config = _tokenizer_config(engine.path)
        self.bos, self.adds_bos = engine.spec.tokens.bos, config.get("add_bos_token") is True
        template = engine.path / "chat_template.jinja"
        #: whether the checkpoint has a chat template
        self.instructed = template.is_file() or bool(config.get("chat_template"))

    def encode(self, text: str, what: str) -> list[int]:
        """Token ids, special ones as tokenizer.json and its config add them; one that begins the
        text is not added again."""
        try:
            text.encode()
        except UnicodeEncodeError as e:
            raise InputError(f"{what}: not UTF-8 at character {e.start}") from None
        ids = self._ids(text, what, True)
        if self.bos is None:
            return ids
        if self.adds_bos and ids[:1] != [self.bos]:
            return [self.bos, *ids]
        return ids[1:] if ids[:2] == [self.bos] * 2 else ids

    def has_turns(self, ids: Sequence[int]) -> bool:
        """Whether there are special tokens behind the first, as a chat template would put."""
        special = {i for i, t in self.tokenizer.get_added_tokens_decoder().items() if t.special}
        return not special.isdisjoint(ids[1:])

    def plain(self, text: str) -> list[int]:
        """Token ids of a part of a text, nothing added."""
        return self._ids(text, "a part of the prompt", False)

    def _ids(self, text: str, what: str, special: bool) -> list[int]:
        try:
            ids: list[int] = self.tokenizer.encode(text, add_special_tokens=special).ids
        except BaseException as e:
            # What the library's own code stumbles over is no Exception.
            if not isinstance(e, Exception) and type(e).__name__ != "PanicException":
                raise
            raise InputError(f"{what}: tokenizer.json does not take this text: {e}") from e
        return ids

    def spell(self, token: int) -> str:
        """The string of a special token, which encodes to it alone."""
        text: str | None = self.tokenizer.id_to_token(token)
        if not text or self.plain(text) != [token]:
            raise InputError(f"the engine's tokenizer.json has no special token {token}, which "
                             f"text with media needs: give token ids")  # fmt: skip
        return text

    def decode(self, ids: list[int]) -> str:
        """Text without special tokens."""
        text: str = self.tokenizer.decode(ids)
        return text

    def is_byte(self, token: int) -> bool:
        """Whether a token stands for one byte of a character that has no token."""
        return _BYTE.fullmatch(self.tokenizer.id_to_token(token) or "") is not None


def _tokenizer_config(folder: Path) -> dict[str, Any]:
    """What tokenizer_config.json says, nothing where there is none."""
    path = folder / "tokenizer_config.json"
    return parse_json(path, path.read_bytes()) if path.is_file() else {}


class TextStream:
    """Token ids in, text out as soon as it is certain; together it is the text of all ids.

    A character may be spread over several tokens, and how a token reads may depend on the one
    before it: a piece is the difference of two decodings from the last piece on. Byte tokens wait
    for the end of their run, which special tokens do not end, because one that is wrong makes all
    of it unreadable.
    """

    def __init__(self, codec: Codec) -> None:
        self.codec = codec
        self._ids: list[int] = []  # the last piece's tokens, then those not yet shown
        self._known = 0  # how many of them are the last piece's

    def push(self, token: int) -> str:
        """The text that this token completes, or nothing yet."""
        self._ids.append(token)
        if self.codec.is_byte(token) or not self.codec.decode([token]):  # a special one
            return ""
        piece = self._piece()
        if not piece or piece.endswith("\ufffd"):  # an incomplete character decodes to U+FFFD
            return ""
        self._ids = self._ids[self._known :]
        self._known = len(self._ids)
        return piece

    def rest(self) -> str:
        """What was held back, at the end."""
        return self._piece() if len(self._ids) > self._known else ""

    def _piece(self) -> str:
        before = self.codec.decode(self._ids[: self._known])
        return self.codec.decode(self._ids)[len(before) :]


# --- answering --------------------------------------------------------------------------------


class Desk:
    """Checks requests against an engine, and answers them in one row of it."""

    def __init__(self, engine: Engine, flags: Mapping[str, Any] | None = None) -> None:
        """`flags` are settings, named as in FIELDS, for requests that do not give their own."""
        self.engine = engine
        self.flags = {k: v for k, v in (flags or {}).items() if v is not None}
        self.codec = Codec(engine) if (engine.path / "tokenizer.json").is_file() else None
        self.defaults, self.never = engine.defaults(), engine.suppressed()
        self.session = engine.session(1)
        self._held: list[int] = []
        self._sampling({})  # a wrong flag is no request's fault
        checked_ids(self.flags.get("stop", []), engine.spec.text.vocab_size, "stop")

    def request(
        self, fields: Mapping[str, Any], where: str, media: Sequence[tuple[str, str]] = ()
    ) -> Request:
        """A checked request out of fields as in FIELDS, with (kind, path) of more media;
        InputError begins with `where`. The media are read by `answer`."""
        flagged = [(k, p, f"--{k}") for k, p in media]
        named = [(k, p, f"{where}: {name}") for name, k in LISTS.items()
                 for p in fields.get(name, [])]  # fmt: skip
        files = tuple(self._medium(fields, *m) for m in (*flagged, *named))
        tokens, notes = self._tokens(fields, where, [m.kind for m in files])
        unread = Unread(fields, where, files) if files else None
        return replace(self._request(fields, where, tokens), notes=notes, unread=unread)

    def _medium(self, fields: Mapping[str, Any], kind: str, path: str, where: str) -> Medium:
        media = self.engine.media
        setting, keyword = MEDIA_SETTINGS[kind]
        value = self._setting(fields, setting)
        with named(where):
            check_taken(kind, media, self.engine.spec)
            if kind == IMAGE and value is not None:
                check_budget(value, media)
            check_there(kind, path)
        return Medium(kind, path, {} if value is None else {keyword: value}, where)

    def _request(self, fields: Mapping[str, Any], where: str, tokens: list[int]) -> Request:
        vocab, room = self.engine.spec.text.vocab_size, self.engine.limits.max_seq
        count = self._setting(fields, "max_new_tokens")
        if count is None:
            count = max(1, min(MAX_NEW_TOKENS, room + 1 - len(tokens)))
        stop = checked_ids(self._setting(fields, "stop") or [], vocab, f"{where}: stop")
        checked_prompt(tokens, count, vocab, room, f"{where}: prompt")
        with named(where):
            sampling = self._sampling(fields)
        return Request(
            fields.get("id"), tuple(tokens), count, sampling,
            frozenset([*stop, *self.engine.stop_ids()]),
        )  # fmt: skip

    def _tokens(
        self, fields: Mapping[str, Any], where: str, given: Sequence[str],
        soft: Sequence[Soft] = (),
    ) -> tuple[list[int], tuple[str, ...]]:  # fmt: skip
        """The ids of the prompt and notes; in text, media of the kinds `given` have a placeholder
        each, or the expansion of those that are read. InputError where the numbers cannot fit."""
        special, kinds = self.engine.spec.tokens, self.engine.media.kinds
        tokens, notes = fields.get("tokens"), list[str | None]()
        if tokens is None:
            codec = self._codec()
            text, note = self._text(fields, where, given)
            # What media are expanded to has special tokens, which are no turns.
            raw = codec.instructed and not codec.has_turns(codec.encode(fields["prompt"], where))
            notes += [note, RAW if raw else None]
            with named(where):
                text = prompts.expand_text(text, soft, special, codec.spell)
            tokens = codec.encode(text, where)
        with named(where):
            prompts.check_given(tokens, given, special, kinds)
        return tokens, tuple(n for n in notes if n)

    def _text(
        self, fields: Mapping[str, Any], where: str, given: Sequence[str]
    ) -> tuple[str, str | None]:
        """The text of the prompt with a placeholder for each medium, and a note."""
        codec, special = self._codec(), self.engine.spec.tokens
        bos = None if special.bos is None else codec.tokenizer.id_to_token(special.bos)
        with named(where):
            return prompts.mark(
                fields["prompt"], given, self.engine.media.kinds, special, codec.spell, bos
            )

    def _read(self, unread: Unread) -> Request:
        """The request with its media encoded, and a placeholder for each soft token."""
        fields, where, soft = unread.fields, unread.where, list[Soft]()
        for m in unread.media:
            with named(m.where):
                soft.append(self.engine.encode(m.kind, m.path, **m.settings))
        special, kinds = self.engine.spec.tokens, self.engine.media.kinds
        encode = self.codec.plain if self.codec else None
        tokens, notes = self._tokens(fields, where, [s.kind for s in soft], soft)
        with named(where):
            placed = prompts.place(tokens, soft, special, encode, kinds)
        untimed = not encode and prompts.times_left_out([tokens], [placed], special)
        notes += (prompts.NO_TIMES,) if untimed else ()
        return replace(self._request(fields, where, placed), soft=tuple(soft), notes=notes)

    def _codec(self) -> Codec:
        if self.codec is None:
            self.engine.tokenizer()  # says what is missing
        assert self.codec
        return self.codec

    def _setting(self, fields: Mapping[str, Any], name: str) -> Any:
        return fields.get(name, self.flags.get(name))

    def _sampling(self, fields: Mapping[str, Any]) -> Sampling:
        file = self.defaults
        base = Sampling(file.temperature or 0.0, file.top_k, file.top_p, None, self.never)
        return _sampling_of(base, {**self.flags, **fields})

    def answer(self, request: Request, told: Told = lambda token: None) -> Result:
        """Generate; `told(token)` sees each token as it is drawn. InputError, or MissingError, for
        media that cannot be read; CheckError where logits are NaN or infinite. The desk answers
        others then."""
        begun = time.perf_counter()
        if request.unread:
            request = self._read(request.unread)
        encode_s = time.perf_counter() - begun
        cached, logits = self._prefill(request)
        sampling = _seeded(request.sampling)
        sampler, out, first = Sampler(sampling), list[int](), 0.0
        for (token,), _ in self.session.stream(
            logits, request.max_new_tokens, sampler, request.stop
        ):
            first = first or time.perf_counter() - begun
            out.append(token)
            told(token)
        self._held += self._remembered(out[:-1])
        total = time.perf_counter() - begun
        return Result(
            request.id, tuple(out), self.codec.decode(out) if self.codec else None,
            "stop" if out[-1] in request.stop else "length",
            len(request.tokens), cached, first, total, counts(request.soft), encode_s,
            request.notes, sampling.seed,
        )  # fmt: skip

    def answer_lines(self, stream: BinaryIO, source: str) -> Iterator[Result | Failure]:
        """An answer to every JSON line, or what is wrong with it alone. A request without an id
        has the number of its line, and None where that cannot be read."""
        for number, line in read_lines(stream):
            where, name = f"{source}:{number}", None
            try:
                given = {"id": number, **parse_line(line, where)}
                name = given["id"] if FIELDS["id"][0](given["id"]) else None
                yield self.answer(self.request(checked_fields(given, where), where))
            except G4Error as e:
                yield Failure(name, str(e), number)

    def _prefill(self, request: Request) -> tuple[int, torch.Tensor]:
        """(tokens that the row held already, logits after the prompt)."""
        import torch

        tokens = request.tokens
        kept = self._keep(tokens)
        self._held = []  # unknown until the prefill is through
        logits = self.session.append(torch.tensor([tokens[kept:]]), soft=request.soft)
        self._held = self._remembered(tokens)
        return kept, logits

    def _remembered(self, tokens: Sequence[int]) -> list[int]:
        """Tokens that a later prompt may share: placeholders are none."""
        holders = {*placeholders(self.engine.spec.tokens, self.engine.media.kinds).values()}
        return [_SOFT if t in holders else t for t in tokens]

    def _keep(self, tokens: tuple[int, ...]) -> int:
        """Cut the row to what it shares with a prompt, the last token left to compute.

        That ends before the first soft token that the row holds (`_remembered`), so that none is
        reused and no block is cut.
        """
        pairs = zip(self._held, tokens[:-1])
        shared = next((i for i, (a, b) in enumerate(pairs) if a != b), None)
        if shared is None:
            shared = min(len(self._held), len(tokens) - 1)
        try:
            self.session.truncate(shared)
        except InputError:  # a ring has overwritten what the next token would see
            shared = 0
            self.session.reset()
        return shared


def _seeded(s: Sampling) -> Sampling:
    """With a seed where tokens are drawn, so that it can be told."""
    if s.temperature == 0:
        return replace(s, seed=None)
    return s if s.seed is not None else replace(s, seed=secrets.randbits(32))


@contextmanager
def named(where: str) -> Iterator[None]:
    """An InputError begins with `where`."""
    try:
        yield
    except InputError as e:
        raise InputError(f"{where}: {e}") from None
