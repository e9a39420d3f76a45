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
from torch.nn import functional as f

from g4ir.backends.primitives.lowerings import OUTSIDE
from g4ir.errors import VerifyError
from g4ir.ir.flatten import inner_nodes
from g4ir.ir.graph import Node, Value, infer
from g4ir.ir.interpret import run_node
from g4ir.model.text import build_graph
from g4ir.ops import OPS, Sample
from g4ir.ops.attention import slot_positions, visible
from g4ir.ops.base import as_tuple, op
from g4ir.ops.budgets import MOVES
from g4ir.ops.kv_quant import comparable
from g4ir.ops.rope import inverse_frequencies, rotate_half
from g4ir.ops.types import FLOATS, Type, dtype_name, torch_dtype
from g4ir.spec.record import load_spec

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
            out.append(ints.to(torch_dtype(t.dtype)))
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


def test_the_table_holds_each_op_under_its_name() -> None:
    assert all(name == o.name and o.doc.strip() and o.samples for name, o in OPS.items())
    phases = ("embed", "prefill", "decode")
    used = {
        n.op
        for s in ("tiny-moe", "tiny-ple")
        for p in phases
        for n in build_graph(load_spec(s), p).nodes
    }
    assert used <= OPS.keys()


@pytest.mark.parametrize("case", CASES)
def test_results_are_as_inferred(case: tuple[str, int]) -> None:
    s = sample(case)
    for types in (s.types(), as_bf16(s.types())):
        n = node(case[0], types, s.attrs)
        for v, t in zip(n.outputs, run_node(n, tensors(types, s)), strict=True):
            assert (tuple(t.shape), t.dtype) == (v.type.shape, torch_dtype(v.type.dtype))
            assert not t.is_floating_point() or t.float().isfinite().all()


@pytest.mark.parametrize("case", CASES)
def test_float64_in_gives_float64_out(case: tuple[str, int]) -> None:
    """Except where a table is made of integers: its dtype is an attribute."""
    s = sample(case)
    n = node(case[0], s.types(), s.attrs)
    inputs = tensors(s.types(), s, F64)
    results = run_node(n, inputs)
    if any(x.dtype == F64 for x in inputs):
        assert all(r.dtype == F64 for r in results if r.is_floating_point())
    narrow = run_node(n, tensors(s.types(), s))
    for wide, got in zip(results, narrow, strict=True):
        torch.testing.assert_close(got.to(wide.dtype), wide, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("case", CASES)
def test_nothing_given_is_changed(case: tuple[str, int]) -> None:
    s = sample(case)
    inputs = tensors(s.types(), s)
    before = [x.clone() for x in inputs]
    run_node(node(case[0], s.types(), s.attrs), inputs)
    assert all(torch.equal(*map(comparable, pair)) for pair in zip(inputs, before, strict=True))


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
    assert (flops == 0) == (case[0] in NO_FLOPS)
    assert (not any((*reads, *writes))) == (case[0] in VIEWS)


NO_FLOPS = {
    "all_gather",
    "cast",
    "concat",
    "split",
    "heads",
    "merge_heads",
    "last_row",
    "row_start",
    "cache_write",
    "stack_layers",
    "unstack_layers",
    "latent_row",
    "narrow_row",
    "quantize",
    "as_bytes",
    "dequantize",
    "dequantize_columns",
    "columns",
    "tiles",
    "dequantize_tiles",
    "by_cluster",
    "pick_id",
    "pick_rows",
}
VIEWS = {
    "split",
    "heads",
    "merge_heads",
    "unstack_layers",
    "dequantize",
    "dequantize_columns",
    "dequantize_tiles",
}


@pytest.mark.parametrize("case", [c for c in CASES if not OPS[c[0]].flops])
def test_a_fused_op_without_a_count_costs_its_parts(case: tuple[str, int]) -> None:
    """Down to ops that count; its own results are among theirs."""
    assert OPS[case[0]].traffic is None
    n = node(case[0], sample(case).types(), sample(case).attrs)
    inner = inner_nodes(n)
    assert all(m.definition.flops and m.definition.traffic for m in inner)
    made = [v for m in inner for v in m.outputs]
    assert len(set(made)) == len(made) and {*n.outputs} <= {*made}
    given = tensors(sample(case).types(), sample(case))
    env = {v.name: t for v, t in zip(n.inputs, given, strict=True)}
    for m in inner:
        results = run_node(m, [env[v.name] for v in m.inputs])
        env |= {v.name: t for v, t in zip(m.outputs, results, strict=True)}
    for v, want in zip(n.outputs, run_node(n, given), strict=True):
        assert torch.equal(env[v.name], want)


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


#: (op, form) -> inputs before the fresh chunk
WITHOUT_FRESH = {
    ("attention", None): 5,
    ("attention_latent", "value"): 5,
    ("attention_latent", "raw"): 6,
}


@pytest.mark.parametrize("case", [c for c in CASES if OPS[c[0]].rows])
def test_rows_are_independent(case: tuple[str, int]) -> None:
    """What an op says of `rows`: one row of those inputs alone gives that row of the results."""
    s, rows = sample(case), OPS[case[0]].rows
    # The keys of a fresh chunk belong to all its queries: such rows read the cache alone.
    inputs = tensors(s.types(), s, F64)[: WITHOUT_FRESH.get((case[0], s.attrs.get("form")))]
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


MISMATCHES = {
    "linear": ("f32[2,8]", "f32[4,9]"),
    "add": ("f32[2,8]", "f32[2,7]"),
    "mul": ("f32[2,8]", "f32[3]"),
    "glu": ("f32[2,8]", "f32[2,7]"),
    "concat": ("f32[2,8]", "f32[2,7]"),
    "rms_norm": ("f32[2,8]", "f32[7]"),
    "rope": ("f32[2,3,4,8]", "f32[2,3,7]", "f32[2,3,7]"),
    "last_row": ("f32[2,3,8]", "i64[3]"),
    "embedding": ("f32[8]", "i64[2]"),
    "cache_write": ("f32[4,2,2,8]", "f32[2,3,2,9]", "i64[2]", "i64[2]"),
    "attention": ("f32[2,1,4,8]", "i64[2,1]", "i64[2]", "f32[9,2,2,7]", "f32[9,2,2,7]"),
    "attention_latent": ("f32[2,1,4,8]", "i64[2,1]", "i64[2]", "f32[9]", "f32[9,2,2,12]"),
    "latent_row": ("f32[2,3,2,8]", "f32[2,3,2,7]"),
    "dual_norm_residual": (
        *("f32[2,8]", "f32[8]", "f32[2,8]", "f32[8]"),
        *("f32[8]", "f32[2,7]", "f32[1]", "f32[8]"),
    ),
    "moe_mlp": (
        *("f32[2,3,8]",) * 3,
        "f32[8]",
        "f32[4,8]",
        "f32[4]",
        "f32[6,8]",
        "f32[8,3]",
        "f32[5,6,8]",
        "f32[5,8,3]",
    ),
    "qkv_write": (
        "f32[2,1,64]",
        "f32[8]",
        "f32[9]",
        "f32[2,1,8]",
        "f32[2,1,8]",
        "i64[2]",
        "i64[2]",
        "f32[4,2,2,8]",
        "f32[4,2,2,8]",
    ),
}


@pytest.mark.parametrize("name", MISMATCHES)
def test_infer_itself_names_both_types(name: str) -> None:
    types = Sample(MISMATCHES[name]).types()
    with pytest.raises(ValueError, match=name) as e:
        OPS[name].infer_types(types, OPS[name].samples[0].attrs)
    assert sum(text in str(e.value) for text in MISMATCHES[name]) >= 2


def test_an_attribute_is_no_list() -> None:
    """Other wrong ones are in refused/graph.yaml."""
    s = OPS["split"].samples[0]
    with pytest.raises(VerifyError, match=r"y: split\(%x0: "):
        node("split", s.types(), {**s.attrs, "sizes": [6, 4, 2]})


def test_an_op_class_must_be_complete() -> None:
    def make(**parts: Any) -> type:
        return type(
            "thing", (), {"__doc__": "does", "samples": [Sample(())], "budget": MOVES, **parts}
        )

    def typed(x: Type) -> Type:
        return x

    def odd(x: Type, *, table: dict) -> Type:
        return x

    for cls, message in (
        (make(), "docstring, and infer or expand"),
        (make(infer=typed, __doc__=""), "docstring, and infer or expand"),
        (make(reference=typed), "docstring, and infer or expand"),
        (make(infer=typed), "exactly one of"),
        (make(infer=typed, reference=typed, expand=typed), "exactly one of"),
        (make(infer=typed, reference=typed, samples=[]), "samples"),
        (make(infer=typed, reference=typed, budget=None), "a budget"),
        (make(infer=typed, reference=typed, kind="tail"), "kind 'tail': one of attention"),
        (make(infer=odd, reference=typed), "attribute of kind dict"),
        (make(expand=lambda b, x, **attrs: x), r"attribute of kind \*\*"),
    ):
        with pytest.raises(TypeError, match=message):
            op(cls)
    made = op(make(infer=staticmethod(typed), reference=staticmethod(typed)))
    assert made.fold and not made.glue and made.rows == () and as_tuple(3) == (3,)


# --- fused ops --------------------------------------------------------------------------------

CACHE_WRITES = ("cache_write", "cache_write")
EXPANSIONS = {
    "all_reduce": [["scale"], ["scale", "scale"]],
    "all_gather": [["scale"]],
    "all_reduce_norm_residual": [["all_reduce", "norm_residual"]] * 2,
    "all_reduce_dual_norm_residual": [["all_reduce", "dual_norm_residual"]],
    "dense": [["dequantize"]],
    "norm_rope": [["rms_norm", "rope"]],
    "norm_residual": [
        ["rms_norm", "add", "mul", "rms_norm"],
        ["rms_norm", "add", "rms_norm", "rms_norm", "rms_norm"],
        ["rms_norm", "add"],
    ],
    "norm_linear": [
        ["norm_residual", "linear"],
        ["norm_residual", "linear_glu"],
        ["norm_residual", "linear_glu"],
    ],
    "dual_norm_linear": [["dual_norm_residual", "linear"], ["dual_norm_residual", "linear_glu"]],
    "norm_moe_mlp": [["norm_residual", "moe_mlp"]],
    "qkv_attention": [["qkv_write", "attention"]] * 2,
    "q_attention": [["norm_rope", "attention"]],
    "glu_packed": [["split", "glu"]],
    "linear_clipped": [["clip", "linear", "clip"]],
    "linear_glu": [["linear", "glu_packed"], ["linear", "glu"]],
    "dual_norm_residual": [["rms_norm", "norm_residual", "norm_residual"]] * 3,
    "moe_mlp": [["linear_glu", "linear", "router", "experts"]] * 3,
    "qkv_write": [
        ["split", "heads", "norm_rope", "heads", "heads", "norm_rope", "rms_norm", *CACHE_WRITES],
        ["split", "heads", "norm_rope", "heads", "norm_rope", "rms_norm", *CACHE_WRITES],
        [
            "split",
            "heads",
            "norm_rope",
            "heads",
            "norm_rope",
            "rms_norm",
            "latent_row",
            "cache_write",
        ],
        ["split", "heads", "norm_rope", "heads", "inverse_rms", *CACHE_WRITES],
        *[
            ["split", "heads", "norm_rope", "heads", "heads", "norm_rope", "rms_norm"]
            + ["narrow_row", "narrow_row", *CACHE_WRITES]
        ]
        * 2,
    ],
}


def test_those_listed_are_fused_ops() -> None:
    assert EXPANSIONS.keys() <= {name for name, o in OPS.items() if o.expand}


@pytest.mark.parametrize("case", [c for c in CASES if c[0] in EXPANSIONS])
def test_an_expansion_is_the_documented_composition(case: tuple[str, int]) -> None:
    n = node(case[0], sample(case).types(), sample(case).attrs)
    nodes, results = n.expanded
    assert [inner.op for inner in nodes] == EXPANSIONS[case[0]][case[1]]
    assert [v.type for v in results] == [v.type for v in n.outputs]


def test_norm_rope_is_the_norm_then_the_rotation() -> None:
    x, w, cos, sin = rand(2, 3, 4, 8), rand(8, seed=1), rand(2, 3, 8, seed=2), rand(2, 3, 8, seed=3)
    want = run("rope", run("rms_norm", x, w, eps=1e-6), cos, sin)
    assert torch.equal(run("norm_rope", x, w, cos, sin, eps=1e-6), want)


def test_norm_residual_rounds_after_each_step() -> None:
    """[6 to 9] the norm, the add and the layer scalar round one after the other."""
    x, r, w, s, u = (
        rand(*shape, seed=i) for i, shape in enumerate([(2, 3, 16), (2, 3, 16), (16,), (1,), (16,)])
    )
    h, n, m = run("norm_residual", x, r, w, s, u, eps=1e-6, scaled=True, weighted=(True, False))
    want = (r + norm(x, w)) * s
    assert torch.equal(h, want)
    assert torch.equal(n, norm(want, u)) and torch.equal(m, norm(want))
    plain, k = run("norm_residual", x, r, w, u, eps=1e-6, scaled=False, weighted=(True,))
    assert torch.equal(plain, r + norm(x, w)) and torch.equal(k, norm(r + norm(x, w), u))
    assert torch.equal(run("norm_residual", x, r, w, eps=1e-6, scaled=False, weighted=()), plain)


def test_glu_packed_takes_the_gate_first() -> None:
    x = rand(2, 3, 32)
    want = run("glu", x[..., :16].contiguous(), x[..., 16:].contiguous(), act="gelu_pytorch_tanh")
    assert torch.equal(run("glu_packed", x, act="gelu_pytorch_tanh"), want)


def test_linear_glu_rounds_the_product_first() -> None:
    x, w, up = rand(2, 3, 64), rand(48, 64, seed=1), rand(2, 3, 48, seed=2)
    product, act = f.linear(x, w), {"act": "gelu_pytorch_tanh"}
    gate, half = product.chunk(2, -1)
    want = f.gelu(gate, approximate="tanh") * half
    assert torch.equal(run("linear_glu", x, w, **act), want)
    assert torch.equal(run("linear_glu", x, w, up, **act), f.gelu(product, approximate="tanh") * up)


def test_dual_norm_residual_rounds_after_each_step() -> None:
    """[7 to 9] both norms, their sum, its norm, the residual, the scalar, the next norm."""
    a, b, r = (rand(2, 3, 16, seed=i) for i in range(3))
    w_a, w_b, w, u = (rand(16, seed=i) for i in range(3, 7))
    s = rand(1, seed=7)
    attrs = {"eps": 1e-6, "scaled": True, "weighted": (True, False)}
    h, n, m = run("dual_norm_residual", a, w_a, b, w_b, w, r, s, u, **attrs)
    want = (r + norm(norm(a, w_a) + norm(b, w_b), w)) * s
    assert torch.equal(h, want) and torch.equal(n, norm(want, u)) and torch.equal(m, norm(want))


def test_moe_mlp_is_the_mlp_and_the_experts() -> None:
    x, y, z = (rand(2, 3, 16, seed=i) for i in range(3))
    routing = rand(16, seed=3), rand(8, 16, seed=4), rand(8, seed=5)
    mlp, experts = (rand(40, 16, seed=6), rand(16, 20, seed=7)), (rand(8, 24, 16), rand(8, 16, 12))
    act = {"act": "silu"}
    dense, moe = run("moe_mlp", x, y, z, *routing, *mlp, *experts, **act, top_k=2, root=0.25)
    assert torch.equal(dense, f.linear(run("linear_glu", x, mlp[0], **act), mlp[1]))
    weights, index = run("router", z, *routing, top_k=2, root=0.25)
    assert torch.equal(moe, run("experts", y, weights, index, *experts, **act))


@pytest.mark.parametrize(
    ("form", "values"), [("plain", True), ("plain", False), ("value", False), ("raw", False)]
)
def test_qkv_write_norms_rotates_and_writes(form: str, values: bool) -> None:
    """[12, 13] by hand: heads in order q, k, v; V of K's projection where it has none of its own;
    row 0 goes to slot 7 mod 5, row 1 has no token and keeps its caches."""
    heads, kv, d = 4, 2, 8
    qkv = rand(2, 1, (heads + kv * (1 + values)) * d)
    w_q, w_k, cos, sin = rand(d, seed=1), rand(d, seed=2), rand(2, 1, d), rand(2, 1, d, seed=3)
    q, *rest = qkv.view(2, 1, -1, d).split([heads, *[kv] * (1 + values)], 2)
    widths = {"plain": (d, d), "value": (d + 4,), "raw": (d, 1)}[form]
    caches = [rand(5, 2, kv, n, dtype=F32 if n == 1 else BF16, seed=n) for n in widths]
    got = run(
        "qkv_write",
        qkv,
        w_q,
        w_k,
        cos,
        sin,
        torch.tensor([7, 3]),
        torch.tensor([1, 0]),
        *caches,
        heads=heads,
        kv_heads=kv,
        values=values,
        form=form,
        pairs=2 if form == "value" else 0,
        eps=1e-6,
    )

    def rotated(x: torch.Tensor) -> torch.Tensor:
        return x * cos[:, :, None] + rotate_half(x) * sin[:, :, None]

    raw, v = rest[0], norm(rest[-1])
    k = rotated(norm(raw, w_k))
    rms = torch.pow(raw.float().pow(2).mean(-1, keepdim=True) + 1e-6, -0.5)
    latent = torch.cat((v, k[..., :2], k[..., 4:6]), -1)
    rows = {"plain": (k, v), "value": (latent,), "raw": (raw, rms)}[form]
    assert torch.equal(got[0], rotated(norm(q, w_q)))
    for new, old, row in zip(got[1:], caches, rows, strict=True):
        want = old.clone()
        want[2, 0] = row[0, 0]
        assert torch.equal(new, want)


# --- rounding order ---------------------------------------------------------------------------


def norm(x: torch.Tensor, w: torch.Tensor | None = None, eps: float = 1e-6) -> torch.Tensor:
    """[10] all of it in fp32, the weight too, rounded once; a power, not rsqrt."""
    h = x.float()
    h = h * torch.pow(h.pow(2).mean(-1, keepdim=True) + eps, -0.5)
    return (h if w is None else h * w.float()).to(x.dtype)


@pytest.mark.parametrize("width", [1536, 33])
def test_rms_norm_rounds_once(width: int) -> None:
    x, w = rand(2, 5, width) * 3, rand(width, seed=1)
    assert torch.equal(run("rms_norm", x, w, eps=1e-6), norm(x, w))
    assert torch.equal(run("rms_norm", x, eps=1e-6), norm(x))
    twice = norm(x) * w
    assert not torch.equal(twice, norm(x, w)), "the test would not see a second rounding"


def test_rms_norm_has_its_eps_inside_the_mean() -> None:
    assert run("rms_norm", torch.zeros(1, 8), eps=1e-6).eq(0).all()
    tiny = torch.full((1, 8), 1e-3, dtype=F64)
    assert run("rms_norm", tiny, eps=1e-6)[0, 0].item() == pytest.approx(1e-3 / 2e-6**0.5)


@pytest.mark.parametrize(
    ("hidden", "scale"),
    [(1536, 39.25), (2560, 50.5), (2816, 53.0), (3840, 62.0), (5376, 73.5), (256, 16.0)],
)
def test_the_embedding_scale_is_rounded_first(hidden: int, scale: float) -> None:
    """[1, 2] the factor is a bf16 number by the time it multiplies."""
    table, ids = rand(50, 8), torch.tensor([[0, 49, 7]])
    got = run("embedding", table, ids, scale=hidden**0.5)
    assert torch.equal(got, table[ids] * torch.tensor(scale, dtype=BF16))
    ones = run("embedding", torch.ones(2, 1, dtype=BF16), torch.tensor([1]), scale=hidden**0.5)
    assert ones.item() == scale
    if hidden == 1536:
        table, ids = rand(1000, 64), torch.arange(1000)
        got = run("embedding", table, ids, scale=hidden**0.5)
        assert 0.2 < (got != table * hidden**0.5).float().mean() < 0.35


def test_a_scale_is_not_rounded() -> None:
    """[3, 4] Python floats multiply in fp32 and round once."""
    x = rand(2, 3, 64)
    for value in (1536**-0.5, 2**-0.5):
        got = run("scale", x, value=value)
        assert torch.equal(got, (x.float() * torch.tensor(value)).to(BF16))
        assert not torch.equal(got, x * torch.tensor(value).to(BF16))


def test_per_layer_inputs_follow_the_rules() -> None:
    """[3, 4] linear, round, * H^-0.5, round, norm, + token part, round, * 2^-0.5, round."""
    embeds, w, n = rand(1, 3, 24), rand(3 * 8, 24, seed=1), rand(8, seed=2)
    tokens = rand(1, 3, 24, seed=3)
    x = run("scale", run("linear", embeds, w), value=24**-0.5)
    x = run("rms_norm", run("heads", x, n=3), n, eps=1e-6)
    x = run("scale", run("add", x, run("heads", tokens, n=3)), value=2**-0.5)
    context = norm(((embeds @ w.T).float() * 24**-0.5).to(BF16).view(1, 3, 3, 8), n)
    mean = ((context + tokens.view(1, 3, 3, 8)).float() * 2**-0.5).to(BF16)
    assert torch.equal(x, mean)
    layers = run("unstack_layers", run("stack_layers", x))
    assert all(torch.equal(layers[i], mean[:, :, i]) for i in range(3))


@pytest.mark.parametrize("act", ["gelu_pytorch_tanh", "gelu", "silu", "relu"])
def test_glu_rounds_the_activation(act: str) -> None:
    gate, up = rand(2, 3, 64), rand(2, 3, 64, seed=1)
    x = gate.float()
    by_hand = {
        "gelu_pytorch_tanh": 0.5
        * x
        * (1 + torch.tanh((2 / math.pi) ** 0.5 * (x + 0.044715 * x**3))),
        "gelu": 0.5 * x * (1 + torch.erf(x * 0.5**0.5)),
        "silu": x * torch.sigmoid(x),
        "relu": x.clamp(min=0),
    }[act]
    got = run("glu", gate, up, act=act)
    want = by_hand.to(BF16) * up
    torch.testing.assert_close(got, want, rtol=2**-7, atol=1e-6)
    assert (got == want).float().mean() > 0.97, "the same but for ties of the last bit"
    wide = [t.double() for t in (gate, up)]
    torch.testing.assert_close(
        run("glu", *wide, act=act), by_hand.double() * wide[1], rtol=1e-5, atol=1e-6
    )


def test_softcap_rounds_three_times() -> None:
    """[22] division, tanh and product each in bf16: 29.9 -> 22.875, and the cap is reached."""
    x = torch.tensor([[29.9, 120.0, -120.0, 0.0]], dtype=BF16)
    got = run("softcap", x, cap=30.0)
    assert got.tolist() == [[22.875, 30.0, -30.0, 0.0]]
    many = rand(4, 500) * 20
    assert torch.equal(run("softcap", many, cap=30.0), torch.tanh(many / 30.0) * 30.0)
    once = (torch.tanh(many.float() / 30.0) * 30.0).to(BF16)
    assert not torch.equal(once, run("softcap", many, cap=30.0))


def test_the_layer_scalar_multiplies_in_the_dtype() -> None:
    """[9]"""
    x, s = rand(2, 3, 16), torch.tensor([0.3], dtype=BF16)
    assert torch.equal(run("mul", x, s), (x.float() * s.float()).to(BF16))


# --- rope -------------------------------------------------------------------------------------


def test_inverse_frequencies_of_a_full_layer() -> None:
    """[14] 256 entries of which 64 turn; the exponent's denominator is the whole head dim."""
    table = inverse_frequencies("proportional", 1e6, 512, 0.25, 1.0)
    assert (len(table), int((table != 0).sum()), table.dtype) == (256, 64, F32)
    assert table[0] == 1 and not table[64:].any()
    assert table[1].item() == pytest.approx(0.9474635, abs=1e-7)
    assert table[63].item() == pytest.approx(0.0333762, abs=1e-7)


def test_inverse_frequencies_of_a_sliding_layer() -> None:
    table = inverse_frequencies("default", 10000.0, 256, 1.0, 1.0)
    assert len(table) == 128 and table[127].item() == pytest.approx(1.07461e-4, abs=1e-9)
    assert torch.equal(inverse_frequencies("default", 10000.0, 256, 1.0, 8.0), table / 8.0)


@pytest.mark.parametrize("dtype", ["bf16", "f32"])
def test_a_rope_table_is_fp32_then_cast(dtype: str) -> None:
    positions = torch.tensor([[0, 1, 4095], [7, 131071, 262143]])
    cos, sin = run(
        "rope_table",
        positions,
        kind="proportional",
        theta=1e6,
        dim=512,
        fraction=0.25,
        factor=1.0,
        dtype=dtype,
    )
    angle = positions[..., None].float() * inverse_frequencies("proportional", 1e6, 512, 0.25, 1.0)
    for got, function in ((cos, torch.cos), (sin, torch.sin)):
        assert torch.equal(got, function(torch.cat((angle, angle), -1)).to(torch_dtype(dtype)))
    still = torch.cat((torch.arange(64, 256), torch.arange(320, 512)))
    assert cos[..., still].eq(1).all() and sin[..., still].eq(0).all(), "dims that do not turn"


def test_rope_rounds_three_times_and_pairs_j_with_j_plus_half() -> None:
    x, cos, sin = rand(1, 2, 3, 8), rand(1, 2, 8, seed=1), rand(1, 2, 8, seed=2)
    got = run("rope", x, cos, sin)
    for s, n, j in itertools.product(range(2), range(3), range(8)):
        other = -x[0, s, n, j + 4] if j < 4 else x[0, s, n, j - 4]
        assert got[0, s, n, j] == x[0, s, n, j] * cos[0, s, j] + other * sin[0, s, j]
    assert torch.equal(rotate_half(rotate_half(x)), -x)


# --- experts ----------------------------------------------------------------------------------


def router_by_hand(h: torch.Tensor, scale: Any, proj: Any, per: Any, k: int) -> tuple[Any, Any]:
    """[23] everything up to the scores rounds to bf16, everything after is fp32."""
    u = norm(h)
    u = u * scale
    u = (u.float() * h.shape[-1] ** -0.5).to(h.dtype)
    p = torch.softmax(f.linear(u, proj).float(), -1)
    best = sorted(range(p.shape[-1]), key=lambda e: -p[e].item())[:k]
    w = p[best]
    w = w / w.sum()
    return w * per[best].float(), best


def test_the_router_follows_the_rules() -> None:
    h, scale, proj, per = rand(2, 3, 64), rand(64, seed=1), rand(16, 64, seed=2), rand(16, seed=3)
    weights, index = run(
        "router", run("rms_norm", h, eps=1e-6), scale, proj, per, top_k=4, root=64**-0.5
    )
    assert weights.dtype == F32 and index.dtype == torch.int64
    for b, s in itertools.product(range(2), range(3)):
        want, best = router_by_hand(h[b, s], scale, proj, per, 4)
        assert index[b, s].tolist() == best
        torch.testing.assert_close(weights[b, s], want, rtol=1e-6, atol=0)


def test_experts_sum_in_fp32_in_rank_order() -> None:
    """[24, 25] products round to bf16; weights, and the sum over slots, stay fp32; cast once."""
    x, weights = rand(2, 3, 16), rand(2, 3, 3, dtype=F32, seed=1)
    index = torch.tensor([[[4, 0, 2], [1, 3, 0], [0, 4, 1]], [[2, 1, 0], [3, 2, 4], [4, 3, 1]]])
    gate_up, down = rand(5, 24, 16, seed=2), rand(5, 16, 12, seed=3)
    got = run("experts", x, weights, index, gate_up, down, act="gelu_pytorch_tanh")
    late = torch.zeros_like(x)
    for b, s in itertools.product(range(2), range(3)):
        total = torch.zeros(16)
        for slot in range(3):
            e = int(index[b, s, slot])
            gate, up = f.linear(x[b, s], gate_up[e]).chunk(2)
            y = f.linear(f.gelu(gate, approximate="tanh") * up, down[e])
            total = total + y.float() * weights[b, s, slot]
            late[b, s] += (y.float() * weights[b, s, slot]).to(BF16)
        torch.testing.assert_close(got[b, s], total.to(BF16), rtol=2**-7, atol=1e-3)
    assert got.dtype == BF16 and not torch.equal(got, late)
    exact = [t.double() if t.is_floating_point() else t for t in (x, weights, index, gate_up, down)]
    wide = run("experts", *exact, act="gelu_pytorch_tanh")
    assert (got - wide).abs().max() < 0.02 * wide.abs().max()


def test_an_expert_met_twice_counts_twice() -> None:
    x, index = rand(1, 1, 16, dtype=F64), torch.tensor([[[3, 3]]])
    gate_up, down = rand(4, 24, 16, dtype=F64, seed=1), rand(4, 16, 12, dtype=F64, seed=2)
    ones = torch.ones(1, 1, 2, dtype=F64)
    two = run("experts", x, ones, index, gate_up, down, act="relu")
    one = run("experts", x, 2 * ones[..., :1], index[..., :1], gate_up, down, act="relu")
    torch.testing.assert_close(two, one)


# --- rows -------------------------------------------------------------------------------------


def test_last_row_takes_the_last_valid_token() -> None:
    x = torch.arange(24.0).view(3, 4, 2)
    got = run("last_row", x, torch.tensor([4, 1, 0]))
    assert got.tolist() == [[[6, 7]], [[8, 9]], [[16, 17]]]


def test_row_start_is_the_first_position() -> None:
    assert run("row_start", torch.tensor([[5, 6], [0, 1]])).tolist() == [5, 0]


# --- the cache --------------------------------------------------------------------------------


def test_the_window_counts_the_query_itself() -> None:
    """[16] W = 4: query 8 sees 5, 6, 7, 8."""
    keys, query = torch.arange(10)[:, None], torch.tensor([[8]])
    assert visible(keys, query, 4)[0, 0].nonzero().flatten().tolist() == [5, 6, 7, 8]


@pytest.mark.parametrize("window", [0, 1, 2, 6, 7])
def test_the_window_s_truth_table(window: int) -> None:
    """Windows of 1, 2, L and L + 1 keys, and none, at L = 6."""
    positions = torch.arange(6)[None]
    mask = visible(positions.t(), positions, window)[0]
    for q, k in itertools.product(range(6), range(6)):
        assert mask[q, k].item() == (k <= q and (not window or k > q - window))


def test_empty_slots_are_seen_by_nobody() -> None:
    assert not visible(torch.tensor([[-1], [-3]]), torch.tensor([[0], [9]])[:1], 0).any()


@given(st.lists(st.integers(0, 40), min_size=1, max_size=4), st.integers(1, 12))
def test_slot_positions_against_writing_one_by_one(written: list[int], slots: int) -> None:
    held = [[-1] * len(written) for _ in range(slots)]
    for row, count in enumerate(written):
        for p in range(count):
            held[p % slots][row] = p
    got = slot_positions(torch.tensor(written), slots)
    assert got.clamp(min=-1).tolist() == held


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


def attention_by_hand(
    q: Any, keys: Any, values: Any, key_pos: list[int], pos: list[int], window: int, cap: float
) -> torch.Tensor:
    """One row, every element in a Python loop: q [S,nq,d], keys and values [T,n,d]."""
    out = torch.zeros_like(q)
    group = q.shape[1] // keys.shape[1]
    for s, h in itertools.product(range(q.shape[0]), range(q.shape[1])):
        seen = [
            t
            for t, p in enumerate(key_pos)
            if 0 <= p <= pos[s] and (not window or p > pos[s] - window)
        ]
        scores = [sum(q[s, h, i] * keys[t, h // group, i] for i in range(q.shape[2])) for t in seen]
        if cap:
            scores = [torch.tanh(x / cap) * cap for x in scores]
        weights = [torch.exp(x - max(scores)) for x in scores]
        for t, w in zip(seen, weights, strict=True):
            out[s, h] += w / sum(weights) * values[t, h // group]
    return out


@pytest.mark.parametrize("dtype", [F32, F64])
@pytest.mark.parametrize(("window", "cap"), [(0, 0.0), (0, 2.0), (3, 0.0), (1, 0.0), (4, 1.5)])
def test_attention_against_a_loop(window: int, cap: float, dtype: torch.dtype) -> None:
    """A history in a cache, then a chunk: rows of different age, the ring where there is a
    window, read before the write with the chunk beside it and after the write alone."""
    history, size, kv, heads, d = (5, 0), 3, 2, 4, 3
    slots = window or 9
    everything = rand(2, 2, 8, kv, d, dtype=dtype)
    cache_k = cache_v = torch.full((slots, 2, kv, d), 99.0, dtype=dtype)
    zero, age = torch.tensor([0, 0]), torch.tensor(history)
    cache_k, cache_v = (
        run("cache_write", c, x[:, :5].contiguous(), zero, age)
        for c, x in zip((cache_k, cache_v), everything, strict=True)
    )
    rows = [torch.stack([x[b, h : h + size] for b, h in enumerate(history)]) for x in everything]
    q = rand(2, size, heads, d, dtype=dtype, seed=5) * 2
    positions = age[:, None] + torch.arange(size)
    attrs = {"window": window, "scale": 1.0, "softcap": cap}
    got = run("attention", q, positions, age, cache_k, cache_v, *rows, **attrs)
    rtol, atol = (1e-12, 1e-12) if dtype == F64 else (2e-5, 2e-6)
    for b, past in enumerate(history):
        total = past + size
        want = attention_by_hand(
            q[b],
            everything[0][b, :total],
            everything[1][b, :total],
            list(range(total)),
            positions[b].tolist(),
            window,
            cap,
        )
        torch.testing.assert_close(got[b], want, rtol=rtol, atol=atol)
    new_k, new_v = (
        run("cache_write", c, x, age, torch.tensor([size, size]))
        for c, x in zip((cache_k, cache_v), rows, strict=True)
    )
    last = run("attention", q[:, -1:], positions[:, -1:], age + size, new_k, new_v, **attrs)
    torch.testing.assert_close(last, got[:, -1:], rtol=rtol, atol=atol)


def test_attention_rounds_scores_probabilities_and_output() -> None:
    """[15] q k^T in bf16, softmax in fp32 then bf16, the product with V in bf16."""
    q, k, v = (rand(1, 4, 1, 16, seed=i) for i in range(3))
    cache = torch.zeros(1, 1, 1, 16, dtype=BF16)
    positions, written = torch.arange(4)[None], torch.tensor([0])
    attrs = {"window": 0, "scale": 1.0, "softcap": 0.0}
    got = run("attention", q, positions, written, cache, cache, k, v, **attrs)
    scores = q[0, :, 0] @ k[0, :, 0].T
    scores = scores.masked_fill(torch.ones(4, 4).triu(1).bool(), torch.finfo(BF16).min)
    want = torch.softmax(scores.float(), -1).to(BF16) @ v[0, :, 0]
    torch.testing.assert_close(got[0, :, 0], want, rtol=2**-7, atol=2**-8)
    assert got.dtype == BF16 and torch.equal(got[0, 0, 0], v[0, 0, 0])


def test_a_query_that_sees_nothing_stays_finite() -> None:
    q, cache = rand(1, 1, 2, 4, dtype=F32), torch.zeros(3, 1, 1, 4)
    out = run(
        "attention",
        q,
        torch.tensor([[0]]),
        torch.tensor([0]),
        cache,
        cache,
        window=0,
        scale=1.0,
        softcap=0.0,
    )
    assert out.isfinite().all()
