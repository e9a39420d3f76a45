"""Checks of media files before decoding: file size, pixels, truncation; import of decoders."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

from g4ir.errors import InputError, MissingError
from g4ir.model.media import check_file

EBML, SEGMENT = b"\x1a\x45\xdf\xa3", b"\x18\x53\x80\x67"
#: types of top-level elements that must be complete: of MP4 (three), AVI and WAV, Matroska
CONTENT = (b"moov", b"moof", b"mdat", b"RIFF", SEGMENT)
_MAX_ELEMENTS = 1 << 16  # elements to look at, so that the walk through a damaged file ends


@contextmanager
def opened(path: Path, kind: str, max_bytes: int, fix: str) -> Iterator[BinaryIO]:
    """Context with an open file. InputError if it is missing, no regular file, empty, larger than
    `max_bytes` (the message ends with `fix`) or cannot be read."""
    check_file(kind, path)
    try:
        size = path.stat().st_size
        if size == 0:
            raise InputError(f"{path}: the file is empty")
        if size > max_bytes:
            raise InputError(f"{path}: {size} bytes, at most {max_bytes}; {fix}")
        with path.open("rb") as file:
            yield file
    except OSError as e:
        raise InputError(f"{path}: cannot be read: {e.strerror or e}") from e


def library(name: str, message: str) -> Any:
    """Import a decoder; MissingError, with a `message` such as `PATH: audio needs soundfile`, if it
    cannot be imported."""
    try:
        importlib.import_module(name.partition(".")[0])
        return importlib.import_module(name)
    except (ImportError, OSError) as e:  # OSError: its C library is missing
        raise MissingError(f"{message}: pip install 'g4ir[mm]'") from e


def check_size(path: Path, width: int, height: int, max_pixels: int) -> None:
    """Raise InputError for a size below 1x1, or of more than `max_pixels` pixels."""
    if min(width, height) < 1:
        raise InputError(f"{path}: {width}x{height} pixels; at least 1x1")
    if width * height > max_pixels:
        why = f"{width}x{height} are {width * height} pixels, at most {max_pixels}; make it smaller"
        raise InputError(f"{path}: {why}")


def is_cut(file: BinaryIO, total: int) -> bool:
    """Whether a file is truncated: its last top-level element of CONTENT extends beyond the file's
    `total` bytes."""
    end = at = 0
    for _ in range(_MAX_ELEMENTS):
        file.seek(at)
        head = file.read(24)
        size = _size(head) if len(head) == 24 else 0
        at += size
        end = at if head[:4] in CONTENT or head[4:8] in CONTENT else end
        if not size or at >= total:
            break
    return end > total + 8  # some programs count a header of 8 bytes twice


def _size(head: bytes) -> int:
    """Return the size in bytes of the element with this header of 24 bytes, header included; 0 if
    it is unknown."""
    kind, word = head[:4], int.from_bytes(head[4:8], "little")
    if kind in (EBML, SEGMENT):  # a size of 1 to 8 bytes: its leading zero bits encode how many
        width = 9 - head[4].bit_length()
        size, mask = int.from_bytes(head[4 : 4 + width], "big"), (1 << 7 * width) - 1
        return 0 if size & mask == mask else 4 + width + (size & mask)
    if kind == b"RIFF":
        # Sizes near 2^31 or 2^32 are placeholders of programs that wrote to a pipe.
        unknown = any(-4096 <= word - full < 4096 for full in (1 << 31, 1 << 32))
        return 0 if unknown else 8 + word + word % 2
    size = int.from_bytes(kind, "big")
    return int.from_bytes(head[8:16], "big") if size == 1 else size
