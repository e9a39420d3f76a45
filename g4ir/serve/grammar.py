"""Holds answers to JSON: which tokens may follow, by llguidance."""

from __future__ import annotations

import json
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np

from g4ir.chat import Vocabulary
from g4ir.chat.control import CHANNEL, CHANNEL_END
from g4ir.errors import MissingError

from .refusals import bad

#: characters of a schema
LARGEST = 1 << 16


class Grammars:
    """Makes masks for one tokenizer, whose tables are made when they are first needed. `ends` are
    the ids behind which an answer is over."""

    def __init__(self, vocabulary: Vocabulary, size: int, ends: Sequence[int]) -> None:
        self.vocabulary, self.size, self.ends = vocabulary, size, [*ends]
        self._lock = threading.Lock()

    @cached_property
    def _tables(self) -> Any:
        return _llguidance().LLTokenizer(
            self.vocabulary.tokenizer.to_str(), n_vocab=self.size, eos_token=self.ends
        )

    def mask(self, schema: Mapping[str, Any], thinking: bool, inside: bool) -> JsonMask:
        """Return what holds an answer to a schema. `thinking`: it may begin with a thought;
        `inside`: it begins in one. Refused where the schema is not one that can be held to."""
        library, text = _llguidance(), json.dumps(schema)
        if len(text) > LARGEST:
            raise bad("response_format", f"the schema has more than {LARGEST} characters")
        with self._lock:
            tables = self._tables
        grammar = library.LLMatcher.grammar_from_json_schema(text)
        if error := library.LLMatcher.validate_grammar(grammar, tables):
            raise bad("response_format", f"the schema cannot be held to: {error[:300]}")
        controls = self.vocabulary.controls
        channel = controls.get(CHANNEL), controls.get(CHANNEL_END)
        return JsonMask(library.LLMatcher(tables, grammar), channel, thinking, inside)


@dataclass
class _Row:
    """How far one answer has come."""

    generated: Sequence[int]
    matcher: Any
    inside: bool
    read: int = 0
    begun: bool = False


@dataclass
class JsonMask:
    """Says which tokens may follow in each answer of one request; thoughts are free."""

    matcher: Any
    channel: tuple[int | None, int | None]
    thinking: bool
    inside: bool
    rows: dict[int, _Row] = field(default_factory=dict)

    def mask(self, generated: Sequence[int]) -> Any:
        """Return int32 words of bits, or None inside of a thought."""
        row = self.rows.get(id(generated))
        if row is None:  # it holds the list, so that no other one gets its id
            row = _Row(generated, self.matcher.deep_copy(), self.inside)
            self.rows[id(generated)] = row
        for token in generated[row.read :]:
            self._read(row, token)
        row.read = len(generated)
        if row.inside:
            return None
        words = np.frombuffer(row.matcher.compute_bitmask(), np.int32).copy()
        if self.thinking and not row.begun and self.channel[0] is not None:
            at, bit = divmod(self.channel[0], 32)
            words.view(np.uint32)[at] |= np.uint32(1 << bit)
        return words

    def _read(self, row: _Row, token: int) -> None:
        begins, ends = self.channel
        if row.inside:
            row.inside, row.begun = token != ends, token == ends
        elif token == begins and not row.begun:
            row.inside = True
        else:
            row.begun = True
            row.matcher.consume_token(token)


def _llguidance() -> Any:
    try:
        import llguidance
    except ImportError as e:
        raise MissingError("response_format needs llguidance: pip install 'g4ir[serve]'") from e
    return llguidance
