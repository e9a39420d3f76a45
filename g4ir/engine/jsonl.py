"""Reads JSON lines one by one, each a request or its own error; of a pipe what has come."""

from __future__ import annotations

import json
import os
import select
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from io import UnsupportedOperation
from typing import Any, BinaryIO

from g4ir.errors import InputError
from g4ir.media.audio import CUT, REFUSE
from g4ir.spec.reader import json_object
from g4ir.ui.units import size_text

#: bytes of one JSON line (eight times a full prompt of the longest context), and of all of them
LINE_BYTES, INPUT_BYTES = 1 << 24, 1 << 36
Line = tuple[int, bytes]
#: test of a value, and what is expected
Field = tuple[Callable[[Any], bool], str]


def _whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _number(value: Any) -> bool:
    return _whole(value) or isinstance(value, float)


def _biases(value: Any) -> bool:
    """Whether it is {"177": -5.0, ...}: keys of JSON objects are text."""
    keys = isinstance(value, dict) and all(k.isdecimal() and k.isascii() for k in value)
    return keys and all(len(k) < 10 and _number(v) for k, v in value.items())


def _list(fits: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, list) and all(map(fits, value))


def _text(value: Any) -> bool:
    return isinstance(value, str)


WHOLE: Field = _whole, "a whole number"
NUMBER: Field = _number, "a number"
IDS: Field = _list(_whole), "a list of token ids"
PATHS: Field = _list(_text), "a list of paths"
FIELDS: dict[str, Field] = {
    "id": (lambda v: _whole(v) or _text(v), "a string or a whole number"),
    "prompt": (_text, "a string"),
    "tokens": IDS,
    "bos": (lambda v: isinstance(v, bool), "true or false"),
    "max_new_tokens": WHOLE,
    "temperature": NUMBER,
    "top_k": WHOLE,
    "top_p": NUMBER,
    "seed": WHOLE,
    "min_p": NUMBER,
    "presence_penalty": NUMBER,
    "frequency_penalty": NUMBER,
    "repetition_penalty": NUMBER,
    "logit_bias": (_biases, 'numbers by token id, such as {"177": -5}'),
    "min_tokens": WHOLE,
    "logprobs": WHOLE,
    "stop": IDS,
    "images": PATHS,
    "videos": PATHS,
    "audio": PATHS,
    "image_budget": WHOLE,
    "frames": WHOLE,
    "audio_too_long": (lambda v: v in (CUT, REFUSE), f"{CUT} or {REFUSE}"),
}


def parse_line(line: bytes, where: str) -> dict[str, Any]:
    """Return the object of one line, whose fields are yet to be checked."""
    if len(line) > LINE_BYTES:
        raise InputError(
            f"{where}: a line of more than {size_text(LINE_BYTES)}, or input of more "
            f"than {size_text(INPUT_BYTES)}; what follows is not read"
        )
    try:
        return json_object(line)
    except ValueError as e:
        raise InputError(f'{where}: {e}; expected a line such as {{"tokens": [2, 5]}}') from None


def checked_fields(value: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Return the fields of a request; those that are null are left out."""
    for key, item in value.items():
        if key not in FIELDS:
            raise InputError(f"{where}: unknown field {key[:40]!r}; one of {', '.join(FIELDS)}")
        fits, expected = FIELDS[key]
        if item is not None and not fits(item):
            shown = json.dumps(item)[:60]
            raise InputError(f"{where}: {key}: expected {expected}, found {shown}")
    fields = {k: v for k, v in value.items() if v is not None}
    if ("prompt" in fields) == ("tokens" in fields):
        raise InputError(f"{where}: give either prompt or tokens")
    return fields


@contextmanager
def named(where: str) -> Iterator[None]:
    """A context in which an InputError begins with `where`."""
    try:
        yield
    except InputError as e:
        raise InputError(f"{where}: {e}") from None


class ReadAhead:
    """The lines of a stream that are not blank, with their numbers; the next can be asked for
    without waiting. One of more than LINE_BYTES, or beyond INPUT_BYTES, is the last; `parse_line`
    refuses it."""

    def __init__(self, stream: BinaryIO) -> None:
        self.ended = False
        self._stream, self._pipe = stream, _Pipe.of(stream)
        self._count = self._total = 0

    def next(self, wait: bool) -> Line | None:
        """Return the next line; None where there is none: at the end, and without `wait` also while
        none has come."""
        source = self._pipe or self._stream
        while not self.ended:
            if not wait and self._pipe and not self._pipe.ready(LINE_BYTES + 1):
                return None
            line = source.readline(LINE_BYTES + 1)
            self._count, self._total = self._count + 1, self._total + len(line)
            if self._count == 1:
                line = line.removeprefix(b"\xef\xbb\xbf")
            if self._total > INPUT_BYTES:
                line = line.ljust(LINE_BYTES + 1)
            self.ended = not line or len(line) > LINE_BYTES
            if line.strip() or len(line) > LINE_BYTES:
                return self._count, line
        return None

    def close(self) -> None:
        """Want no more lines."""
        self.ended = True


class _Pipe:
    """What may make its reader wait for a line."""

    def __init__(self, fd: int) -> None:
        self.fd, self.held, self.over = fd, bytearray(), False

    @classmethod
    def of(cls, stream: BinaryIO) -> _Pipe | None:
        try:
            return None if stream.seekable() else cls(stream.fileno())
        except UnsupportedOperation:  # not of a file
            return None

    def ready(self, size: int) -> bool:
        """Whether `readline` would not wait."""
        while not self._has(size) and select.select([self.fd], [], [], 0)[0]:
            self._read()
        return self._has(size)

    def readline(self, size: int) -> bytes:
        while not self._has(size):
            self._read()
        end = self.held.find(b"\n", 0, size) + 1 or size
        line = bytes(self.held[:end])
        del self.held[:end]
        return line

    def _has(self, size: int) -> bool:
        return self.over or len(self.held) >= size or b"\n" in self.held

    def _read(self) -> None:
        data = os.read(self.fd, 1 << 16)
        self.held += data
        self.over = not data
