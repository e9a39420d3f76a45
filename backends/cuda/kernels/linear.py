"""Matmul of a few rows with a weight (small-batch decode), with an optional gated activation."""

from __future__ import annotations

from typing import Any

from g4ir.backends.inductor.lowered import Run
from g4ir.backends.inductor.target import Target
from g4ir.ir.graph import Graph, Node
from g4ir.ops.mlp import ACTIVATIONS

from .base import (
    Choice,
    Kernel,
    Sample,
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
    """Return the launch settings of a GEMV: `block_n` weight rows per program, with 0.5 to 4 KB of
    each in flight."""
    if shape["k"] <= 256:
        block_k, stages = 256, 1
    else:
        block_k, stages = 1024 if is_quantised(shape) else 512, 4
    tile = fit_blocks(shape, block_n, block_k)
    return {"block_m": 1, **tile, "warps": 4, "stages": stages}


def _estimate(shape: Shape) -> Use:
    """Return launch settings that give each of 132 SMs several programs."""
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


def _linear(run: Run, n: Node, choice: Choice, x: Any, w: Any, up: Any = None) -> Any:
    from .linear_triton import skinny_linear

    w, scales, form = codes_and_scales(w)
    act = "" if n.op == "linear" else n.word("act")
    return skinny_linear(x, w, up, act, **choice.use, scales=scales, form=form)


def _use(block_m: int, block_n: int, block_k: int = 32, **more: int) -> dict[str, int]:
    return {"block_m": block_m, "block_n": block_n, "block_k": block_k, "warps": 1, "stages": 2} | (
        more
    )


#: settings of both inner loops, for at most and for more rows than `block_m`
M1, M16, M64 = _use(1, 4), _use(16, 16), _use(64, 16)
#: rows, n, k, settings: tiny, odd, partial blocks, full blocks
PRODUCTS = [
    (1, 1, 1, M1),
    (1, 17, 100, M1),
    (1, 32, 96, M16),
    (3, 17, 100, M16),
    (16, 5, 33, M16),
    (33, 17, 100, M64),
    (64, 32, 96, M64),
    (1, 40, 1536, _use(1, 8, 512, stages=4)),
    (5, 72, 1536, _use(16, 64, 128, stages=3)),
]
GATED = [(1, 5, 33, M1), (3, 32, 96, M16), (16, 5, 33, M16), (2, 37, 45, M1)]
#: the same for quantised weights and their format: scales per row, and per group of more and fewer
#: codes than a block
INT8, INT4, FP8 = ("int8", 0), ("int4", 32), ("fp8", 0)
CODED = [
    (1, 17, 104, M1, INT8),
    (3, 5, 96, M1, INT4),
    (1, 9, 160, _use(1, 4, 128), INT4),
    (2, 5, 256, M16, ("fp8", 128)),
    (4, 5, 40, M16, ("int4", 0)),
]
CODED_GLU = [
    (1, 5, 96, M1, INT4),
    (16, 5, 96, M16, INT4),
    (1, 5, 40, M1, FP8),
]


def _product(rows: int, n: int, k: int) -> tuple[str, ...]:
    return f"T[{rows},1,{k}]", f"*T[{n},{k}]"


KERNELS = (
    Kernel(
        op="linear",
        starts={"skinny_linear": 1},
        rule=_shape,
        call=_linear,
        samples=tuple(Sample(_product(b, n, k), use=use) for b, n, k, use in PRODUCTS)
        + tuple(Sample(_product(b, n, k), use=use, coded={1: how}) for b, n, k, use, how in CODED),
        error=5e-6,
        uses={"skinny_linear": _estimate},
        coded=True,
    ),
    Kernel(
        op="linear_glu",
        starts={"skinny_linear_glu": 1},
        rule=_shape,
        call=_linear,
        samples=tuple(
            Sample(
                (*_product(b, n * (1 + packed), k), *[f"T[{b},1,{n}]"] * (not packed)),
                {"act": act},
                use,
            )
            for (b, n, k, use), act in zip(GATED, ACTIVATIONS, strict=True)
            for packed in (True, False)
        )
        + tuple(
            Sample((*_product(b, 2 * n, k),), {"act": "silu"}, use, coded={1: how})
            for b, n, k, use, how in CODED_GLU
        ),
        error=1e-5,
        differ=0.02,
        uses={"skinny_linear_glu": _glu},
        coded=True,
    ),
)
