"""RMS norms: alone, and from the end of a block to the input of the next."""

from __future__ import annotations

from typing import Any

from g4ir.backends.inductor.lowered import Run
from g4ir.backends.inductor.target import Target
from g4ir.ir.graph import Graph, Node

from .base import Choice, Kernel, Sample, Shape, Use, is_row, norm_end, norm_start, size


def _shape(g: Graph, n: Node, target: Target) -> Shape | None:
    x = n.inputs[0].type
    return {"d": size(x, -1)} if is_row(x) else None


def _rms_norm(run: Run, n: Node, choice: Choice, x: Any, w: Any = None) -> Any:
    from .norms_triton import rms_norm

    return rms_norm(x, w, n.number("eps"), **choice.use)


def _norm_residual(run: Run, n: Node, choice: Choice, *given: Any) -> tuple[Any, ...]:
    from .norms_triton import norm_residual

    start, both, rest = norm_start(n, given)
    return tuple(norm_residual(*start, *norm_end(n, rest), **choice.use, **both))


def _use(shape: Shape) -> Use:
    d = shape["d"]
    return {"warps": 1 if d <= 512 else 8 if d <= 4096 else 16}


#: leading dims, d, warps
ROWS = [("1,1", 8, 1), ("5,1", 33, 4), ("2,1", 64, 2)]
#: for each pre-norm whether it has a weight; whether there is a scalar; partial sums of x, or 0
ENDS = [
    ((), False, 0),
    ((True,), True, 1),
    ((False,), False, 3),
    ((True, True), True, 4),
    ((False, True), False, 0),
    ((True, True, True), True, 0),
    ((True, True, False), False, 3),
    ((False, True, True), True, 1),
    ((False, False, False), False, 4),
]
#: a real width, where it shows how many values differ
WIDE = [("2,1", 1536, 8, (True, True, True), True, 4)]
CASES = [(*ROWS[i % 3], *end) for i, end in enumerate(ENDS)] + WIDE


def _sample(
    dual: bool, rows: str, d: int, warps: int, weighted: tuple[bool, ...], scaled: bool, parts: int
) -> Sample:
    x, w = f"T[{rows},{d}]", f"*T[{d}]"
    inputs = (x, w, x, w, w, x) if dual else (x, x, w)
    sums = {0: parts, 2: (parts + 3) % 5} if dual else {0: parts}
    return Sample(
        (*inputs, *["*T[1]"] * scaled, *[w] * sum(weighted)),
        {"eps": 1e-6, "scaled": scaled, "weighted": weighted},
        {"warps": warps},
        parts={i: count for i, count in sums.items() if count},
    )


KERNELS = (
    Kernel(
        op="rms_norm",
        starts={"rms_norm": 1},
        rule=_shape,
        call=_rms_norm,
        samples=tuple(
            Sample((f"T[{rows},{d}]", *[f"*T[{d}]"] * weighted), {"eps": eps}, {"warps": warps})
            for (rows, d, warps), eps in zip(ROWS, (1e-6, 1e-6, 0.3), strict=True)
            for weighted in (0, 1)
        ),
        error=1e-6,
        uses={"rms_norm": _use},
    ),
    *(
        Kernel(
            op=op,
            starts={op: 1},
            rule=_shape,
            call=_norm_residual,
            samples=tuple(_sample("dual_" in op, *case) for case in CASES),
            error=1e-6,
            uses={op: _use},
        )
        for op in ("norm_residual", "dual_norm_residual")
    ),
)
