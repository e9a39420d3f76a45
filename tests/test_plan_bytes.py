"""A plan and a build count the same bytes: every quantisation, backend and device; and those are
the bytes of the engine."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from g4ir import build
from g4ir.artefact.directory import open_artefact
from g4ir.backends import find_backend
from g4ir.backends.cuda.schedule import dense_bytes, same_kernels, schedule
from g4ir.backends.cuda.target import HOPPER
from g4ir.backends.inductor.target import Target
from g4ir.builder.build import prepare
from g4ir.cli.models import named_model
from g4ir.engine.engine import Engine
from g4ir.model.tensors import text_tensors
from g4ir.ops.types import TORCH_NAMES
from g4ir.plan.footprint import Footprint
from g4ir.plan.gpus import find_gpu
from g4ir.plan.options import BuildOptions
from g4ir.plan.plan import PLANNED, make_plan, plan_engine
from g4ir.plan.table import plan_text
from g4ir.quant.recipe import SCHEMES, built_in_names
from g4ir.spec.record import Spec, load_spec
from g4ir.weights.gguf.checkpoint import READ
from g4ir.weights.random import random_weights
from g4ir.weights.write import write_checkpoint
from tests.cases import TABLES
from tests.cli_tools import g4ir
from tests.configs import widened
from tests.gguf_files import all_of, bare_file, write_gguf
from tests.test_checkpoint import MLX, MLX_OTHERS, mlx_checkpoint
from tests.test_quantised_checkpoints import CASES, OTHERS, quantise_experts

#: where engines run
WHERE = [(*row,) for row in TABLES["where engines run"]]
SIZES = {"max_seq": 300, "prefill_chunk": 64, "max_batch": 3}
#: memory in which everything fits
ENOUGH = 1 << 40


def recipe_of(form: str, folder: Path) -> Path:
    """A quantisation config that stores the table and all matrices of the layers in one format."""
    path, group = folder / f"{form}.yaml", SCHEMES[form].group
    names = "[embed.table, 'L*.attn.w*', 'L*.mlp.w_*']"
    path.write_text(
        f"rules:\n- tensors: {names}\n  form: {form}\n  group: {group}\n  otherwise: int8\n"
    )
    return path


def both(spec: Spec, backend: str, device: str, **options: Any) -> tuple[Any, Any]:
    """The footprint of a build, and the plan with the same options."""
    held = options.pop("held", None)
    asked = {"backend": backend, "device": device, "media": "none", **options}
    weights = {} if "checkpoint" in options else {"random_weights": 0}
    p = prepare(spec, BuildOptions(**asked, **weights, **SIZES, memory=ENOUGH), dry=True)
    asked.pop("checkpoint", None)
    planned = BuildOptions(**asked, prefill_chunk=SIZES["prefill_chunk"])
    sizes = {"ctx": SIZES["max_seq"], "batch": SIZES["max_batch"], "memory": ENOUGH}
    plan = make_plan(spec, planned, **sizes, stored=held, backend=find_backend(backend))
    return p, plan


def assert_same(p: Any, plan: Any) -> None:
    parts = Footprint(p.config, p.backend, p.packing).built
    row, weights = plan.rows[0], plan.weights[0]
    assert plan.config.dtype == p.config.dtype
    assert plan.config.ple_placement == p.config.ple_placement
    assert weights.device + (weights.host if p.config.device == "cpu" else 0) == parts["weights"]
    assert row.planned == parts["caches"] == p.cache_bytes()
    assert (row.activations, row.workspace) == (parts["activations"], parts["workspace"])
    assert row.needed == sum(parts.values())
    assert weights.device + weights.host + weights.mapped == p.param_bytes()


def assert_stored(engine: Engine, plan: Any) -> None:
    """The bytes of a loaded engine's weights and of its session's caches are those of a plan."""
    assert engine.session(SIZES["max_batch"]).nbytes() == plan.rows[0].planned
    backend, weights = engine.config.backend, plan.weights[0]
    if backend == "onnx":  # which reads them from the engine's files
        files = map(load_file, engine.path.glob("weights-*"))
        stored = sum(t.nbytes for tensors in files for t in tensors.values())
        assert stored == weights.device + weights.mapped
        return
    tensors = engine.runtime.params if backend == "reference" else engine.runtime.weights
    assert sum(t.numel() * t.element_size() for t in tensors.values()) == weights.device


def specs() -> list[Spec]:
    """Specs whose rows are multiples of 256: per-layer embeddings and a tied head, experts."""
    return [widened("tiny-ple"), widened("tiny-moe")]


#: each built-in config, and each format in a recipe of its own, in one place; in all with --full
FORMATS = [None, *built_in_names(), *(f"{form}.yaml" for form in SCHEMES)]
PLACED = [
    pytest.param(quant, *where, marks=() if j == i % len(WHERE) else pytest.mark.full)
    for i, quant in enumerate(FORMATS)
    for j, where in enumerate(WHERE)
]


@pytest.mark.parametrize(("quant", "backend", "device"), PLACED)
def test_own_formats(quant: str | None, backend: str, device: str, tmp_path: Path) -> None:
    form = quant.removesuffix(".yaml") if quant else ""
    for spec in specs():
        given = quant if form in ("", quant) else recipe_of(form, tmp_path)
        assert_same(*both(spec, backend, device, quant=given or None))


def gguf_file(*kinds: str, folder: Path) -> Path:
    """Write a GGUF file of matrices in the first type, and tables in the last."""
    spec, path = widened("tiny-moe" if "Q4_0" in kinds else "tiny-ple"), folder / "a.gguf"
    source = random_weights(spec, 0, torch.float32)
    tensors = {name: source.tensor(name) for name in text_tensors(spec)}
    matrices, *_, tables = (*map(all_of, kinds), all_of(kinds[-1]))

    def kind_of(name: str, shape: tuple[int, ...]) -> str:
        return (tables if "embed_tokens" in name else matrices)(name, shape)

    write_gguf(path, spec, tensors, kind_of)
    return path


def directory(name: str, quantise: Callable[[Path], Any], folder: Path) -> Path:
    """Write a checkpoint directory of a spec, and quantise it."""
    spec, path = load_spec(name), folder / "checkpoint"
    write_checkpoint(path, spec, random_weights(spec, 3, torch.float32))
    quantise(path)
    return path


def of_mlx(folder: Path) -> Path:
    mlx_checkpoint(folder / "mlx", load_spec("tiny-dense"), {**MLX, **MLX_OTHERS})
    return folder / "mlx"


#: quantised model -> the function that writes it into a folder: every type of GGUF files that
#: the package gguf writes, and every format of checkpoint directories that is read
FILES: dict[str, Callable[..., Path]] = {
    **{
        kind: partial(gguf_file, kind)
        for kind in READ
        if not kind.startswith(("IQ1", "IQ2", "IQ3"))
    },
    "Q4_K, tables Q6_K": partial(gguf_file, "Q4_K", "Q6_K"),
    "Q4_0, tables F16": partial(gguf_file, "Q4_0", "F16"),
    **{name: partial(directory, "tiny-ple", case.quantise) for name, case in CASES.items()},
    **{
        f"others, {name}": partial(directory, case.model, partial(quantise_experts, case))
        for name, case in OTHERS.items()
    },
    "MLX": of_mlx,
}
TARGETS = [
    (backend, device, dtype) for backend, device in WHERE for dtype in find_backend(backend).dtypes
]


@pytest.mark.covering
@pytest.mark.parametrize(("backend", "device", "dtype"), TARGETS)
@pytest.mark.parametrize("file", FILES)
def test_quantised_files(file: str, backend: str, device: str, dtype: str, tmp_path: Path) -> None:
    path = FILES[file](folder=tmp_path)
    model = named_model(str(path))
    options = {"dtype": TORCH_NAMES[dtype], "checkpoint": path, "held": model.quant}
    assert_same(*both(model.spec, backend, device, **options))


#: a quarter of the files on a backend each; all on all with --full
LOADED = [
    pytest.param(file, backend, marks=() if 4 * j == i % 12 else pytest.mark.full)
    for i, file in enumerate(FILES)
    for j, backend in enumerate(("reference", "onnx", "torch"))
]


@pytest.mark.parametrize(("file", "backend"), LOADED)
def test_engines_of_quantised_files(file: str, backend: str, tmp_path: Path) -> None:
    """Planned is what the engine of a quantised file stores."""
    path = FILES[file](folder=tmp_path)
    model = named_model(str(path))
    options = {"backend": backend, "device": "cpu", "checkpoint": path, "media": "none"}
    _, plan = both(model.spec, **options, held=model.quant)
    engine = build(None, tmp_path / "e", **options, **SIZES)
    assert_stored(engine, plan)
    engine.close()


@pytest.mark.parametrize("kind", ["Q4_K", "Q4_1"])
def test_gguf_files_by_the_command_line(kind: str, tmp_path: Path) -> None:
    """With the device by default and on a GPU."""
    file = tmp_path / "a.gguf"
    bare_file(file, widened("tiny-ple"), kind=kind)
    for device in ("cpu", "cuda"):
        where = ("--device", device) if device == "cuda" else ()
        limits = ("--max-seq", 300, "--media", "none", "--memory", "1TB", "--dry-run")
        chunks = ("--prefill-chunk", 64, "--json")
        made = g4ir("build", file, "--backend", "torch", *where, *limits, *chunks)
        chunk = ("--set", "prefill_chunk=64", "--json")
        planned = g4ir("plan", file, *where, "--ctx", 300, *chunk)
        assert (made.code, planned.code) == (0, 0), made.err + planned.err
        made, planned = json.loads(made.out), json.loads(planned.out)
        assert made["needed_bytes"] == sum(made["memory"].values())
        assert planned["rows"][0]["needed"] == made["needed_bytes"]
        assert (planned["backend"], planned["device"]) == ("torch", device)


def test_a_card_that_is_too_small_for_what_is_computed(tmp_path: Path) -> None:
    """A file of 6.6 GiB in uint4 needs 22 GiB in TensorRT: the plan says so, and why; torch keeps
    the formats of the file."""
    spec, gpu = load_spec("12b"), find_gpu("rtx4080-16gb")
    options = replace(PLANNED, quant=recipe_of("uint4", tmp_path), device="cuda")
    sizes = {"ctx": 8192, "memory": gpu.memory_bytes}
    plans = [
        make_plan(spec, replace(options, backend=name), **sizes, backend=find_backend(name))
        for name in ("trt", "torch")
    ]
    weights = [p.weights_as("uint4.yaml") for p in plans]
    assert plans[0].rows[0].spare < 0 < plans[1].rows[0].spare
    assert weights[0].upcast == {"uint4": "bf16"} and not weights[1].upcast
    assert weights[0].device > 3 * weights[1].device
    note = "backend trt on cuda stores these formats in more bits: uint4 as bf16"
    assert note in plan_text(plans[0]) and "in more bits" not in plan_text(plans[1])


@pytest.mark.parametrize("quant", [None, "int4"])
def test_scratch_by_batch_size_is_that_of_every_batch_size(quant: str | None) -> None:
    """Batch sizes with the same kernels are counted once."""
    spec = widened("tiny-moe")
    p, _ = both(spec, "torch", "cuda", quant=quant, dtype="bfloat16")
    for rows in (1, 2, 3, 4, 63, 64, 65, 200):
        same, target = same_kernels(rows), Target("cuda", HOPPER, rows)
        for g in (p.packing.program.graphs[name] for name in ("prefill", "decode")):
            one, other = (schedule(g, replace(target, rows=n)) for n in (rows, same))
            kernels = [{k: c.kernel for k, c in s.choices.items()} for s in (one, other)]
            assert kernels[0] == kernels[1]
            assert dense_bytes(one) == dense_bytes(other)


ENGINES = [
    *((backend, "cpu", quant) for backend in ("reference", "onnx") for quant in ("int8", "uint4")),
    *(pytest.param("torch", "cpu", q, marks=pytest.mark.full) for q in (None, "uint4", "int6")),
]


@pytest.mark.parametrize(("backend", "device", "quant"), ENGINES)
def test_engines(backend: str, device: str, quant: str | None, tmp_path: Path) -> None:
    """What a built engine holds and its session allocates is what was planned."""
    spec = widened("tiny-ple")
    own = quant in SCHEMES and quant not in built_in_names()
    given = recipe_of(quant, tmp_path) if own else quant
    options = {"backend": backend, "device": device, "quant": given, "media": "none"}
    _, plan = both(spec, **options)
    engine = build(spec, tmp_path / "e", random_weights=0, **options, **SIZES)
    assert_stored(engine, plan)
    found = open_artefact(engine.path)
    again = plan_engine(found.config, find_backend(backend), memory=ENOUGH)
    assert again.rows[0].needed == plan.rows[0].needed
    engine.close()


def test_devices_by_default() -> None:
    """A GPU that is named is the device; else that of a build."""
    for words, device in {"--gpu 24GiB": "cuda", "": "cpu", "--backend trt": "cuda"}.items():
        found = json.loads(g4ir("plan", "tiny-dense", *words.split(), "--json").out)
        assert found["device"] == device
