"""The plan: what the runtime allocates, what fits, and how it is asked for. A plan and a build
count the same bytes: every quantisation, backend and device; and those are the engine's.
Plans and costs of the variants against published numbers (golden/published.yaml). Presets of a
build, and plans of all that can be a MODEL.
"""

from __future__ import annotations

import json
import math
import re
import shlex
import time
from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file

from g4ir import Engine, Graph, Program, Spec, build, build_graph, load_spec, run_passes
from g4ir.backends import find_backend
from g4ir.backends.cuda.device import COMPILER
from g4ir.backends.cuda.schedule import dense_bytes, same_kernels, schedule
from g4ir.backends.cuda.target import HOPPER
from g4ir.backends.inductor.target import Target
from g4ir.builder.build import prepare
from g4ir.cli import parse
from g4ir.cli.models import named_model
from g4ir.errors import InputError, PlanError
from g4ir.ir.rewrite import split_prologue
from g4ir.model.media import Media
from g4ir.model.tensors import numel, text_tensors, tower_tensors
from g4ir.ops.types import TORCH_NAMES
from g4ir.plan.backend import DEFINITION
from g4ir.plan.cost import NodeCost, by_kind, floor, graph_costs, total
from g4ir.plan.engine_limits import Limits
from g4ir.plan.fit import fitted
from g4ir.plan.footprint import RESERVE_BYTES, Footprint, measured, reserve
from g4ir.plan.gpus import find_gpu, parse_bytes
from g4ir.plan.memory import live_sizes
from g4ir.plan.options import BuildOptions
from g4ir.plan.plan import PLANNED, make_plan
from g4ir.plan.presets import PRESETS
from g4ir.plan.records import SCHEMA, Plan
from g4ir.plan.resolve import resolved
from g4ir.plan.table import plan_text
from g4ir.quant.recipe import SCHEMES, built_in_names, find_quant_config
from g4ir.quant.rewrite import quantise
from g4ir.ui.units import count_text, parse_counts, rounded_count, size_text
from g4ir.weights.gguf.checkpoint import READ
from g4ir.weights.random import random_weights
from g4ir.weights.write import write_checkpoint
from tests.cases import TABLES, read_table
from tests.cli_tools import built, g4ir, ok, refused
from tests.configs import NAMES, SMALL, VARIANTS, short, spec_called, widened
from tests.engines import random_checkpoint
from tests.gguf_files import all_of, bare_file, write_gguf
from tests.shrink import shrink
from tests.test_checkpoint import MLX, MLX_OTHERS, mlx_checkpoint
from tests.test_quantised_checkpoints import CASES as CODED
from tests.test_quantised_checkpoints import OTHERS, quantise_experts

CASES = read_table("plan_cases.yaml")
GIB, GB = 2**30, 10**9
FORMS = ("off", "value")


# --- planned is what is allocated ---------------------------------------------------------------


@pytest.mark.covering
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", [*SMALL, "tiny-ple"])
def test_shrunk_engines_allocate_what_was_planned(name: str, form: str, tmp_path: Path) -> None:
    spec = spec_called(name)
    shared = {"backend": "reference", "random_weights": 0, "latent_kv": form, "max_batch": 3}
    options = replace(PLANNED, latent_kv=form, device="cpu")
    for max_seq in (100, 700):
        engine = build(spec, tmp_path / str(max_seq), max_seq=max_seq, **shared)
        plan = make_plan(spec, options, ctx=max_seq, batch=(1, 2, 3))
        for found in plan.rows[:3]:
            assert engine.session(found.batch).nbytes() == found.planned
            assert found.naive == found.batch * plan.rows[0].naive
        weights = sum(t.numel() * t.element_size() for t in engine.runtime.params.values())
        assert weights == plan.weights_as(spec.dtype).device
        engine.close()


@pytest.mark.parametrize("variant", short("e2b", "12b", "31b", of=VARIANTS))
def test_towers_are_counted_as_they_are_packed(variant: str) -> None:
    """What an engine that takes media needs more is what its towers hold."""
    spec = shrink(load_spec(variant), media=True)
    kinds = ("none", "all")
    asked = [BuildOptions(random_weights=0, backend="reference", media=k) for k in kinds]
    built = [prepare(spec, options) for options in asked]
    planned = [make_plan(spec, replace(PLANNED, media=k)).weights[0].device for k in kinds]
    more = built[1].param_bytes() - built[0].param_bytes()
    assert planned[1] - planned[0] == more > 0


# --- activations and workspace ------------------------------------------------------------------


def by_definition(g: Graph, dims: dict[str, int]) -> int:
    """Most bytes of inputs, and of values from the node that makes them to the last that reads
    them or a view of them."""
    caches = {v.name for v in (*g.state, *g.next.values())}
    views = {"heads", "merge_heads", "split", "unstack_layers"}
    owner = {v.name: v.name for v in (*g.inputs, *g.params)}
    born, dies, size = {}, {}, {}
    for i, n in enumerate(g.nodes):
        for v in n.inputs:
            if owner.get(v.name) in dies:
                dies[owner[v.name]] = i
        for v in n.outputs:
            if v.name in caches:
                continue
            if n.op in views:
                owner[v.name] = owner[n.inputs[0].name]
                continue
            owner[v.name] = v.name
            born[v.name] = dies[v.name] = i
            size[v.name] = v.type.bind(dims).nbytes()
    for v in g.outputs:
        dies[owner[v.name]] = len(g.nodes)
    fixed = sum(v.type.bind(dims).nbytes() for v in g.inputs)
    last = sum(size[owner[v.name]] + 4 * v.type.bind(dims).numel() for v in g.outputs)
    steps = (sum(size[k] for k in born if born[k] <= i <= dies[k]) for i in range(len(g.nodes)))
    return fixed + max(*steps, last)


@pytest.mark.covering
@pytest.mark.parametrize("name", [*NAMES[:6], "e2b", "26b-a4b"])
@pytest.mark.parametrize("phase", ["prefill", "decode"])
def test_activations_by_definition(name: str, phase: str) -> None:
    for g in (build_graph(spec_called(name), phase), run_passes(build_graph(spec_called(name)))):
        main = split_prologue(g)[1]
        for dims in ({"B": 1, "S": 64, "C": 512}, {"B": 5, "S": 7, "C": 256}):
            assert max(s.at(dims) for s in live_sizes(main)) == by_definition(main, dims)


# --- what fits ----------------------------------------------------------------------------------


@settings(max_examples=25)
@given(
    name=st.sampled_from((*SMALL, "tiny-ple", "tiny-moe")),
    memory=st.integers(0, 30 << 20).map(lambda room: int(RESERVE_BYTES * 1.02) + room),
    latent_kv=st.sampled_from(FORMS),
    ctx=st.integers(1, 500),
    batch=st.integers(1, 40),
    prefill_chunk=st.sampled_from((1, 100, 1024)),
    device=st.sampled_from(("cpu", "cuda")),
)
@example(  # a batch of 9 fits once the table of per-layer embeddings leaves the device
    name="e2b-small",
    memory=547608330,
    latent_kv="off",
    ctx=1,
    batch=1,
    prefill_chunk=1,
    device="cuda",
)
def test_largest_that_fits(name: str, memory: int, ctx: int, batch: int, **options: Any) -> None:
    """The reported context and batch fit; one token or row more does not, nor a block more."""
    spec = spec_called(name)
    longest = spec.text.max_position_embeddings
    make = partial(make_plan, spec, replace(PLANNED, **options), memory=memory)
    largest = make(ctx=ctx, batch=batch).largest
    most = {x.weights: (x.max_context[batch], x.max_batch[ctx]) for x in largest}
    contexts = [c + more for c, _ in most.values() for more in (0, 1, 256)]
    batches = [b + more for _, b in most.values() for more in (0, 1)]
    along = make(ctx=[c for c in contexts if 1 <= c <= longest], batch=batch)
    across = make(ctx=ctx, batch=[b for b in batches if 1 <= b <= 65536])
    for plan, at, sizes in ((along, 0, "ctx"), (across, 1, "batch")):
        for r in plan.rows:
            assert r.spare == memory - reserve(memory) - r.needed
            assert (r.spare >= 0) == (getattr(r, sizes) <= most[r.weights][at])


def test_time_floors_are_those_of_the_cost_model() -> None:
    spec, gpu = load_spec("26b-a4b"), find_gpu("h200-141gb")
    plan = make_plan(spec, ctx=(4096, 8192), batch=(1, 8), memory=gpu)
    step = Program({"decode": build_graph(spec, "decode")})
    for form in ("bf16", "int8", "int4"):
        recipe = None if form == spec.dtype else find_quant_config(form)
        graph = run_passes(quantise(step, spec, recipe, spec.dtype).graphs["decode"])
        for r in (r for r in plan.rows if r.weights == form):
            seconds = floor(total(graph_costs(graph, C=r.ctx - 1, B=r.batch)), gpu.roof).seconds
            assert r.step_s == pytest.approx(seconds, rel=1e-4)
    sized = make_plan(spec, memory=gpu.memory_bytes)
    assert {r.step_s for r in sized.rows} == {None}


WHERE = [("cuda", 80 * GB, "device"), ("cuda", 9 * GIB, "mmap"), ("cpu", 80 * GB, "mmap")]


@pytest.mark.parametrize("device, memory, place", WHERE)
def test_where_the_table_lies_by_default(device: str, memory: int, place: str) -> None:
    """A plan and a build say the same, and its bytes are counted there."""
    spec = load_spec("e2b")
    plan = make_plan(spec, replace(PLANNED, device=device), ctx=8192, memory=memory)
    given = {"device": device, "memory": memory, "media": "none"}
    built = prepare(spec, BuildOptions(random_weights=0, backend="reference", **given), dry=True)
    assert plan.config.ple_placement == built.config.ple_placement == place
    found = plan.weights_as("bf16")
    table = 2 * plan.counts.ple_table
    assert {"device": found.device, "mmap": found.mapped}[place] >= table
    assert plan.to_dict()["ple_placement"] == place


# --- refusing a build ---------------------------------------------------------------------------


def check(name: str, memory: int, latent: str = "off", quant: Any = None, **changes: Any) -> None:
    """Raise PlanError where an engine by these settings does not fit."""
    limits = Limits(**{k: changes.pop(k) for k in vars(Limits()) if k in changes})
    options = BuildOptions(**{"dtype": "bf16", "device": "cuda", "latent_kv": latent, **changes})
    parts = {"limits": limits, "media": Media(), "quant": quant, "drafter": None}
    config = resolved(spec_called(name), options, DEFINITION, **parts)
    found = measured(replace(config, limits=Limits()), DEFINITION).at(limits=limits)
    _, short = fitted(found, memory)
    if short:
        raise PlanError(short)


def advised(message: str) -> list[dict[str, Any]]:
    """The settings that a refusal names: alternatives, or one that takes all of them."""
    names = {"bfloat16": "bf16"}
    found = [
        {flag.replace("-", "_"): int(value) if value.isdigit() else names.get(value, value)}
        for flag, value in re.findall(
            r"--(?:set )?([a-z_-]+)[ =](\w+)", message.partition("short; ")[2]
        )
    ]
    if "all of these together" in message:
        found = [{k: v for f in found for k, v in f.items()}]
    assert found
    return found


@pytest.mark.parametrize("case", CASES["refused"])
def test_a_build_that_does_not_fit_is_refused_with_what_fits(case: str) -> None:
    name, size, options, expected = CASES["refused"][case]
    memory = parse_bytes(size, case)
    with pytest.raises(PlanError) as refusal:
        check(name, memory, **options)
    message = str(refusal.value)
    assert refusal.value.exit_code == 2
    assert f" on {options.get('device', 'cuda')} (weights " in message
    short = re.search(r"\(([0-9]+) bytes\) short", message)
    assert short
    settings = advised(message)
    assert {k for s in settings for k in s} == {*expected}
    for setting in settings:
        check(name, memory, **{**options, **setting})
    # the number short is exact: so much more memory, and what is reserved of it, is enough
    more = memory + math.ceil(int(short[1]) / (1 - 1 / 64)) + 2
    check(name, more, **options)
    with pytest.raises(PlanError):
        check(name, memory + int(short[1]) - 2, **options)


def test_nothing_fits() -> None:
    nothing = "no limits or dtype fit: take a smaller variant or a device with more memory"
    advised = {
        2.0: "--quant int8 fits",
        1.5: "--quant int4 fits",
        1.3: "with --quant int4 any of these fits: --max-seq ",
        1.0: f"with --quant int4 {nothing}",
    }
    for size, advice in advised.items():
        with pytest.raises(PlanError, match=f"short; {advice}"):
            check("gemma3-1b", int(size * GB))
    for quant, advice in {"int4": nothing, "fp8": advised[1.0]}.items():
        with pytest.raises(PlanError, match=f"short; {advice}"):
            check("gemma3-1b", GB, quant=find_quant_config(quant))


# --- the command --------------------------------------------------------------------------------


def test_json_keeps_its_keys() -> None:
    """Scripts read them: a change of one raises SCHEMA."""
    found = json.loads(ok("plan", "--variant", "e2b", "--gpu", "h100-80gb", "--json"))
    assert found["schema"] == SCHEMA == 5
    assert found.keys() == set(CASES["keys"].split())
    for key, names in CASES["keys of parts"].items():
        part = found[key] if isinstance(found[key], dict) else found[key][0]
        assert part.keys() == set(names.split())


@pytest.mark.parametrize(("options", "message"), CASES["arguments"])
def test_bad_arguments(options: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=re.escape(message)):
        sizes = {k: options[k] for k in ("ctx", "batch", "memory") if k in options}
        others = {k: v for k, v in options.items() if k not in sizes}
        make_plan(load_spec("e2b"), replace(PLANNED, **others), **sizes)


# --- quick --------------------------------------------------------------------------------------


def test_a_plan_is_instant() -> None:
    """Processor time, which other work on the machine does not lengthen by much."""
    times = []
    for _ in range(3):
        start = time.process_time()
        assert "256K" in ok("plan", "31b", "--ctx", "256K", "--gpu", "h100-80gb")
        times.append(time.process_time() - start)
    assert min(times) < 1


# --- words --------------------------------------------------------------------------------------


def test_counts_and_sizes() -> None:
    assert parse_counts("4096,4_096,4K, 1m", "--ctx") == [4096, 4096, 4096, 1 << 20]
    counts = {1: "1", 1000: "1000", 4096: "4K", 5000: "5000", 262_144: "256K", 1 << 20: "1M"}
    assert {n: count_text(n) for n in counts} == counts
    assert [rounded_count(n) for n in (0, 1, 9999, 93_440)] == ["-", "1", "9999", "91K"]
    sizes = {0: "0.00 KiB", 3000: "2.93 KiB", 512 << 20: "0.50 GiB", 220 << 30: "220 GiB"}
    assert {n: size_text(n) for n in sizes} == sizes


# --- several ranks ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "options"), [("tiny-moe", {"ep": True}), ("e2b", {}), ("tiny-ple", {"quant": "int8"})]
)
def test_what_fits_is_of_a_rank(name: str, options: dict[str, Any]) -> None:
    """With the weights and caches that a build of as many ranks counts for one."""
    spec, sizes = load_spec(name), {"max_seq": 512, "prefill_chunk": 64}
    asked = BuildOptions(
        backend="torch", device="cuda", tp=2, random_weights=0, media="none", **sizes, **options
    )
    short = prepare(spec, replace(asked, memory=1 << 20), dry=True).short
    counts = re.search(r"weights (\S+ \w+), caches (\S+ \w+), ", short)
    plan = make_plan(spec, asked, ctx=512, memory=1 << 20)
    assert counts and plan.config.ranks == 2
    row, weights = plan.rows[0], plan.weights[0]
    assert (size_text(weights.device), size_text(row.planned)) == counts.groups()
    whole = make_plan(spec, replace(asked, tp=1, ep=False), ctx=512)
    assert weights.device < whole.weights[0].device and row.planned <= whole.rows[0].planned


def test_two_cards_where_one_is_too_small() -> None:
    card = find_gpu("a6000-48gb")
    spec, options = load_spec("31b"), (replace(PLANNED, tp=n) for n in (1, 2))
    one, two = (make_plan(spec, o, ctx=8192, memory=card) for o in options)
    assert one.rows[0].spare < 0 < two.rows[0].spare
    assert two.rows[0].step_s == pytest.approx(one.rows[0].step_s / 2, rel=0.01)
    assert "one of 2 ranks, " in plan_text(two) and "without collectives" in plan_text(two)
    assert "ranks" not in plan_text(one)


def test_workspace_of_a_softcap_and_of_latent_rows() -> None:
    spec = load_spec("31b")
    plans = {f: make_plan(spec, replace(PLANNED, latent_kv=f), ctx=4096) for f in FORMS}
    needs = {f: plan.rows[0].workspace for f, plan in plans.items()}
    keys, mask = 4096 + 1024, (4096 + 1024) * 1024 * (1 + 8 * 2)
    assert needs["off"] == max(2 * keys * 4 * 512 * 2 + mask, 2 * 2048 * 16 * 256 * 2 + 2048 * 5120)
    assert needs["value"] < needs["off"]
    capped = replace(spec, text=replace(spec.text, attn_logit_softcapping=50.0))
    scores = 32 * 1024 * keys * 2 * (2 + 4)
    assert make_plan(capped, ctx=4096).rows[0].workspace == needs["off"] + scores


#: where engines run
ENGINES = [(*row,) for row in TABLES["where engines run"]]
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
    pytest.param(quant, *where, marks=() if j == i % len(ENGINES) else pytest.mark.full)
    for i, quant in enumerate(FORMATS)
    for j, where in enumerate(ENGINES)
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
    **{name: partial(directory, "tiny-ple", case.quantise) for name, case in CODED.items()},
    **{
        f"others, {name}": partial(directory, case.model, partial(quantise_experts, case))
        for name, case in OTHERS.items()
    },
    "MLX": of_mlx,
}
TARGETS = [
    (backend, device, dtype)
    for backend, device in ENGINES
    for dtype in find_backend(backend).dtypes
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


def test_a_build_notes_that_attention_uses_kernels_of_torch() -> None:
    """An A100 has 163 KiB of shared memory per block, which is not enough."""
    (note,) = COMPILER.notes(Target("cuda", "sm_80", 1))
    assert "for GPUs with 227 KiB of shared memory" in note
    assert not [*COMPILER.notes(Target("cuda", HOPPER, 1))]


PUBLISHED = read_table("golden/published.yaml")
PUBLISHED_NAMES = PUBLISHED["variants"]
CONTEXTS = (1024, 8192, 32768, 131072)
FLOP_RATE = 790e12


def of(name: str, table: str) -> dict[str, Any]:
    """Return one variant's column of a table."""
    return {key: row[PUBLISHED_NAMES.index(name)] for key, row in PUBLISHED[table].items()}


def printed(value: float, digits: int = 1) -> Any:
    """Within 1 % of a printed figure, plus half of its last digit."""
    return pytest.approx(value, rel=0, abs=0.01 * value + 0.5 * 10**-digits)


def digits(value: float) -> int:
    return 0 if isinstance(value, int) else 1


@cache
def planned(name: str) -> Plan:
    return make_plan(load_spec(name))


# --- parameters ---------------------------------------------------------------------------------


@pytest.mark.parametrize("name", PUBLISHED_NAMES)
def test_parameters(name: str) -> None:
    expected, found = of(name, "parameters"), planned(name).counts
    assert {key: getattr(found, key) for key in expected} == expected


@pytest.mark.parametrize("name", PUBLISHED_NAMES)
def test_reported_sums(name: str) -> None:
    towers, count = tower_tensors(load_spec(name)), planned(name).counts
    parts = {"position_table": ".position_embedding_table", "buffers": (".std_bias", ".std_scale")}
    found = {f: getattr(count, f) for f in ("active", *vars(count))} | {
        f"vision_{part}": numel({k: v for k, v in towers.items() if k.endswith(ending)})
        for part, ending in parts.items()
    }
    for terms, millions in of(name, "reported").items():
        signed = re.findall(r"(-?) ?(\w+)", terms)
        value = sum(-found[key] if sign else found[key] for sign, key in signed)
        assert value / 1e6 == pytest.approx(millions, abs=0.051), terms


def test_an_encoder_has_no_head() -> None:
    plan = planned("embeddinggemma-300m")
    assert plan.counts.active == plan.counts.layers and "also the head" not in plan_text(plan)


# --- the KV cache -------------------------------------------------------------------------------


@pytest.mark.parametrize("name", PUBLISHED_NAMES)
def test_cache(name: str) -> None:
    table = PUBLISHED["cache"][name]
    naive, per_token, window = table["bytes"]
    contexts = (4096, 32768, 131072, 262144)[: len(table["gib"])]
    rows = [r for r in planned(name).rows if r.weights == "bf16"]
    assert [r.ctx for r in rows] == list(contexts)
    for found, gib, public in zip(rows, table["gib"], table.get("naive_gib", [None] * 4)):
        assert found.planned == window + per_token * found.ctx
        assert found.planned / GIB == pytest.approx(gib, abs=5.1e-4)
        assert found.naive == naive * found.ctx
        assert public in (None, round(found.naive / GIB, 2 if (public or 1) < 0.1 else 1))


# --- cost ---------------------------------------------------------------------------------------


@cache
def graph(name: str, phase: str = "decode", skip: tuple[str, ...] = ()) -> Graph:
    return run_passes(build_graph(load_spec(name), phase), skip=skip)


@cache
def stored(name: str, weights: str) -> Graph:
    """A decode step with quantised weights."""
    spec, recipe = load_spec(name), None if weights == "bf16" else find_quant_config(weights)
    program = Program({"decode": build_graph(spec, "decode")})
    return run_passes(quantise(program, spec, recipe, spec.dtype).graphs["decode"])


def body(name: str, tokens: int) -> list[NodeCost]:
    """Every row through every layer, without the head: what the table counts."""
    costs = graph_costs(graph(name, "prefill", ("last_token_only",)), S=tokens)
    return [c for c in costs if c.kind != "head"]


@pytest.mark.parametrize(
    "name, weights", [(name, w) for name, table in PUBLISHED["decode"].items() for w in table]
)
def test_decode_reads_what_the_table_says(name: str, weights: str) -> None:
    for batch, expected in PUBLISHED["decode"][name][weights].items():
        for context, gb in zip(CONTEXTS, expected, strict=True):
            cost = total(graph_costs(stored(name, weights), C=context - 1, B=batch))
            assert cost.needed_bytes / 1e9 == printed(gb), (batch, context)


@pytest.mark.parametrize("name", PUBLISHED["prefill"])
def test_prefill_takes_the_flops_of_the_table(name: str) -> None:
    table = PUBLISHED["prefill"][name]
    for tokens, each, ms in zip(CONTEXTS, table["gflop"], table["ms"], strict=True):
        flops = total(body(name, tokens)).flops
        assert flops / tokens / 1e9 == printed(each, digits(each))
        assert flops / FLOP_RATE * 1e3 == printed(ms, digits(ms))
    for tokens, percent in zip(CONTEXTS[2:], table["attention"], strict=True):
        costs = body(name, tokens)
        share = 100 * by_kind(costs)["kv"].flops / total(costs).flops
        assert share == pytest.approx(percent, abs=0.5)


# --- presets ------------------------------------------------------------------------------------

#: a build of random weights in small
TINY = ("--variant", "tiny-moe", "--random-weights", "0", "--max-seq", "64", "--max-batch", "2")


def options(line: str) -> BuildOptions:
    parser, values = parse(shlex.split(line))
    verb: Any = parser.flags.make(values)
    return getattr(verb, "first_use", verb).options


@pytest.mark.parametrize("name", short(*({*PRESETS} - {"rtx"}), of=PRESETS))
def test_each_preset_builds_in_small(name: str, tmp_path: Path) -> None:
    """As far as that goes without its GPU."""
    words = ("build", "--preset", name, *TINY, "--out", tmp_path / "e", "--dry-run")
    found, preset = json.loads(ok(*words, "--json")), PRESETS[name].options
    assert (found["backend"], found["device"]) == (preset["backend"], preset["device"])
    assert (found["quant"], found["kv_dtype"]) == ("int8", preset.get("kv_dtype"))
    assert (found["max_seq"], found["max_batch"]) == (64, 2)


@pytest.mark.full
def test_the_laptop_s_engine_runs(tmp_path: Path) -> None:
    ok("build", "--preset", "laptop", *TINY, "--out", tmp_path / "e", "--verify")


@pytest.mark.parametrize("line", TABLES["presets"]["flags"])
def test_flags_win_wherever_they_stand(line: str) -> None:
    """Also one with the value that it has without a preset."""
    found, preset = options(line), PRESETS["h100-throughput"].options
    assert found.max_batch == (1 if "--max-batch" in line else preset["max_batch"])
    assert found.kv_dtype == ("bfloat16" if "--kv-dtype" in line else "int8")
    others = preset.keys() - {"max_batch", "kv_dtype"}
    assert {k: getattr(found, k) for k in others} == {k: preset[k] for k in others}


@pytest.mark.parametrize(("line", "backend", "target"), TABLES["presets"]["targets"])
def test_the_target_of_a_preset(line: str, backend: str, target: str | None) -> None:
    found = options(line)
    assert (found.backend, found.target, found.quant) == (backend, target, "int8")


def test_a_flag_of_another_meaning_is_no_option_of_a_preset() -> None:
    """`--draft-tokens` of run is a number of drafts at a time, and needs --draft."""
    assert PRESETS["h100-latency"].options["draft_tokens"] == 4
    assert options("build --preset h100-latency --variant x").draft_tokens == 4
    assert options("run m --preset h100-latency --tokens 2").draft_tokens is None


def test_a_quantised_file_keeps_its_codes(tmp_path: Path) -> None:
    file = bare_file(tmp_path / "tiny.gguf", load_spec("tiny-dense"), kind="Q8_0")
    words = ("--preset", "laptop", "--max-seq", "64", "--dry-run", "--out", tmp_path / "e")
    done = g4ir("build", "--checkpoint", file, *words)
    assert done.code == 0 and "quant          checkpoint\n" in done.out, done
    assert f"note: {file} is quantised already: the preset's --quant int8 is left out\n" in done.err
    assert "checkpoint" in g4ir("plan", file, "--preset", "laptop").out
    assert "is quantised already; leave" in refused("plan", file, "--quant", "int8")


# --- models -------------------------------------------------------------------------------------


def test_an_engine_is_planned_at_its_limits(tmp_path: Path) -> None:
    limits = ("--max-seq", "64", "--max-batch", "2", "--prefill-chunk", "16")
    words = ("--variant", "tiny-ple", "--random-weights", "0", "--quant", "int4", *limits)
    built(tmp_path / "e", *words)
    plan = json.loads(ok("plan", tmp_path / "e", "--gpu", "16GiB", "--json"))
    (row,), (most,) = plan["rows"], plan["largest"]
    assert (row["weights"], row["ctx"], row["batch"]) == ("int4", 64, 2)
    assert (most["max_context"], most["max_batch"]) == ({"2": 64}, {"64": 2})


def test_verbs_take_models(tmp_path: Path) -> None:
    file = bare_file(tmp_path / "tiny.gguf", load_spec("tiny-dense"), kind="Q8_0")
    assert "%embed.table.codes: i8[" in g4ir("show", file, "--phase", "embed").out
    assert "weights int8" in g4ir("cost", file).out
    assert "skinny_linear" in g4ir("kernels", file).out
    stated = json.loads(g4ir("inspect", file, "--json").out)
    assert stated["quantised"].endswith(" int8") and stated["takes"] == "text"
    assert stated["digest"] == json.loads(g4ir("plan", file, "--json").out)["spec_digest"]
    for verb in ("show", "cost", "kernels", "plan"):
        assert g4ir(verb, "tiny-moe").out == g4ir(verb, "--variant", "tiny-moe").out != ""
    both = g4ir("plan", "tiny-dense", file, "--gpu", "8GiB")
    assert "weights f32/int8/int4 or checkpoint" in both.out, both


def test_plan_of_a_cached_config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    assert "no complete model of this name in the local" in refused("plan", "some/tiny")
    folder = tmp_path / "models--some--tiny" / "snapshots" / "abc"
    random_checkpoint(folder)
    for file in folder.glob("*.safetensors*"):
        file.unlink()
    (folder.parents[1] / "refs").mkdir()
    (folder.parents[1] / "refs" / "main").write_text("abc")
    want = g4ir("plan", folder, "--json")
    assert g4ir("plan", "some/tiny", "--json").out == want.out and want.code == 0


def test_plan_of_a_hub_id_without_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    by_id, by_name = (g4ir("plan", model, "--json") for model in ("google/gemma-4-E2B-it", "e2b"))
    assert by_id.code == 0 and by_id.out == by_name.out
