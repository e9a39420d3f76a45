"""JSON lines of requests, read one by one; pipes without blocking."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from io import UnsupportedOperation
from itertools import count
from queue import Empty, Queue
from threading import Thread
from typing import Any, BinaryIO

from g4ir.errors import InputError
from g4ir.model.audio import CUT, REFUSE
from g4ir.spec.reader import json_object
from g4ir.ui.units import size_text

#: maximum bytes of one JSON line (eight times a full prompt of the longest context), and of an
#: input
LINE_BYTES, INPUT_BYTES = 1 << 24, 1 << 36
#: number of a line in the input, from 1 on, and its content
Line = tuple[int, bytes]
#: predicate on a value, and a description of expected values
Field = tuple[Callable[[Any], bool], str]


def _of(*types: type) -> Callable[[Any], bool]:
    return lambda value: type(value) in types


def _list(kind: type) -> Callable[[Any], bool]:
    return lambda value: type(value) is list and {*map(type, value)} <= {kind}


def _biases(value: Any) -> bool:
    """Whether the value is an object such as {"177": -5.0, ...}: JSON keys are strings."""
    keys = isinstance(value, dict) and all(k.isdecimal() and k.isascii() for k in value)
    return keys and all(len(k) < 10 and type(v) in (int, float) for k, v in value.items())


TEXT: Field = _of(str), "a string"
INTEGER: Field = _of(int), "a whole number"
NUMBER: Field = _of(int, float), "a number"
IDS: Field = _list(int), "a list of token ids"
PATHS: Field = _list(str), "a list of paths"
#: settings that `g4ir chat` has too
SETTINGS: dict[str, Field] = {
    "max_new_tokens": INTEGER,
    "temperature": NUMBER,
    "top_k": INTEGER,
    "top_p": NUMBER,
    "seed": INTEGER,
    "min_p": NUMBER,
    **{f"{kind}_penalty": NUMBER for kind in ("presence", "frequency", "repetition")},
}
FIELDS: dict[str, Field] = {
    "id": (_of(str, int), "a string or a whole number"),
    "prompt": TEXT,
    "tokens": IDS,
    "bos": (_of(bool), "true or false"),
    **SETTINGS,
    "logit_bias": (_biases, 'numbers by token id, such as {"177": -5}'),
    **dict.fromkeys(("min_tokens", "logprobs"), INTEGER),
    "stop": IDS,
    **dict.fromkeys(("images", "videos", "audio"), PATHS),
    **dict.fromkeys(("image_budget", "frames"), INTEGER),
    "fps": NUMBER,
    "audio_too_long": (lambda v: v in (CUT, REFUSE), f"{CUT} or {REFUSE}"),
}


def parse_line(line: bytes, where: str) -> dict[str, Any]:
    """Return the JSON object of a line; its fields are not checked yet. InputError, which begins
    with `where`, if it is no JSON object or longer than LINE_BYTES."""
    if len(line) > LINE_BYTES:
        raise InputError(
            f"{where}: a line of more than {size_text(LINE_BYTES)}, or input of more "
            f"than {size_text(INPUT_BYTES)}; what follows is not read"
        )
    try:
        return json_object(line)
    except ValueError as e:
        raise InputError(f'{where}: {e}; expected a line such as {{"tokens": [2, 5]}}') from None


def checked_fields(
    value: Mapping[str, Any],
    where: str,
    known: Mapping[str, Field] = FIELDS,
    either: tuple[str, str] = ("prompt", "tokens"),
) -> dict[str, Any]:
    """Return a request's fields without nulls; InputError unless all are `known`, with values that
    fit, and exactly one of `either` is present."""
    for key, item in value.items():
        if key not in known:
            raise InputError(f"{where}: unknown field {key[:40]!r}; one of {', '.join(known)}")
        fits, expected = known[key]
        if item is not None and not fits(item):
            text = json.dumps(item)[:60]
            raise InputError(f"{where}: {key}: expected {expected}, found {text}")
    fields = {k: v for k, v in value.items() if v is not None}
    if (either[0] in fields) == (either[1] in fields):
        raise InputError(f"{where}: give either {either[0]} or {either[1]}")
    return fields


@contextmanager
def named(where: str) -> Iterator[None]:
    """A context in which an InputError begins with `where`."""
    try:
        yield
    except InputError as e:
        text = str(e)
        raise InputError(text if text.startswith(where) else f"{where}: {text}") from None


class ReadAhead:
    """Non-blank lines of a stream, with their numbers. A pipe is read by a thread, so that `next`
    need not block; a file is read by `next`. The first line that is longer than LINE_BYTES, or with
    which the input exceeds INPUT_BYTES, is the last; `parse_line` refuses it."""

    def __init__(self, stream: BinaryIO) -> None:
        self.ended = False
        self._lines, self._come = _numbered(stream), Queue[Line | Exception | None](1)
        try:
            self._pipe = None if stream.seekable() else os.dup(stream.fileno())
        except UnsupportedOperation:  # a stream without a file descriptor
            self._pipe = None
        if self._pipe is not None:
            Thread(target=self._read, args=(self._pipe,), daemon=True).start()

    def next(self, wait: bool) -> Line | None:
        """Return the next line; None at the end (then `ended` is True), or, without `wait`, if none
        is available yet. Raises the stream's errors."""
        if self.ended:
            return None
        try:
            line = next(self._lines, None) if self._pipe is None else self._come.get(wait)
        except Empty:
            return None
        if isinstance(line, Exception):
            raise line
        self.ended = line is None
        return line

    def _read(self, pipe: int) -> None:
        # A separate file object: at exit Python crashes if a thread waits on sys.stdin.
        try:
            with open(pipe, "rb") as stream:
                for line in _numbered(stream):
                    self._come.put(line)
            self._come.put(None)
        except Exception as e:
            self._come.put(e)


def _numbered(stream: BinaryIO) -> Iterator[Line]:
    total = 0
    for number in count(1):
        line = stream.readline(LINE_BYTES + 1)
        total += len(line)
        line = line.removeprefix(b"\xef\xbb\xbf") if number == 1 else line
        if total > INPUT_BYTES:
            line = line.ljust(LINE_BYTES + 1)
        if line.strip() or len(line) > LINE_BYTES:
            yield number, line
        if not line or len(line) > LINE_BYTES:
            return
