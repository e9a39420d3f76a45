"""Holds answers to JSON and to calls: which tokens may follow, by llguidance."""

from __future__ import annotations

import json
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from importlib.util import find_spec
from typing import Any

import numpy as np

from g4ir.chat import Vocabulary
from g4ir.chat.control import CALL, CALL_END, CHANNEL, CHANNEL_END, CONTROLS
from g4ir.errors import MissingError

from .calls import Called, grammar_of, texts_of
from .refusals import bad

#: characters of a schema, and of a grammar
LARGEST, MOST_GRAMMAR = 1 << 16, 1 << 20


class Grammars:
    """Makes masks for one tokenizer, whose tables are made once. `ends` are
    the ids behind which an answer is over."""

    def __init__(self, vocabulary: Vocabulary, size: int, ends: Sequence[int]) -> None:
        self.vocabulary, self.size, self.ends = vocabulary, size, [*ends]
        self._lock = threading.Lock()

    @cached_property
    def _tables(self) -> Any:
        text = self.vocabulary.tokenizer.to_str()
        added = self.vocabulary.tokenizer.get_added_tokens_decoder().values()
        if any(t.content in CONTROLS and not t.special for t in added):
            held = json.loads(text)
            for token in held["added_tokens"]:  # never the characters of its text
                token["special"] |= token["content"] in CONTROLS
            text = json.dumps(held)
        return _llguidance().LLTokenizer(text, n_vocab=self.size, eos_token=self.ends)

    def prepare(self) -> None:
        """Make the tables, which takes seconds and holds the interpreter's lock, before requests
        come; without llguidance they are refused anyway."""
        if find_spec("llguidance"):
            with self._lock:
                self._tables  # noqa: B018

    def json(self, schema: Mapping[str, Any], thinking: bool, inside: bool) -> HeldMask:
        """Return what holds an answer to a schema. `thinking`: it may begin with a thought;
        `inside`: it begins in one. Refused where the schema is not one that can be held to."""
        text = json.dumps(self._spaced(schema))
        if len(text) > LARGEST:
            raise bad("response_format", f"the schema has more than {LARGEST} characters")
        grammar = _llguidance().LLMatcher.grammar_from_json_schema(text)
        return self._held(grammar, "response_format", thinking, inside)

    def calls(
        self,
        functions: Sequence[Called],
        thinking: bool,
        inside: bool,
        *,
        many: bool,
        content: Mapping[str, Any] | None = None,
    ) -> HeldMask:
        """Return what holds an answer to one call of these functions, or to `many`; or to JSON
        of a schema, where `content` is one."""
        named = None if content is None else self._spaced(content)
        text = grammar_of(functions, self.vocabulary.controls, many=many, content=named)
        return self._held(text, "tools", thinking, inside)

    def some_calls(self, functions: Sequence[Called]) -> LazyMask:
        """Return what holds each call of an answer, if there is one, and leaves the rest free."""
        controls = self.vocabulary.controls
        text = grammar_of(functions, controls, many=False)
        return LazyMask(self._matcher(text, "tools"), controls[CALL], controls[CALL_END])

    def _spaced(self, schema: Mapping[str, Any]) -> dict[str, Any]:
        """Return a schema whose JSON has at most one blank, or one new line, between two words.
        Refused with a text that llguidance would take for a control token."""
        controls = self.vocabulary.controls
        if found := next((c for t in texts_of(schema) for c in controls if c in t), None):
            raise bad("response_format", f"{found} in a text that is given cannot be held to")
        return {**schema, "x-guidance": {"whitespace_pattern": "( |\\n {0,24})"}}

    def _held(self, grammar: str, field: str, thinking: bool, inside: bool) -> HeldMask:
        controls = self.vocabulary.controls
        channel = controls.get(CHANNEL), controls.get(CHANNEL_END)
        thought = np.full(-(-self.size // 32), -1, np.int32)
        for i in {*controls.values(), *self.ends} - {channel[1]}:
            _set(thought, i, False)
        return HeldMask(self._matcher(grammar, field), channel, thought, thinking, inside)

    def _matcher(self, grammar: str, field: str) -> Any:
        """Return what follows a grammar; refused where it is none that can be followed."""
        library = _llguidance()
        if len(grammar) > MOST_GRAMMAR:
            raise bad(field, f"its grammar has more than {MOST_GRAMMAR} characters")
        with self._lock:
            tables = self._tables
        if error := library.LLMatcher.validate_grammar(grammar, tables):
            raise bad(field, f"the schema cannot be held to: {error[:300]}")
        return library.LLMatcher(tables, grammar)


@dataclass
class _Row:
    """How far one answer has come. Without a matcher nothing is held."""

    generated: Sequence[int]
    matcher: Any
    inside: bool = False
    begun: bool = False
    read: int = 0


@dataclass
class Mask:
    """Says which tokens may follow in each answer of one request."""

    matcher: Any
    rows: dict[int, _Row] = field(default_factory=dict, init=False)

    def mask(self, generated: Sequence[int]) -> Any:
        """Return int32 words of bits; None: all tokens may follow."""
        row = self.rows.get(id(generated))
        if row is None:  # it holds the list, so that no other one gets its id
            row = self.rows[id(generated)] = self._first(generated)
        for token in generated[row.read :]:
            self._read(row, token)
        row.read = len(generated)
        return self._words(row)

    def _first(self, generated: Sequence[int]) -> _Row:
        raise NotImplementedError

    def _read(self, row: _Row, token: int) -> None:
        raise NotImplementedError

    def _words(self, row: _Row) -> Any:
        if row.matcher is None:
            return None
        return np.frombuffer(row.matcher.compute_bitmask(), np.int32).copy()


@dataclass
class HeldMask(Mask):
    """Holds a whole answer behind its thought, in which all text may stand."""

    channel: tuple[int | None, int | None]
    thought: Any
    thinking: bool
    inside: bool

    def _first(self, generated: Sequence[int]) -> _Row:
        return _Row(generated, self.matcher.deep_copy(), self.inside)

    def _read(self, row: _Row, token: int) -> None:
        begins, ends = self.channel
        if row.inside:
            row.inside, row.begun = token != ends, token == ends
        elif token == begins and not row.begun:
            row.inside = True
        else:
            row.begun = True
            row.matcher.consume_token(token)

    def _words(self, row: _Row) -> Any:
        if row.inside:
            return self.thought
        words = super()._words(row)
        if self.thinking and not row.begun and self.channel[0] is not None:
            _set(words, self.channel[0], True)
        return words


@dataclass
class LazyMask(Mask):
    """Holds calls, each from the token that begins it to that which ends it."""

    begins: int
    ends: int

    def _first(self, generated: Sequence[int]) -> _Row:
        return _Row(generated, None)

    def _read(self, row: _Row, token: int) -> None:
        if row.matcher is None and token == self.begins:
            row.matcher = self.matcher.deep_copy()
        if row.matcher is not None:
            row.matcher.consume_token(token)
        if token == self.ends:
            row.matcher = None


def _set(words: Any, token: int, value: bool) -> None:
    at, bit = divmod(token, 32)
    one = np.uint32(1 << bit)
    view = words.view(np.uint32)
    view[at] = view[at] | one if value else view[at] & ~one


def _llguidance() -> Any:
    try:
        import llguidance
    except ImportError as e:
        raise MissingError("forms of answers need llguidance: pip install 'g4ir[serve]'") from e
    return llguidance
