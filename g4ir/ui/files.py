"""Files and folders: atomic creation, this package's YAML tables, and disk space."""

from __future__ import annotations

import os
import secrets
import shutil
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

import yaml

from g4ir.errors import InputError

from .units import size_text


def read_table(path: Path) -> Any:
    """Parse a YAML file of this package, by libyaml if PyYAML has it."""
    return yaml.load(path.read_bytes(), getattr(yaml, "CSafeLoader", yaml.SafeLoader))


def write_file(path: Path, *parts: Iterable[bytes | memoryview], mode: int = 0o666) -> None:
    """Write the concatenated parts as `new_version` does."""
    with new_version(path, mode) as file:
        for part in parts:
            for piece in part:
                file.write(piece)


@contextmanager
def new_version(path: Path, mode: int = 0o666) -> Iterator[IO[bytes]]:
    """Context with a temporary file next to `path`, open for writing. At the end it is synced and
    renamed to `path`; after an error it is removed. Its permissions are `mode` minus the umask."""
    name = _new_path(path.parent, f".{path.name}.")
    try:
        handle = os.open(
            name, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode
        )  # the module tempfile would ignore the umask
    except OSError as e:
        raise OSError(e.errno, e.strerror, str(path)) from None
    try:
        with open(handle, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(name, path)
    except BaseException:
        name.unlink(missing_ok=True)
        raise


def new_folder(parent: Path, prefix: str) -> Path:
    """Create an empty folder in `parent`, with a new name that begins with `prefix`."""
    path = _new_path(parent, prefix)
    try:
        path.mkdir()
    except OSError as e:
        raise OSError(e.errno, e.strerror, str(parent)) from None
    return path


def _new_path(parent: Path, prefix: str) -> Path:
    return parent / f"{prefix}{secrets.token_hex(8)}"  # long enough not to exist


def free_bytes(path: Path) -> int:
    """Return the free bytes of the disk of the nearest existing folder above a path."""
    above = (p for p in path.absolute().parents if p.is_dir())
    return shutil.disk_usage(next(above)).free


def check_folder(path: Path) -> None:
    """Raise InputError if a path, or the nearest existing path above it, is no directory."""
    above = next(p for p in (path.absolute(), *path.absolute().parents) if p.exists())
    if not above.is_dir():
        raise InputError(f"{path}: {above} is no directory; choose another --out")


def check_disk_space(path: Path, need: int) -> None:
    """Raise InputError if fewer than `need` bytes are free on the disk of a path."""
    if (free := free_bytes(path)) < need:
        problem = f"{path}: {size_text(need)} are to be written, and {size_text(free)} are free"
        raise InputError(f"{problem}; make room or choose a path on another disk")
