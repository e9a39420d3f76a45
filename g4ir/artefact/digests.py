"""Records of earlier checks, so that unchanged files are not checked again: SHA-256 of large files,
and engines whose graphs were verified.

SHA-256 of a weight file takes about a second per GiB, and building the graphs of a model tenths of
a second: most of the load time of an engine in the page cache. A file counts as unchanged if its
device, inode, size, mtime and ctime are the same; users cannot set ctime. Records are files in the
user's state folder; without them checks only take longer.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import suppress
from hashlib import sha256 as sha256_of
from pathlib import Path
from typing import Any

import g4ir
from g4ir import backends, passes
from g4ir.errors import TrustError
from g4ir.ui.files import write_file
from g4ir.ui.paths import check_private, private, state_root
from g4ir.weights.checkpoint import sha256

#: minimum bytes of a file with a record. Hashing one takes longer than a clock tick, so a write
#: during the hashing changes its mtime
LARGE = 32 << 20
FILES, GRAPHS = "digests", "graphs"
#: suffixes of the package's files on which graphs depend
SOURCES = (".py", ".yaml")


def file_digest(path: Path, computed: str | None = None) -> str:
    """Return the SHA-256 of a file, or `computed` if it is known from writing the file; store a
    record of it for a large file."""
    identity = identity_of(path)
    digest = computed or sha256(path)
    if identity[2] >= LARGE:
        _keep(FILES, _named(identity), [*identity, digest])
    return digest


def has_digest(path: Path, digest: str) -> bool:
    """Whether a file's SHA-256 is `digest`: by its record if the file has not changed since, else
    computed."""
    identity = identity_of(path)
    if identity[2] >= LARGE and _recall(FILES, _named(identity)) == [*identity, digest]:
        return True
    return file_digest(path) == digest


def were_equal(engine: str) -> bool:
    """Whether an engine's graphs (by its digest) were verified before to equal those that these
    sources build."""
    return bool(_recall(GRAPHS, engine) == sources_digest())


def keep_equal(engine: str) -> None:
    """Store a record that an engine's graphs equal those that these sources build."""
    _keep(GRAPHS, engine, sources_digest())


def sources_digest() -> str:
    """Return a digest of the paths and identities (`identity_of`) of the sources of g4ir, its
    passes and its backends."""
    facts = [(str(p), identity_of(p)) for p in _sources()]
    return sha256_of(repr(sorted(facts)).encode()).hexdigest()


def _sources() -> Iterator[Path]:
    for top in (*g4ir.__path__, *passes.__path__, *backends.__path__):
        for folder, _, names in os.walk(top):
            yield from (Path(folder, name) for name in names if name.endswith(SOURCES))


def identity_of(path: Path) -> list[int]:
    """Return a file's identity, which changes with its content: device, inode, size, mtime and
    ctime."""
    s = path.stat()
    return [s.st_dev, s.st_ino, s.st_size, s.st_mtime_ns, s.st_ctime_ns]


def _named(identity: list[int]) -> str:
    return f"{identity[0]:x}-{identity[1]:x}"


def _recall(kind: str, name: str) -> Any:
    """Return the content of a record; None if it is missing or invalid, or other users could have
    written it."""
    record = state_root() / kind / name
    with suppress(OSError, TrustError, ValueError):
        check_private(record.parent)
        return json.loads(record.read_bytes())


def _keep(kind: str, name: str, facts: Any) -> None:
    with suppress(OSError, TrustError):
        write_file(private(state_root() / kind) / name, [json.dumps(facts).encode()])
