"""A gated product of one row behind its norm, and the product behind that."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from g4ir.ir.graph import Graph, Node

from ..target import Target
from .base import (
    LONGEST,
    Choice,
    Kernel,
    Sample,
    Shape,
    codes_of,
    given_zeros,
    held,
    is_row,
    norm_end,
    size,
)

if TYPE_CHECKING:
    from ..run import Run

#: the longest row that each of the programs behind it reads whole
WHOLE = 1024


def _shape(g: Graph, n: Node, target: Target) -> Shape | None:
    """Return the shape; None for several rows, which would be made again by each program, and for
    a gated row that is long."""
    (rows, k), out = (size(n["w"].type, axis) for axis in (0, 1)), size(n["w_out"].type, 0)
    fits = target.rows == 1 and is_row(n["residual"].type) and k <= LONGEST and rows <= WHOLE
    return {"n": rows, "k": k, "out": out} | codes_of(g, n["w"]) if fits else None


def _norm_glu_linear(
    run: Run,
    n: Node,
    choice: Choice,
    x: Any,
    residual: Any,
    w_post: Any,
    w: Any,
    w_out: Any,
    *rest: Any,
) -> tuple[Any, Any]:
    from .norm_glu_linear_triton import norm_glu_linear

    scalar, weights, eps = norm_end(n, rest)
    words = given_zeros(run, n, choice, n["x"], residual)
    (w, scales), (w_out, out_scales) = held(w), held(w_out)
    made: tuple[Any, Any] = norm_glu_linear(
        *(x, residual, w_post, scalar, weights, w, w_out, rest[-1], words, n.word("act"), eps),
        **choice.use,
        scales=scales,
        out_scales=out_scales,
    )
    return made


def _use(block_n: int, block_out: int, warps: int = 1) -> dict[str, int]:
    return {"block_n": block_n, "block_out": block_out, "warps": warps}


#: k, n, n_out, activation, scalar, pre-norms, partial sums of x, settings: rows of odd sizes, tiles
#: that are whole and not, one of all rows
CASES: list[tuple[int, int, int, str, bool, tuple[bool, ...], int, dict[str, int]]] = [
    (8, 5, 9, "silu", False, (), 0, _use(2, 4)),
    (33, 17, 6, "gelu_pytorch_tanh", False, (), 3, _use(4, 2)),
    (64, 16, 40, "gelu", True, (True,), 1, _use(16, 8, 4)),
    (45, 7, 12, "relu", True, (False,), 0, _use(1, 16)),
    (1536, 64, 48, "gelu_pytorch_tanh", False, (), 1, _use(2, 16, 4)),
]
#: the same of weights in codes: of the gate, and of the product behind it
CODED: list[tuple[int, int, int, tuple[str, int], tuple[str, int]]] = [
    (96, 32, 9, ("int4", 32), ("int4", 32)),
    (40, 16, 12, ("int8", 0), ("fp8", 0)),
]


def _sample(
    k: int,
    n: int,
    out: int,
    act: str,
    scaled: bool,
    weighted: tuple[bool, ...],
    parts: int,
    use: dict[str, int],
    codes: tuple[tuple[str, int], ...] = (),
) -> Sample:
    row, norm = f"T[1,1,{k}]", f"*T[{k}]"
    return Sample(
        (
            *(row, row, norm, f"*T[{n},{k}]", f"*T[{out},{n}]"),
            *["*T[1]"] * scaled,
            *[norm] * sum(weighted),
            f"T[1,1,{n}]",
        ),
        {"eps": 1e-6, "scaled": scaled, "weighted": weighted, "act": act},
        use,
        parts={0: parts} if parts else {},
        coded=dict(zip((3, 4), codes)),
    )


KERNELS = (
    Kernel(
        op="norm_glu_linear",
        starts={"norm_glu_linear": 1},
        rule=_shape,
        call=_norm_glu_linear,
        samples=tuple(_sample(*case) for case in CASES)
        + tuple(
            _sample(k, n, out, "silu", False, (), 0, _use(2, 4), (gate, behind))
            for k, n, out, gate, behind in CODED
        ),
        error=4e-5,
        differ=0.05,
        coded=True,
    ),
)
