"""Collectives of tensor parallelism: every rank runs the same graph on its shard of the weights.

`g4ir.parallel.group.Group` computes the results; its all-reduces of large tensors may add the ranks
in another order. With one rank the results are the inputs.
"""

from __future__ import annotations

from typing import Any

from .base import cases, free, op, require
from .budgets import MOVES, Budget
from .types import Type, Types

COLLECTIVES = ("all_reduce", "all_gather")


def _alone(op: str, b: Any, xs: tuple[Any, ...], ranks: int) -> tuple[Any, ...]:
    require(ranks == 1, f"{op}: one of {ranks} ranks alone lacks the tensors of the others")
    return tuple(b.emit("scale", x, value=1.0) for x in xs)


@op
class all_reduce:
    """y = sum over ranks of x, in fp32 and in order of rank, rounded once; several x at a time"""

    budget = Budget(1, 64, "sums of as many products as on one rank, rounded once for each rank")
    kind = "other"
    rows = (0, 1)
    glue = True
    fold = False

    @staticmethod
    def infer(*xs: Type, ranks: int) -> Types:
        types = ", ".join(map(str, xs))
        require(ranks > 0, f"all_reduce: ranks {ranks}: expected 1 or more; {types}")
        require(all(x.dtype == xs[0].dtype for x in xs), f"all_reduce: {types} differ in dtype")
        return xs

    @staticmethod
    def expand(b: Any, *xs: Any, ranks: int) -> tuple[Any, ...]:
        return _alone("all_reduce", b, xs, ranks)

    @staticmethod
    def flops(ins: Types, outs: Types, *, ranks: int) -> int:
        return ranks * sum(t.numel() for t in outs)

    samples = cases("f32[2,3,8]", "f32[2,3,8] f32[2,3,5]", ranks=1)


@op
class all_gather:
    """[..., n] of each rank -> [..., ranks * n], in order of rank"""

    budget = MOVES
    kind = "other"
    rows = (0,)
    glue = True
    fold = False

    @staticmethod
    def infer(x: Type, *, ranks: int) -> Type:
        fits = x.rank > 0 and isinstance(x.shape[-1], int) and ranks > 0
        require(fits, f"all_gather: {x}, ranks {ranks}: expected a known last dim, 1 rank or more")
        return x.with_shape(*x.shape[:-1], ranks * int(x.shape[-1]))

    @staticmethod
    def expand(b: Any, x: Any, *, ranks: int) -> Any:
        return _alone("all_gather", b, (x,), ranks)

    flops = free
    samples = cases("f32[2,3,8]", ranks=1)
