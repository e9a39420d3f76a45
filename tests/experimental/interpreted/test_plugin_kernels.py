"""The plugins' kernels, started as TensorRT starts them: grid and whole numbers from the shape
expressions, outputs that hold garbage before.

Budgets. fp32: sums in another order, 1e-5 of the rms. bf16, each kernel from the same inputs: a
rounding turned in a few of a thousand cases, and what a turned gate makes of it: 2 ulps, 3 % of the
values. Attention in bf16: probabilities are rounded in units of a maximum so far, which decides
where roundings fall: 2 ulps, any quarter of the values.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch

from g4ir.backends.experimental.trt_plugins.plugins import (
    Decode,
    Experts,
    kernel_of,
    norm_plan,
    result_types,
    tightened,
)
from g4ir.backends.experimental.trt_plugins.reference import run as meaning
from g4ir.backends.experimental.trt_plugins.table import NORMS, PLUGINS, Plan
from g4ir.backends.trt.recorder import SHARED_BYTES
from g4ir.backends.trt.recorder.plugin import ShapeExpr, plugin_module
from g4ir.ops.moe import experts
from g4ir.ops.types import Type, dtype_name, torch_dtype
from tests.experimental.plugin_bindings import grid_of

pytestmark = pytest.mark.covering

Tensor = torch.Tensor
TRTP = plugin_module()


def start(plan: Plan, *inputs: Tensor) -> list[Tensor]:
    """A plugin layer: its outputs."""
    plugin, kernel = PLUGINS[plan.plugin], kernel_of(PLUGINS[plan.plugin])
    given = dict(zip(plugin.inputs, inputs, strict=True))
    shapes = {n: tuple(ShapeExpr(d) for d in t.shape) for n, t in given.items()}
    grid = tuple(
        size if isinstance(size, int) else size.value
        for size in plugin.grid(TRTP, shapes, plan.constants)
    )
    assert grid == grid_of(plan, {n: tuple(t.shape) for n, t in given.items()})
    whole = [f(shapes, plan.constants).value for f in plugin.whole.values()]
    types = {n: Type(dtype_name(t.dtype), tuple(t.shape)) for n, t in given.items()}
    outputs = [garbage(t) for t in result_types(plan, types)]
    constants = dict(plan.constants)
    if "STAGES" in kernel.arg_names:
        constants["STAGES"] = plan.stages
    kernel[grid](*inputs, *whole, *outputs, **constants)
    return outputs


def garbage(t: Type) -> Tensor:
    dtype = torch_dtype(t.dtype)
    return torch.full(t.shape, torch.nan if dtype.is_floating_point else -7, dtype=dtype)


def rms(x: Tensor) -> Tensor:
    return x.double().square().mean().sqrt()


def agree(got: Tensor, want: Tensor, turned: float = 0.03) -> None:
    assert got.dtype == want.dtype and got.shape == want.shape
    error = (got.double() - want.double()).abs()
    if got.dtype == torch.float32:
        assert float(error.max()) < 1e-5 * float(rms(want))
        return
    ulp = want.double().abs().clamp(min=float(rms(want))) * 2**-7
    assert bool((error <= 2 * ulp).all())
    assert float((got != want).double().mean()) <= turned


# ---- norms ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NORMS)
def test_norms(name: str) -> None:
    """A width that is no power of two; what was there before does not count."""
    g = torch.Generator().manual_seed(0)
    for dtype in ("f32", "bf16"):
        plan = norm_plan(NORMS[name], Type(dtype, (2, 3, 40)), 1e-6)
        shapes = {n: (40,) if n.startswith("w") else (2, 3, 40) for n in PLUGINS[name].inputs}
        shapes |= {"scalar": (1,)} if "scalar" in shapes else {}
        given = [torch.randn(s, generator=g).to(torch_dtype(dtype)) for s in shapes.values()]
        for got, want in zip(start(plan, *given), meaning(plan, *given), strict=True):
            agree(got, want)


# ---- experts -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Case:
    """Sizes of an MoE block; by default none is a multiple of a block."""

    rows: int
    tokens: int
    hidden: int = 37
    inner: int = 11
    count: int = 6
    top_k: int = 2
    act: str = "gelu_pytorch_tanh"
    chosen: tuple[int, ...] = ()  # the only experts that are chosen

    def sizes(self, dtype: str) -> Experts:
        return Experts(
            dtype,
            self.hidden,
            self.inner,
            self.count,
            self.top_k,
            self.act,
            self.rows * self.tokens,
        )


CASES = [
    Case(1, 1),
    Case(2, 1, hidden=32, inner=16, count=8, top_k=4, act="silu"),
    Case(1, 3, top_k=6, act="gelu"),
    Case(2, 9, count=9, top_k=3, chosen=(2, 3, 8)),  # experts with none, also the first
    Case(1, 37, inner=16, count=5, top_k=1, chosen=(4,), act="relu"),  # all tokens to one
    Case(2, 3, hidden=32, inner=16, count=33, top_k=8),
]


class Data:
    def __init__(self, case: Case, dtype: torch.dtype) -> None:
        g = torch.Generator().manual_seed(case.hidden + case.tokens)

        def draw(*shape: int, scale: float = 1.0) -> Tensor:
            return (torch.randn(*shape, generator=g) * scale).to(dtype)

        lead, d, i, e = (case.rows, case.tokens), case.hidden, case.inner, case.count
        self.x = draw(*lead, d)
        self.gate_up = draw(e, 2 * i, d, scale=d**-0.5)
        self.down = draw(e, d, i, scale=i**-0.5)
        self.weights = torch.rand(*lead, case.top_k, generator=g)
        among = torch.tensor(case.chosen or range(e))
        order = torch.rand(*lead, len(among), generator=g).argsort(-1)[..., : case.top_k]
        self.index = among[order].to(torch.int32)
        unused = torch.ones(e, dtype=torch.bool)
        unused[self.index.flatten().long()] = False
        self.gate_up[unused], self.down[unused] = torch.nan, torch.nan  # must not be read

    def expected(self, case: Case) -> Tensor:
        """By the op, in fp64."""
        wide = [t.double() for t in (self.x, self.weights)]
        y: Any = experts.reference(
            *wide, self.index.long(), self.gate_up.double(), self.down.double(), act=case.act
        )
        return y  # type: ignore[no-any-return]


def small(plan: Plan) -> Plan:
    """Blocks that the sizes here need several of."""
    blocks = {"BLOCK_N": 8, "BLOCK_K": 16, "BLOCK_M": 16, "BLOCK": 32}
    if "grouped" in plan.plugin:
        blocks["BLOCK_N"] = 16
    return replace(
        plan, constants={k: blocks.get(k, v) for k, v in plan.constants.items()}, stages=2
    )


def many(data: Data, plans: tuple[Plan, ...], check: bool = False) -> Tensor:
    sort, first, second, combine = plans
    listed = start(sort, data.index)
    act = start(first, data.x, *listed, data.gate_up)[0]
    parts = start(second, act, *listed, data.down)[0]
    out = start(combine, parts, data.weights)[0]
    if check:
        assert all(map(torch.equal, listed, meaning(sort, data.index)))
        agree(act, meaning(first, data.x, *listed, data.gate_up)[0])
        agree(parts, meaning(second, act, *listed, data.down)[0])
        agree(out, meaning(combine, parts, data.weights)[0])
    return out


@pytest.mark.parametrize("case", CASES, ids=lambda c: f"{c.rows}x{c.tokens}-{c.top_k}of{c.count}")
def test_experts(case: Case) -> None:
    """fp32 against the op in fp64; bf16 each kernel against its meaning."""
    for name in ("f32", "bf16"):
        data = Data(case, torch_dtype(name))
        got = many(data, tuple(map(small, case.sizes(name).plans())), check=True)
        if name == "f32":
            want = data.expected(case)
            assert float((got.double() - want).abs().max()) < 1e-5 * float(rms(want))


def test_experts_with_the_blocks_of_a_build() -> None:
    """Those within the shared memory of every launch too."""
    case = Case(1, 2, hidden=130, inner=70, count=4)
    data = Data(case, torch.bfloat16)
    plans = case.sizes("bf16").plans()
    many(data, plans, check=True)
    many(data, tuple(tightened(p, SHARED_BYTES) for p in plans), check=True)


def test_indices_without_meaning_are_put_into_their_range() -> None:
    """As when TensorRT times a layer on memory that nobody wrote."""
    case = Case(1, 3)
    data = Data(case, torch.float32)
    data.gate_up.nan_to_num_(), data.down.nan_to_num_()
    plans = tuple(map(small, case.sizes("f32").plans()))
    data.index = torch.tensor([[[-5, 3], [2**31 - 1, 0], [-(2**31), 6]]], dtype=torch.int32)
    got = many(data, plans)
    data.index = torch.tensor([[[0, 3], [5, 0], [0, 5]]], dtype=torch.int32)
    assert torch.equal(got, many(data, plans))


def test_a_list_without_meaning_is_not_followed() -> None:
    """The grouped products end, and write where they may."""
    case = Case(1, 3)
    data = Data(case, torch.float32)
    plan = small(case.sizes("f32").plans()[1])
    g = torch.Generator().manual_seed(0)
    for _ in range(3):
        order = torch.randint(-(2**31), 2**31 - 1, (1, 3, 2), generator=g).to(torch.int32)
        offsets = torch.randint(-(2**31), 2**31 - 1, (7,), generator=g).to(torch.int32)
        start(plan, data.x, order, offsets, data.gate_up)


def test_equal_inputs_give_equal_bits() -> None:
    case = CASES[3]
    data = Data(case, torch.bfloat16)
    plans = tuple(map(small, case.sizes("bf16").plans()))
    assert torch.equal(many(data, plans), many(data, plans))


# ---- attention -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Heads:
    heads: int
    group: int
    d: int
    splits: int
    window: int = 0
    softcap: float = 0.0
    looked_at: int = 80

    def plans(self, dtype: str, rows: int) -> tuple[Plan, Plan]:
        found = Decode(
            dtype, rows, self.heads, self.group, self.d, 96, self.window, 0.7, self.softcap
        ).plans()
        first, second = (
            replace(p, constants={**p.constants, "N": 16, "SPLITS": self.splits}, stages=2)
            for p in found
        )
        return first, second


ATTENTIONS = [
    Heads(1, 8, 64, 4),
    Heads(2, 1, 16, 1),
    Heads(2, 3, 40, 3, softcap=5.0),
    Heads(1, 5, 32, 8, window=21),
    Heads(1, 2, 512, 2),
]
POSITIONS = (0, 37, 79)


def rows_of(
    case: Heads, dtype: torch.dtype, positions: tuple[int, ...], tokens: int = 1
) -> list[Tensor]:
    """Inputs of `decode_parts`: the last tokens of a row up to its position."""
    g = torch.Generator().manual_seed(case.d)
    b = len(positions)
    q = torch.randn(b, tokens, case.heads * case.group, case.d, generator=g) * case.d**-0.5
    caches = [torch.randn(b, case.heads, 96, case.d, generator=g) for _ in range(2)]
    for row, end in enumerate(positions):
        for cache in caches:  # what is not visible must not count
            cache[row, :, max(0, min(end, case.looked_at - 1)) + 1 :] = torch.nan
    at = torch.tensor(positions)[:, None] - torch.arange(tokens - 1, -1, -1)
    at = at.to(torch.int32)
    slots = torch.arange(case.looked_at, dtype=torch.int32)
    return [q.to(dtype), *(c.to(dtype) for c in caches), at, slots]


def expected(case: Heads, q: Tensor, k: Tensor, v: Tensor, at: Tensor, slots: Tensor) -> Tensor:
    """Softmax over the visible keys, in fp64."""
    out = torch.empty(q.shape, dtype=torch.float64)
    for b, i, h in itertools.product(*map(range, q.shape[:3])):
        end = max(min(int(at[b, i]), len(slots) - 1) + 1, 1)
        first = max(0, end - case.window) if case.window else 0
        keys, values = (t[b, h // case.group, first:end].double() for t in (k, v))
        s = keys @ q[b, i, h].double() * 0.7
        s = case.softcap * (s / case.softcap).tanh() if case.softcap else s
        out[b, i, h] = s.softmax(0) @ values
    return out


@pytest.mark.parametrize("case", ATTENTIONS, ids=lambda c: f"{c.heads}x{c.group}x{c.d}-{c.splits}")
@pytest.mark.parametrize("name", ["f32", "bf16"])
@pytest.mark.parametrize("tokens", [1, 3])
def test_decode_attention(case: Heads, name: str, tokens: int) -> None:
    """One key, some, and all; most splits of the first row have none. A chunk's tokens share fewer
    splits, and the first of a row may lie before it."""
    given = rows_of(case, torch_dtype(name), POSITIONS, tokens)
    first, second = case.plans(name, len(POSITIONS))
    made = start(first, *given)
    got = start(second, *made, *given[3:])[0]
    want = expected(case, *given)
    tolerance = 1e-5 if name == "f32" else 2 * 2**-7
    error = (got.double() - want).abs() / want.abs().clamp(min=float(rms(want)))
    assert got.dtype == given[0].dtype and float(error.max()) < tolerance
    clean = [given[0], *(t.nan_to_num() for t in given[1:3]), *given[3:]]
    again = meaning(second, *meaning(first, *clean), *given[3:])[0]
    agree(again, got, turned=0.25)
    written = made[1].isfinite()
    agree(made[1][written], meaning(first, *clean)[1][written])


def test_positions_without_meaning_are_put_into_their_range() -> None:
    """No key beyond C is looked at, and always one."""
    case = replace(ATTENTIONS[0], looked_at=50)
    positions = (-(2**31), 79, 2**31 - 1)
    given = rows_of(case, torch.float32, positions)
    first, second = case.plans("f32", 3)
    got = start(second, *start(first, *given), *given[3:])[0]
    want = expected(case, *given)
    assert float((got.double() - want).abs().max()) < 1e-5 * float(rms(want))
