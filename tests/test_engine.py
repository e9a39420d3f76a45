"""The engine directory: what is in it, what is refused, where weights and table rows come from."""

from __future__ import annotations

import hashlib
import importlib
import inspect
import json
import os
import pydoc
import shutil
import subprocess
import sys
from dataclasses import fields
from itertools import pairwise
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

import g4ir
from g4ir import Engine, load_engine, load_spec
from g4ir.artefact.directory import Manifest, open_artefact
from g4ir.builder.build import prepare, write_engine
from g4ir.errors import EngineError, InputError
from g4ir.plan.options import BuildConfig, BuildOptions
from g4ir.ui.progress import no_progress
from g4ir.weights import pack as packing
from g4ir.weights.pack import MadeParams, RowTable, StoredParams
from g4ir.weights.tensorfile import HUGE_PAGE, on_huge_pages, read_header
from tests.cases import TABLES
from tests.engines import agrees, random_checkpoint, some_tokens

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


def tensors_made(monkeypatch: pytest.MonkeyPatch, kind: Any) -> list[str]:
    """Names of tensors that are made as a whole from now on."""
    names, whole = list[str](), kind.tensor
    monkeypatch.setattr(kind, "tensor", lambda self, n: names.append(n) or whole(self, n))
    return names


@pytest.mark.parametrize("kind", TABLES["large tables"])
def test_large_tables_are_read_by_rows(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """The same rows, and the table is never made as a whole."""
    options = TABLES["large tables"][kind]
    options = options | ({"checkpoint": checkpoint} if "checkpoint" in options else {})
    engine = small(tmp_path / "engine", **options)
    want = answer(engine)
    assert not any(isinstance(t, RowTable) for t in engine.tables.values())
    monkeypatch.setattr(packing, "TABLE_BYTES", 1000)
    asked = [*(tensors_made(monkeypatch, kind) for kind in (StoredParams, MadeParams))]
    large = load_engine(engine.path)
    assert isinstance(large.tables["ple.table"], RowTable)
    assert torch.equal(answer(large), want)
    assert not any("ple.table" in names for names in asked)


@pytest.mark.parametrize("quant", [None, "int8", "int4-mixed", "all.yaml"])
def test_large_tables_are_written_in_pieces(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, quant: str | None
) -> None:
    """The same bytes, the same fit to a grid of 4 bits, and no table is made as a whole."""
    if quant == "all.yaml":
        (tmp_path / quant).write_text("rules:\n- {tensors: ['*.table'], form: int4, group: 16}\n")
        quant = str(tmp_path / quant)
    whole = small(tmp_path / "whole", checkpoint=checkpoint, quant=quant).manifest
    made = tensors_made(monkeypatch, MadeParams)
    monkeypatch.setattr(packing, "TABLE_BYTES", 1000)
    monkeypatch.setattr(packing, "PIECE_BYTES", 700)
    pieces = small(tmp_path / "pieces", checkpoint=checkpoint, quant=quant).manifest
    assert pieces["files"] == whole["files"]
    assert pieces["notes"] == whole["notes"]
    assert made and not {"ple.table", "ple.table.codes"} & {*made}


def test_table_placements(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = {}
    for placement in packing.PLACEMENTS:
        engine = small(tmp_path / placement, checkpoint=checkpoint, ple_placement=placement)
        assert engine.manifest["ple_placement"] == placement
        found[placement] = answer(load_engine(engine.path))
        monkeypatch.setattr(packing, "TABLE_BYTES", 1000)
        assert torch.equal(answer(load_engine(engine.path)), found[placement])
        monkeypatch.undo()
    assert all(torch.equal(x, found["device"]) for x in found.values())
    moved = load_engine(tmp_path / "device", ple_placement="host")
    assert torch.equal(answer(moved), found["device"])


# --- what is refused --------------------------------------------------------------------------


def test_weights_are_checked_unless_told_otherwise(built: Engine, tmp_path: Path) -> None:
    copied = Path(shutil.copytree(built.path, tmp_path / "copy"))
    file = copied / "weights-00000.safetensors"
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    with pytest.raises(EngineError, match="weights-00000"):
        load_engine(copied)
    load_engine(copied, check_weights=False)
    file.write_bytes(data + b"\0")
    with pytest.raises(EngineError, match="weights-00000"):
        load_engine(copied, check_weights=False)


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
