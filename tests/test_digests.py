"""Large files are compared with their digests once, until anything about them changes."""

from __future__ import annotations

import os
import time
from hashlib import sha256
from pathlib import Path

import pytest

from g4ir.artefact import digests
from g4ir.artefact.digests import has_digest, remembered_digest
from g4ir.ui.paths import state_root

CONTENT = bytes(range(256)) * 4


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[Path]:
    """The files that were read, where any size is large."""
    seen: list[Path] = []

    def counted(file: Path) -> str:
        seen.append(file)
        return sha256(file.read_bytes()).hexdigest()

    monkeypatch.setattr(digests, "sha256", counted)
    monkeypatch.setattr(digests, "LARGE", 1)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    return seen


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "weights"
    path.write_bytes(CONTENT)
    return path


DIGEST = sha256(CONTENT).hexdigest()


def test_equal_files_are_read_once_each(read: list[Path], file: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.write_bytes(CONTENT)
    assert all(has_digest(f, DIGEST) for f in (file, other, file, other))
    assert read == [file, other]


def test_what_was_built_is_known(read: list[Path], file: Path) -> None:
    """Although it was written just now."""
    assert remembered_digest(file) == DIGEST and has_digest(file, DIGEST)
    assert read == [file]


def test_another_digest_is_never_kept(read: list[Path], file: Path) -> None:
    assert not has_digest(file, "0" * 64) and not has_digest(file, "0" * 64)
    assert len(read) == 2 and not list(state_root().rglob("0" * 64 + "*"))


def test_any_write_is_seen(read: list[Path], file: Path) -> None:
    """Also one of the same size that sets the time of the last write back."""
    assert has_digest(file, DIGEST)
    before = file.stat()
    time.sleep(2 * digests.TICK_NS / 1e9)
    with open(file, "r+b") as stream:
        stream.write(b"\xff")
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert not has_digest(file, DIGEST)
    file.write_bytes(CONTENT)
    assert has_digest(file, DIGEST)
    other = file.with_name("other")
    other.write_bytes(b"x" * len(CONTENT))
    other.replace(file)
    assert not has_digest(file, DIGEST)


def test_what_others_could_have_written_is_not_believed(read: list[Path], file: Path) -> None:
    assert has_digest(file, DIGEST)
    (state_root() / "digests").chmod(0o777)
    assert has_digest(file, DIGEST) and len(read) == 2


@pytest.mark.parametrize("kept", ["[", "null", "[1, 2]"])
def test_damaged_memory_costs_time_alone(read: list[Path], file: Path, kept: str) -> None:
    assert has_digest(file, DIGEST)
    next(state_root().rglob(f"{DIGEST}*")).write_text(kept)
    assert has_digest(file, DIGEST) and len(read) == 2
    assert has_digest(file, DIGEST) and len(read) == 2
