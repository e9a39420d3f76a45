"""Bad input, through the command line: one clear error, the right exit code, nothing left over.

What is one input and one message lies in refused/*.yaml.
"""

from __future__ import annotations

import errno
import io
import json
import os
import random
import shutil
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from g4ir.artefact.directory import MANIFEST, read_manifest
from g4ir.backends.reference import ReferenceBackend
from g4ir.builder.build import prepare, write_engine
from g4ir.builder.load import load_engine
from g4ir.errors import EngineError, WeightsError
from g4ir.generate import jsonl
from g4ir.plan.options import BuildOptions
from g4ir.ui import files
from g4ir.ui.progress import no_progress
from tests.cli_tools import BUILD, built, g4ir, ok, refused, text_checkpoint
from tests.engines import random_checkpoint, resigned, rewrite

RANDOM = ("--random-weights", "0")


@pytest.fixture
def out(tmp_path: Path) -> Iterator[Path]:
    """An output path at which, and beside which, nothing may be left."""
    folder = tmp_path / "outputs"
    folder.mkdir()
    yield folder / "engine"
    assert not list(folder.iterdir())


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from a checkpoint with a tokenizer: it has every kind of file; do not alter it."""
    folder = tmp_path_factory.mktemp("engine")
    return built(folder / "e", "--checkpoint", text_checkpoint(folder / "c"), "--max-batch", "2")


def has(message: str, *parts: str | Path) -> None:
    """Every part occurs in the message."""
    assert not [p for p in map(str, parts) if p not in message], message


# --- checkpoints ------------------------------------------------------------------------------


def test_what_is_not_used_is_reported(tmp_path: Path) -> None:
    """Dead K and V, towers: no errors."""
    folder = random_checkpoint(tmp_path / "c", dead=True)
    moved, tower = "model.layers.4.self_attn.k_proj.weight", "model.vision_tower.x.weight"
    rewrite(folder, lambda tensors: tensors.update({tower: tensors.pop(moved)}))
    outcome = g4ir(*BUILD, "--checkpoint", folder, "--out", tmp_path / "e")
    assert outcome.code == 0
    assert "g4ir: note: 11 tensors not used: K or V of a layer" in outcome.err
    assert "g4ir: note: 1 tensors not used: part of vision" in outcome.err


# --- options of build -------------------------------------------------------------------------

VARIANT = ("--variant", "tiny-dense")


@pytest.mark.parametrize("make", [Path.mkdir, Path.touch, lambda path: path.symlink_to("x")])
def test_the_output_exists(make: Callable[[Path], None], tmp_path: Path) -> None:
    """A directory, a file, a link to nothing."""
    out = tmp_path / "e"
    make(out)
    for words in ((), ("--dry-run",)):
        message = refused(*BUILD, *VARIANT, *RANDOM, *words, "--out", out)
        has(message, f"{out} exists", "--out")
    assert [p.name for p in tmp_path.iterdir()] == ["e"]


def test_inputs_that_no_yaml_holds(engine: Path, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    has(refused(*BUILD, *VARIANT, *RANDOM, "--out", tmp_path / "file" / "e"), tmp_path / "file")
    has(refused("run", engine, "--prompt", "a\udcff"), "--prompt", "UTF-8 at character 1")


# --- disks that fill up -----------------------------------------------------------------------


def full_disk(monkeypatch: pytest.MonkeyPatch, fail: int) -> list[Any]:
    """What writes to a disk is noted, and fails the `fail`-th time; 0 is never."""
    writes = list[Any]()

    def counted(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            writes.append(args)
            if len(writes) == fail:
                raise OSError(errno.ENOSPC, "No space left on device")
            return function(*args, **kwargs)

        return call

    of_os = [(os, name) for name in ("fsync", "replace", "rename")]
    for module, name in ((files, "_new_path"), *of_os, (shutil, "copyfile")):
        monkeypatch.setattr(module, name, counted(getattr(module, name)))
    return writes


def test_side_files_that_turn_out_wrong(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are read while weights are packed: nothing is compiled behind them, or left."""
    folder = text_checkpoint(tmp_path / "c")
    prepared = prepare(None, BuildOptions(checkpoint=folder, backend="reference", max_seq=64))
    wrong = Future[Any]()
    wrong.set_exception(WeightsError("tokenizer.json: no tokenizer"))
    monkeypatch.setattr(type(prepared.backend), "compile", compiled := Mock())
    with pytest.raises(WeightsError, match="no tokenizer"):
        write_engine(replace(prepared, side_files=wrong), tmp_path / "e", no_progress)
    assert not compiled.called and {f.name for f in tmp_path.iterdir()} == {"c"}


def test_no_space_left_at_any_write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = text_checkpoint(tmp_path / "c")
    prepared = prepare(None, BuildOptions(checkpoint=folder, backend="reference", max_seq=64))
    out = tmp_path / "outputs" / "e"
    out.parent.mkdir()
    # What is kept of a build beside it: a warning where there is no room (tests/test_trust.py).
    monkeypatch.setattr("g4ir.builder.build.record_built", lambda manifest, path: None)

    def write(fail: int) -> int:
        with monkeypatch.context() as patch:
            writes = full_disk(patch, fail)
            write_engine(prepared, out, lambda message: None)
        return len(writes)

    writes = write(0)
    shutil.rmtree(out)
    assert writes > 20
    for k in range(1, writes + 1):
        with pytest.raises(EngineError, match="No space left on device; make room"):
            write(k)
        assert not list(out.parent.iterdir()), k
    assert write(0) == writes
    shutil.rmtree(out)
    # A build that is killed there removes nothing, and what it leaves does not load.
    remove = shutil.rmtree
    monkeypatch.setattr(shutil, "rmtree", lambda *_, **__: None)
    monkeypatch.setattr(Path, "unlink", lambda *_, **__: None)
    for k in range(1, writes + 1):
        with pytest.raises(EngineError, match="No space left on device"):
            write(k)
        left = [*out.parent.iterdir()]
        assert out not in left and (left or k == 1), k
        for folder in left:
            with pytest.raises(EngineError, match="no engine directory"):
                load_engine(folder)
            remove(folder)


def test_the_umask_holds_for_engines(tmp_path: Path) -> None:
    mask = 0o077
    before = os.umask(mask)
    try:
        engine = built(tmp_path / "e", "--checkpoint", text_checkpoint(tmp_path / "c"))
    finally:
        os.umask(before)
    for path in (engine, engine.parent / "c", *engine.rglob("*")):
        mode = 0o777 if path.is_dir() else 0o666
        assert path.stat().st_mode & 0o777 == mode & ~mask, path


def test_weights_that_do_not_fit(
    tmp_path: Path, out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = random_checkpoint(tmp_path / "c")
    usage = shutil.disk_usage(tmp_path)._replace(free=1 << 20)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    short = "needs 66.1 MiB (2.07 MiB of weights), 1.00 MiB are free"
    message = refused(*BUILD, "--checkpoint", folder, "--out", out)
    has(message, out.parent, short, "--link-weights")
    dry = g4ir(*BUILD, "--checkpoint", folder, "--dry-run", "--out", out)
    assert dry.code == 1 and dry.out.startswith("would not build here: ") and short in dry.out
    words = ("--link-weights", "--dry-run", "--out", out)
    dry = g4ir(*BUILD, "--checkpoint", folder, *words)
    assert dry.code == 0 and dry.out.startswith("would build here\n")
    packs = ("--backend", "onnx", "--variant", "tiny-ple", "--random-weights", "0", "--out", out)
    dry = g4ir("build", *packs, "--dry-run", "--json")
    found = json.loads(dry.out)
    assert dry.code == 1 and found["verdict"] == f"would not build here: {found['short'][0]}"
    assert found["short"][0].endswith("; make room or choose another --out")


# --- engines that were altered ----------------------------------------------------------------


def run(engine: Path) -> str:
    """The refusal of an engine, by every verb that loads it."""
    return refused("run", engine, "--tokens", "2,5", "--max-new-tokens", "2")


@contextmanager
def changed(file: Path, raw: bytes) -> Iterator[None]:
    """A file with other content."""
    before = file.read_bytes()
    file.write_bytes(raw)
    yield
    file.write_bytes(before)


@pytest.fixture
def copy(engine: Path, tmp_path: Path) -> Path:
    return shutil.copytree(engine, tmp_path / "copy")


def test_any_byte_of_the_manifest(copy: Path) -> None:
    file = copy / MANIFEST
    raw, rng = file.read_bytes(), random.Random(0)
    for at in rng.sample(range(len(raw)), 400):
        other = raw[:at] + bytes([raw[at] ^ rng.randrange(1, 256)]) + raw[at + 1 :]
        with changed(file, other), pytest.raises(EngineError, match=r"manifest\.json"):
            read_manifest(copy)


KINDS = {"spec.yaml", "weights-00000.safetensors", "graph.decode.g4ir", "prologue.g4ir"}
KINDS |= {MANIFEST, "tokenizer.json", "generation_config.json"}


def test_changed_truncated_grown_or_missing_files(copy: Path) -> None:
    files = sorted(p for p in copy.rglob("*") if p.is_file())
    assert {f.name for f in files} > KINDS
    for file in files:
        raw = file.read_bytes()
        at = len(raw) // 2
        flipped = raw[:at] + bytes([raw[at] ^ 1]) + raw[at + 1 :]
        for other in (flipped, raw[:-1], b"", raw + b"\n"):
            with changed(file, other):
                has(run(copy), file, "build")
        file.unlink()
        has(run(copy), file.name if file.name == MANIFEST else file, "build")
        file.write_bytes(raw)
    assert load_engine(copy)


def edited(copy: Path, **changes: Any) -> Path:
    """The engine with another manifest, digest included."""
    return resigned(copy, lambda m: m.update(changes))


def test_built_for_another_device(copy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    message = run(edited(copy, device="cuda"))
    has(message, copy, "cuda", "--device cpu")
    assert refused("verify", copy) == message


HERE = "x86_64 AVX2 avx,avx2,fma"


def test_built_for_another_machine(copy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ReferenceBackend, "machine", lambda self, device: HERE)
    flags = "avx,avx2,avx512f,fma"
    for other in ("aarch64 DEFAULT asimd", f"x86_64 AVX512 {flags}", f"x86_64 AVX2 {flags}"):
        has(run(edited(copy, machine=other)), copy, other, HERE, "build it again")
    assert "without avx512f" in run(copy)
    versions = json.loads((copy / MANIFEST).read_text())["versions"]
    with_torch = edited(copy, machine=HERE, versions={"torch": "1.0.0", "python": "3.8.0"})
    has(run(with_torch), copy, "1.0.0", torch.__version__, "build it again")
    edited(copy, versions=versions)
    assert load_engine(edited(copy, machine="x86_64 AVX2 avx,fma"))


def test_linked_weights_that_changed(tmp_path: Path) -> None:
    folder = random_checkpoint(tmp_path / "c", shards=2)
    engine = built(tmp_path / "e", "--checkpoint", folder, "--link-weights")
    shard = sorted(folder.glob("*.safetensors"))[1]
    raw = shard.read_bytes()
    with changed(shard, raw[:-1] + bytes([raw[-1] ^ 1])):
        has(run(engine), shard, "--link-weights")
    shard.unlink()
    has(run(engine), shard, "--link-weights")


# --- requests ---------------------------------------------------------------------------------


def test_a_token_without_a_row_in_the_per_layer_table(tmp_path: Path) -> None:
    file = tmp_path / "small.yaml"
    file.write_text("schema: 1\nextends: tiny-ple\ntext: {ple: {dim: 16, vocab_size: 256}}\n")
    engine = built(tmp_path / "e", "--spec", file, *RANDOM)
    has(refused("run", engine, "--tokens", "2,300"), "token 300", "vocabulary of 256")
    loaded = load_engine(engine)  # it is never drawn either, or an answer would end there
    logits = loaded.session().prefill([[2, 9]])
    assert int(logits.argmax()) >= 256
    assert max(loaded.generate([2, 9], 8)) < 256
    words = ("run", engine, "--tokens", "2,9", "--max-new-tokens", "8", "--temperature")
    for temperature in ("0", "5"):
        assert max(json.loads(ok(*words, temperature, "--json"))["tokens"]) < 256
    assert "greedy" in ok("verify", engine, "--against", "hf")


@pytest.mark.parametrize("piece", [b"x", b"\0", b"\n"])
def test_endless_input(piece: bytes, engine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One endless line ends at the limit of a line, endless lines at that of them all."""
    monkeypatch.setattr(jsonl, "LINE_BYTES", 1 << 20)
    monkeypatch.setattr(jsonl, "INPUT_BYTES", 1 << 21)
    endless = io.BytesIO(piece * (1 << 23))
    monkeypatch.setattr(sys, "stdin", SimpleNamespace(buffer=endless, isatty=lambda: False))
    outcome = g4ir("run", engine, "--input-jsonl", "-", "--max-new-tokens", "1")
    told = json.loads(outcome.out)
    assert outcome.code == 1 and told["id"] is None and endless.tell() < 1 << 22
    has(told["error"], "stdin:", "1.00 MiB", "2.00 MiB", "what follows is not read")
