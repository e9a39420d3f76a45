"""Ops of text encoders: texts are packed into one chunk without padding.

`ends` i64[B] are cumulative lengths: text b has the tokens from ends[b - 1] (0 for the first) to
ends[b]; an empty one has none. Tokens after the last end belong to no text.
"""

from __future__ import annotations

from typing import Any

from .attention import attend, require_groups
from .base import cases, op, per_input, require, upcast
from .budgets import Budget
from .types import FLOATS, Type, Types, torch

#: lower bound of a vector's norm, as in torch.nn.functional.normalize
MIN_NORM = 1e-12


def text_of_tokens(ends: Any, count: int) -> Any:
    """Return the index of each token's text, i64 [count]: the number of ends up to the token; B for
    tokens after the last."""
    tokens = torch.arange(count, device=ends.device)
    return (ends[:, None] <= tokens).sum(0)


def _require_packed(name: str, x: Type, ends: Type, rank: int) -> None:
    fits = x.rank == rank and x.shape[0] == 1 and x.dtype in FLOATS
    require(fits, f"{name}: expected floats [1, S, ...] of rank {rank}, found {x}")
    require(ends == Type("i64", ends.shape) and ends.rank == 1, f"{name}: ends {ends}: not i64[B]")


@op
class packed_attention:
    """softmax(q k^T * scale) v over the tokens of the query's own text, in both directions

    q [1,S,nq,d]; k, v [1,S,n,d]; ends i64[B]. With a window |q - k| < window; 0: unlimited. Scores,
    probabilities and output are rounded to q's dtype, softmax is fp32 (transformers,
    models/gemma3 with use_bidirectional_attention; models/embedding_gemma2).
    """

    budget = Budget(4, 512, "scores, weights and output are rounded, sums reordered")
    kind = "kv"

    @staticmethod
    def infer(q: Type, k: Type, v: Type, ends: Type, *, window: int, scale: float) -> Type:
        _require_packed("packed_attention", q, ends, 4)
        require(k.rank == 4 and k == v, f"packed_attention: k {k}, v {v} differ or are not rank 4")
        fits = k == q.with_shape(1, q.shape[1], k.shape[2], q.shape[3]) and window >= 0
        require(fits, f"packed_attention: k {k} does not fit q {q}; window {window}")
        require_groups("packed_attention", q.shape[2], k.shape[2])
        return q

    @staticmethod
    def reference(q: Any, k: Any, v: Any, ends: Any, *, window: int, scale: float) -> Any:
        text = text_of_tokens(ends, q.shape[1])
        mask = text[:, None] == text
        if window:
            at = torch.arange(q.shape[1], device=q.device)
            mask = mask & ((at[:, None] - at).abs() < window)
        return attend(q, k, v, mask, scale)

    @staticmethod
    def flops(ins: Types, outs: Types, *, window: int, **_: Any) -> int:
        """Count two matmuls per query over the keys of one text; texts are assumed to be equally
        long."""
        tokens = int(ins[0].shape[1])
        length = -(-tokens // int(ins[3].shape[0]))
        return 4 * outs[0].numel() * min(length, 2 * window - 1 if window else length)

    samples = cases(
        "f32[1,9,4,8] 2*f32[1,9,2,8] i64[1]@7:9 {window=0}",
        "f32[1,9,4,8] 2*f32[1,9,1,8] i64[1]@9:10 {window=3}",
        scale=1.0,
    )


@op
class packed_mean:
    """The mean over each text's tokens: [1, B, D] of x [1,S,D]; summed in fp32, rounded once

    An empty text has zeros. ends i64[B].
    """

    budget = Budget(1, 64, "a sum in fp32 in any order, divided and rounded once")
    kind = "head"

    @staticmethod
    def infer(x: Type, ends: Type) -> Type:
        _require_packed("packed_mean", x, ends, 3)
        return x.with_shape(1, ends.shape[0], x.shape[2])

    @staticmethod
    def reference(x: Any, ends: Any) -> Any:
        texts = torch.arange(ends.shape[0], device=x.device)
        members = text_of_tokens(ends, x.shape[1]) == texts[:, None]
        counts = members.sum(-1, keepdim=True).clamp(min=1)
        fp32 = upcast(x)
        return (members.to(fp32.dtype) @ fp32 / counts).to(x.dtype)

    flops = per_input(1)
    samples = cases("f32[1,9,8] i64[1]@7:10")


@op
class unit_norm:
    """x / max(|x|, 1e-12) over the last dim, in fp32: f32 [..., D]"""

    budget = Budget(0, 16, "a sum of squares, its root and a quotient in fp32")
    kind = "head"

    @staticmethod
    def infer(x: Type) -> Type:
        require(x.dtype in FLOATS, f"unit_norm: expected floats, found {x}")
        return Type("f64" if x.dtype == "f64" else "f32", x.shape)

    @staticmethod
    def reference(x: Any) -> Any:
        fp32 = upcast(x)
        return fp32 / fp32.norm(dim=-1, keepdim=True).clamp(min=MIN_NORM)

    flops = per_input(3)
    samples = cases("f32[1,3,8]")
