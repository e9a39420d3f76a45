"""Compiled engines against transformers: a Hugging Face directory in, logits out.

Each program costs seconds to compile. The short run still covers every structural feature:
`tiny-ple` and `tiny-moe` share their programs with other tests, and what neither has is run without
torch's compiler (tests/uncompiled.py). `--full` compiles it too, and runs every spec of
`tests/configs.py`, every pass alone off, and bf16 on all variants.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from g4ir.backends.torch_compile.compile import compile_program
from g4ir.backends.torch_compile.programs import phase_steps
from g4ir.backends.torch_compile.runtime import _load_program
from g4ir.backends.torch_compile.segment import Segment
from g4ir.backends.torch_compile.target import Target
from g4ir.engine.build import build, prepare
from g4ir.engine.engine import Engine
from g4ir.ir.graph import Builder
from g4ir.ir.interpret import interpret
from g4ir.ir.text import print_graph
from g4ir.model.tensors import dead_tensors
from g4ir.ops import OPS
from g4ir.ops.kv_quant import as_held, comparable
from g4ir.ops.types import Type
from g4ir.passes import PASSES
from g4ir.plan.engine_limits import Limits
from g4ir.plan.formats import capacity, kv_bytes, weight_sizes
from g4ir.plan.options import BuildOptions
from g4ir.spec.record import Spec, check_spec
from g4ir.weights.checkpoint import Checkpoint
from g4ir.weights.pack import split_program
from g4ir.weights.write import write_checkpoint
from tests import engines, parity
from tests.configs import FEATURES, NAMES, SMALL, few, spec_called
from tests.oracle import (
    close_calls,
    cosine,
    find_oracle,
    save_checkpoint,
)
from tests.parity import CHUNK, MAX_SEQ, ROWS, Built, Case, agrees, built, prefill_then_decode
from tests.runner import built_program

COSINE = 0.999
PLANS = ("plan_cache", "last_token_only")
FUSIONS = tuple(p for p in PASSES if p not in PLANS)


# --- engines ----------------------------------------------------------------------------------


def full(*cases: Case) -> list[Any]:
    """Cases for the full run only."""
    return [pytest.param(c, marks=pytest.mark.full, id=str(c)) for c in cases]


def short(*cases: Case) -> list[Any]:
    return [pytest.param(c, id=str(c)) for c in cases]


def shared(name: str) -> Case:
    """The case of an engine of `tests/engines.py`: nothing more is compiled for it."""
    options = engines.limits_of("torch", name)
    return Case(name, options["max_batch"], options["all_logits"], chunk=engines.CHUNK)


SHORT = {
    "every token": (shared("tiny-moe"), Case("tiny-ple", compiled=False)),
    "last token": (shared("tiny-ple"),),
    # in the form that is bit-equal in bf16, so that it is run too
    "bf16": (Case("leftover", 1, bf16=True, latent_kv="raw", compiled=False),),
}
SKIPPED = (*((p,) for p in PASSES), PLANS, FUSIONS, PASSES)


@pytest.fixture(
    scope="module",
    params=[
        *short(*SHORT["every token"], *SHORT["last token"]),
        *full(replace(shared("tiny-ple"), all_logits=True)),
        *full(replace(shared("tiny-moe"), all_logits=False)),
        *full(Case("leftover"), *map(Case, NAMES)),
        *full(*(Case(n, ROWS, False) for n in NAMES)),
        *full(*(Case(n, 1, False) for n in (*SMALL, "combined"))),
        *full(Case("leftover", 1, False, PASSES), Case("leftover", ROWS, False, PLANS)),
        *full(*(Case("combined", ROWS, False, skip) for skip in SKIPPED)),
        *full(*(Case("random-18", 1, False, skip) for skip in (PLANS, FUSIONS))),
    ],
)
def subject(request: pytest.FixtureRequest, tmp_path_factory: Any) -> Iterator[Built]:
    """Engines with the logits of every token or of the last, some without passes."""
    yield from built(request.param, tmp_path_factory, "torch")


@pytest.fixture(
    scope="module",
    params=[
        *short(*SHORT["bf16"]),
        *full(*(replace(c, compiled=True) for c in SHORT["bf16"])),
        *full(*(Case(n, bf16=True) for n in (*SMALL, "combined"))),
    ],
)
def half(request: pytest.FixtureRequest, tmp_path_factory: Any) -> Iterator[Built]:
    """An engine in bf16."""
    yield from built(request.param, tmp_path_factory, "torch")


def test_short_cases_have_every_feature() -> None:
    cases = [c for kind in SHORT.values() for c in kind]
    texts = [c.spec.text for c in cases]
    missing = [feature for feature, has in FEATURES.items() if not any(map(has, texts))]
    assert missing == ["window 13"]  # a number: of the uneven windows one is enough here


# --- fp32 -------------------------------------------------------------------------------------


@pytest.mark.parametrize("chunk", ["W-1", "W+1", "prime", "all"])
def test_a_prompt_and_its_text(subject: Built, chunk: str) -> None:
    if subject.engine.all_logits:
        parity.prefill_in_chunks(subject, chunk)
    parity.last_tokens(subject, chunk)


def test_ragged_rows(subject: Built) -> None:
    parity.ragged_rows(subject)


def test_greedy_text(subject: Built) -> None:
    parity.greedy_text(subject)


def test_allocated_caches_are_the_planned_ones(subject: Built) -> None:
    for rows in {1, subject.batch}:
        caches_are_planned(subject.engine, rows)


# --- bf16 -------------------------------------------------------------------------------------


@pytest.mark.parametrize("chunk", ["W-1", "all"])
def test_bf16(half: Built, chunk: str) -> None:
    """Every position of a prompt in chunks and of the tokens decoded after it."""
    assert half.engine.dtype == "bf16"
    oracle, want = half.oracle, half.logits
    got = prefill_then_decode(half.session(chunk), half.tokens, oracle.prompt)
    assert cosine(got, want).min() > COSINE
    clear = ~close_calls(want.float(), oracle.self_difference)
    assert clear.float().mean() > 0.4, "the top-1 comparison is nearly empty"
    assert torch.equal(got.argmax(-1)[clear], want.argmax(-1)[clear])


# --- caches in fewer bits -----------------------------------------------------------------------


@pytest.mark.parametrize("to", ["i8", pytest.param("f8e4m3", marks=pytest.mark.full)])
def test_a_compiled_chunk(tmp_path: Path, to: str) -> None:
    """Rows are made, attended to beside a ring, and written into it in place."""
    b = Builder("segment")
    q = b.input("q", Type("f32", (2, "S", 4, 40)))
    k, v = (b.input(name, Type("f32", (2, "S", 2, 40))) for name in "kv")
    positions = b.input("positions", Type("i64", (2, "S")))
    start, lengths = (b.input(name, Type("i64", (2,))) for name in ("start", "lengths"))
    rows = [b.emit("narrow_row", x, to=to) for x in (k, v)]
    ring = as_held(Type("f32", (8, 2, 2, 40)), to)
    old = [b.cache(x, ring) for x in "KV"]
    attrs = {"window": 8, "scale": 0.2, "softcap": 0.0}
    out = b.emit("attention", q, positions, start, *old, *rows, **attrs)
    for cache, new in zip(old, rows, strict=True):
        b.next[cache.name] = b.emit("cache_write", cache, new, start, lengths)
    graph = b.graph(out)
    path = tmp_path / "segment.pt2"
    compile_program(print_graph(graph), Target("cpu"), path)
    g = torch.Generator().manual_seed(0)
    first = torch.tensor([11, 3])
    feeds = {x: torch.randn(2, 5, 4 if x == "q" else 2, 40, generator=g) for x in "qkv"}
    feeds |= {"positions": first[:, None] + torch.arange(5), "start": first}
    feeds |= {"lengths": torch.tensor([5, 2])}
    narrow = OPS["narrow_row"].reference
    state = {x.name: narrow(torch.randn(8, 2, 2, 40, generator=g), to=to) for x in graph.state}
    outputs, after = interpret(graph, feeds, {}, state)
    held = [t.clone() for t in state.values()]
    made = _load_program(path, "cpu")([*feeds.values(), *held])
    for got, want in zip(made, outputs.values(), strict=True):
        torch.testing.assert_close(got, want)
    for got, want in zip(held, after.values(), strict=True):
        assert torch.equal(comparable(got), comparable(want))


# --- sizes ------------------------------------------------------------------------------------


def caches_are_planned(engine: Engine, rows: int) -> None:
    """Rings of a window's size, the context for full layers, nothing for layers that share."""
    session, dtype = engine.session(rows), engine.dtype
    planned = kv_bytes(engine.spec, capacity(engine.limits.max_seq), rows, dtype).planned
    allocated = sum(t.untyped_storage().nbytes() for t in session.state.tensors.values())
    assert session.nbytes() == allocated == planned


@pytest.mark.parametrize("name", few(NAMES))
def test_planned_cache_bytes(tmp_path: Path, name: str) -> None:
    engine = build(
        spec_called(name),
        tmp_path / "engine",
        random_weights=0,
        backend="reference",
        max_batch=3,
        max_seq=100,
    )
    for rows in (1, 3):
        caches_are_planned(engine, rows)


def programs(spec: Spec, rows: int, all_logits: bool) -> int:
    """How many programs the torch backend compiles: the texts of the distinct segments."""
    program = split_program(built_program(spec, all_logits)).program
    steps = phase_steps(program, Limits(rows, MAX_SEQ, CHUNK))
    return len({s.text for many in steps.values() for s in many if isinstance(s, Segment)})


@pytest.mark.parametrize(
    "name, rows, all_logits",
    [
        pytest.param("combined", 1, False, marks=pytest.mark.full),
        pytest.param("e2b-small", ROWS, True, marks=pytest.mark.full),
    ],
)
def test_compiled_programs_do_not_grow_with_layers(name: str, rows: int, all_logits: bool) -> None:
    """About 60 layers cost as many programs as about 12."""
    base = spec_called(name)
    layers, shared = base.text.num_hidden_layers, base.text.num_kv_shared_layers
    times = 60 // layers
    text = replace(base.text, num_hidden_layers=times * layers, num_kv_shared_layers=times * shared)
    deep = check_spec(replace(base, text=text))
    assert times > 1 and programs(deep, rows, all_logits) == programs(base, rows, all_logits) < 20


# --- weights ----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", few(NAMES))
def test_packed_weights_have_no_padding(name: str) -> None:
    """What an engine stores is every tensor once: a layer with K=V packs Q and K alone."""
    spec = spec_called(name)
    prepared = prepare(spec, BuildOptions(random_weights=0))
    assert prepared.param_bytes() == weight_sizes(spec, spec.dtype).total
    packs = {
        n.out.name.split(".")[0]: n
        for n in prepared.packing.prologue.find("concat")
        if ".attn." in n.inputs[0].name
    }
    for layer in spec.layers():
        found = packs.get(f"L{layer.index}")
        parts = [v.name.rsplit(".", 1)[1] for v in found.inputs] if found else ["wq"]
        tied = layer.attention.k_eq_v
        assert parts == (
            ["wq"] if layer.donor is not None else ["wq", "wk"] if tied else ["wq", "wk", "wv"]
        )


#: how a checkpoint of KV-shared layers may look
FORMS: dict[str, dict[str, Any]] = {
    "without dead K and V": {},
    "with dead K and V": {"dead": True},
    "under the prefix of the hub": {"prefix": "model.language_model.", "dead": True},
    "under another prefix": {"prefix": "language_model."},
    "under no prefix": {"prefix": "", "dead": True},
    "in shards": {"shards": 3, "dead": True},
}


def test_all_forms_of_a_checkpoint_are_one_engine(tmp_path: Path) -> None:
    oracle = find_oracle(spec_called("tiny-ple"))
    spec, tokens = oracle.spec, oracle.tokens[:1]
    theirs = save_checkpoint(oracle, tmp_path / "theirs")
    found = {"as transformers writes it": reference_logits(theirs, tokens)}
    for i, (form, options) in enumerate(FORMS.items()):
        source = Checkpoint.open(theirs, spec)
        folder = write_checkpoint(tmp_path / f"form{i}", spec, source, **options)
        assert len(Checkpoint.open(folder, spec).ignored) == (
            len(dead_tensors(spec)) if options.get("dead") else 0
        )
        found[form] = reference_logits(folder, tokens)
    want = found["as transformers writes it"]
    agrees(want, oracle.logits[:1, -1], oracle)
    assert all(torch.equal(logits, want) for logits in found.values())


def reference_logits(checkpoint: Path, tokens: torch.Tensor) -> torch.Tensor:
    """The last logits of an engine of the reference backend."""
    out = checkpoint.with_name(f"{checkpoint.name}-engine")
    engine = build(None, out, checkpoint=checkpoint, backend="reference", max_seq=MAX_SEQ)
    return engine.session().prefill(tokens)
