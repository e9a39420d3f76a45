"""Reads the body of a call, `NAME{key:value,...}`, in which strings stand between control tokens.

Bodies are marked texts (see special_tokens.py). What models write beside the format is read where
it is clear: JSON strings, single quotes, bare words, commas at the end. By the schema of the
function alone `_Drifted` and `_repaired` read more.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from typing import Any

from .special_tokens import MARKS, QUOTE, spelled, whole

_QUOTE = MARKS[QUOTE]
_SURROGATES = "\ud800-\udfff"
_SPACE = re.compile(r"\s*")
_HEAD = re.compile(rf"\s*(?:call\s*)?:\s*([^\s{{}}()<>:,\"'{_SURROGATES}]{{1,256}})\s*([{{(])")
_BEGUN = re.compile(rf"\s*(?:(?:c(?:a(?:l)?)?)?|call\s*)(?::[^{{}}(){_SURROGATES}]*)?")
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
_JSON_STRING = re.compile(r'"(?:[^"\\]|\\.)*"', re.S)
_LITERAL = re.compile(rf"(?:{_NUMBER.pattern}|(?i:true|false|null|none)\b)")
#: type of a value -> types of a schema that allow it; numbers are not told apart
_FITS: dict[type, set[str]] = {kind: {"integer", "number"} for kind in (int, float)}
_FITS |= {bool: {"boolean"}, str: {"string"}, list: {"array"}, dict: {"object"}}
#: how deep the values of a call may lie in each other
MOST_DEPTH = 64
CLOSERS = {"{": "}", "(": ")"}

Schema = Mapping[str, Any]
Schemas = Mapping[str, Schema]


class Unreadable(ValueError):
    """A body does not have the form of a call."""


def begins_head(text: str) -> bool:
    """Whether a text is what the head of a call begins with."""
    return _BEGUN.fullmatch(text) is not None


def head_name(text: str) -> str | None:
    """Return the name in the head of a call, `call:NAME{`, the first word optional; None for a text
    that is none."""
    found = _HEAD.fullmatch(text)
    return found[1] if found else None


def is_bare_key(text: str) -> bool:
    """Whether a key is read back as it is without delimiters."""
    return _KEY.fullmatch(text) is not None and text == text.strip()


def read_call(body: str, schemas: Schemas) -> dict[str, Any] | None:
    """Return the arguments of a body that ends with its last brace; None where it has no reading.

    One with bare words where the schema allows no text is read as written only if the schema gives
    no better reading.
    """
    head = _HEAD.match(body)
    if head is None:
        return None
    schema = schemas.get(head[1], {})
    strict = _Values(body, CLOSERS[head[2]])
    written = strict.arguments(head.end(), schema)
    if (written is None or strict.odd) and properties(schema):
        drifted = _Drifted(body, strict.last).arguments(head.end(), schema)
        written = written if drifted is None else drifted
    if written is not None or not body.rstrip().endswith(strict.last):
        return written
    try:
        return _repaired(body.rstrip()[head.end() : -1], schema)
    except Unreadable:
        return None


def _repaired(text: str, schema: Schema) -> dict[str, Any]:
    """Read arguments as far as the schema says what must be meant: a text between quotes of any
    kind, of which some may be missing, up to the next declared key or the end."""
    first: dict[str, re.Match[str]] = {}
    if keys := either(properties(schema)):
        for found in re.finditer(rf"(?:^|,)\s*({keys})\s*:", text):
            first.setdefault(found[1], found)
    starts = [*first.values()]
    if not starts or text[: starts[0].start()].strip():
        raise Unreadable
    out, at = dict[str, Any](), 0
    ends = [m.start() for m in starts[1:]] + [len(text)]
    for start, end in zip(starts, ends):
        if start.start() < at:  # it looks like a key, and lies in a value
            continue
        name, inside = start[1], properties(schema)[start[1]]
        try:  # a value that is right as it is
            out[name], at = _Values(text + "}", "}").value(start.end(), inside, 1)
            at = len(text) - len(text[at:].lstrip())
        except Unreadable:
            at = -1
        if at not in ends:
            out[name], at = _raw(text[start.end() : end], inside), end
    return out


def either(words: Iterable[str]) -> str:
    """Return a regular expression of some words, the longest first."""
    return "|".join(map(re.escape, sorted(words, key=len, reverse=True)))


def _raw(text: str, schema: Schema) -> str:
    """Return the text that a value must be, without the quotes that it has."""
    if not is_text(schema):
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


def properties(schema: Schema, key: str = "properties") -> Mapping[str, Any]:
    """Return the properties that a schema declares."""
    found = schema.get(key)
    return found if isinstance(found, Mapping) else {}


def items(schema: Schema) -> Schema:
    """Return the schema of a list's elements."""
    return properties(schema, "items")


def kinds_of(schema: Schema) -> set[str]:
    """Return the types that a schema allows beside null."""
    kinds = schema.get("type")
    listed = kinds if isinstance(kinds, list) else [kinds]
    return {k.lower() for k in listed if isinstance(k, str)} - {"null"}


def is_text(schema: Schema) -> bool:
    """Whether a schema allows texts only, beside null."""
    return kinds_of(schema) == {"string"}


def takes_text(schema: Schema) -> bool:
    """Whether a schema allows texts, so that a delimited one is not converted."""
    return fits("", schema)


def fits(value: Any, schema: Schema) -> bool:
    """Whether a schema allows the type of a value; one without types allows all."""
    kinds = kinds_of(schema)
    return not kinds or value is None or bool(_FITS[type(value)] & kinds)


def read_key(raw: str) -> str:
    """Read one key as it is written. Raises Unreadable."""
    values = _Values(f"{raw}:", "}")
    key, end = values.key(values.space(0), {})
    if end <= len(raw):
        raise Unreadable
    return key


def read_value(raw: str, schema: Schema, last: str) -> Any:
    """Read one value as it is written, within a call that `last` closes. Raises Unreadable, also
    for one that may have a better reading."""
    values = _Values(f"{raw}{last}", last)
    value, end = values.value(0, schema, 1)
    if raw[end:].strip() or values.odd:
        raise Unreadable
    return value


class _Values:
    """The values of one body. `last` is the brace that closes its outermost object. Each method
    takes a place in the text, and returns what it read with the place behind it."""

    #: whether a key may be written once only; else the last one holds
    once = False

    def __init__(self, text: str, last: str) -> None:
        self.text, self.last, self.odd = text, last, False

    def arguments(self, at: int, schema: Schema) -> dict[str, Any] | None:
        """Return the object at a place, which ends where the text does; None where it does not."""
        try:
            found, end = self.object(at, schema, 0)
        except Unreadable:
            return None
        return found if end == len(self.text) else None

    def object(self, at: int, schema: Schema, depth: int) -> tuple[dict[str, Any], int]:
        """Read an object whose opening brace is before `at`."""
        close = "}" if depth else self.last
        inside = properties(schema)
        out: dict[str, Any] = {}
        while not self.text.startswith(close, at := self.space(at)):
            key, at = self.key(at, inside)
            if key in out and self.once:
                raise Unreadable
            out[key], at = self.value(at, inside.get(key, {}), depth + 1)
            at = self._comma(at, close)
        return out, at + 1

    def _array(self, at: int, schema: Schema, depth: int) -> tuple[list[Any], int]:
        out: list[Any] = []
        while not self.text.startswith("]", at := self.space(at)):
            value, at = self.value(at, items(schema), depth + 1)
            out.append(value)
            at = self._comma(at, "]")
        return out, at + 1

    def space(self, at: int) -> int:
        found = _SPACE.match(self.text, at)
        return found.end() if found else at

    def _comma(self, at: int, close: str) -> int:
        """Return the place behind a comma, which may be missing before the end alone."""
        at = self.space(at)
        if not self.text.startswith((",", close), at):
            raise Unreadable
        return at + self.text.startswith(",", at)

    def key(self, at: int, inside: Mapping[str, Schema]) -> tuple[str, int]:
        if found := _STRING.match(self.text, at):
            key, at = spelled(found[1]), found.end()
        elif self.text.startswith('"', at):
            key, at = self._json_string(at)
        elif found := _KEY.match(self.text, at):
            key, at = found[0].rstrip(), found.end()
        else:
            raise Unreadable
        at = self.space(at)
        if not self.text.startswith(":", at):
            raise Unreadable
        return key, at + 1

    def value(self, at: int, schema: Schema, depth: int) -> tuple[Any, int]:
        if depth > MOST_DEPTH:
            raise Unreadable
        at = self.space(at)
        if self.text.startswith("{", at):
            return self.object(at + 1, schema, depth)
        if self.text.startswith("[", at):
            return self._array(at + 1, schema, depth)
        if found := _STRING.match(self.text, at):
            return _typed(spelled(found[1]), schema), found.end()
        if self.text.startswith('"', at):
            text, end = self._json_string(at)
            return _typed(text, schema), end
        if found := _SINGLE.match(self.text, at):
            return _typed(found[1], schema), found.end()
        return self._bare(at, schema)

    def _bare(self, at: int, schema: Schema) -> tuple[Any, int]:
        if (found := _WORDS[self.last].match(self.text, at)) is None:
            raise Unreadable
        value = _bare(found[0].strip(), schema)
        self.odd |= isinstance(value, str) and not fits(value, schema)
        return value, found.end()

    def _json_string(self, at: int) -> tuple[str, int]:
        closed = _JSON_STRING.match(self.text, at)
        end = closed.end() if closed else 0
        try:
            return whole(_JSON.decode(spelled(self.text[at:end]))), end
        except ValueError:
            raise Unreadable from None


class _Drifted(_Values):
    """Values of which the schema alone says where each one ends."""

    once = True

    def object(self, at: int, schema: Schema, depth: int) -> tuple[dict[str, Any], int]:
        at = self.space(at)
        if depth or not self.text.startswith("{", at):
            return super().object(at, schema, depth)
        found, at = super().object(at + 1, schema, 1)
        at = self.space(at)
        if not self.text.startswith(self.last, at):
            raise Unreadable
        return found, at + 1

    def _comma(self, at: int, close: str) -> int:
        at = self.space(at)
        return at + self.text.startswith(",", at)

    def key(self, at: int, inside: Mapping[str, Schema]) -> tuple[str, int]:
        if not inside:
            return super().key(at, inside)
        found = re.compile(rf"([{_QUOTE}\"']?)({either(inside)})\1\s*[:=]").match(self.text, at)
        if found is None:
            raise Unreadable
        return found[2], found.end()

    def value(self, at: int, schema: Schema, depth: int) -> tuple[Any, int]:
        value, end = super().value(at, schema, depth)
        if not fits(value, schema):
            raise Unreadable
        return value, end

    def _bare(self, at: int, schema: Schema) -> tuple[Any, int]:
        named = "|".join(map(re.escape, schema.get("enum", ())))
        pattern = rf"(?:{named})(?!\w)|{_LITERAL.pattern}" if named else _LITERAL.pattern
        if (found := re.compile(pattern).match(self.text, at)) is None:
            raise Unreadable
        return _bare(found[0], schema), found.end()


def _typed(text: str, schema: Schema) -> Any:
    """Return a delimited text as the one value of its schema's types that it spells; else as it
    is."""
    if takes_text(schema):
        return text
    word = text.strip()
    value = _literal(word, python=True)
    if value is None and word in ("null", "None"):
        return None if schema.get("nullable") else text
    if value is None and word[:1] in ("[", "{"):
        try:
            value, end = _Values(word, "}").value(0, schema, 1)
        except Unreadable:
            return text
        value = value if end == len(word) else None
    return text if value is None or not fits(value, schema) else value


def _bare(word: str, schema: Schema) -> Any:
    python = not takes_text(schema)
    value = _literal(word, python)
    if word == "null" or (word == "None" and python and schema.get("nullable")):
        return None
    if '"' in word or not word:
        raise Unreadable
    return word if value is None or is_text(schema) else value


def _literal(word: str, python: bool) -> Any:
    """Return the number, true or false that a word is, as JSON writes it or also Python; None for
    all others."""
    if word in ("true", "false") or (python and word in ("True", "False")):
        return word.lower() == "true"
    if (number := _NUMBER.fullmatch(word)) is None:
        return None
    try:
        value = float(word) if number[1] or number[2] else int(word)
    except ValueError:  # more digits than Python converts
        return None
    return value if abs(value) != float("inf") else None
