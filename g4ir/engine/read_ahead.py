"""Lines of a file, or of a pipe whose next line may be long in coming."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress
from io import UnsupportedOperation
from queue import Empty, Full, Queue
from threading import Thread
from typing import BinaryIO

from .jsonl import read_lines

Line = tuple[int, bytes]
#: seconds between two looks at whether anybody still wants lines
LOOK_S = 1.0


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
