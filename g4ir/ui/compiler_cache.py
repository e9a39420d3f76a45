"""The folders in which compilers keep files between builds, and when those may be deleted.

A build holds a shared lock on them while it compiles; whoever deletes needs an exclusive one.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from .locks import AT_ONCE, EXCLUSIVE, SHARED
from .paths import cache_root, locked

#: below the user's cache: torch's compiler, and compiled programs
INDUCTOR, PROGRAMS = "inductor", "programs"
LOCK = "compilers.lock"


@contextmanager
def in_use() -> Iterator[None]:
    """Lock the compilers' cache against deletion, for the duration of a context."""
    with locked(cache_root(), LOCK, SHARED):
        yield


def folders() -> list[Path]:
    return [cache_root() / name for name in (INDUCTOR, PROGRAMS)]


def size() -> int:
    """Return the bytes of the compilers' files."""
    files = (f for folder in folders() for f in folder.rglob("*"))
    return sum(f.lstat().st_size for f in files if f.is_file() and not f.is_symlink())


def delete_all() -> bool:
    """Delete the compilers' files; False while a build uses them, or where the cache is not this
    user's alone: then builds keep nothing in it."""
    with locked(cache_root(), LOCK, EXCLUSIVE | AT_ONCE) as alone:
        for folder in folders() if alone else ():
            shutil.rmtree(folder, ignore_errors=True)
        return alone is True
