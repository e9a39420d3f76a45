"""Token embeddings and the layout of per-layer embeddings."""

from __future__ import annotations

from typing import Any

from .base import VIEW, cases, free, gathered, op, require
from .budgets import MOVES, Budget
from .types import Type, Types, torch


@op
class embedding:
    """table[ids] * scale, scale rounded to the table's dtype first (rules 1, 2)"""

    budget = Budget(1, 0, "one product, rounded once")
    kind = "embed"
    rows = (1,)
    fold = False

    @staticmethod
    def infer(table: Type, ids: Type, *, scale: float) -> Type:
        require(
            table.rank == 2 and ids.dtype == "i64",
            f"embedding: expected a matrix and ids i64, found {table}, ids {ids}",
        )
        return Type(table.dtype, (*ids.shape, table.shape[1]))

    @staticmethod
    def reference(table: Any, ids: Any, *, scale: float) -> Any:
        return table[ids] * torch.tensor(scale).to(table.dtype)

    traffic = gathered
    samples = cases("f32[11,8] i64[2,3]@0:11", scale=39.191835884530846)


@op
class mask_ids:
    """Token ids with those in `ids` replaced by `pad`: media placeholders, before both embedding
    lookups (rules 2, 38)"""

    budget = MOVES
    kind = "embed"
    rows = (0,)

    @staticmethod
    def infer(tokens: Type, *, ids: tuple[int, ...], pad: int) -> Type:
        require(tokens.dtype == "i64", f"mask_ids: {tokens} are no token ids")
        return tokens

    @staticmethod
    def reference(tokens: Any, *, ids: tuple[int, ...], pad: int) -> Any:
        for i in ids:  # not `isin`, whose table a recorded step may not copy from the host
            tokens = tokens.masked_fill(tokens == i, pad)
        return tokens

    samples = cases("i64[2,7]@0:7 {ids=(3, 5)}", "i64[2,3]@0:7 {ids=()}", pad=0)


@op
class unstack_layers:
    """[layers, B, S, P] -> one [B, S, P] per layer"""

    budget = MOVES
    glue = True

    @staticmethod
    def infer(x: Type) -> Types:
        require(isinstance(x.shape[0], int), f"unstack_layers: {x} has no layer count")
        return (x.with_shape(*x.shape[1:]),) * int(x.shape[0])

    @staticmethod
    def reference(x: Any) -> Any:
        return tuple(x.unbind(0))

    flops, traffic = VIEW
    samples = cases("f32[3,2,5,4]")


@op
class stack_layers:
    """[B, S, layers, P] -> [layers, B, S, P], so that each layer's slice is contiguous"""

    budget = MOVES

    @staticmethod
    def infer(x: Type) -> Type:
        require(x.rank == 4, f"stack_layers: {x} is not [B, S, layers, P]")
        b, s, n, p = x.shape
        return x.with_shape(n, b, s, p)

    @staticmethod
    def reference(x: Any) -> Any:
        return x.permute(2, 0, 1, 3).contiguous()

    flops = free
    samples = cases("f32[2,5,3,4]")
