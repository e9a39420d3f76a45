"""Latent KV: attention over one cache instead of two, for layers whose K and V share a projection.

There K = rope(rms_norm(x, w)) and V = rms_norm(x) of one projection x (rule 13). A row of the
latent cache is V and the rotated dims of K, d + 2p elements for p rotated pairs; the other dims of
K are V * w. V is rounded before it is multiplied by w, so in 16 bits K differs by one rounding from
that of separate caches.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from .attention import MASKING, attention, attention_workspace, split_chunk
from .base import cases, free, op, require
from .budgets import MOVES, Budget
from .kv_quant import dequantize_rows, dequantized_type
from .types import FLOATS, Type, Types, torch


@op
class latent_row:
    """V and the rotated dims of K, one row: concat(v, k[:pairs], k[d/2 : d/2 + pairs])

    v, k [B,S,n,d]; the result is [B,S,n,d + 2 pairs].
    """

    budget = MOVES
    kind = "kv"
    rows = (0, 1)

    @staticmethod
    def infer(v: Type, k: Type, *, pairs: int) -> Type:
        d = v.shape[-1]
        require(v.rank == 4 and v == k, f"latent_row: v {v} and k {k} differ or are not rank 4")
        fits = isinstance(d, int) and d % 2 == 0 and 0 <= pairs <= d // 2
        require(fits, f"latent_row: {pairs} pairs do not fit {v}")
        return v.with_shape(*v.shape[:-1], int(d) + 2 * pairs)

    @staticmethod
    def reference(v: Any, k: Any, *, pairs: int) -> Any:
        half = k.shape[-1] // 2
        return torch.cat((v, k[..., :pairs], k[..., half : half + pairs]), -1)

    flops = free
    samples = cases("2*f32[2,3,2,8] {pairs=1}", "2*f32[2,3,2,8] {pairs=0}")


def keys_values(row: Any, w: Any) -> tuple[Any, Any]:
    """Return K and V [..., d] of rows [..., d + 2p], with w [d] the weight of K's norm; K's
    unrotated dims are V * w, rounded once."""
    d = w.shape[0]
    half, pairs = d // 2, (row.shape[-1] - d) // 2
    v, low, high = row.split([d, pairs, pairs], -1)
    k = v * w
    return torch.cat((low, k[..., pairs:half], high, k[..., half + pairs :]), -1), v


def _split(caches: Sequence[Any]) -> tuple[list[Any], tuple[Any, ...]]:
    """Split the inputs after w into [cache, and the chunk's rows if passed] and (block ids,), or ()
    without these."""
    rows, block_ids = split_chunk(caches[1:], 1)
    return [caches[0], *rows], () if block_ids is None else (block_ids,)


#: in samples: types of query, positions, number of cached tokens, and weight of K's norm
_QUERY = "f32[2,5,4,8] i64[2,5]@9:14 i64[2]@9:10 f32[8]"
_ATTRS = "window=4, softcap=0.0, pairs=2"


@op
class attention_latent:
    """`attention` over K and V rebuilt from the rows of a latent cache

    q [B,S,nq,d], positions, written, window, scale, softcap as in `attention`; w [d] the weight
    of K's norm. Then the cache [C,B,n,d + 2 pairs] and, for a chunk that is not in it yet, its rows
    [B,S,n,d + 2 pairs] of `latent_row` and optionally block_ids, as in `attention`. Rounded as
    `attention`, plus one rounding of K. Rows may be quantised as in `attention`.
    """

    budget = Budget(8, 512, "as attention, on keys that are rebuilt and rounded")
    kind = "kv"
    rows = (0, 1)
    cache_range = (4, 5)
    operands = "q positions written w *held"
    attrs = MASKING | {"pairs": "int"}

    @staticmethod
    def infer(
        q: Type, positions: Type, written: Type, w: Type, *caches: Type, pairs: int, **masking: Any
    ) -> Type:
        fits = q.rank == 4 and isinstance(q.shape[-1], int) and w == Type(q.dtype, q.shape[-1:])
        require(fits, f"attention_latent: weight {w} does not fit q {q}")
        d = int(q.shape[-1])
        require(0 <= pairs <= d // 2, f"attention_latent: pairs {pairs}: expected 0 to {d // 2}")
        rows, block_ids = _split(caches)
        keys = [dequantized_type(t, q.dtype) for t in rows]
        same, names = len({t.dtype for t in rows}) == 1, ", ".join(map(str, rows))
        require(same, f"attention_latent: cache and chunk {names} differ in dtype")
        for t in keys:
            fits = t.rank == 4 and t.shape[-1] == d + 2 * pairs and t.dtype in FLOATS
            require(fits, f"attention_latent: {t} is not [.,.,n,{d + 2 * pairs}] of q {q}")
        both = [t.with_shape(*t.shape[:3], d) for t in keys for _ in "kv"]
        attention.infer(q, positions, written, *both, *block_ids, **masking)
        return q

    @staticmethod
    def reference(
        q: Any, positions: Any, written: Any, w: Any, *caches: Any, pairs: int, **masking: Any
    ) -> Any:
        rows, block_ids = _split(caches)
        both = [x for row in rows for x in keys_values(dequantize_rows(row, q.dtype), w)]
        return attention.reference(q, positions, written, *both, *block_ids, **masking)

    @staticmethod
    def flops(ins: Types, outs: Types, *, pairs: int, **masking: Any) -> int:
        """As `attention`, with keys of d + 2 pairs elements."""
        q, d = ins[0], int(ins[0].shape[-1])
        keys = [x.with_shape(*x.shape[:-1], d) for x in _split(ins[4:])[0] for _ in "kv"]
        count: int = attention.flops((q, *ins[1:3], *keys), outs, **masking)
        return count * (d + pairs) // d

    @staticmethod
    def workspace(ins: Types, outs: Types, *, softcap: float, **_: Any) -> int:
        return attention_workspace(ins[0], ins[4:], 1, softcap)

    samples = cases(
        f"{_QUERY} f32[7,2,2,12] f32[2,5,2,12] {{{_ATTRS}}}",
        f"{_QUERY} f32[7,2,2,12] f32[2,5,2,12] i64[2,5]@-1:2 {{{_ATTRS}}}",
        "f32[2,1,4,8] i64[2,1]@6:7 i64[2]@7:8 f32[8] f32[16,2,1,10] {window=0, softcap=20.0,"
        " pairs=1}",
        f"{_QUERY} f8e4m3[7,2,2,12]@1:64 f8e4m3[2,5,2,12]@1:64 {{{_ATTRS}}}",
        f"{_QUERY} i8[7,2,2,14]@1:64 i8[2,5,2,14]@1:64 {{{_ATTRS}}}",
        scale=1.0,
    )
