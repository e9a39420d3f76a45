"""Reads JSON lines one by one, each a request or its own error; from a pipe one line ahead."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from io import UnsupportedOperation
from itertools import count
from queue import Empty, Full, Queue
from threading import Thread
from typing import Any, BinaryIO

from g4ir.errors import InputError
from g4ir.media.audio import CUT, REFUSE
from g4ir.spec.reader import json_object
from g4ir.ui.units import size_text

#: bytes of one JSON line (eight times a full prompt of the longest context), and of all of them
LINE_BYTES, INPUT_BYTES = 1 << 24, 1 << 36
Line = tuple[int, bytes]
#: seconds between two looks at whether anybody still wants lines
LOOK_S = 1.0


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


def _biases(value: Any) -> bool:
    """Whether it is {"177": -5.0, ...}: keys of JSON objects are text."""
    keys = isinstance(value, dict) and all(k.isdecimal() and k.isascii() for k in value)
    return keys and all(len(k) < 10 and _number(v) for k, v in value.items())


#: field of a JSON line -> test of its value, and what is expected
FIELDS: dict[str, tuple[Callable[[Any], bool], str]] = {
    "id": (lambda v: _whole(v) or _text(v), "a string or a whole number"),
    "prompt": (_text, "a string"),
    "tokens": (_ids, "a list of token ids"),
    "bos": (lambda v: isinstance(v, bool), "true or false"),
    "max_new_tokens": (_whole, "a whole number"),
    "temperature": (_number, "a number"),
    "top_k": (_whole, "a whole number"),
    "top_p": (_number, "a number"),
    "seed": (_whole, "a whole number"),
    "min_p": (_number, "a number"),
    "presence_penalty": (_number, "a number"),
    "frequency_penalty": (_number, "a number"),
    "repetition_penalty": (_number, "a number"),
    "logit_bias": (_biases, 'numbers by token id, such as {"177": -5}'),
    "min_tokens": (_whole, "a whole number"),
    "logprobs": (_whole, "a whole number"),
    "stop": (_ids, "a list of token ids"),
    "images": (_paths, "a list of paths"),
    "videos": (_paths, "a list of paths"),
    "audio": (_paths, "a list of paths"),
    "image_budget": (_whole, "a whole number"),
    "frames": (_whole, "a whole number"),
    "audio_too_long": (lambda v: v in (CUT, REFUSE), f"{CUT} or {REFUSE}"),
}


def read_lines(stream: BinaryIO) -> Iterator[Line]:
    """Yield (number, bytes) of every line that is not blank, as soon as it is there. One of more
    than LINE_BYTES, or beyond INPUT_BYTES, is the last; `parse_line` refuses it."""
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
        _check_field(key, item, where)
    fields = {k: v for k, v in value.items() if v is not None}
    if ("prompt" in fields) == ("tokens" in fields):
        raise InputError(f"{where}: give either prompt or tokens")
    return fields


def _check_field(key: str, value: Any, where: str) -> None:
    if key not in FIELDS:
        raise InputError(f"{where}: unknown field {key[:40]!r}; one of {', '.join(FIELDS)}")
    fits, expected = FIELDS[key]
    if value is not None and not fits(value):
        shown = json.dumps(value)
        raise InputError(f"{where}: {key}: expected {expected}, found {shown[:60]}")


@contextmanager
def named(where: str) -> Iterator[None]:
    """A context in which an InputError begins with `where`."""
    try:
        yield
    except InputError as e:
        raise InputError(f"{where}: {e}") from None


# --- ahead ------------------------------------------------------------------------------------


class ReadAhead:
    """Numbered lines as `read_lines` has them, of which the next can be asked for without waiting.

    A file always has its next line. What may make its reader wait is read by a thread, one line
    ahead, which ends with the input, or with the process where that never comes.
    """

    def __init__(self, stream: BinaryIO) -> None:
        self.ended = False
        self._lines: Iterator[Line] | None = None
        self._coming: Queue[Line | Exception | None] = Queue(1)
        if stream.seekable():
            self._lines = read_lines(stream)
        else:
            Thread(target=self._read, args=(_own(stream),), daemon=True).start()

    def next(self, wait: bool) -> Line | None:
        """Return the next line; None where there is none: at the end, and without `wait` also while
        none has come."""
        if self.ended:
            return None
        try:
            found = next(self._lines, None) if self._lines else self._coming.get(wait)
        except Empty:
            return None
        if isinstance(found, Exception):
            self.ended = True
            raise found
        self.ended = found is None
        return found

    def close(self) -> None:
        """Want no more lines."""
        self.ended = True

    def _read(self, stream: BinaryIO) -> None:
        try:
            for line in read_lines(stream):
                self._hand(line)
                if self.ended:
                    return
            self._hand(None)
        except Exception as e:
            self._hand(e)

    def _hand(self, item: Line | Exception | None) -> None:
        while not self.ended:
            with suppress(Full):
                self._coming.put(item, timeout=LOOK_S)
                return


def _own(stream: BinaryIO) -> BinaryIO:
    """Return a stream of the same file that nobody else has: where the process ends while a thread
    reads, Python would wait for the lock of one that it closes itself."""
    try:
        return os.fdopen(os.dup(stream.fileno()), "rb")
    except UnsupportedOperation:  # not of a file
        return stream
