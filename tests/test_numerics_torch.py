"""Compiled engines against transformers: a Hugging Face directory in, logits out.

Each program costs seconds to compile. The short run still covers every structural feature:
`tiny-ple` and `tiny-moe` share their programs with other tests, and what neither has is run without
torch's compiler (tests/uncompiled.py). `--full` compiles it too, and runs every spec of
`tests/configs.py`, every pass alone off, and bf16 on all variants.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass, replace
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
from g4ir.spec.parts import FULL, SLIDING, Moe
from g4ir.spec.record import Spec, check_spec
from g4ir.weights.checkpoint import Checkpoint
from g4ir.weights.pack import split_program
from g4ir.weights.write import write_checkpoint
from tests import engines
from tests.configs import FEATURES, NAMES, SMALL, few, spec_called
from tests.oracle import (
    Oracle,
    close_calls,
    cosine,
    find_bf16_oracle,
    find_oracle,
    first_difference,
    random_tokens,
    save_checkpoint,
)
from tests.runner import build_engine, built_program, with_chunk
from tests.test_numerics import CHUNKS, agrees, by_row, cut, padded, prefill_then_decode
from tests.uncompiled import uncompiled

MAX_SEQ = engines.MAX_SEQ
CHUNK = 64
GREEDY = 64
COSINE = 0.999
ROWS = 5  # of an engine for several rows
PLANS = ("plan_cache", "last_token_only")
FUSIONS = tuple(p for p in PASSES if p not in PLANS)


# --- engines ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Case:
    """One engine. Equal limits let engines share compiled programs."""

    name: str
    rows: int = ROWS
    all_logits: bool = True
    skip: tuple[str, ...] = ()
    bf16: bool = False
    latent_kv: str = "off"
    chunk: int = CHUNK
    compiled: bool = True

    def __str__(self) -> str:
        parts = [self.name, f"{self.rows}-rows", "all" if self.all_logits else "last"]
        parts += [] if self.compiled else ["uncompiled"]
        return "-".join(
            [*parts, *(f"no-{p}" for p in self.skip)]
            if self.skip != PASSES
            else [*parts, "no-pass"]
        )

    @property
    def spec(self) -> Spec:
        return OWN[self.name]() if self.name in OWN else spec_called(self.name)

    @property
    def oracle(self) -> Oracle:
        return (find_bf16_oracle if self.bf16 else find_oracle)(self.spec)


@dataclass(frozen=True)
class Built:
    """A case's engine and what it is compared with."""

    case: Case
    engine: Engine
    oracle: Oracle

    @property
    def rows(self) -> int:
        """Rows of `oracle.tokens` that the engine takes."""
        return min(self.case.rows, len(self.oracle.tokens))

    @property
    def tokens(self) -> torch.Tensor:
        return self.oracle.tokens[: self.rows]

    def session(self, chunk: int = CHUNK, rows: int | None = None) -> Any:
        most = min(chunk, self.case.chunk)
        return with_chunk(self.engine, most).session(rows or self.rows)


def leftover() -> Spec:
    """Four layers with every feature that the tiny specs have not, and a head of its own."""
    base = spec_called("26b-a4b-small")
    text = replace(
        base.text,
        num_hidden_layers=4,
        pattern=(SLIDING, SLIDING, SLIDING, FULL),
        sliding=replace(base.text.sliding, window=4, k_eq_v=True),
        full=replace(base.text.full, rope=replace(base.text.full.rope, factor=4.0)),
        moe=Moe(num_experts=6, top_k_experts=1, intermediate_size=24, layers=(3,)),
        attn_logit_softcapping=20.0,
        tie_word_embeddings=False,
    )
    return check_spec(replace(base, name="leftover", text=text))


#: specs that only this file has
OWN = {"leftover": leftover}


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
        *short(*SHORT["every token"]),
        *full(replace(shared("tiny-ple"), all_logits=True)),
        *full(Case("leftover"), *map(Case, NAMES)),
    ],
)
def every(request: pytest.FixtureRequest, tmp_path_factory: Any) -> Iterator[Built]:
    """An engine that returns the logits of every token."""
    yield from built(request.param, tmp_path_factory)


@pytest.fixture(
    scope="module",
    params=[
        *short(*SHORT["last token"]),
        *full(replace(shared("tiny-moe"), all_logits=False)),
        *full(*(Case(n, ROWS, False) for n in NAMES)),
        *full(*(Case(n, 1, False) for n in (*SMALL, "combined"))),
    ],
)
def last(request: pytest.FixtureRequest, tmp_path_factory: Any) -> Iterator[Built]:
    """An engine that works out each row's last token only."""
    yield from built(request.param, tmp_path_factory)


@pytest.fixture(
    scope="module",
    params=[
        *full(Case("leftover", 1, False, PASSES), Case("leftover", ROWS, False, PLANS)),
        *full(*(Case("combined", ROWS, False, skip) for skip in SKIPPED)),
        *full(*(Case("random-18", 1, False, skip) for skip in (PLANS, FUSIONS))),
    ],
)
def fewer(request: pytest.FixtureRequest, tmp_path_factory: Any) -> Iterator[Built]:
    """An engine without some of the passes."""
    yield from built(request.param, tmp_path_factory)


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
    yield from built(request.param, tmp_path_factory)


def built(case: Case, tmp_path_factory: Any) -> Iterator[Built]:
    """Builds the engine for the tests of one parameter, then removes it."""
    oracle, folder = case.oracle, tmp_path_factory.mktemp("engine")
    with nullcontext() if case.compiled else uncompiled():
        engine = build_engine(
            oracle,
            folder,
            backend="torch",
            max_batch=case.rows,
            max_seq=MAX_SEQ,
            prefill_chunk=case.chunk,
            all_logits=case.all_logits,
            skip=case.skip,
            latent_kv=case.latent_kv,
        )
    assert engine.dtype == ("bf16" if case.bf16 else "f32")
    yield Built(case, engine, oracle)
    engine.close()
    shutil.rmtree(folder)


def test_short_cases_have_every_feature() -> None:
    cases = [c for kind in SHORT.values() for c in kind]
    texts = [c.spec.text for c in cases]
    missing = [feature for feature, has in FEATURES.items() if not any(map(has, texts))]
    assert missing == ["window 13"]  # a number: of the uneven windows one is enough here


# --- fp32 -------------------------------------------------------------------------------------


@pytest.mark.parametrize("chunk", CHUNKS)
def test_prefill_in_chunks(every: Built, chunk: str) -> None:
    oracle, tokens = every.oracle, every.tokens[:, : every.oracle.prompt + 2]
    session = every.session(CHUNKS[chunk](oracle.window, oracle.prompt))
    got = prefill_then_decode(session, tokens, oracle.prompt)
    agrees(got, oracle.logits[: every.rows, : tokens.shape[1]], oracle)


def test_decode_past_three_windows(every: Built) -> None:
    got = prefill_then_decode(every.session(), every.tokens, 3)
    agrees(got, every.oracle.logits[: every.rows], every.oracle)


@pytest.mark.parametrize("chunk", ["W-1", "W+1", "prime", "all"])
def test_last_token(last: Built, chunk: str) -> None:
    last_tokens_agree(last, CHUNKS[chunk](last.oracle.window, last.oracle.prompt))


@pytest.mark.parametrize("chunk", ["W+1", "prime", "all"])
def test_fewer_passes(fewer: Built, chunk: str) -> None:
    last_tokens_agree(fewer, CHUNKS[chunk](fewer.oracle.window, fewer.oracle.prompt))


def last_tokens_agree(b: Built, chunk: int) -> None:
    """A prompt, then every token that follows it, past three windows."""
    session, n = b.session(chunk), b.oracle.prompt
    got = [session.prefill(b.tokens[:, :n])]
    got += [session.decode(column) for column in b.tokens[:, n:].unbind(1)]
    agrees(torch.stack(got, 1), b.oracle.logits[: b.rows, n - 1 :], b.oracle)


def test_ragged_rows_equal_single_rows(every: Built) -> None:
    ragged_rows_agree(every)


def test_ragged_rows_of_a_last_token_engine(last: Built) -> None:
    ragged_rows_agree(last)


def test_ragged_rows_with_fewer_passes(fewer: Built) -> None:
    ragged_rows_agree(fewer)


def ragged_rows_agree(b: Built) -> None:
    """Rows that end in different chunks, an empty row, a second turn, then decoding."""
    oracle, w, rows = b.oracle, b.oracle.window, b.case.rows
    tokens = random_tokens(oracle.spec, rows, 5 * w, seed=9)
    session = b.session(w + 1, rows)
    first = cut(tokens, [3 * w + 1, 0, w + 3, 1, 2 * w + 2][:rows])
    second = cut(tokens.flip(1), [3, 2 * w, 0, 1, w + 4][:rows])
    held = [row[:0] for row in first]
    for turn in (first, second):
        got = session.prefill(*padded(turn))
        held = [torch.cat(pair) for pair in zip(held, turn, strict=True)]
        live = [i for i, row in enumerate(turn) if len(row)]
        agrees(got[live], by_row(oracle, [held[i] for i in live]), oracle)
        assert not got[[i for i in range(rows) if i not in live]].any()
        assert session.length.tolist() == [len(row) for row in held]
    step = tokens[:, -1]
    want = by_row(oracle, [torch.cat((row, t[None])) for row, t in zip(held, step, strict=True)])
    agrees(session.decode(step), want, oracle)


def test_greedy_text_is_identical(every: Built) -> None:
    greedy_text_agrees(every)


def test_greedy_text_of_a_last_token_engine(last: Built) -> None:
    greedy_text_agrees(last)


def greedy_text_agrees(b: Built) -> None:
    prompt = b.tokens[:, :6]
    want, logits = b.oracle.greedy(prompt, GREEDY)
    got = with_chunk(b.engine, 4).generate(prompt.tolist(), GREEDY, stop_ids=())
    for ours, text, seen in zip(got, want, logits, strict=True):
        assert first_difference(torch.tensor(ours), text, seen, b.oracle.budget) is None


def test_allocated_caches_are_the_planned_ones(every: Built) -> None:
    for rows in (1, every.case.rows):
        caches_are_planned(every.engine, rows)


# --- bf16 -------------------------------------------------------------------------------------


@pytest.mark.parametrize("chunk", ["W-1", "all"])
def test_bf16(half: Built, chunk: str) -> None:
    """Every position of a prompt in chunks and of the tokens decoded after it."""
    oracle, want = half.oracle, half.oracle.logits[: half.rows]
    session = half.session(CHUNKS[chunk](oracle.window, oracle.prompt))
    got = prefill_then_decode(session, half.tokens, oracle.prompt)
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
