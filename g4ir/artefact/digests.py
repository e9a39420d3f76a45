"""Compares files with their digests, large ones once: what has not changed since is not read again.

What a user compared is kept in the user's own state folder, one file for each digest and file: the
file system's facts of it, which change when anybody writes to it or puts another in its place.
"""

from __future__ import annotations

import json
import os
import time
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from g4ir.errors import TrustError
from g4ir.ui.files import write_file
from g4ir.ui.paths import check_private, private, state_root
from g4ir.weights.checkpoint import sha256

#: bytes from which on a file is worth remembering: some hundredths of a second
LARGE = 64 << 20
#: bytes that are copied at a time
PIECE = 8 << 20
#: after a write so long ago, a further one has another time: file systems count in ticks
TICK_NS = 50_000_000


def has_digest(file: Path, digest: str) -> bool:
    """Whether the SHA-256 of a file is `digest`; read only where that is not known already."""
    if file.stat().st_size < LARGE:
        return sha256(file) == digest
    facts = _facts(file)
    with suppress(TrustError):
        if find_kept(_kept_file(digest, facts)) == facts:
            return True
    return _compared(file, digest) == digest


def link_file(file: Path, new: Path, digest: str) -> bool:
    """Link a file of this digest under another name, or copy it where the file system has no links;
    False, and nothing done, if it is not the file of the digest. Linking changes the time of a
    file's last change, after which it would be read again: what is known of it is kept."""
    if not has_digest(file, digest):
        return False
    before = _facts(file)
    try:
        os.link(file, new)
    except OSError:
        with file.open("rb") as source:
            write_file(new, iter(partial(source.read, PIECE), b""))
        return remembered_digest(new) == digest
    after = _facts(new)
    if before[:-1] == after[:-1] and after[2] >= LARGE:
        with suppress(OSError, TrustError):
            keep(_kept_file(digest, after), after)
    return True


def remembered_digest(file: Path) -> str:
    """Return the SHA-256 of a file, so that `has_digest` need not read it again."""
    return sha256(file) if file.stat().st_size < LARGE else _compared(file, None)


def _compared(file: Path, wanted: str | None) -> str:
    """Return the digest of a file; keep it where it is the wanted one, and nobody wrote since."""
    before = _facts(file)
    time.sleep(min(max(before[-1] + TICK_NS - time.time_ns(), 0), TICK_NS) / 1e9)
    begun = time.time_ns()
    found = sha256(file)
    settled = before == _facts(file) and before[-1] + TICK_NS <= begun
    if settled and wanted in (None, found):
        with suppress(OSError, TrustError):  # it saves time alone
            keep(_kept_file(found, before), before)
    return found


def _facts(file: Path) -> list[int]:
    """Return device, inode, size, time of the last write and of the last change, ns."""
    s = os.stat(file)
    return [s.st_dev, s.st_ino, s.st_size, s.st_mtime_ns, s.st_ctime_ns]


def _kept_file(digest: str, facts: list[int]) -> Path:
    return state_root() / "digests" / f"{digest}-{facts[0]:x}-{facts[1]:x}"


def keep(file: Path, value: Any) -> None:
    """Write JSON to a file of this user alone. OSError if it cannot be written; TrustError if
    others could write there."""
    write_file(private(file.parent) / file.name, [json.dumps(value).encode()])


def find_kept(file: Path) -> Any:
    """Return what `keep` wrote; None if there is nothing. TrustError if others could write it."""
    if not file.is_file():
        return None
    check_private(file.parent)
    with suppress(OSError, ValueError):
        return json.loads(file.read_text())
    return None
