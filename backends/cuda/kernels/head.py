"""The best tokens from logits, exactly."""

from __future__ import annotations

from typing import Any

from g4ir.backends.inductor.lowered import Run
from g4ir.backends.inductor.target import Target
from g4ir.ir.graph import Graph, Node

from .base import CANDIDATES, Choice, Kernel, Sample, Shape, size


def _shape(g: Graph, n: Node, target: Target) -> Shape | None:
    return {"vocab": size(n["logits"].type, -1)}


def _few(g: Graph, n: Node, target: Target) -> Shape | None:
    return _shape(g, n, target) if n.whole("k") <= CANDIDATES else None


def _argmax(run: Run, n: Node, choice: Choice, logits: Any) -> Any:
    from .head_triton import block_argmax

    return block_argmax(logits.flatten(0, 1))


def _candidates(run: Run, n: Node, choice: Choice, logits: Any) -> tuple[Any, ...]:
    from .head_triton import top_candidates

    return tuple(top_candidates(logits.flatten(0, 1), n.whole("k")))


#: rows, vocabulary, candidates
SIZES = [(2, 1, 1), (1, 2, 2), (3, 5, 3), (1, 64, 64), (2, 100, 1), (3, 300, 7), (1, 512, 40)]

KERNELS = (
    Kernel(
        op="greedy",
        starts={"block_argmax": 2},
        rule=_shape,
        call=_argmax,
        samples=tuple(Sample((f"T[{b},1,{v}]",)) for b, v, _ in SIZES),
        error=0,
        differ=0,
    ),
    Kernel(
        op="candidates",
        starts={"top_candidates": 2},
        rule=_few,
        call=_candidates,
        samples=tuple(Sample((f"T[{b},1,{v}]",), {"k": k}) for b, v, k in SIZES),
        error=0,
        differ=0,
    ),
)
