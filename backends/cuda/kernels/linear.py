"""Matmul of a few rows with a weight (small-batch decode), with an optional gated activation."""

from __future__ import annotations

from typing import Any

from g4ir.backends.inductor.target import Target
from g4ir.ir.graph import Graph, Node

from .base import (
    Choice,
    Kernel,
    Shape,
    Use,
    codes_and_scales,
    fit_blocks,
    is_quantised,
    is_skinny,
    row_tile,
    size,
    weight_codes,
)


def _shape(g: Graph, n: Node, target: Target) -> Shape | None:
    w = n["w"].type
    shape = {"rows": target.rows, "n": size(w, 0), "k": size(w, 1)}
    return shape | weight_codes(g, n["w"]) if is_skinny(n, target) else None


def _one_row(shape: Shape, block_n: int) -> Use:
    """Return the launch settings of a GEMV: `block_n` weight rows per program, with up to 4 KB of
    each in flight."""
    if shape["k"] <= 256:
        block_k, stages = 256, 1
    else:
        block_k, stages = 1024 if is_quantised(shape) else 512, 4
    tile = fit_blocks(shape, block_n, block_k)
    return {"block_m": 1, **tile, "warps": 4, "stages": stages}


def _estimate(shape: Shape) -> Use:
    """Return launch settings: few weight rows per program if n is small, so that most of 132 SMs
    have work."""
    n = shape["n"]
    if shape["rows"] == 1:
        return _one_row(shape, 2 if n <= 512 else 4 if n <= 3072 else 8)
    block_n = 16 if n <= 2048 else 32 if n <= 4096 else 64 if n <= 10240 else 128
    tile = fit_blocks(shape, block_n, 128)
    return {"block_m": row_tile(shape), **tile, "warps": 4, "stages": 4}


def _glu(shape: Shape) -> Use:
    """Return launch settings for gate and up together, whose weight rows come in pairs."""
    n = shape["n"]
    if shape["rows"] == 1:
        return _one_row(shape, 2 if n <= 512 else 4)
    block_n = 16 if n <= 512 else 32 if n <= 12288 else 64
    tile = fit_blocks(shape, block_n, 256 if n <= 512 else 128, pairs=2)
    return {"block_m": row_tile(shape), **tile, "warps": 4, "stages": 3}


def _linear(n: Node, choice: Choice, x: Any, w: Any, up: Any = None) -> Any:
    from .linear_triton import skinny_linear

    w, scales, form = codes_and_scales(w)
    act = "" if n.op == "linear" else n.word("act")
    return skinny_linear(x, w, up, act, **choice.use, scales=scales, form=form)


KERNELS = (
    Kernel(
        op="linear",
        starts={"skinny_linear": 1},
        rule=_shape,
        call=_linear,
        uses={"skinny_linear": _estimate},
        coded=True,
    ),
    Kernel(
        op="linear_glu",
        starts={"skinny_linear_glu": 1},
        rule=_shape,
        call=_linear,
        uses={"skinny_linear_glu": _glu},
        coded=True,
    ),
)
