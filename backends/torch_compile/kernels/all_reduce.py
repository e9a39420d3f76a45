"""Sums over ranks with the residual and the norms behind them, in one kernel."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from g4ir.ir.graph import Graph, Node
from g4ir.ops.reduce_norm import MOST_ROWS, WITH_SUMS

from ..target import Target
from .base import SLOT, Choice, Kernel, Sample, Shape, is_row, norm_end, size

if TYPE_CHECKING:
    from ..run import Run

DENSE, DUAL = (fused for fused, _ in WITH_SUMS.values())


def _shape(g: Graph, n: Node, target: Target) -> Shape | None:
    x = n.inputs[0].type
    row = (1 + (n.op == DUAL)) * x.with_shape(size(x, -1)).nbytes()
    if not is_row(x) or target.rows > MOST_ROWS or row > SLOT:
        return None
    return {"d": size(x, -1)}


def _norm(run: Run, n: Node, choice: Choice, x: Any, *given: Any) -> tuple[Any, ...]:
    from .all_reduce_triton import all_reduce_norm_residual, meeting

    peers, ranks = meeting(x.device), n.whole("ranks")
    end = norm_end(n, given[2:])
    return tuple(all_reduce_norm_residual(x, *given[:2], *end, peers, ranks, **choice.use))


def _dual_norm(run: Run, n: Node, choice: Choice, *given: Any) -> tuple[Any, ...]:
    from .all_reduce_triton import all_reduce_dual_norm_residual, meeting

    peers, ranks = meeting(given[0].device), n.whole("ranks")
    end = norm_end(n, given[6:])
    return tuple(all_reduce_dual_norm_residual(*given[:6], *end, peers, ranks, **choice.use))


def _sample(dual: bool, rows: int, d: int, warps: int, weighted: tuple[bool, ...]) -> Sample:
    x, w = f"T[{rows},1,{d}]", f"*T[{d}]"
    inputs = (x, w, x, w, w, x) if dual else (x, x, w)
    scaled = len(weighted) == 1
    return Sample(
        (*inputs, *["*T[1]"] * scaled, *[w] * sum(weighted)),
        {"eps": 1e-6, "scaled": scaled, "weighted": weighted, "ranks": 1},
        {"warps": warps},
    )


#: rows, d, warps, and for each pre-norm whether it has a weight; alone: tests of several ranks are
#: beside those of orders
CASES = [(1, 8, 1, ()), (5, 33, 4, (True,)), (2, 64, 2, (True, True, False))]

KERNELS = tuple(
    Kernel(
        op=op,
        starts={op: 1},
        rule=_shape,
        call=_dual_norm if op == DUAL else _norm,
        samples=tuple(_sample(op == DUAL, *case) for case in CASES),
        error=1e-6,
    )
    for op in (DENSE, DUAL)
)
