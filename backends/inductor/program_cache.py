"""Cache of compiled programs and CPU kernels, in the user's cache folder."""

from __future__ import annotations

import shutil
from pathlib import Path

from g4ir.errors import TrustError
from g4ir.ui.files import write_file
from g4ir.ui.paths import cache_root, check_private, private, state_root
from g4ir.weights.checkpoint import sha256


def cache_dir() -> Path:
    """Return the folder of cached programs."""
    return cache_root() / "programs"


def from_cache(name: str, out: Path) -> bool:
    """Copy a cached program into the folder `out`; False if there is none, it cannot be copied or
    its digest differs. TrustError if other users can write to the cache or to the digests."""
    cached, digest = cache_dir() / name, _digest_file(name)
    if not (cached.is_file() and digest.is_file()):
        return False
    for file in (cached, digest):
        check_private(file.parent)
    copy = out / f"{name}.kept"
    try:
        shutil.copyfile(cached, copy)
        right = sha256(copy) == digest.read_text()
        if right:
            copy.replace(out / name)
        return right
    except (OSError, UnicodeDecodeError):
        return False
    finally:
        copy.unlink(missing_ok=True)


def _digest_file(name: str) -> Path:
    """Return the file of a program's digest. It is outside the cache, so that writing to the cache
    does not suffice to replace a program."""
    return state_root() / "programs" / name


def keep_program(path: Path) -> None:
    """Store a program's file in the cache; errors are ignored. A concurrent process would store an
    equal one."""
    try:
        if from_cache(path.name, path.parent):
            return
        cached, digest = private(cache_dir()), private(_digest_file(path.name).parent)
        write_file(cached / path.name, [path.read_bytes()])
        write_file(digest / path.name, [sha256(path).encode()])
    except (TrustError, OSError):
        return
