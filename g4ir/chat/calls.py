"""Incremental parser of a tool call, `NAME{key:value,...}`: returns its arguments as JSON while it
is generated.

Calls are marked text (see special_tokens.py), with strings between QUOTE tokens. Unambiguous
deviations from the format are accepted: JSON strings, single quotes, bare words, `=` after declared
keys, missing commas after delimited values, a second pair of braces. Parsed text is final, so all
of it may be streamed. What may follow an open string, if its closing delimiter is missing, is held
back: trailing white space and braces, and everything from a control token on that may end a call.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from . import special_tokens as control
from .special_tokens import spelled

_CALL, _CALL_END = control.MARKS[control.CALL], control.MARKS[control.CALL_END]
_QUOTE = control.MARKS[control.QUOTE]
_SURROGATES = "\ud800-\udfff"
_HEAD = re.compile(rf"\s*(?:call\s*)?:\s*([^\s{{}}()<>:,\"'{_SURROGATES}]{{1,256}})\s*([{{(])")
_PARTIAL_HEAD = re.compile(rf"\s*(?:(?:c(?:a(?:l)?)?)?|call\s*)(?::[^{{}}(){_SURROGATES}]*)?")
_KEY = re.compile(rf"[^\s:,{{}}\[\]\"'{_SURROGATES}][^:,{{}}\[\]\"'{_SURROGATES}]*")
_NUMBER = re.compile(r"-?(?:0|[1-9][0-9]*)(\.[0-9]+)?([eE][+-]?[0-9]+)?")
_JSON = json.JSONDecoder(strict=False)
#: control tokens that may end a call while a string is open, and those that end it outside of
#: strings (also the one that begins reasoning)
_ENDS = {_CALL, _CALL_END, *control.END_MARKS}
_BREAKS = {*_ENDS, control.MARKS[control.CHANNEL]}
_OUTSIDE = re.compile(rf"[{{}}()\[\],:=\"]|{control.MARK.pattern}")
_IN_STRING = {_QUOTE: control.MARK, '"': re.compile(rf'["\\]|{control.MARK.pattern}')}
#: pattern of the end of an open string that is held back (see the module's docstring), and its
#: maximum number of characters
_TAIL, LONGEST_TAIL = re.compile(r"[\s)}]*\Z"), 256
_CLOSERS = {"{": "}", "(": ")", "[": "]"}
#: Python type -> schema types that accept it; integers and numbers are not distinguished
_FITS: dict[type, set[str]] = {kind: {"integer", "number"} for kind in (int, float)}
_FITS |= {bool: {"boolean"}, str: {"string"}, list: {"array"}, dict: {"object"}}
#: maximum nesting of a call's values
MAX_DEPTH = 64
#: number of string arguments' characters that must be final before a call is streamed: a shorter
#: text may turn out to be no call
MIN_STREAMED = 32

#: parser states: in a key, after a key, in a value, in a streamed string, after a value, or
#: unparsable
KEY, COLON, VALUE, TEXT, AFTER, DEAD = range(6)
#: how the arguments ended: complete, cut off by a control token, or unparsable
DONE, BROKEN, WRONG = "done", "broken", "wrong"

Schema = Mapping[str, Any]
Schemas = Mapping[str, Schema]


class Unreadable(ValueError):
    """Raised if a text cannot be parsed as the arguments of a tool call."""


def begins_head(text: str) -> bool:
    """Whether a text is a prefix of a call's head, `call:NAME{`."""
    return _PARTIAL_HEAD.fullmatch(text) is not None


def head_name(text: str) -> str | None:
    """Return NAME of a call's head, `call:NAME{` or `:NAME{` (`(` instead of `{` too); None if the
    text is not a head."""
    match = _HEAD.fullmatch(text)
    return match[1] if match else None


def is_bare_key(text: str) -> bool:
    """Whether a key can be written without delimiters."""
    return _KEY.fullmatch(text) is not None and text == text.strip()


class CallBody:
    """Parser of one call's arguments, after `head` (`call:NAME{`). `schema`: of the arguments, for
    their types; `plain`: any begin or end token of calls within a string ends the call (else only a
    begin token after an end token, with nothing but white space between them)."""

    def __init__(self, head: str, name: str, schema: Schema, plain: bool) -> None:
        self.name, self._parts, self._plain = name, [head], plain
        self._json, self._sent = ["{"], 0
        #: stack of open objects and lists: (closing character, schema); None for a redundant pair
        #: of braces
        self._open: list[tuple[str, Schema | None]] = [(_CLOSERS[head[-1]], schema)]
        self._schema, self._state = schema, KEY  # schema of the next value
        self._raw = list[str]()  # text of an unfinished key or value, or the held tail of a string
        self._quote = ""  # delimiter of the open string
        # after a backslash; after a call's end token in the open string
        self._escaped = self._closed = False
        self._mark: int | None = None  # index in `_raw` of a control token that ends the call
        self._final_chars = 0  # final characters of strings
        # characters of the call's text: converted to JSON; consumed
        self._json_end = self._seen = len(head)

    @property
    def streams(self) -> bool:
        """Whether enough text is final (MIN_STREAMED) to stream the JSON."""
        return self._final_chars >= MIN_STREAMED

    @property
    def raw(self) -> str:
        """The call's text as generated."""
        return "".join(self._parts)

    @property
    def json(self) -> str:
        """The JSON so far, all of which is final."""
        return "".join(self._json)

    @property
    def end(self) -> int:
        """The index in `raw` where a call without an end token ends: at the first control token of
        its open string that may end a call, else at the end of the text."""
        return self._seen - (0 if self._mark is None else len("".join(self._raw)) - self._mark)

    def as_written(self, body: str) -> str:
        """Return the final JSON, followed by the rest of the call's text `body` as generated."""
        return self.json + spelled(body[self._json_end :])

    def new_json(self) -> str:
        """Return the JSON that became final since this method was called last."""
        new, self._sent = self._json[self._sent :], len(self._json)
        return "".join(new)

    def cut_off(self) -> str:
        """End a truncated call. Return its JSON so far, which is not closed: with all the text of
        an open string that is streamed, without any other partial key or value; if the call is
        unparsable, with the rest as generated."""
        if self._state == TEXT:
            self._finalise(len("".join(self._raw)))
        return self.as_written(self.raw) if self._state == DEAD else self.json

    def close(self) -> bool:
        """If the open string's schema allows only strings, and its text before the control token
        ends with the closers of all that is open (objects alone), end the string before them and
        complete the JSON. Return whether this was done."""
        if self._state != TEXT or self._mark is None or not is_text(self._schema):
            return False
        text = "".join(self._raw)[: self._mark].rstrip()
        for closer, _ in self._open:  # the last brace closes the first
            if not text.endswith(closer):
                return False
            text = text[:-1].rstrip()
        self._finalise(len(text))
        self._emit('"' + "}" * sum(schema is not None for _, schema in self._open))
        return True

    def scan(self, text: str, at: int) -> tuple[int, str]:
        """Parse text from index `at`. Return the index after the consumed text, and how the
        arguments ended there: DONE, BROKEN, WRONG, or "" if they have not."""
        start, ended = at, ""
        while at < len(text) and not ended:
            at, ended = self._step(text, at)
        self._parts.append(text[start:at])
        return at, ended

    def _step(self, text: str, at: int) -> tuple[int, str]:
        if self._escaped:
            self._escaped = False
            self._text(text[at])
            return at + 1, ""
        match = _IN_STRING.get(self._quote, _OUTSIDE).search(text, at)
        end = match.start() if match else len(text)
        self._text(text[at:end])
        if match is None:
            return end, ""
        token = match[0]
        calls = token in (_CALL, _CALL_END) if self._plain else token == _CALL and self._closed
        if calls if self._quote else token in _BREAKS:
            return end, BROKEN
        try:
            if self._quote:
                self._in_string(token)
            elif self._state != DEAD:
                self._seen += 1
                self._outside(token)
            else:
                self._text(token)
        except Unreadable:
            self._state = DEAD
            if not self.streams:
                return match.end(), WRONG
        return match.end(), "" if self._open else DONE

    def _text(self, text: str) -> None:
        """Consume text without delimiters: of a string, or of a bare key or value."""
        self._seen += len(text)
        self._closed = self._closed and not text.strip()
        if text and self._state != DEAD:
            self._raw.append(text)
        if text and self._state == TEXT and self._mark is None:
            pending = "".join(self._raw)
            tail = _TAIL.search(pending, max(0, len(pending) - LONGEST_TAIL))
            self._raw = [pending]
            self._finalise(tail.start() if tail else len(pending))

    def _in_string(self, token: str) -> None:
        if token != self._quote:
            if token in _ENDS and self._mark is None:
                self._mark = len("".join(self._raw))
            self._text(token)
            self._escaped, self._closed = token == "\\", token == _CALL_END
            return
        self._seen += 1
        raw, self._quote = "".join(self._raw), ""
        if self._state == TEXT:
            self._finalise(len(raw))
            self._emit('"')
            self._state = AFTER
            return
        text = spelled(raw)
        if token == '"':
            try:
                text = control.replace_surrogates(_JSON.decode(f'"{text}"'))
            except ValueError:
                raise Unreadable from None
        if self._state == KEY:
            self._key(text, COLON)
        else:
            self._value(_typed(text, self._schema))

    def _outside(self, token: str) -> None:
        """Consume a delimiter outside of strings. Unreadable if the state does not allow it."""
        closer, schema = self._open[-1]
        self._raw = ["".join(self._raw)]
        raw = self._raw[0].strip()
        if schema is None and (raw or token != closer):
            raise Unreadable
        if self._state == VALUE and raw[:1] == "'" and _unquoted(raw) == raw:
            self._raw.append(token)  # between single quotes
            return
        if self._state == AFTER and (raw or token in f'{{["{_QUOTE}'):  # missing comma
            self._next()
        state = self._state
        separates = token == ":" or (token == "=" and raw in properties(schema))
        if token in f'"{_QUOTE}' and not raw and state in (KEY, VALUE):
            self._begin_string(token)
        elif token == _QUOTE and state == VALUE and is_text(self._schema):  # unopened quote
            self._value(_unquoted(raw))
        elif state == KEY and raw and separates:
            if '"' in raw:
                raise Unreadable
            self._key(_unquoted(raw), VALUE)
        elif state == COLON and token in ":=" and not raw:
            self._raw, self._state = [], VALUE
        elif state == VALUE and token in "{[" and not raw:
            self._push(token)
        elif state == KEY and token == "{" and len(self._json) == len(self._open) == 1 and not raw:
            self._open = [(closer, None), ("}", schema)]
        elif token in (",", closer):
            self._end(token, raw)
        elif (state == KEY and token in '=()"') or (state == VALUE and token in ':=()"'):
            self._raw.append(token)
        else:
            raise Unreadable

    def _next(self) -> None:
        """Expect the next element of the innermost object or list: a key, or a value."""
        closer, schema = self._open[-1]
        self._state = VALUE if closer == "]" else KEY
        self._schema = properties(schema, "items")

    def _begin_string(self, quote: str) -> None:
        self._quote, self._closed, self._mark, self._raw = quote, False, None, []
        if self._state == VALUE and quote == _QUOTE and fits("", self._schema):
            self._emit(self._comma() + '"')
            self._state = TEXT

    def _key(self, key: str, state: int) -> None:
        self._emit(f"{self._comma()}{json.dumps(key, ensure_ascii=False)}: ")
        self._raw, self._state = [], state
        self._schema = properties(self._open[-1][1]).get(key, {})

    def _value(self, value: Any, behind: int = 0) -> None:
        self._emit(self._comma() + json.dumps(value, ensure_ascii=False), behind)
        self._raw, self._state = [], AFTER

    def _push(self, opener: str) -> None:
        if len(self._open) >= MAX_DEPTH:
            raise Unreadable
        self._emit(self._comma() + opener)
        self._open.append((_CLOSERS[opener], self._schema))
        self._raw = []
        self._next()

    def _end(self, token: str, raw: str) -> None:
        """Consume a comma, or the closer of the innermost object or list."""
        closer, schema = self._open[-1]
        if self._state == VALUE and raw:
            word = _unquoted(raw)
            value = _bare(raw, self._schema) if word == raw else _typed(word, self._schema)
            self._value(value, len(token))
        empty = self._state == (VALUE if closer == "]" else KEY) and token == closer
        if self._state != AFTER and (raw or not empty):
            raise Unreadable
        self._raw = []
        if token == closer:
            self._open.pop()
            self._state = AFTER
            if schema is not None:
                self._emit("]" if closer == "]" else "}")
        else:
            self._next()

    def _comma(self) -> str:
        """Return the separator before the next element; "" before the first, and before a key's
        value."""
        return "" if self._json[-1][-1] in "[{ " else ", "

    def _finalise(self, count: int) -> None:
        """Emit `count` held-back characters of a string as final."""
        pending = "".join(self._raw)
        text, self._raw = pending[:count], [pending[count:]]
        if text:
            self._final_chars += len(text)
            escaped = json.dumps(spelled(text), ensure_ascii=False)[1:-1]
            self._emit(escaped, len(pending) - count)

    def _emit(self, text: str, behind: int = 0) -> None:
        """Emit final JSON, to which the last `behind` characters of the consumed text do not
        belong."""
        self._json.append(text)
        self._json_end = self._seen - behind


def properties(schema: Schema | None, key: str = "properties") -> Mapping[str, Any]:
    """Return the mapping under a schema's keyword `key`: by default the declared properties; an
    empty one if there is none."""
    declared = (schema or {}).get(key)
    return declared if isinstance(declared, Mapping) else {}


def kinds_of(schema: Schema) -> set[str]:
    """Return the types that a schema names, without null."""
    kinds = schema.get("type")
    listed = kinds if isinstance(kinds, list) else [kinds]
    return {k.lower() for k in listed if isinstance(k, str)} - {"null"}


def is_text(schema: Schema) -> bool:
    """Whether a schema allows only strings (and null)."""
    return kinds_of(schema) == {"string"}


def fits(value: Any, schema: Schema) -> bool:
    """Whether the schema's types include the value's. None fits every schema, and every value fits
    a schema without types."""
    kinds = kinds_of(schema)
    return not kinds or value is None or bool(_FITS[type(value)] & kinds)


def _unquoted(raw: str) -> str:
    """Strip single quotes around a text."""
    return raw[1:-1] if len(raw) > 1 and raw[0] == raw[-1] == "'" else raw


def _typed(text: str, schema: Schema) -> Any:
    """Parse a delimited text as a number, boolean, null, list or object if the schema does not
    allow strings; return it unchanged if that fails or the schema does not allow the value."""
    if fits("", schema):
        return text
    word = text.strip()
    value = _literal(word, python=True)
    if value is None and word in ("null", "None"):
        return None if schema.get("nullable") else text
    if value is None and word[:1] in ("[", "{"):
        try:
            value = json.loads(word)
        except (ValueError, RecursionError):
            return text
    return text if value is None or not fits(value, schema) else value


def _bare(word: str, schema: Schema) -> Any:
    python = not fits("", schema)
    value = _literal(word, python)
    if word == "null" or (word == "None" and python and schema.get("nullable")):
        return None
    if set(word) & {"\n", '"'} or (value is None and python and set(word) & {":", "="}):
        raise Unreadable
    return word if value is None or is_text(schema) else value


def _literal(word: str, python: bool) -> Any:
    """Parse a word as a JSON number, true or false (with `python` also True or False); None for
    others."""
    if word in ("true", "false") or (python and word in ("True", "False")):
        return word.lower() == "true"
    if (number := _NUMBER.fullmatch(word)) is None:
        return None
    try:
        value = float(word) if number[1] or number[2] else int(word)
    except ValueError:  # more digits than Python's int limit
        return None
    return value if abs(value) != float("inf") else None
