"""Matmul of a few rows with a weight (small-batch decode), with an optional gated activation."""

from __future__ import annotations

from g4ir.ops.mlp import ACTIVATIONS

from .base import Budget, Sample


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
CODED_GLU = [(1, 5, 96, M1, INT4), (16, 5, 96, M16, INT4), (1, 5, 40, M1, FP8)]


def _product(rows: int, n: int, k: int) -> tuple[str, ...]:
    return f"T[{rows},1,{k}]", f"*T[{n},{k}]"


BUDGETS = {
    "skinny_linear": Budget(
        samples=tuple(Sample(_product(b, n, k), use=use) for b, n, k, use in PRODUCTS)
        + tuple(Sample(_product(b, n, k), use=use, coded={1: how}) for b, n, k, use, how in CODED),
        error=5e-6,
    ),
    "skinny_linear_glu": Budget(
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
    ),
}
