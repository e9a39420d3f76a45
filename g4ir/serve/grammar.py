"""Grammar-constrained decoding: logits masks, by llguidance."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from importlib.util import find_spec
from typing import Any

import numpy as np

from g4ir.chat import Vocabulary
from g4ir.chat.special_tokens import CALL, CALL_END, CHANNEL, CHANNEL_END
from g4ir.errors import InputError

from .http_errors import Refused, bad
from .json_schema import llguidance, read_schema
from .request_schema import CHOICE, GRAMMAR, JSON, REGEX, Constraint
from .tool_grammar import Called, grammar_of

#: maximum characters: LARGEST of a schema, a regular expression or all choices, MAX_GBNF of a
#: request's own grammar, MAX_GRAMMAR of any grammar as llguidance gets it
LARGEST, MAX_GBNF, MAX_GRAMMAR = 1 << 16, 1 << 14, 1 << 20
#: limits of llguidance's Earley parser: items in a row (Earley set), and items per mask; 1,500
#: optional properties take 6,000 items in a row
MAX_ITEMS, MAX_STEP_ITEMS = 1 << 13, 1 << 20


class _Tokenizer:
    """The bytes of all tokens, as llguidance's tokenizer interface: llguidance's own parser of
    tokenizer.json takes three times as long. Control tokens are special: text of a grammar that
    spells one neither matches it nor is tokenised to it."""

    is_tokenizer_wrapper, bos_token_id = True, None

    def __init__(self, vocabulary: Vocabulary, size: int, end: int) -> None:
        self._vocabulary, self.eos_token_id = vocabulary, end
        ids = [[i] for i in range(size)]
        texts = vocabulary.tokenizer.decode_batch(ids, skip_special_tokens=False)
        self.tokens = [text.encode() for text in texts]
        for token, byte in vocabulary.bytes.items():
            self.tokens[token] = bytes([byte])
        self.special_token_ids = [i for i in vocabulary.strings if i < size]

    def __call__(self, text: str) -> list[int]:
        return self._vocabulary.plain(text)  # llguidance tokenises forced text by this


class Grammars:
    """Compiles grammars to logits masks for one tokenizer. `size`: of the vocabulary; `ends`: ids
    of the tokens that end an answer."""

    def __init__(self, vocabulary: Vocabulary, size: int, ends: Sequence[int]) -> None:
        self.vocabulary, self.size, self.ends = vocabulary, size, [*ends]
        self._lock = threading.Lock()

    @cached_property
    def _tables(self) -> Any:
        tokenizer = _Tokenizer(self.vocabulary, self.size, self.ends[0])
        return llguidance().LLTokenizer(tokenizer, n_vocab=self.size, eos_token=self.ends)

    def prepare(self) -> None:
        """Build the token tables before requests arrive: it takes seconds and holds the GIL. Does
        nothing without llguidance; constrained requests are refused then."""
        if find_spec("llguidance"):
            with self._lock:
                self._tables  # noqa: B018

    def text(self, c: Constraint, thinking: bool, inside: bool) -> FullMask:
        """Return the mask for an answer with constrained text. `thinking`: it may begin with
        reasoning; `inside`: the prompt ends within reasoning. Refused if llguidance does not
        support the constraint."""
        return self._masked(self._grammar(c), c.field, thinking, inside)

    def calls(
        self,
        functions: Sequence[Called],
        thinking: bool,
        inside: bool,
        *,
        many: bool,
        content: Constraint | None = None,
    ) -> FullMask:
        """Return the mask for an answer that is one call of these functions, or with `many` one or
        more. With `content` (a JSON schema) the answer may also be JSON of that schema."""
        named = None if content is None else self._schema(content)
        text = grammar_of(functions, self.vocabulary.controls, many=many, content=named)
        return self._masked(text, "tools", thinking, inside)

    def some_calls(self, functions: Sequence[Called]) -> LazyMask:
        """Return the mask that constrains only the tool calls of an answer."""
        controls = self.vocabulary.controls
        text = grammar_of(functions, controls, many=False)
        matcher, ends = self._matcher(text, "tools"), controls[CALL_END]
        return LazyMask(matcher, "tools", begins=controls[CALL], ends=ends)

    def _grammar(self, c: Constraint) -> str:
        library = llguidance()
        if c.kind == JSON:
            return str(library.LLMatcher.grammar_from_json_schema(self._schema(c)))
        texts = c.value if c.kind == CHOICE else [c.value]
        limit = MAX_GBNF if c.kind == GRAMMAR else LARGEST
        if sum(map(len, texts)) > limit:
            raise bad(c.field, f"has more than {limit} characters")
        if c.kind == CHOICE:
            return "start: " + " | ".join(json.dumps(t, ensure_ascii=False) for t in texts)
        if c.kind == REGEX:  # the full text is matched, so outer anchors are redundant
            pattern = re.sub(r"(?<!\\)((?:\\\\)*)\$$", r"\1", c.value.removeprefix("^"))
            return str(library.LLMatcher.grammar_from_regex(pattern))
        try:
            return str(library.grammar_from("grammar", c.value))
        except (ValueError, RecursionError) as e:
            raise bad(c.field, f"is no grammar in Lark or GBNF: {str(e)[:200]}") from None

    def _schema(self, c: Constraint) -> str:
        """Return a constraint's schema as JSON text for llguidance; refused if it is too long or
        not supported."""
        if len(json.dumps(c.value)) > LARGEST:
            raise bad(c.field, f"the schema has more than {LARGEST} characters")

        def refuse(where: str, why: str) -> Refused:
            return bad(c.field, f"{where[:200]}: {why}")

        return json.dumps(read_schema(c.value, "schema", strict=c.strict, refuse=refuse))

    def _masked(self, grammar: str, field: str, thinking: bool, inside: bool) -> FullMask:
        controls = self.vocabulary.controls
        channel = controls.get(CHANNEL), controls.get(CHANNEL_END)
        reasoning = np.full(-(-self.size // 32), -1, np.int32)
        for i in {*controls.values(), *self.ends} - {channel[1]}:
            _set(reasoning, i, False)
        matcher = self._matcher(grammar, field)
        first = words_of(matcher)
        return FullMask(matcher, field, inside, channel, reasoning, thinking, first)

    def _matcher(self, grammar: str, field: str) -> Any:
        """Compile a grammar to a matcher; refused if it is invalid, or exceeds llguidance's limits
        before the first token."""
        library = llguidance()
        if len(grammar) > MAX_GRAMMAR:
            raise bad(field, f"needs a grammar of more than {MAX_GRAMMAR} characters; simplify it")
        with self._lock:
            tables = self._tables
        limits = library.LLParserLimits(max_items_in_row=MAX_ITEMS, step_max_items=MAX_STEP_ITEMS)
        matcher = library.LLMatcher(tables, grammar, log_level=0, limits=limits)
        matcher.compute_bitmask()  # some errors appear only here
        if error := matcher.get_error():
            reason = f"is not supported: {_short_error(error)}"
            raise bad(field, "matches no text" if "NoExtensionBias" in error else reason)
        return matcher


@dataclass
class Mask:
    """Logits mask of one answer. `initial`: matcher at the start of its grammar, copied for use;
    `named`: the request's field with the constraint, for errors; `inside`: whether the answer is
    within its reasoning."""

    initial: Any
    named: str
    inside: bool = False
    #: state of the grammar; None before its first token and after its end
    matcher: Any = field(default=None, init=False)
    #: tokens of the answer that the mask has read
    read: int = field(default=0, init=False)

    def mask(self, generated: Sequence[int]) -> Any:
        """Return the mask of the next token after `generated`, all tokens of the answer so far:
        int32 [ceil(vocab / 32)], a bit per token, 1: allowed; None: all are allowed. InputError if
        llguidance fails, as at its limits."""
        for token in generated[self.read :]:
            self._read(token)
        self.read = len(generated)
        return self._words()

    def _read(self, token: int) -> None:
        raise NotImplementedError

    def _words(self) -> Any:
        if self.matcher is None:
            return None
        words = words_of(self.matcher)
        if error := self.matcher.get_error():  # after an error the mask allows only the end
            after = f"after {self.read} tokens"
            raise InputError(f"{self.named}: the grammar fails {after}: {_short_error(error)}")
        return words

    def _start(self) -> None:
        self.matcher = self.matcher or self.initial.deep_copy()


@dataclass
class FullMask(Mask):
    """Constrains all of an answer but its reasoning, which is free text. `channel`: ids of the
    tokens that begin and end reasoning; `reasoning`: mask within it; `thinking`: whether an answer
    may begin with it."""

    channel: tuple[int | None, int | None] = (None, None)
    reasoning: Any = None
    thinking: bool = False
    #: mask of the first token, computed in advance so that the scheduler does not wait
    first: Any = None

    def _read(self, token: int) -> None:
        begins, ends = self.channel
        if self.inside:
            self.inside = token != ends
            if not self.inside:
                self._start()
        elif token == begins and not self.matcher:
            self.inside = True
        else:
            self._start()
            self.matcher.consume_token(token)

    def _words(self) -> Any:
        if self.inside:
            return self.reasoning
        words = super()._words() if self.matcher else self.first.copy()
        if self.thinking and not self.matcher and self.channel[0] is not None:
            _set(words, self.channel[0], True)
        return words


@dataclass
class LazyMask(Mask):
    """Constrains only tool calls, each from its first token (`begins`) to its last (`ends`)."""

    begins: int = -1
    ends: int = -1

    def _read(self, token: int) -> None:
        if token == self.begins:
            self._start()
        if self.matcher:
            self.matcher.consume_token(token)
        if token == self.ends:
            self.matcher = None


def words_of(matcher: Any) -> Any:
    """Return a matcher's mask of the next token: int32 [ceil(vocab / 32)], a bit per token."""
    return np.frombuffer(matcher.compute_bitmask(), np.int32).copy()


def _short_error(error: str) -> str:
    """Return llguidance's error message without its dump of the parser state."""
    return " ".join(re.split("<state>|<backtrace>|; consider", error)[0].split())[:300]


def _set(words: Any, token: int, value: bool) -> None:
    view, one = words.view(np.uint32), np.uint32(1 << token % 32)
    view[token // 32] = view[token // 32] | one if value else view[token // 32] & ~one
