"""The folders in which compilers keep files between builds, and when those may be deleted.

A build holds a shared lock on them while it compiles; whoever deletes needs an exclusive one.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from g4ir.errors import TrustError

from .paths import cache_root, private
from .posix import fcntl

#: below the user's cache: torch's compiler, and compiled programs
INDUCTOR, PROGRAMS = "inductor", "programs"
#: precompiled headers of C++ in the former, some 270 MB, which the next build makes again
HEADERS = "precompiled_headers"
LOCK = "compilers.lock"


@contextmanager
def in_use() -> Iterator[None]:
    """A context in which nobody deletes the compilers' files."""
    held = _open_lock()
    try:
        if held is not None:
            fcntl.flock(held, fcntl.LOCK_SH)
        yield
    finally:
        if held is not None:
            os.close(held)


def folders() -> list[Path]:
    return [cache_root() / name for name in (INDUCTOR, PROGRAMS)]


def size() -> int:
    """Return the bytes of the compilers' files."""
    files = (f for folder in folders() for f in folder.rglob("*"))
    return sum(f.lstat().st_size for f in files if f.is_file() and not f.is_symlink())


def delete_headers() -> bool:
    """Delete precompiled headers; False while a build uses them."""
    return _delete([cache_root() / INDUCTOR / HEADERS])


def delete_all() -> bool:
    """Delete the compilers' files; False while a build uses them."""
    return _delete(folders())


def _delete(chosen: list[Path]) -> bool:
    held = _open_lock()
    if held is None:
        return False
    try:
        fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
        for folder in chosen:
            shutil.rmtree(folder, ignore_errors=True)
        return True
    except BlockingIOError:
        return False
    finally:
        os.close(held)


def _open_lock() -> int | None:
    """Return the open lock; None where the cache cannot be written or is not this user's alone, so
    that builds keep nothing in it."""
    try:
        file = private(cache_root()) / LOCK
        return os.open(file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except (OSError, TrustError):
        return None
