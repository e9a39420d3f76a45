"""Digests of large files, which are computed again only if a file has changed since.

SHA-256 of a weight file takes about a second per GiB: most of the time in which an engine whose
pages are in memory is loaded. What tells that a file has changed is what the system keeps of it:
device, inode, size, and the times of its last write and of the last change of anything, which no
user can set. Records are the user's own files, one for each inode.
"""

from __future__ import annotations

import json
import os
from contextlib import suppress
from pathlib import Path

from g4ir.errors import TrustError
from g4ir.ui.files import write_file
from g4ir.ui.paths import check_private, private, state_root
from g4ir.weights.checkpoint import sha256

#: bytes of files that have a record; computing it takes longer than a clock's tick, so that a file
#: that is written meanwhile has another time
LARGE = 32 << 20


def file_digest(path: Path) -> str:
    """Compute the SHA-256 of a file; the record is kept by best effort."""
    identity, record = _identity(path)
    digest = sha256(path)
    if identity[2] >= LARGE:
        with suppress(OSError, TrustError):
            write_file(
                private(record.parent) / record.name, [json.dumps([*identity, digest]).encode()]
            )
    return digest


def has_digest(path: Path, digest: str) -> bool:
    """Whether a file's SHA-256 is `digest`: by its record, if it has not changed since."""
    identity, record = _identity(path)
    if identity[2] >= LARGE:
        with suppress(OSError, TrustError, ValueError):
            check_private(record.parent)
            if json.loads(record.read_bytes()) == [*identity, digest]:
                return True
    return file_digest(path) == digest


def _identity(path: Path) -> tuple[list[int], Path]:
    """Return what identifies the content of a file, and the path of its record."""
    s: os.stat_result = path.stat()
    identity = [s.st_dev, s.st_ino, s.st_size, s.st_mtime_ns, s.st_ctime_ns]
    return identity, state_root() / "digests" / f"{s.st_dev:x}-{s.st_ino:x}"
