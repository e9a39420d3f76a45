"""The engine directory: what is in it, what is refused, where weights and table rows come from.
Bad input, through the command line: one clear error, the right exit code, nothing left over.

What is one input and one message lies in refused/*.yaml.
"""

from __future__ import annotations

import errno
import hashlib
import importlib
import inspect
import io
import json
import math
import os
import pydoc
import random
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import fields, replace
from itertools import pairwise
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

import g4ir
from g4ir import Engine, load_engine, load_spec
from g4ir.artefact.directory import MANIFEST, Manifest, MergedWeights, open_artefact, read_manifest
from g4ir.backends.reference import ReferenceBackend
from g4ir.builder.build import check_space, prepare, write_engine
from g4ir.cli.build import _tell_notes
from g4ir.errors import EngineError, InputError, WeightsError
from g4ir.generate import jsonl
from g4ir.plan.options import BuildConfig, BuildOptions
from g4ir.ui import files
from g4ir.ui.progress import no_progress
from g4ir.weights import pack as packing
from g4ir.weights.pack import MadeParams, RowTable, StoredParams
from g4ir.weights.tensorfile import HUGE_PAGE, on_huge_pages, read_header
from tests.cases import TABLES
from tests.cli_tools import BUILD, ok, refused, text_checkpoint
from tests.cli_tools import built as built_by_command
from tests.cli_tools import g4ir as command
from tests.engines import agrees, random_checkpoint, resigned, rewrite, some_tokens
from tests.spies import spy

GRAPHS = {"graph.embed.g4ir", "graph.prefill.g4ir", "graph.decode.g4ir", "prologue.g4ir"}
SIDE = {
    "tokenizer.json": Tokenizer(WordLevel({"a": 0}, "a")).to_str(),
    "generation_config.json": '{"eos_token_id": [1]}',
    "chat_template.jinja": "hi",
}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """tiny-ple with side files, and one that engines have no use for."""
    folder = random_checkpoint(tmp_path_factory.mktemp("c") / "checkpoint", "tiny-ple")
    for name, text in {**SIDE, "README.md": "no"}.items():
        (folder / name).write_text(text)
    return folder


def small(out: Path, spec: Any = None, **options: Any) -> Engine:
    """A reference engine."""
    options = {"backend": "reference", "max_seq": 64, "prefill_chunk": 16, **options}
    return g4ir.build(spec, out, **options)


@pytest.fixture(scope="module")
def built(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Engine:
    return small(tmp_path_factory.mktemp("e") / "engine", checkpoint=checkpoint)


def names(folder: Path) -> set[str]:
    return {f.relative_to(folder).as_posix() for f in folder.rglob("*") if f.is_file()}


def answer(engine: Engine) -> torch.Tensor:
    """Logits after a prompt of several chunks and one step."""
    session, tokens = engine.session(), some_tokens(1, 41)
    session.prefill(tokens[:, :40])
    return session.decode(tokens[:, 40])


# --- what is written --------------------------------------------------------------------------


def test_manifest(built: Engine, checkpoint: Path) -> None:
    """It names each file with its digest; none names the machine that it was built on."""
    packed = {"manifest.json", "spec.yaml", "weights-00000.safetensors"}
    assert names(built.path) == packed | GRAPHS | set(SIDE)
    assert g4ir.load_spec(built.path / "spec.yaml") == built.spec
    m = json.loads((built.path / "manifest.json").read_text())
    config = {f.name for f in fields(BuildConfig)} - {"spec", "drafter"}
    record = {f.name for f in fields(Manifest)} - {"config"}
    specs = {"variant", "spec_digest", "drafter_digest"}
    assert m.keys() == {"format", "digest", *config, *record, *specs}
    assert m["weights"] == {"kind": "packed", "seed": None}
    assert m["spec_digest"] == built.spec.digest()
    assert set(m["files"]) == names(built.path) - {"manifest.json"}
    for name, kept in m["files"].items():
        data = (built.path / name).read_bytes()
        assert kept == {"sha256": hashlib.sha256(data).hexdigest(), "bytes": len(data)}
        assert str(checkpoint).encode() not in data


def test_what_is_read_is_what_was_resolved(tmp_path: Path) -> None:
    given = {"backend": "reference", "quant": "int4", "kv_dtype": "int8", "skip": ("fuse_qkv",)}
    given |= {"drafter": "default", "random_weights": 0, "max_seq": 64}
    p = prepare(load_spec("tiny-media"), BuildOptions(**given))
    write_engine(p, tmp_path / "engine", no_progress)
    assert open_artefact(tmp_path / "engine").config == p.config


def test_weights_in_shards(
    checkpoint: Path, built: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("g4ir.weights.tensorfile.SHARD_BYTES", 100_000)
    sharded = small(tmp_path / "sharded", checkpoint=checkpoint)
    shards = [read_header(f) for f in sorted(sharded.path.glob("weights-*.safetensors"))]
    sizes = [[e.nbytes for e in h.entries.values()] for h in shards]
    assert len(sizes) > 3 and all(sum(s) <= 100_000 or len(s) == 1 for s in sizes)
    # No shard has room for the first tensor of the next.
    assert all(sum(a) + b[0] > 100_000 for a, b in pairwise(sizes))
    agrees(answer(sharded), answer(built))


# --- where weights come from ------------------------------------------------------------------


def test_random_weights_are_not_stored(tmp_path: Path) -> None:
    engine = small(tmp_path / "r", "tiny-ple", random_weights=5)
    assert names(engine.path) == {"manifest.json", "spec.yaml"} | GRAPHS
    assert engine.manifest["weights"] == {"kind": "random", "seed": 5}
    again, other = load_engine(engine.path), small(tmp_path / "o", "tiny-ple", random_weights=6)
    assert torch.equal(answer(engine), answer(again))
    assert not torch.allclose(answer(engine), answer(other), atol=0.1)


# --- tables -----------------------------------------------------------------------------------


def tables_in_4_bits(folder: Path) -> str:
    (folder / "tables.yaml").write_text("rules:\n- {tensors: ['*.table'], form: int4, group: 16}\n")
    return str(folder / "tables.yaml")


def tensors_made(monkeypatch: pytest.MonkeyPatch, kind: Any) -> list[str]:
    """Names of tensors that are made as a whole from now on."""
    names = list[str]()
    spy(monkeypatch, kind, "tensor", lambda _, name: names.append(name))
    return names


@pytest.mark.parametrize("kind", TABLES["large tables"])
def test_large_tables_are_read_by_rows(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """The same rows as in any memory, and the table is never made as a whole."""
    options = TABLES["large tables"][kind]
    options = options | ({"checkpoint": checkpoint} if "checkpoint" in options else {})
    options |= {"quant": tables_in_4_bits(tmp_path)} if kind == "packed codes" else {}
    engine = small(tmp_path / "engine", **options)
    want = answer(engine)
    assert not any(isinstance(t, RowTable) for t in engine.tables.values())
    monkeypatch.setattr(packing, "TABLE_BYTES", 1000)
    for placement in packing.PLACEMENTS:
        assert torch.equal(answer(load_engine(engine.path, ple_placement=placement)), want)
    asked = [*(tensors_made(monkeypatch, kind) for kind in (StoredParams, MadeParams))]
    large = load_engine(engine.path)
    (name,) = large.tables.keys() & {"ple.table", "ple.table.codes"}
    assert isinstance(large.tables[name], RowTable)
    assert torch.equal(answer(large), want)
    assert not any(name in names for names in asked)


@pytest.mark.parametrize("quant", [None, "int8", "int4-mixed", "tables"])
def test_large_tables_are_written_in_pieces(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, quant: str | None
) -> None:
    """The same bytes, the same fit to a grid of 4 bits, and no table is made as a whole."""
    quant = tables_in_4_bits(tmp_path) if quant == "tables" else quant
    whole = small(tmp_path / "whole", checkpoint=checkpoint, quant=quant).manifest
    made = tensors_made(monkeypatch, MadeParams)
    monkeypatch.setattr(packing, "TABLE_BYTES", 1000)
    monkeypatch.setattr(packing, "PIECE_BYTES", 700)
    pieces = small(tmp_path / "pieces", checkpoint=checkpoint, quant=quant).manifest
    assert pieces["files"] == whole["files"]
    assert pieces["notes"] == whole["notes"]
    assert made and not {"ple.table", "ple.table.codes"} & {*made}


# --- loading ----------------------------------------------------------------------------------

#: packages and modules that answers to text do not need
UNUSED = {"transformers", "torch._inductor", "torch._dynamo", "sympy", "triton", "networkx"}
UNUSED |= {"jinja2", "PIL", "soundfile", "huggingface_hub", "matplotlib", "fastapi", "tokenizers"}

USE = (
    "import contextlib, io, sys, g4ir\n"
    "from g4ir.cli import main\n"
    "engine = g4ir.load_engine(sys.argv[1], trust=True)\n"
    "print(engine.generate([2, 5, 7], 5, stop_ids=()))\n"
    "words = '--tokens 2,5,7 --max-new-tokens 1 --trust'.split()\n"
    "with contextlib.redirect_stderr(io.StringIO()):\n"
    "    assert main(['run', sys.argv[1], *words]) == 0\n"
    f"print(*{UNUSED} & set(sys.modules))"
)


def test_loading_needs_no_compiler(engines: Any, tmp_path: Path) -> None:
    """In a process that finds no program at all; the kernels are kept, or ready. Nor does it need
    most packages, and no more does `g4ir run`."""
    engine = engines("torch", "tiny-moe")
    env = {**os.environ, "PATH": str(tmp_path)}
    for name in ("CC", "CXX"):
        env.pop(name, None)
    how: dict[str, Any] = {"capture_output": True, "text": True, "timeout": 200}
    done = subprocess.run([sys.executable, "-c", USE, str(engine.path)], env=env, **how)
    assert done.returncode == 0, done.stderr
    tokens, _, imported = done.stdout.split("\n", 2)
    assert json.loads(tokens) == engine.generate([2, 5, 7], 5, stop_ids=())
    assert not done.stderr and not imported.strip()


def test_weights_are_the_mapped_file(engines: Any) -> None:
    """On a CPU nothing is copied that begins at a whole cache line."""
    engine = load_engine(engines("torch", "tiny-ple").path)
    held = {t.data_ptr(): t for t in engine.runtime.weights.values() if t.nbytes % 64 == 0}
    mapped = [at for at in held if str(engine.path) in _mapping_of(at)]
    assert len(mapped) == len(held) > 10
    assert str(engine.path) in _mapping_of(engine.tables["ple.table"].data_ptr())


def _mapping_of(address: int) -> str:
    """The line of this process's memory map that an address lies in."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        start, end = (int(x, 16) for x in line.split()[0].split("-"))
        if start <= address < end:
            return line
    return ""


def test_public_names_stay_what_they_are() -> None:
    """Modules of the same name do not hide functions of the package."""
    for module in ("ir.interpret", "builder.build", "check.logits", "cli"):
        importlib.import_module(f"g4ir.{module}")
    assert not any(isinstance(getattr(g4ir, name), ModuleType) for name in g4ir.__all__)


# --- as an object -----------------------------------------------------------------------------


def test_help_shows_the_options_of_a_build() -> None:
    shown = inspect.signature(g4ir.build).parameters
    options = {f.name: f for f in fields(BuildOptions)}
    assert {*shown} == {"spec", "out", "progress", *options} and shown["max_batch"].default == 1
    assert all(shown[k].default == f.default for k, f in options.items())
    text = " ".join(pydoc.render_doc(g4ir.build, renderer=pydoc.plaintext).split())
    assert "latent_kv: 'str' = 'off'" in text
    assert all(" ".join(f.metadata["help"].split()) in text for f in options.values())


@pytest.mark.parametrize(
    "prompt", [np.array([2, 5, 7], np.int32), torch.tensor([2, 5, 7]), (2, 5, 7)]
)
def test_prompts_of_other_types(prompt: Any, built: Engine) -> None:
    assert built.generate(prompt, 3) == built.generate([2, 5, 7], 3)
    assert built.generate([prompt], 3) == built.generate([[2, 5, 7]], 3)
    with pytest.raises(InputError, match=r"token 2\.0 at index 0"):
        built.generate(np.array([2.0, 5.0]), 3)


def test_more_prompts_than_the_batch(built: Engine) -> None:
    prompts = [[2, 5 + i, 7][: 2 + i % 2] for i in range(2 * built.limits.max_batch + 1)]
    assert built.generate(prompts, 3) == [built.generate(p, 3) for p in prompts]


def test_linked_shards_in_folders(tmp_path: Path) -> None:
    """An index may name files in folders of the checkpoint; they keep their places."""
    source = random_checkpoint(tmp_path / "source", "tiny-dense")
    (source / "deep").mkdir()
    file = (source / "model.safetensors").rename(source / "deep" / "a.safetensors")
    weight_map = dict.fromkeys(load_file(file), "deep/a.safetensors")
    (source / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    engine = small(tmp_path / "e", checkpoint=source, link_weights=True)
    assert engine.manifest["weights"]["files"].keys() == {"deep/a.safetensors"}
    assert load_engine(engine.path, check_weights=False)


def test_an_engine_that_could_not_be_read_is_not_written(tmp_path: Path) -> None:
    source = random_checkpoint(tmp_path / "so\turce", "tiny-dense")
    with pytest.raises(EngineError, match=r"could not be read again.*plain names"):
        small(tmp_path / "e", checkpoint=source, link_weights=True)
    assert [p.name for p in tmp_path.iterdir()] == ["so\turce"]


def test_huge_pages(engines: Any) -> None:
    """Weights are this process's own, of any size, and the same; refused where they are no help."""
    path = engines("torch", "tiny-moe").path
    mapped, own = (load_engine(path, huge_pages=h) for h in (False, True))
    for name, w in mapped.runtime.weights.items():
        assert torch.equal(w, own.runtime.weights[name])
    large = torch.arange(HUGE_PAGE).view(2, -1)
    assert on_huge_pages(large).data_ptr() % HUGE_PAGE == 0
    assert torch.equal(on_huge_pages(large.T), large.T) and on_huge_pages(large).is_contiguous()
    assert own.generate([2, 5, 7], 8) == mapped.generate([2, 5, 7], 8)
    with pytest.raises(EngineError, match="reference on cpu has no huge pages"):
        load_engine(engines("reference", "tiny-moe").path, huge_pages=True)


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
    return built_by_command(
        folder / "e", "--checkpoint", text_checkpoint(folder / "c"), "--max-batch", "2"
    )


def has(message: str, *parts: str | Path) -> None:
    """Every part occurs in the message."""
    assert not [p for p in map(str, parts) if p not in message], message


# --- checkpoints ------------------------------------------------------------------------------


def test_what_is_not_used_is_reported(tmp_path: Path) -> None:
    """Dead K and V, towers: no errors."""
    folder = random_checkpoint(tmp_path / "c", dead=True)
    moved, tower = "model.layers.4.self_attn.k_proj.weight", "model.vision_tower.x.weight"
    rewrite(folder, lambda tensors: tensors.update({tower: tensors.pop(moved)}))
    outcome = command(*BUILD, "--checkpoint", folder, "--out", tmp_path / "e")
    assert outcome.code == 0
    assert "g4ir: note: 11 tensors not used: K or V of a layer" in outcome.err
    assert "g4ir: note: 1 tensors not used: part of vision" in outcome.err


def test_absent_tensors_are_reported_by_their_value(capsys: pytest.CaptureFixture[str]) -> None:
    defaults = {"a.layer_scalar": 1.0, "t.input_max": math.inf, "t.output_max": math.inf}
    prepared: Any = SimpleNamespace(source=SimpleNamespace(ignored={}, defaults=defaults))
    _tell_notes(prepared)
    assert capsys.readouterr().err == (
        "g4ir: note: 1 tensors absent (a.layer_scalar): filled with 1\n"
        "g4ir: note: 2 tensors absent (t.input_max, ...): filled with inf\n"
    )


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

    def counted(*args: Any, **_: Any) -> None:
        writes.append(args)
        if len(writes) == fail:
            raise OSError(errno.ENOSPC, "No space left on device")

    of_os = [(os, name) for name in ("fsync", "replace", "rename")]
    for module, name in ((files, "_new_path"), *of_os, (shutil, "copyfile")):
        spy(monkeypatch, module, name, counted)
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
        engine = built_by_command(tmp_path / "e", "--checkpoint", text_checkpoint(tmp_path / "c"))
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
    dry = command(*BUILD, "--checkpoint", folder, "--dry-run", "--out", out)
    assert dry.code == 1 and dry.out.startswith("would not build here: ") and short in dry.out
    words = ("--link-weights", "--dry-run", "--out", out)
    dry = command(*BUILD, "--checkpoint", folder, *words)
    assert dry.code == 0 and dry.out.startswith("would build here\n")
    packs = ("--backend", "onnx", "--variant", "tiny-ple", "--random-weights", "0", "--out", out)
    dry = command("build", *packs, "--dry-run", "--json")
    found = json.loads(dry.out)
    assert dry.code == 1 and found["verdict"] == f"would not build here: {found['short'][0]}"
    assert found["short"][0].endswith("; make room or choose another --out")
    prepared = prepare(None, BuildOptions(checkpoint=folder, backend="reference", max_seq=64))
    with pytest.raises(EngineError, match="; make room, try --link-weights or choose"):
        check_space(prepared, out)
    with pytest.raises(EngineError, match="; make room or choose another --out"):
        check_space(replace(prepared, weights=MergedWeights()), out)
    prepared.source.close()


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
    weights = copy / "weights-00000.safetensors"
    raw = weights.read_bytes()
    with changed(weights, raw[:-1] + bytes([raw[-1] ^ 1])):
        load_engine(copy, check_weights=False)
    with changed(weights, raw + b"\0"), pytest.raises(EngineError, match="weights-00000"):
        load_engine(copy, check_weights=False)
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


# --- requests ---------------------------------------------------------------------------------


def test_a_token_without_a_row_in_the_per_layer_table(tmp_path: Path) -> None:
    file = tmp_path / "small.yaml"
    file.write_text("schema: 1\nextends: tiny-ple\ntext: {ple: {dim: 16, vocab_size: 256}}\n")
    engine = built_by_command(tmp_path / "e", "--spec", file, *RANDOM)
    has(refused("run", engine, "--tokens", "2,300"), "token 300", "embedding table of 256")
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
    outcome = command("run", engine, "--input-jsonl", "-", "--max-new-tokens", "1")
    told = json.loads(outcome.out)
    assert outcome.code == 1 and told["id"] is None and endless.tell() < 1 << 22
    has(told["error"], "stdin:", "1.00 MiB", "2.00 MiB", "what follows is not read")
