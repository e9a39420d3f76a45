"""Reads text files of any size in pieces."""

from __future__ import annotations

import codecs
from collections.abc import Iterable, Iterator
from pathlib import Path

from g4ir.errors import InputError

from .prompt import CHEAP

#: bytes of a file that are read at a time
READ = 1 << 16
#: what a file is that is not UTF-8, or has NUL characters
BINARY = "a binary file, or a text in another encoding"


def check_files(paths: Iterable[str], flag: str) -> None:
    """Raise InputError for a file that is missing, empty or not a regular file."""
    for path in paths:
        if not Path(path).is_file():
            problem = "no regular file" if Path(path).exists() else "no such file"
            raise InputError(f"{flag} {path}: {problem}")
        if not Path(path).stat().st_size:
            raise InputError(f"{flag} {path}: the file is empty")


def cut_blocks(texts: Iterable[str]) -> Iterator[str]:
    """Regroup streamed text into blocks of at most CHEAP characters, cut after a newline if they
    have one."""
    pending = ""
    for text in texts:
        pending += text
        start = 0
        while len(pending) - start > CHEAP:
            cut = pending.rfind("\n", start, start + CHEAP) + 1 or start + CHEAP
            yield pending[start:cut]
            start = cut
        pending = pending[start:]
    if pending:
        yield pending


def read_text(path: Path) -> Iterator[str]:
    """Yield a file's text in pieces, without a byte order mark. InputError for bytes that are not
    UTF-8, and for NUL, which UTF-8 texts do not have."""
    decoder, read = codecs.getincrementaldecoder("utf-8")(), 0
    with path.open("rb") as stream:
        while True:
            raw = stream.read(READ)
            consumed = read - len(decoder.getstate()[0])
            try:
                text = decoder.decode(raw, final=not raw)
            except UnicodeDecodeError as e:
                at = consumed + e.start
                raise InputError(f"{path}: not UTF-8 at byte {at}: {BINARY}") from None
            if "\0" in text:
                raise InputError(f"{path}: NUL among its characters: {BINARY}")
            yield text.removeprefix("\ufeff") if not read else text
            read += len(raw)
            if not raw:
                break
