"""Engines that somebody altered and gave right digests again: one error, or the same answers;
digests of files, and when they are computed again."""

from __future__ import annotations

import os
import shlex
import shutil
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import g4ir
from g4ir import Engine, load_engine
from g4ir.artefact import digests, directory
from g4ir.artefact.digests import SOURCES, file_digest, has_digest
from g4ir.artefact.directory import MANIFEST, manifest_text, open_artefact, read_manifest, rebuild
from g4ir.cli import main
from g4ir.errors import EngineError, G4Error
from g4ir.ui.paths import state_root
from g4ir.weights.checkpoint import sha256
from tests.cases import TABLES
from tests.configs import spec_called
from tests.engines import random_checkpoint, resigned, stored_manifest
from tests.mutations import mutate
from tests.spies import spy

PROMPT = [2, 5, 7, 11, 400, 3, 9, 8, 7, 6, 5]


@pytest.fixture(scope="module")
def engine(engines: Any) -> Engine:
    return engines("reference", "tiny-ple")


@pytest.fixture(scope="module")
def answer(engine: Engine) -> list[int]:
    return engine.generate(PROMPT, 4, stop_ids=())


@pytest.fixture
def altered(engine: Engine, tmp_path: Path) -> Path:
    return Path(shutil.copytree(engine.path, tmp_path / "engine"))


def refused(path: Path, *parts: str) -> None:
    """One error of ours, which names the engine and what is said of it."""
    with pytest.raises(EngineError) as caught:
        load_engine(path, trust=True)
    message = str(caught.value)
    assert (str(path) in message and "build" in message) or "remove" in message
    assert all(part in message for part in parts), message


@pytest.mark.parametrize("name", ["../x", "/etc/passwd"])
def test_files_elsewhere(altered: Path, name: str) -> None:
    resigned(altered, lambda m: m["files"].update({name: {"sha256": "0" * 64, "bytes": 1}}))
    refused(altered, name)


def test_a_rank_without_weights(tmp_path: Path) -> None:
    options = {"checkpoint": random_checkpoint(tmp_path / "c", "tiny-moe"), "tp": 2}
    out = g4ir.build(None, tmp_path / "two", backend="reference", **options).path

    def keep_rank_1(manifest: dict[str, Any]) -> None:
        for name in [n for n in manifest["files"] if "weights" in n and "rank1of2" not in n]:
            del manifest["files"][name]
            (out / name).unlink()

    resigned(out, keep_rank_1)
    refused(out, "no weight file of rank 0 is named")


def test_keys_in_another_order(altered: Path) -> None:
    resigned(altered, lambda m: m.update(notes=m.pop("notes")))
    refused(altered, "not as g4ir writes it")


def test_a_manifest_that_is_no_ordinary_file(altered: Path, tmp_path: Path) -> None:
    file = altered / MANIFEST
    text = file.read_bytes()
    file.unlink()
    os.mkfifo(file)
    refused(altered, "no engine directory")
    file.unlink()
    file.write_bytes(b" " * (17 << 20) + text)
    refused(altered, "larger than")


# --- whatever is altered ----------------------------------------------------------------------

NAMES = st.sampled_from(("zz", "a2", "../y"))


@settings(max_examples=max(250, settings.default.max_examples if settings.default else 0))
@given(data=st.data())
def test_any_alteration(engine: Engine, answer: list[int], data: st.DataObject) -> None:
    values = stored_manifest(engine.path)
    del values["digest"]
    values = mutate(data, values, st.sampled_from(TABLES["values of manifests"]), NAMES)
    file = engine.path / MANIFEST
    before = file.read_bytes()
    file.write_text(manifest_text(values))
    try:
        assert load_engine(engine.path).generate(PROMPT, 4, stop_ids=()) == answer
    except G4Error as e:
        assert "\n" not in str(e)
    finally:
        file.write_bytes(before)


def test_paths_that_cannot_be_read(altered: Path, tmp_path: Path) -> None:
    """Whatever the system says of a path, or the parser of what lies there, is one error."""
    for path in (Path("a\0b"), tmp_path / ("x" * 5000)):
        with pytest.raises(EngineError):
            load_engine(path)
    deep: Any = []
    values = stored_manifest(altered)
    del values["digest"]
    for depth in range(sys.getrecursionlimit()):
        deep = [deep]
        if depth % 200 == 199:
            with suppress(RecursionError):  # where the writer itself cannot go as deep
                (altered / MANIFEST).write_text(manifest_text({**values, "notes": deep}))
            with pytest.raises(EngineError):
                load_engine(altered)


def test_the_command_that_builds_it_again_does(tmp_path: Path) -> None:
    """With all its options: the same manifest, digest and all."""
    spec, out = tmp_path / "media.yaml", tmp_path / "engine"
    spec.write_text(spec_called("tiny-media").to_yaml())
    text = {"max_seq": 256, "prefill_chunk": 192, "dtype": "bfloat16", "all_logits": True}
    media = {"image_budgets": (140, 70), "audio_seconds": (1.0, 3.0), "media": ("image", "audio")}
    text |= {"quant": "int4", "quant_activations": "int8", "kv_dtype": "int8"}
    given = {**text, **media, "random_weights": 0, "skip": ("fuse_gate_up", "fuse_norm_residual")}
    first = g4ir.build(spec, out, backend="reference", **given)
    found = open_artefact(out)
    words = shlex.split(rebuild(out, found.manifest).partition("build it again: ")[2])
    assert main([*words[1:-1], str(tmp_path / "again")]) == 0
    again = load_engine(tmp_path / "again")
    assert again.manifest == first.manifest


# --- digests of weight files, and when they are computed again ---------------------------------


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
    g4ir.build(None, path, backend="reference", checkpoint=checkpoint)
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
    with pytest.raises(EngineError, match="is not what this g4ir builds"):
        open_artefact(path)
    assert len(made) == 2
