"""The torch backend below the session: schedule of segments, products and experts, programs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from g4ir import Spec, interpret, load_spec, parse_graph, print_graph
from g4ir.backends.cuda.lowerings import smallest
from g4ir.backends.inductor.cache_write import write_list, write_ring
from g4ir.backends.inductor.compile import compile_program
from g4ir.backends.inductor.lower import COMMON, SegmentModule
from g4ir.backends.inductor.lowered import lowered_by_op
from g4ir.backends.inductor.programs import phase_steps
from g4ir.backends.inductor.runtime import _load_program, check_aligned
from g4ir.backends.inductor.segment import graph_steps, state_steps
from g4ir.backends.inductor.target import Target
from g4ir.errors import EngineError, LowerError
from g4ir.ir.graph import Builder, Graph
from g4ir.ops import OPS
from g4ir.ops.kv_quant import quantized_type, to_comparable
from g4ir.ops.types import Type, torch_dtype
from g4ir.plan.engine_limits import Limits
from g4ir.weights.pack import split_program
from tests.cases import TABLES
from tests.configs import RANDOM, SMALL, cut, spec_called
from tests.runner import built_program

PHASES = ("prefill", "decode")
SPECS = ("tiny-dense", "tiny-moe", "tiny-ple", "combined", *SMALL, *RANDOM[:6])
#: with the forms of the K=V caches
OF_VALUE = ("combined", "31b-small", "random-19")
FORMS = (*((n, "off") for n in SPECS), *((n, "value") for n in OF_VALUE))


# --- the schedule -----------------------------------------------------------------------------


def main_graph(spec: Spec, phase: str, **options: Any) -> Graph:
    return split_program(built_program(spec, **options)).program.graphs[phase]


@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize(("name", "form"), FORMS)
def test_steps_of_a_graph(name: str, form: str, phase: str) -> None:
    """Every node once and after what it reads. A cache is written once, in place; what reads its
    old contents comes before, what reads the new ones after. Segments parse, and their operands
    match their text in number. The steps without logits are a subset with every write."""
    graph = main_graph(spec_called(name), phase, latent_kv=form)
    steps = graph_steps(graph)
    written = {v.name: cache for cache, v in graph.next.items()}
    caches = {v.name for v in graph.state}
    known, nodes = {v.name for v in (*graph.inputs, *graph.params, *graph.state)}, 0
    writer = {c: i for i, s in enumerate(steps) for c in s.writes}
    assert set(writer) == caches and sum(len(s.writes) for s in steps) == len(caches)
    for i, step in enumerate(steps):
        reads = {*step.inputs, *step.params}
        assert {written.get(n, n) for n in reads} <= known
        assert not known & set(step.outputs), "a value is made twice"
        known.update(step.outputs)
        if step.node:
            nodes += 1
            continue
        assert all(i < writer[c] for c in step.state if c not in step.writes)
        assert all(i > writer[c] for c in (written.get(n) for n in step.inputs) if c)
        g = parse_graph(step.text)
        nodes += len(g.nodes)
        assert print_graph(g) == step.text
        sizes = (g.inputs, g.params, g.state, g.outputs, g.next)
        names = (step.inputs, step.params, step.state, step.outputs, step.writes)
        assert [*map(len, sizes)] == [*map(len, names)]
    assert nodes == len(graph.nodes) and {v.name for v in graph.outputs} <= known
    some, rest = state_steps(steps), iter(steps)
    assert all(any(s is t for t in rest) for s in some)
    assert {c for s in some for c in s.writes} == caches
    made, every = ({o for s in many for o in s.outputs} for many in (some, steps))
    assert all(i in made for s in some for i in s.inputs if i in every) and "logits" not in made


WRITE = TABLES["graphs"]["writes and readers"]


@pytest.mark.parametrize("reader", ["L0.out", "L1.out"])
def test_a_write_with_another_result_waits_for_readers(reader: str) -> None:
    """Of the old contents, in its own layer and in another; readers of its results come after."""
    g = parse_graph(WRITE.format(q="q", reads="q", reader=reader))
    steps = [s for s in graph_steps(g) if s.text]
    at = next(i for i, s in enumerate(steps) if s.writes)
    assert steps[at].writes == ("L0.k", "L0.v") and "L0.q" in steps[at].outputs
    assert not {"L0.k.next", "L0.v.next"} & {v for s in steps for v in s.outputs}
    readers = [i for i, s in enumerate(steps) if reader in s.outputs]
    inner = [n.op for n in parse_graph(steps[at].text).nodes]
    assert (readers == [at] and inner == ["attention", "qkv_write"]) or readers[0] < at
    assert all(i > at for i, s in enumerate(steps) if "L2.out" in s.outputs)


@pytest.mark.parametrize(
    ("reader", "message"),
    [("L0.out", "%L0.k is read after %L0.k.next"), ("L1.out", "depend on each other")],
)
def test_a_reader_that_needs_the_write_is_refused(reader: str, message: str) -> None:
    """Old contents beside another result of the op that replaces them."""
    g = parse_graph(WRITE.format(q="q", reads="L0.q", reader=reader))
    with pytest.raises(LowerError, match=message):
        graph_steps(g)


def program_texts(spec: Spec) -> set[str]:
    program = split_program(built_program(spec)).program
    steps = phase_steps(program, Limits()).values()
    return {s.text for many in steps for s in many if s.text}


@pytest.mark.parametrize(("name", "apart"), [("tiny-dense", 0), ("tiny-moe", 0), ("tiny-ple", 2)])
def test_programs_do_not_grow_with_depth(name: str, apart: int) -> None:
    """Equal layers have equal text. `apart`: texts of what stands around the layers, of per-layer
    embeddings, which depends on their number."""
    few, many = (program_texts(cut(load_spec(name), n)) for n in (12, 28))
    assert len(few) == len(many) <= 12 and len(few - many) <= apart


# --- writes of a chunk --------------------------------------------------------------------------


@pytest.mark.parametrize("into, chunk, start, lengths", TABLES["torch backend"]["writes"])
def test_slots_of_a_chunk(into: str, chunk: int, start: list[int], lengths: list[int]) -> None:
    """As the op says, in place; padding, also behind the last slot of a list, leaves what was
    there, and is not read: it may be NaN. Of a ring no slot is named twice."""
    g = torch.Generator().manual_seed(0)
    cache, new = torch.randn(16, 3, 2, 4, generator=g), torch.randn(3, chunk, 2, 4, generator=g)
    where = torch.tensor(start), torch.tensor(lengths)
    want = OPS["cache_write"].reference(cache, new, *where)
    for row, count in enumerate(lengths):
        new[row, count:] = torch.nan
    with Slots() as slots:
        {"list": write_list, "ring": write_ring}[into](cache, new, *where)
    assert torch.equal(cache, want)
    (slot,) = slots.written
    assert slot.shape == (min(chunk, 16), 3)
    assert all(len({*column}) == len(column) for column in slot.t().tolist())


class Slots(TorchDispatchMode):
    """Notes the slots that rows are put to."""

    def __init__(self) -> None:
        super().__init__()
        self.written: list[torch.Tensor] = []

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if op is torch.ops.aten.index_put_.default:
            self.written.append(args[1][0])
        return op(*args, **(kwargs or {}))


DRAFTED = TABLES["graphs"]["drafted"]


class Sizes(TorchDispatchMode):
    """Notes the largest tensor that an op makes; one that it returns as it was given counts not."""

    most = 0

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = op(*args, **(kwargs or {}))
        if isinstance(out, torch.Tensor) and not op.is_view and out is not args[0]:
            self.most = max(self.most, out.numel())
        return out


@pytest.mark.parametrize("slots", ["19", "C"], ids=["ring", "list"])
@pytest.mark.parametrize(("dtype", "width"), [("f32", 8), ("bf16", 8), ("f8e4m3", 8), ("i8", 10)])
@pytest.mark.parametrize(("start", "lengths"), TABLES["torch backend"]["drafted"])
def test_own_slots(
    slots: str, dtype: str, width: int, start: list[int], lengths: list[int]
) -> None:
    """As the op says, ragged, around a ring's end and in any dtype; nothing as large as the cache
    is made on the way. Padding holds NaN, and so would a slot that it reached."""
    g = torch.Generator().manual_seed(0)
    text = DRAFTED.format(dtype=dtype, width=width, slots=slots)
    cache, new = (
        torch.randint(-99, 99, shape, generator=g).to(torch_dtype(dtype))
        for shape in ((19, len(start), 2, width), (len(start), 4, 2, width))
    )
    for row, count in enumerate(lengths):
        new[row, count:] = 77 if dtype == "i8" else torch.nan
    # A list never wraps: the same slots of its first turn, as far as it has them.
    first = start if slots == "19" else [min(s, 15) for s in start]
    where = torch.tensor(first), torch.tensor(lengths)
    want = OPS["cache_write"].reference(cache.float(), new.float(), *where)
    with Sizes() as sizes:
        SegmentModule(lowered_by_op(parse_graph(text), COMMON))(new, *where, cache)
    assert torch.equal(cache.float(), want)
    assert sizes.most < cache.numel()


def test_caches_are_aligned() -> None:
    """What is not would be written to as a copy."""
    store = torch.zeros(64, dtype=torch.bfloat16)
    check_aligned({"k": store[8:]})
    with pytest.raises(EngineError, match=r"cache v .* multiple of 16"):
        check_aligned({"k": store, "v": store[4:]})


@pytest.mark.parametrize(
    ("experts", "key"),
    [(128, torch.uint8), (255, torch.uint8), (256, torch.int16), (1 << 15, torch.int64)],
)
def test_keys_that_tokens_are_sorted_by(experts: int, key: torch.dtype) -> None:
    """As few bits as hold every expert, and the number that stands for those of other ranks."""
    assert smallest(experts) == key
    ids = torch.randint(0, experts + 1, (999,), generator=torch.Generator().manual_seed(0))
    ids[:2] = torch.tensor([experts, 0])
    assert torch.equal(ids.to(key).argsort(stable=True), ids.argsort(stable=True))


@pytest.mark.full
@pytest.mark.parametrize("to", ["i8", "f8e4m3"])
def test_a_compiled_chunk(tmp_path: Path, to: str) -> None:
    """Rows are made, attended to beside a ring, and written into it in place."""
    b = Builder("segment")
    q = b.input("q", Type("f32", (2, "S", 4, 40)))
    k, v = (b.input(name, Type("f32", (2, "S", 2, 40))) for name in "kv")
    positions = b.input("positions", Type("i64", (2, "S")))
    start, lengths = (b.input(name, Type("i64", (2,))) for name in ("start", "lengths"))
    rows = [b.emit("narrow_row", x, to=to) for x in (k, v)]
    ring = quantized_type(Type("f32", (8, 2, 2, 40)), to)
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
        assert torch.equal(to_comparable(got), to_comparable(want))
