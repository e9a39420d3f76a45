"""LM head over token clusters of equal size, which computes logits only in the best clusters
(transformers 5.17, `models/gemma4_assistant`: ordered embeddings); and greedy token choice."""

from __future__ import annotations

from typing import Any

from .base import Traffic, cases, free, gathered, op, per_input, require
from .budgets import MOVES, PRODUCT
from .types import Type, Types, torch


@op
class by_cluster:
    """table[order], cluster by cluster: [V, d] -> [count, V / count, d]"""

    budget = MOVES
    kind = "head"

    @staticmethod
    def infer(table: Type, order: Type, *, count: int) -> Type:
        size, width = table.shape
        fits = isinstance(size, int) and order == Type("i64", (size,))
        require(fits, f"by_cluster: order {order} does not fit {table}")
        fits = count > 0 and int(size) % count == 0
        require(fits, f"by_cluster: rows of {table} do not divide into {count} clusters")
        return table.with_shape(count, int(size) // count, width)

    @staticmethod
    def reference(table: Any, order: Any, *, count: int) -> Any:
        return table[order].unflatten(0, (count, -1))

    flops = free
    samples = cases("f32[12,8] i64[12]@0:12", count=3)


@op
class cluster_head:
    """logits and ids of the tokens of the top_k clusters by x @ heads^T, each [B,S,top_k * size]

    A logit is x @ row for each of the `rows` [N,size,d] of a chosen cluster, its id order[row],
    order i64[N * size].
    """

    budget = PRODUCT
    kind = "head"
    rows = (0,)

    @staticmethod
    def infer(x: Type, heads: Type, rows: Type, order: Type, *, top_k: int) -> tuple[Type, Type]:
        require(rows.rank == 3, f"cluster_head: rows {rows} are not [N, size, d]")
        count, size, width = rows.shape
        fits = heads == rows.with_shape(count, width) and x.shape[-1] == width
        require(fits and x.dtype == rows.dtype, f"cluster_head: x {x} does not fit {heads}, {rows}")
        sized = isinstance(count, int) and isinstance(size, int)
        fits = sized and order == Type("i64", (int(count) * int(size),))
        require(fits, f"cluster_head: order {order} does not fit {rows}")
        require(0 < top_k <= int(count), f"cluster_head: top_k {top_k} does not fit {rows}")
        out = x.with_shape(*x.shape[:-1], top_k * int(size))
        return out, Type("i64", out.shape)

    @staticmethod
    def reference(x: Any, heads: Any, rows: Any, order: Any, *, top_k: int) -> tuple[Any, Any]:
        best = torch.nn.functional.linear(x, heads).topk(top_k, -1).indices
        picked = rows[best].flatten(-3, -2)
        logits = torch.matmul(x.unsqueeze(-2), picked.transpose(-1, -2)).squeeze(-2)
        return logits, order.view(len(rows), -1)[best].flatten(-2)

    @staticmethod
    def flops(ins: Types, outs: Types, **_: Any) -> int:
        x, heads = ins[:2]
        return 2 * x.numel() * int(heads.shape[0]) + 2 * outs[0].numel() * int(x.shape[-1])

    @staticmethod
    def traffic(ins: Types, outs: Types, **_: Any) -> Traffic:
        """Count only the rows and ids of the chosen clusters."""
        x, heads, rows, _order = ins
        read = outs[1].numel() * int(x.shape[-1]) * rows.nbytes() // rows.numel()
        written = tuple(t.nbytes() for t in outs)
        return (x.nbytes(), heads.nbytes(), read, outs[1].nbytes()), written

    samples = cases("f32[2,1,8] f32[5,8] f32[5,3,8] i64[15]@0:15", top_k=2)


@op
class pick_id:
    """ids[b, 0, at[b]] of each sequence b, i64[B]; ids i64[B,1,n], at i64[B]"""

    budget = MOVES
    kind = "head"

    @staticmethod
    def infer(ids: Type, at: Type) -> Type:
        fits = ids.rank == 3 and ids.shape[1] == 1 and at == Type("i64", ids.shape[:1])
        require(fits and ids.dtype == "i64", f"pick_id: indices {at} do not fit {ids}")
        return at

    @staticmethod
    def reference(ids: Any, at: Any) -> Any:
        return ids[:, 0].gather(1, at[:, None])[:, 0]

    flops = free
    traffic = gathered
    samples = cases("i64[3,1,7]@0:99 i64[3]@0:7")


@op
class greedy:
    """The token id of each sequence's largest logit, the lowest of equal ones: [B,1,V] -> i64[B]"""

    budget = MOVES
    kind = "head"

    @staticmethod
    def infer(logits: Type) -> Type:
        fits = logits.rank == 3 and logits.shape[1] == 1 and isinstance(logits.shape[2], int)
        require(fits, f"greedy: logits {logits} are not [B, 1, vocab]")
        return Type("i64", logits.shape[:1])

    @staticmethod
    def reference(logits: Any) -> Any:
        return logits[:, 0].argmax(-1)

    flops = per_input(1)
    samples = cases("f32[3,1,33]")
