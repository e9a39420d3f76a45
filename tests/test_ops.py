"""The ops: tests generated from their samples, rounding order, and the cache against brute force.

Formulas here are written by hand from the reference model's order of operations (rule numbers in
brackets), one rounding per line, so that a fused or reordered computation shows.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from g4ir.backends.primitives.lowerings import OUTSIDE
from g4ir.errors import VerifyError
from g4ir.ir.graph import Node, Value, infer
from g4ir.ir.interpret import run_node
from g4ir.ops import OPS, Sample
from g4ir.ops.base import as_tuple, op
from g4ir.ops.budgets import MOVES
from g4ir.ops.codecs import FORMATS
from g4ir.ops.kv_quant import to_comparable
from g4ir.ops.types import FLOATS, Type, dtype_name, is_float, torch_dtype

BF16, F32, F64 = torch.bfloat16, torch.float32, torch.float64
#: they make a weight of codes, which in a network is no tensor by itself (primitives/weights.py)
OF_CODES = {"dense", "dequantize", "dequantize_columns", "dequantize_tiles"}
CASES = [(name, i) for name, o in OPS.items() for i in range(len(o.samples))]


def sample(case: tuple[str, int]) -> Sample:
    return OPS[case[0]].samples[case[1]]


#: those that a network has: its caches are of its own dtype
IN_NETWORKS = [
    c
    for c in CASES
    if c[0] not in OUTSIDE | OF_CODES
    and not {"i8", "f8e4m3"} & {t.dtype for t in sample(c).types()}
]


def tensors(types: tuple[Type, ...], s: Sample, dtype: torch.dtype | None = None) -> list[Any]:
    """Random inputs; floats in `dtype` where it is given, as those of their type."""
    g = torch.Generator().manual_seed(7)
    out = []
    for i, t in enumerate(types):
        shape = [int(d) for d in t.shape]
        if t.dtype in FLOATS:
            own = torch.randn(shape, generator=g).to(torch_dtype(t.dtype))
            out.append(own.to(dtype or own.dtype))
        elif t.dtype == "bool":
            out.append(torch.rand(shape, generator=g) < 0.7)
        else:
            ints = torch.randint(*s.ints.get(i, (0, 1)), shape, generator=g)
            bytes_of_blocks = t.dtype in FORMATS
            ints = ints.to(torch.uint8) if bytes_of_blocks else ints
            out.append((ints.view if bytes_of_blocks else ints.to)(torch_dtype(t.dtype)))
    return out


def node(name: str, types: tuple[Type, ...], attrs: Any) -> Node:
    inputs = tuple(Value(f"x{i}", t) for i, t in enumerate(types))
    results = infer(name, inputs, attrs, "y")
    return Node(name, inputs, tuple(Value(f"y{i}", t) for i, t in enumerate(results)), attrs)


def run(name: str, *inputs: torch.Tensor, **attrs: Any) -> Any:
    """An op on tensors, through its reference or expansion."""
    types = tuple(Type(dtype_name(x.dtype), tuple(x.shape)) for x in inputs)
    results = run_node(node(name, types, attrs), list(inputs))
    return results[0] if len(results) == 1 else results


def as_bf16(types: tuple[Type, ...]) -> tuple[Type, ...]:
    """A reciprocal rms, [C,B,n,1], is not rounded."""
    return tuple(
        Type("bf16", t.shape) if t.dtype == "f32" and (t.rank, *t.shape[-1:]) != (4, 1) else t
        for t in types
    )


def rand(*shape: int, dtype: torch.dtype = BF16, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


# --- from the samples -------------------------------------------------------------------------


@pytest.mark.parametrize("case", CASES)
def test_results_are_as_inferred(case: tuple[str, int]) -> None:
    """And nothing given is changed."""
    s = sample(case)
    for types in (s.types(), as_bf16(s.types())):
        n, inputs = node(case[0], types, s.attrs), tensors(types, s)
        before = [x.clone() for x in inputs]
        for v, t in zip(n.outputs, run_node(n, inputs), strict=True):
            assert (tuple(t.shape), t.dtype) == (v.type.shape, torch_dtype(v.type.dtype))
            assert not is_float(t) or t.float().isfinite().all()
        for pair in zip(inputs, before, strict=True):
            assert torch.equal(*map(to_comparable, pair))


#: dtypes that torch does not compare
BITS = [torch_dtype(name) for name in ("b16", "b8", "b4", "b2", "b1", "f4", "nl4", "nl3", "nl2")]


@pytest.mark.parametrize("case", CASES)
def test_float64_in_gives_float64_out(case: tuple[str, int]) -> None:
    """Except where a table is made of integers: its dtype is an attribute."""
    s = sample(case)
    n = node(case[0], s.types(), s.attrs)
    inputs = tensors(s.types(), s, F64)
    results = run_node(n, inputs)
    if any(x.dtype == F64 for x in inputs):
        assert all(r.dtype == F64 for r in results if is_float(r))
    narrow = run_node(n, tensors(s.types(), s))
    for wide, got in zip(results, narrow, strict=True):
        if got.dtype in BITS:
            wide, got = wide.view(torch.uint8), got.view(torch.uint8)
        torch.testing.assert_close(got.to(wide.dtype), wide, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("case", [c for c in CASES if OPS[c[0]].flops])
def test_cost_is_a_count(case: tuple[str, int]) -> None:
    s, o = sample(case), OPS[case[0]]
    outs = o.infer_types(s.types(), s.attrs)
    assert o.flops and o.traffic
    flops, (reads, writes) = (f(s.types(), outs, **s.attrs) for f in (o.flops, o.traffic))
    assert (len(reads), len(writes)) == (len(s.inputs), len(outs))
    assert all(type(n) is int and n >= 0 for n in (flops, *reads, *writes))
    for moved, t in zip((*reads, *writes), (*s.types(), *outs), strict=True):
        assert moved <= t.nbytes(), "an operand is moved at most once"


@pytest.mark.parametrize("case", [c for c in CASES if OPS[c[0]].updates])
def test_what_an_op_says_of_caches(case: tuple[str, int]) -> None:
    """A new cache differs from the old one in the rows that were written, and nowhere else."""
    s = sample(case)
    n, given = node(case[0], s.types(), s.attrs), tensors(s.types(), s)
    pairs = n.definition.updated(given, run_node(n, given))
    caches = n.definition.updated(n.inputs, n.outputs)
    assert pairs and all(old.type == new.type for old, new in caches)
    assert [v.type.rank for v in n.inputs].count(4) - (case[0] == "cache_write") == len(pairs)
    start, lengths = [x for x in given if x.dtype == torch.int64][:2]
    for old, new in pairs:
        slots, moved = old.shape[0], (old != new).flatten(2).any(-1)
        for row, (at, count) in enumerate(zip(start.tolist(), lengths.tolist(), strict=True)):
            last = range(max(at, at + count - slots), at + count)
            assert set(moved[:, row].nonzero().flatten().tolist()) == {p % slots for p in last}


#: op -> inputs before the fresh chunk
WITHOUT_FRESH = {"attention": 5, "attention_latent": 5}


@pytest.mark.parametrize("case", [c for c in CASES if OPS[c[0]].rows])
def test_rows_are_independent(case: tuple[str, int]) -> None:
    """What an op says of `rows`: one row of those inputs alone gives that row of the results."""
    s, rows = sample(case), OPS[case[0]].rows
    # The keys of a fresh chunk belong to all its queries: such rows read the cache alone.
    inputs = tensors(s.types(), s, F64)[: WITHOUT_FRESH.get(case[0])]
    whole = run(case[0], *inputs, **s.attrs)
    for at in range(inputs[rows[0]].shape[1]):
        row = [x[:, at : at + 1] if i in rows else x for i, x in enumerate(inputs)]
        got = run(case[0], *row, **s.attrs)
        for a, b in zip(as_tuple(got), as_tuple(whole), strict=True):
            torch.testing.assert_close(a, b[:, at : at + 1], rtol=1e-12, atol=1e-12)


def mutants(t: Type) -> Iterator[Type]:
    """The type with another dtype, one dim longer by one, one dim more, one dim fewer."""
    yield Type("f16" if t.dtype == "f32" else "f32", t.shape)
    for i, d in enumerate(t.shape):
        yield t.with_shape(*t.shape[:i], int(d) + 1, *t.shape[i + 1 :])
    yield from (t.with_shape(*t.shape, 2), t.with_shape(2, *t.shape), t.with_shape(*t.shape[1:]))
    yield t.with_shape()


@pytest.mark.parametrize("case", CASES)
def test_a_wrong_type_is_refused_by_name_or_it_runs(case: tuple[str, int]) -> None:
    """What infer accepts, the op computes; what it refuses, it refuses naming every type."""
    s = sample(case)
    types = s.types()
    for i, t in enumerate(types):
        for wrong in mutants(t):
            given = (*types[:i], wrong, *types[i + 1 :])
            try:
                n = node(case[0], given, s.attrs)
            except VerifyError as e:
                assert all(str(g) in str(e) for g in given)
                assert str(e).startswith(f"y: {case[0]}(%x0: ")
                continue
            zeros = replace(s, ints={})  # a sample's range of integers fits its own shapes
            for v, r in zip(n.outputs, run_node(n, tensors(given, zeros)), strict=True):
                assert (tuple(r.shape), r.dtype) == (v.type.shape, torch_dtype(v.type.dtype))


def test_an_attribute_is_no_list() -> None:
    """Other wrong ones are in refused/graph.yaml."""
    s = OPS["split"].samples[0]
    with pytest.raises(VerifyError, match=r"y: split\(%x0: "):
        node("split", s.types(), {**s.attrs, "sizes": [6, 4, 2]})


def test_an_op_class_must_be_complete() -> None:
    def typed(x: Type) -> Type:
        return x

    whole = {"__doc__": "does", "samples": [Sample(())], "budget": MOVES, "infer": typed}
    for parts, message in (
        ({"reference": typed, "__doc__": ""}, "docstring, and infer or expand"),
        ({}, "exactly one of"),
        ({"reference": typed, "expand": typed}, "exactly one of"),
        ({"reference": typed, "samples": []}, "samples"),
        ({"reference": typed, "budget": None}, "a budget"),
        ({"reference": typed, "kind": "tail"}, "a kind of attention"),
    ):
        with pytest.raises(TypeError, match=message):
            op(type("thing", (), whole | parts))


# --- rounding order ---------------------------------------------------------------------------


@pytest.mark.parametrize("act", ["gelu_pytorch_tanh", "gelu", "silu", "relu"])
def test_glu_rounds_the_activation(act: str) -> None:
    gate, up = rand(2, 3, 64), rand(2, 3, 64, seed=1)
    x = gate.float()
    tanh = torch.tanh((2 / math.pi) ** 0.5 * (x + 0.044715 * x**3))
    by_hand = {
        "gelu_pytorch_tanh": 0.5 * x * (1 + tanh),
        "gelu": 0.5 * x * (1 + torch.erf(x * 0.5**0.5)),
        "silu": x * torch.sigmoid(x),
        "relu": x.clamp(min=0),
    }[act]
    got = run("glu", gate, up, act=act)
    want = by_hand.to(BF16) * up
    torch.testing.assert_close(got, want, rtol=2**-7, atol=1e-6)
    assert (got == want).float().mean() > 0.97, "the same but for ties of the last bit"
    wide = [t.double() for t in (gate, up)]
    exact = run("glu", *wide, act=act)
    torch.testing.assert_close(exact, by_hand.double() * wide[1], rtol=1e-5, atol=1e-6)


# --- the cache --------------------------------------------------------------------------------


@st.composite
def chunks(draw: st.DrawFn) -> tuple[int, list[tuple[int, list[int]]]]:
    """A ring size and chunks: their padded length and each of three rows' valid tokens."""
    slots = draw(st.integers(1, 7))
    sizes = draw(st.lists(st.integers(1, 10), min_size=1, max_size=4))
    return slots, [(s, draw(st.lists(st.integers(0, s), min_size=3, max_size=3))) for s in sizes]


@given(chunks())
def test_cache_write_against_writing_one_by_one(case: tuple[int, Any]) -> None:
    """Chunks shorter and longer than the ring, ragged rows, rows of length 0; padding is never
    written. The cell of a token is its position and row; padding is -100."""
    slots, parts = case
    cache = torch.full((slots, 3, 2, 2), -1.0)
    held = [[-1.0] * 3 for _ in range(slots)]
    start = [0, 0, 0]
    for size, lengths in parts:
        new = torch.full((3, size, 2, 2), -100.0)
        for row, s in itertools.product(range(3), range(size)):
            if s < lengths[row]:
                new[row, s] = 10 * (start[row] + s) + row
                held[(start[row] + s) % slots][row] = 10 * (start[row] + s) + row
        cache = run("cache_write", cache, new, torch.tensor(start), torch.tensor(lengths))
        start = [a + b for a, b in zip(start, lengths, strict=True)]
        assert cache[:, :, 0, 0].tolist() == held
        assert torch.equal(cache, cache[:, :, :1, :1].expand_as(cache))


def test_a_query_that_sees_nothing_stays_finite() -> None:
    q, cache, zero = rand(1, 1, 2, 4, dtype=F32), torch.zeros(3, 1, 1, 4), torch.tensor([0])
    masking = {"window": 0, "scale": 1.0, "softcap": 0.0}
    assert run("attention", q, zero[None], zero, cache, cache, **masking).isfinite().all()
