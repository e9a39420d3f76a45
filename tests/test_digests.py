"""Digests of weight files, and when they are computed again."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from g4ir import build, load_engine
from g4ir.artefact import digests, directory
from g4ir.artefact.digests import SOURCES, file_digest, has_digest
from g4ir.artefact.directory import open_artefact, read_manifest
from g4ir.errors import EngineError
from g4ir.ui.paths import state_root
from g4ir.weights.checkpoint import sha256
from tests.engines import random_checkpoint, resigned
from tests.spies import spy


@pytest.fixture
def computed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """The files that were read, of any size."""
    files = list[Path]()
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setattr(digests, "LARGE", 1)
    spy(monkeypatch, digests, "sha256", files.append)
    return files


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "file"
    path.write_bytes(b"weights")
    return path


def record() -> Path:
    (found,) = (state_root() / "digests").iterdir()
    return found


def test_an_unchanged_file_is_read_once(computed: list[Path], file: Path) -> None:
    digest = file_digest(file)
    assert has_digest(file, digest) and len(computed) == 1
    assert has_digest(file.rename(file.with_name("other")), digest) and len(computed) <= 2
    assert not has_digest(file.with_name("other"), "0" * 64)


def test_small_files(computed: list[Path], file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(digests, "LARGE", 8)
    digest = file_digest(file)
    assert has_digest(file, digest) and len(computed) == 2


def test_a_changed_file_is_read_again(computed: list[Path], file: Path) -> None:
    """Whether it is written in place, with its old time, or another takes its name."""
    digest, old = file_digest(file), file.stat()
    with file.open("r+b") as opened:
        opened.write(b"W")
    os.utime(file, ns=(old.st_atime_ns, old.st_mtime_ns))
    assert not has_digest(file, digest)
    other = file.with_name("other")
    other.write_bytes(b"Weighty")
    os.utime(other, ns=(old.st_atime_ns, old.st_mtime_ns))
    other.replace(file)
    assert not has_digest(file, digest) and len(computed) == 3


@pytest.mark.parametrize("content", [b"", b"[]", b"{", b"null", b"\xff", b"[1, 2, 3]"])
def test_damaged_records(content: bytes, computed: list[Path], file: Path) -> None:
    digest = file_digest(file)
    record().write_bytes(content)
    assert has_digest(file, digest) and len(computed) == 2
    assert has_digest(file, digest) and len(computed) == 2  # it is whole again


def test_records_others_may_write(computed: list[Path], file: Path) -> None:
    digest = file_digest(file)
    record().parent.chmod(0o777)
    assert has_digest(file, digest) and has_digest(file, digest) and len(computed) == 3


def test_without_records(computed: list[Path], file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(file))
    digest = file_digest(file)
    assert has_digest(file, digest) and not has_digest(file, "0" * 64) and len(computed) == 3


def test_a_build_reads_no_weights_again(computed: list[Path], tmp_path: Path) -> None:
    """It computes their digests as it writes them, and keeps the records."""
    path, checkpoint = tmp_path / "engine", random_checkpoint(tmp_path / "checkpoint", "tiny-moe")
    build(None, path, backend="reference", checkpoint=checkpoint)
    weights, files = sorted(path.glob("*.safetensors")), read_manifest(path).files
    assert weights and computed and not {f.name for f in weights} & {f.name for f in computed}
    assert all(files[f.name].sha256 == sha256(f) for f in weights)


def test_a_second_start_reads_no_weights(
    engines: Any, computed: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An altered file is refused all the same."""
    monkeypatch.setattr(digests, "LARGE", 1 << 14)
    path = shutil.copytree(engines("reference", "tiny-moe").path, tmp_path / "e")
    weights = sorted(path.glob("*.safetensors"))
    assert weights and min(f.stat().st_size for f in weights) > 1 << 14
    load_engine(path).close()
    computed.clear()
    load_engine(path).close()
    assert computed and not {*weights} & {*computed}
    data = weights[0].read_bytes()
    weights[0].write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    with pytest.raises(EngineError, match=weights[0].name):
        load_engine(path)


# --- graphs -----------------------------------------------------------------------------------


@pytest.fixture
def made(computed: list[Path], monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """The engines whose graphs were made."""
    engines = list[Path]()
    spy(monkeypatch, directory, "_rebuild_packing", lambda path, *_: engines.append(path))
    return engines


def test_graphs_are_made_once(engines: Any, made: list[Path]) -> None:
    """Those that are parsed are the same, of a program with a drafter and towers too."""
    for variant in ("tiny-moe", "tiny-ple"):
        path = engines("reference", variant).path
        first, second = open_artefact(path), open_artefact(path)
        assert first.packing == second.packing
        assert [str(g) for g in first.packing.program.graphs.values()] == [
            str(g) for g in second.packing.program.graphs.values()
        ]
    assert len(made) == 2


def test_graphs_are_made_again_where_sources_changed(
    engines: Any, made: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever file of the package it is."""
    path = engines("reference", "tiny-moe").path
    open_artefact(path)
    sources = [*digests._sources()]
    assert {"norm.py", "fuse_qkv.py", "tiles.py", "backend.py"} <= {p.name for p in sources}
    assert {p.suffix for p in sources} == {*SOURCES}
    other = tmp_path / "other.py"
    monkeypatch.setattr(digests, "_sources", lambda: iter([*sources, other]))
    for text, count in (("", 2), ("x = 1", 3)):
        other.write_text(text)
        open_artefact(path)
        assert len(made) == count


def test_altered_graphs_are_refused(engines: Any, made: list[Path], tmp_path: Path) -> None:
    path = shutil.copytree(engines("reference", "tiny-moe").path, tmp_path / "e")
    open_artefact(path)
    graph = path / "graph.decode.g4ir"
    graph.write_text(graph.read_text().replace("rms_norm", "rms_morn", 1))
    with pytest.raises(EngineError, match="SHA-256"):
        open_artefact(path)
    resigned(path, lambda values: None)
    with pytest.raises(EngineError, match="is not what this g4ir makes"):
        open_artefact(path)
    assert len(made) == 2
