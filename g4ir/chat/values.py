"""Reads the body of a call, `NAME{key:value,...}`, in which strings stand between control tokens.

Bodies are marked texts (see `marked`). What models write beside the format is read where it is
clear: JSON strings, single quotes, bare words, commas at the end. `repaired` reads more, by the
schema of the function alone.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from .control import QUOTE
from .marked import MARKS, spelled, whole

_QUOTE = MARKS[QUOTE]
_SURROGATES = "\ud800-\udfff"
_SPACE = re.compile(r"\s*")
_HEAD = re.compile(rf"\s*(?:call\s*)?:\s*([^\s{{}}()<>:,\"'{_SURROGATES}]{{1,256}})\s*([{{(])")
_STRING = re.compile(f"{_QUOTE}([^{_QUOTE}]*){_QUOTE}")
_SINGLE = re.compile(rf"'([^'{_SURROGATES}]*)'(?=\s*[,}}\])])")
_KEY = re.compile(rf"[^\s:,{{}}\[\]\"'{_SURROGATES}][^:,{{}}\[\]\"'{_SURROGATES}]*")
#: bare words, by the brace that ends the call
_WORDS = {
    "}": re.compile(rf"[^,{{}}\[\]\n{_SURROGATES}]+"),
    ")": re.compile(rf"[^,(){{}}\[\]\n{_SURROGATES}]+"),
}
_NUMBER = re.compile(r"-?(?:0|[1-9][0-9]*)(\.[0-9]+)?([eE][+-]?[0-9]+)?")
_JSON = json.JSONDecoder(strict=False)
_LITERALS: dict[str, Any] = {"true": True, "false": False, "null": None}
#: how deep the values of a call may lie in each other
MOST_DEPTH = 64
CLOSERS = {"{": "}", "(": ")"}

Schema = Mapping[str, Any]
Schemas = Mapping[str, Schema]


class Unreadable(ValueError):
    """A body does not have the form of a call."""


@dataclass(frozen=True)
class Read:
    """A call as it was read."""

    name: str
    arguments: dict[str, Any]


def is_head(text: str) -> bool:
    """Whether a text is the head of a call: `call:NAME{`, the first word optional."""
    return _HEAD.fullmatch(text) is not None


def is_bare_key(text: str) -> bool:
    """Whether a key is read back as it is without delimiters."""
    return _KEY.fullmatch(text) is not None and text == text.strip()


def strict(body: str, schemas: Schemas) -> Read:
    """Read a body that ends with its last brace. Raises Unreadable."""
    head = _HEAD.match(body)
    if head is None:
        raise Unreadable
    values = _Values(body, CLOSERS[head[2]])
    found, end = values.object(head.end(), schemas.get(head[1], {}), 0)
    if end != len(body):
        raise Unreadable
    return Read(head[1], found)


def repaired(body: str, schemas: Schemas) -> Read:
    """Read a body as far as the schema of its function says what must be meant: a text between
    quotes of any kind, of which some may be missing, up to the next declared key or the end. Raises
    Unreadable."""
    head = _HEAD.match(body)
    inner = body.rstrip()
    if head is None or head[1] not in schemas or not inner.endswith(CLOSERS[head[2]]):
        raise Unreadable
    schema = schemas[head[1]]
    keys = "|".join(map(re.escape, sorted(_properties(schema), key=len, reverse=True)))
    text = inner[head.end() : -1]
    first: dict[str, re.Match[str]] = {}
    for found in re.finditer(rf"(?:^|,)\s*({keys})\s*:", text) if keys else ():
        first.setdefault(found[1], found)
    starts = [*first.values()]
    if not starts or text[: starts[0].start()].strip():
        raise Unreadable
    out: dict[str, Any] = {}
    ends = [m.start() for m in starts[1:]] + [len(text)]
    at = 0
    for start, end in zip(starts, ends):
        if start.start() < at:  # it looks like a key, and lies in a value
            continue
        name, inside = start[1], _properties(schema).get(start[1], {})
        value = _alone(text, start.end(), inside)
        if value is None or value[1] not in ends:
            value = (_raw(text[start.end() : end], inside), end)
        out[name], at = value
    return Read(head[1], out)


def _alone(text: str, start: int, schema: Schema) -> tuple[Any, int] | None:
    """Return a value that is right as it is, and the place behind it and its white space."""
    try:
        found, end = _Values(text + "}", "}").value(start, schema, 1)
    except Unreadable:
        return None
    return found, len(text) - len(text[end:].lstrip())


def _raw(text: str, schema: Schema) -> str:
    """Return the text that a value must be, without the quotes that it has."""
    if kinds_of(schema) != {"string"}:
        raise Unreadable
    if _QUOTE in text:
        text = text.strip()
    text = text.removeprefix(_QUOTE).removesuffix(_QUOTE)
    for quote in "'\"":
        if len(text) > 1 and text[0] == text[-1] == quote:
            text = text[1:-1]
    if _QUOTE in text:
        raise Unreadable
    return spelled(text)


def _properties(schema: Schema) -> Mapping[str, Schema]:
    found = schema.get("properties")
    return found if isinstance(found, Mapping) else {}


def kinds_of(schema: Schema) -> set[str]:
    """Return the types that a schema allows beside null."""
    kinds = schema.get("type")
    listed = kinds if isinstance(kinds, list) else [kinds]
    return {k.lower() for k in listed if isinstance(k, str)} - {"null"}


class _Values:
    """The values of one body. `last` is the brace that closes its outermost object."""

    def __init__(self, text: str, last: str) -> None:
        self.text, self.last = text, last

    def object(self, at: int, schema: Schema, depth: int) -> tuple[dict[str, Any], int]:
        """Read an object whose opening brace is before `at`."""
        close = "}" if depth else self.last
        inside = _properties(schema)
        out: dict[str, Any] = {}
        while True:
            at = self._space(at)
            if self.text.startswith(close, at):
                return out, at + 1
            key, at = self._key(at)
            out[key], at = self.value(at, inside.get(key, {}), depth + 1)
            at = self._comma(at, close)

    def _array(self, at: int, schema: Schema, depth: int) -> tuple[list[Any], int]:
        items = schema.get("items")
        inner = items if isinstance(items, Mapping) else {}
        out: list[Any] = []
        while True:
            at = self._space(at)
            if self.text.startswith("]", at):
                return out, at + 1
            value, at = self.value(at, inner, depth + 1)
            out.append(value)
            at = self._comma(at, "]")

    def _space(self, at: int) -> int:
        found = _SPACE.match(self.text, at)
        return found.end() if found else at

    def _comma(self, at: int, close: str) -> int:
        """Return the place behind a comma, which may be missing before the end alone."""
        at = self._space(at)
        if self.text.startswith(",", at):
            return at + 1
        if self.text.startswith(close, at):
            return at
        raise Unreadable

    def _key(self, at: int) -> tuple[str, int]:
        if found := _STRING.match(self.text, at):
            key, at = spelled(found[1]), found.end()
        elif self.text.startswith('"', at):
            key, at = self._json_string(at)
        elif found := _KEY.match(self.text, at):
            key, at = found[0].rstrip(), found.end()
        else:
            raise Unreadable
        at = self._space(at)
        if not self.text.startswith(":", at):
            raise Unreadable
        return key, at + 1

    def value(self, at: int, schema: Schema, depth: int) -> tuple[Any, int]:
        """Read one value."""
        if depth > MOST_DEPTH:
            raise Unreadable
        at = self._space(at)
        readers: dict[str, Callable[..., tuple[Any, int]]] = {"{": self.object, "[": self._array}
        if reader := readers.get(self.text[at : at + 1]):
            return reader(at + 1, schema, depth)
        if found := _STRING.match(self.text, at):
            return _typed(spelled(found[1]), schema), found.end()
        if self.text.startswith('"', at):
            return self._json_string(at)
        if found := _SINGLE.match(self.text, at):
            return found[1], found.end()
        if found := _WORDS[self.last].match(self.text, at):
            return _bare(found[0].strip(), schema), found.end()
        raise Unreadable

    def _json_string(self, at: int) -> tuple[str, int]:
        end = string_end(self.text, at + 1)
        try:
            value = _JSON.decode(spelled(self.text[at:end]))
        except ValueError:
            raise Unreadable from None
        return whole(value), end


def string_end(text: str, at: int) -> int:
    """Return the place behind the quote that closes a JSON string, or 0 where none does."""
    found = re.compile(r'(?:[^"\\]|\\.)*"', re.S).match(text, at)
    return found.end() if found else 0


def _typed(text: str, schema: Schema) -> Any:
    """Return a delimited text as what its schema says it is, where that is clear."""
    kinds = kinds_of(schema)
    if kinds and kinds <= {"integer", "number", "boolean"}:
        value = _literal(text)
        if isinstance(value, bool) == ("boolean" in kinds) and value is not None:
            return value
    return text


def _bare(word: str, schema: Schema) -> Any:
    value = _literal(word)
    if kinds_of(schema) == {"string"} and value is not None and word != "null":
        return word
    if value is None and word != "null":
        if '"' in word or not word:
            raise Unreadable
        return word
    return value


def _literal(word: str) -> Any:
    """Return the number, true or false that a word is; None for null and all others."""
    if word in _LITERALS:
        return _LITERALS[word]
    number = _NUMBER.fullmatch(word)
    if number is None:
        return None
    try:
        value = float(word) if number[1] or number[2] else int(word)
    except ValueError:  # more digits than Python converts
        return None
    return value if abs(value) != float("inf") else None
