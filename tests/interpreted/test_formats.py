"""Products, experts and gathers of weights in every quantised format, against its definition."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from g4ir.backends.cuda.kernels.base import Sample
from g4ir.backends.cuda.kernels.linear_triton import skinny_linear
from g4ir.backends.cuda.kernels.rows_triton import dense, gathered_rows
from g4ir.ops import OPS
from g4ir.ops.codecs import FORMATS, dequantize_codes, take_rows

from .samples import Try, kernel_called, rms

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


MIXES = [("uint4", "int6", 17), ("uint4", "int6", 1), ("fp4", "int3k", 17), ("nl4", "min5", 1)]


@pytest.mark.parametrize(
    ("gate_up", "down", "rows"),
    [MIXES[0], *(pytest.param(*mix, marks=pytest.mark.full) for mix in MIXES[1:])],
)
def test_experts(gate_up: str, down: str, rows: int) -> None:
    """Of a K-quants mix and others: both kernels, with formats that differ."""
    x, w, d, inner = f"T[{rows},1,256]", "*T[256]", 256, 256
    mlp = (f"*T[{2 * inner},{d}]", f"*T[{d},{inner}]")
    experts = (f"*T[3,{2 * inner},{d}]", f"*T[3,{d},{inner}]")
    tile = {"block_m": 1 if rows == 1 else 32, "block_n": 64, "block_k": 256, "stages": 2}
    use = {"moe_route": {"block_n": 4, "block_k": 256, "warps": 4}}
    use |= {name: {**tile, "warps": 4} for name in ("moe_gate_up", "moe_down")}
    forms = dict(zip((6, 7, 8, 9), [(f, 0) for f in (down, gate_up, gate_up, down)], strict=True))
    attrs = {"top_k": 2, "root": d**-0.5, "act": "silu"}
    inputs = (x, x, x, w, f"*T[3,{d}]", "*T[3]", *mlp, *experts)
    one = Try(
        kernel_called("moe_down"), Sample(inputs, attrs, use, packed=True, coded=forms), "f32"
    )
    one.check(one.run())
