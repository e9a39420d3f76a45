"""A product of one row behind the norm that makes the row."""

from __future__ import annotations

from typing import Any

from g4ir.ir.graph import Graph, Node

from ..target import Target
from .base import (
    LONGEST,
    Choice,
    Kernel,
    Run,
    Sample,
    Shape,
    codes_of,
    held,
    is_row,
    norm_end,
    norm_start,
    size,
    to_be_zeroed,
)


def _shape(g: Graph, n: Node, target: Target) -> Shape | None:
    """Return the shape; None for several rows, which would be made again by each program."""
    n_rows, k = (size(n["w"].type, axis) for axis in (0, 1))
    fits = target.rows == 1 and is_row(n["residual"].type) and k <= LONGEST
    return {"n": n_rows, "k": k} | codes_of(g, n["w"]) if fits else None


def _norm_linear(run: Run, n: Node, choice: Choice, *given: Any) -> tuple[Any, Any]:
    """Start the kernel; after the norm's inputs come w, those of its end, and perhaps an up."""
    from .norm_linear_triton import norm_linear

    start, both, (w, *rest) = norm_start(n, given)
    scalar, weights, eps = norm_end(n, rest)
    behind = (scalar is not None) + sum(x is not None for x in weights)
    up = rest[behind] if len(rest) > behind else None
    w, scales = held(w)
    made: tuple[Any, Any] = norm_linear(
        *(*start, scalar, weights, w, up, n.word("act"), eps),
        **choice.use,
        scales=scales,
        zeroed=to_be_zeroed(run, n, start[1]),
        **both,
    )
    return made


def _use(block_n: int, programs: int = 3, stages: int = 2) -> dict[str, int]:
    return {"programs": programs, "block_n": block_n, "warps": 1, "stages": stages}


#: k, n, activation, whether an up is given, scalar, pre-norms, partial sums of x; settings: fewer
#: and more programs than tiles, whole tiles and not, and one tile for each
CASES: list[tuple[int, int, str, bool, bool, tuple[bool, ...], int, dict[str, int]]] = [
    (8, 5, "", False, False, (True,), 0, _use(2)),
    (33, 17, "", False, True, (True,), 3, _use(4, 2)),
    (64, 16, "", False, True, (False,), 1, _use(4, 99)),
    (100, 7, "silu", False, False, (True,), 0, _use(4, 1)),
    (45, 12, "gelu_pytorch_tanh", False, False, (True,), 4, _use(8, 2, 3)),
    (33, 9, "gelu_pytorch_tanh", True, False, (), 1, _use(2)),
    (16, 3, "relu", True, True, (), 0, _use(1, 2)),
    (96, 6, "", False, True, (), 0, _use(4, 2)),
    (1536, 24, "gelu", False, False, (True,), 1, _use(4, 3, 4)),
]
#: the same of weights in codes, and the codes
CODED: list[
    tuple[int, int, str, bool, bool, tuple[bool, ...], int, dict[str, int], tuple[str, int]]
] = [
    (96, 6, "", False, True, (True,), 0, _use(4, 2), ("int4", 32)),
    (104, 5, "silu", False, False, (True,), 1, _use(4, 2), ("int8", 0)),
    (40, 7, "", False, True, (True,), 0, _use(4, 2), ("int4", 0)),
    (40, 9, "relu", True, False, (), 2, _use(2, 3), ("fp8", 0)),
    (128, 6, "", False, True, (True,), 0, _use(2, 2), ("int8", 16)),
]


def _sample(
    k: int,
    n: int,
    act: str,
    up: bool,
    scaled: bool,
    weighted: tuple[bool, ...],
    parts: int,
    use: dict[str, int],
    codes: tuple[str, int] | None = None,
    dual: bool = False,
) -> Sample:
    row, w = f"T[1,1,{k}]", f"*T[{k}]"
    packed = 2 if act and not up else 1
    norm = (row, w, row, w, w, row) if dual else (row, row, w)
    return Sample(
        (
            *(*norm, f"*T[{n * packed},{k}]"),
            *["*T[1]"] * scaled,
            *[w] * sum(weighted),
            *[f"T[1,1,{n}]"] * up,
        ),
        {"eps": 1e-6, "scaled": scaled, "weighted": weighted, "act": act},
        use,
        parts={0: parts} if parts and not dual else {},
        coded={len(norm): codes} if codes else {},
    )


KERNELS = (
    Kernel(
        op="norm_linear",
        starts={"norm_linear": 1},
        rule=_shape,
        call=_norm_linear,
        samples=tuple(_sample(*case) for case in CASES) + tuple(_sample(*case) for case in CODED),
        error=2e-5,
        differ=0.02,
        coded=True,
    ),
    Kernel(
        op="dual_norm_linear",
        starts={"dual_norm_linear": 1},
        rule=_shape,
        call=_norm_linear,
        samples=tuple(_sample(*case, dual=True) for case in CASES[::2])
        + tuple(_sample(*case, dual=True) for case in CODED[:2]),
        error=2e-5,
        differ=0.02,
        coded=True,
    ),
)
