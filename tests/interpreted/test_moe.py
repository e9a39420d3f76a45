"""The kernels of the MoE block: the choice of experts, and what is read of them.

Products, experts and gathers of weights in every quantised format, against its definition.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from g4ir.backends.cuda.kernels.linear_triton import skinny_linear
from g4ir.backends.cuda.kernels.moe_triton import moe_route
from g4ir.backends.cuda.kernels.rows_triton import dense, gathered_rows
from g4ir.ops import OPS
from g4ir.ops.codecs import FORMATS, dequantize_codes, take_rows
from g4ir.ops.moe import router

from .cases.moe import moe_sample
from .samples import Try, budget_of, kernel_called, rms

KERNEL = kernel_called("moe_down")
USE = {"block_n": 16, "block_k": 64, "warps": 4}
F32, BF16 = torch.float32, torch.bfloat16


def routed(
    scores: torch.Tensor, factor: torch.Tensor, top_k: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The choice from scores [rows, 1, E]: one feature per expert, so that they are x."""
    count, counter = scores.shape[-1], torch.zeros(1, dtype=torch.int64)
    ones, eye = scores.new_ones(count), torch.eye(count).to(scores.dtype)
    found: tuple[torch.Tensor, torch.Tensor, torch.Tensor]
    found = moe_route(scores, ones, eye, factor, counter, top_k, 1.0, **USE)
    assert not counter.any()
    return found


def test_each_step_of_the_scores_is_rounded() -> None:
    """Weights of a choice of all are those of rounded scores, in order."""
    g = torch.Generator().manual_seed(0)
    x, scale = (torch.randn(*s, generator=g).bfloat16() for s in ((2, 1, 64), (64,)))
    proj, root, ones = torch.eye(64).bfloat16(), 0.37, torch.ones(64)
    given = (x, scale, proj, ones, torch.zeros(1, dtype=torch.int64), 64, root)
    got = moe_route(*given, **USE)[0]
    steps, once = x * scale * root, (x.float() * scale.float() * root).bfloat16()
    for scores, equal in ((steps, True), (once, False)):
        want = scores.float().sort(-1, descending=True)[0].softmax(-1)
        assert torch.allclose(got, want, rtol=2e-6, atol=0) == equal


@pytest.mark.parametrize(
    "count, top_k, dtype",
    [
        *((128, 8, BF16), (48, 5, F32), (48, 5, BF16), (6, 6, BF16), (5, 1, F32)),
        pytest.param(300, 8, F32, marks=pytest.mark.full),
    ],
)
def test_choice_is_the_op_s(count: int, top_k: int, dtype: torch.dtype) -> None:
    """Exactly, in rows whose first top_k + 1 scores differ: `torch.topk` orders equals at will.
    The list has the experts in use, ascending."""
    g = torch.Generator().manual_seed(40)
    scores = torch.randn(20, 1, count, generator=g).to(dtype)
    factor = torch.randn(count, generator=g).to(dtype)
    weights, index, listed = routed(scores, factor, top_k)
    ones, eye = scores.new_ones(count), torch.eye(count).to(dtype)
    want, chosen = router.reference(scores, ones, eye, factor, top_k=top_k, root=1.0)
    best = scores.float().sort(-1, descending=True)[0][..., : top_k + 1]
    distinct = (best.diff(dim=-1) < 0).all(-1)
    assert float(distinct.double().mean()) > 0.25
    assert index.dtype == torch.int64 and torch.equal(index[distinct], chosen[distinct])
    torch.testing.assert_close(weights[distinct], want[distinct].float(), rtol=2e-6, atol=0)
    used = index.unique().tolist()
    assert listed.tolist() == used + [-1] * (count - len(used))


@pytest.mark.parametrize(
    "count, top_k, dtype",
    [(128, 8, F32), (6, 6, BF16), pytest.param(300, 16, F32, marks=pytest.mark.full)],
)
def test_equals_by_lower_index(count: int, top_k: int, dtype: torch.dtype) -> None:
    g = torch.Generator().manual_seed(count)
    scores = torch.randint(-2, 3, (18, 1, count), generator=g).to(dtype) / 2
    scores[0], scores[1, 0, 0::2] = 1.5, -0.0  # all equal; zeros of both signs
    scores[1, 0, 1::2] = 0.0
    scores[2], scores[2, 0, -1] = -2.5, 1.0
    want = scores.float().sort(dim=-1, descending=True, stable=True)[1][..., :top_k]
    weights, index, _ = routed(scores, torch.ones(count), top_k)
    assert torch.equal(index, want)
    expected = scores.double().gather(-1, want).softmax(-1)
    torch.testing.assert_close(weights.double(), expected, rtol=2e-6, atol=0)


@pytest.mark.parametrize("dtype", ["f32", "bf16"])
def test_experts_that_nobody_chose_are_not_read(dtype: str) -> None:
    """Their weights are NaN for the kernel; all rows have negative scores for them."""
    one = Try(KERNEL, budget_of(KERNEL).samples[0], dtype)
    experts = len(one.given[4])
    sign = 1 - 2 * (torch.arange(experts) >= one.node.integer("top_k"))
    one.given[2].abs_(), one.given[3].abs_()
    one.given[4].abs_().mul_(sign[:, None])
    one.ours[2:5] = one.given[2:5]
    for i in (8, 9):
        one.ours[i] = one.given[i].clone()
        one.ours[i][one.node.integer("top_k") :] = torch.nan
    one.check(one.call(one.ours))


QUANTIZE: Any = OPS["quantize"].reference
DTYPES = (torch.float32, torch.bfloat16)
#: columns, codes that share a scale: no multiples of a block of columns, which has 256 and more
SHAPES = ((1280, 256), (768, 0))
NARROW = {"int8": (40, 0), "fp8": (48, 16), "int4": (96, 32)}
#: row tile, weight rows: the tiles that decode steps use
TILES = {1: (1, 4), 17: (32, 16)}
#: rms error of a product, relative to its results: of more rows in bf16 weights are rounded too
ERROR = {
    **{(torch.float32, rows): 1e-6 for rows in TILES},
    (torch.bfloat16, 1): 2.0**-8,
    (torch.bfloat16, 17): 2.0**-8,
}
#: of a weight: fp32 in another order; a few roundings to bf16 in a thousand fall the other way
FLIPPED = {torch.float32: 1e-6, torch.bfloat16: 5e-4}


def weight(form: str, n: int, k: int, group: int, scale: str) -> tuple[torch.Tensor, ...]:
    """Bytes of codes, scales, and what they mean in float64; parts of a row differ in size."""
    w = torch.randn(n, k, generator=torch.Generator().manual_seed(k)) + 0.2
    codes, scales = QUANTIZE(w * torch.linspace(0.1, 2, k), form=form, group=group, scale=scale)
    return codes, scales, dequantize_codes(codes, scales.double(), torch.float64)


@pytest.mark.parametrize(("turn", "form"), enumerate(FORMATS))
def test_products(turn: int, form: str) -> None:
    """In fp32, and in bf16, where weights of more rows are rounded: formats take turns in which
    shape is in which."""
    shapes = (*SHAPES, *([NARROW[form]] if form in NARROW else []))
    for at, (k, group) in enumerate(shapes, turn):
        dtype = DTYPES[at % 2]
        codes, scales, exact = weight(form, 21, k, group, ("f32", "bf16", "f16")[at % 3])
        for rows, (block_m, block_n) in TILES.items():
            x = torch.randn(rows, k).to(dtype)
            want = x.double() @ exact.t()
            tile = (block_m, block_n, 256, 4, 2)
            got = skinny_linear(x, codes.view(torch.uint8), None, "", *tile, scales, form)
            assert got.dtype == dtype
            assert rms(got.double() - want) <= ERROR[dtype, rows] * rms(want), (rows, k)


@pytest.mark.parametrize(("turn", "form"), enumerate(FORMATS))
def test_rows(turn: int, form: str) -> None:
    """All of a weight, of several experts too, and those of ids, times a factor."""
    for i, ((k, group), scale) in enumerate(zip(SHAPES, ("bf16", "f32")), turn):
        dtype = DTYPES[i % 2]
        codes, scales, _ = weight(form, 12, k, group, scale)
        data, ids = codes.view(torch.uint8), torch.tensor([[11, 0], [5, 5]])
        want = dequantize_codes(codes, scales, dtype)
        picked = dequantize_codes(take_rows(codes, ids), scales[ids], dtype)
        pairs = [
            (dense(data, scales, form, dtype), want),
            (dense(data.view(3, 4, -1), scales.view(3, 4, -1), form, dtype).view(12, k), want),
            (
                gathered_rows(data, scales, form, ids, 39.2, dtype),
                picked * torch.tensor(39.2).to(dtype),
            ),
        ]
        for got, expected in pairs:
            assert got.dtype == dtype and got.shape == expected.shape
            assert rms(got - expected) <= FLIPPED[dtype] * rms(expected)


MIXES = [("uint4", "int6", 1), ("uint4", "int6", 17), ("fp4", "int3k", 17), ("nl4", "min5", 1)]


@pytest.mark.parametrize(
    ("gate_up", "down", "rows"),
    [MIXES[0], *(pytest.param(*mix, marks=pytest.mark.full) for mix in MIXES[1:])],
)
def test_experts(gate_up: str, down: str, rows: int) -> None:
    """Of a K-quants mix and others: both kernels, with formats that differ."""
    tile = {"block_m": 1 if rows == 1 else 32, "block_n": 64, "block_k": 256, "stages": 2}
    use = {"moe_route": {"block_n": 4, "block_k": 256, "warps": 4}}
    use |= {name: {**tile, "warps": 4} for name in ("moe_gate_up", "moe_down")}
    forms = ((f, 0) for f in (down, gate_up, gate_up, down))
    one = Try(KERNEL, moe_sample(use, (rows, 256, 256, 256, 3, 2), forms=forms), "f32")
    one.check(one.run())
