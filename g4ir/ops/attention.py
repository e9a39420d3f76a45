"""Ops for attention over a cache and for the cache's update.

A cache is `[C, B, n, d]`, slot-major, so that its first slots are contiguous and a short
context reads only a prefix. Position p lives in slot p mod C: a ring where C is the window, a
plain list where C is at least the sequence length. Which position a slot holds follows from
the number of tokens written, so no mask is stored and the order of slots is free.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from .base import Traffic, cases, free, op, require, wide
from .budgets import MOVES, Budget
from .kv_quant import as_read, numbers
from .types import ITEMSIZE, Dim, Type, Types, torch

#: attributes of an attention: tokens that a query sees, 0: all; factor of the scores and their cap
MASKING = {"window": "int", "scale": "float", "softcap": "float"}


def slot_positions(written: Any, slots: int) -> Any:
    """Return [slots, B]: the newest p = slot (mod slots) with p < written; < 0 where empty."""
    j = torch.arange(slots, device=written.device)[:, None]
    return written - 1 - torch.remainder(written - 1 - j, slots)


def last_seen(positions: Any, block_ids: Any) -> Any:
    """Return i64[B, S]: the last position that each query sees, which is that of the last token of
    its block, or its own in none (rule 19). block_ids i64[B, S]: equal in a block, else -1.
    """
    same = (block_ids[:, :, None] == block_ids[:, None]) & (block_ids >= 0)[:, :, None]
    ends = torch.where(same, positions[:, None], -1).amax(-1)
    return torch.maximum(positions, ends)


def visible(key_pos: Any, query_pos: Any, window: int, last: Any = None) -> Any:
    """Return bool [B, S, T]: keys that exist, are not in the future and lie within the window of
    `window` keys that ends at the query (rule 16); window 0 sees all the past. `last` i64[B, S] are
    the last positions that queries see instead of their own."""
    key = key_pos.t()[:, None, :]
    query = query_pos[:, :, None]
    mask = (key >= 0) & (key <= (query if last is None else last[:, :, None]))
    return mask & (key > query - window) if window else mask


def split_chunk(given: Sequence[Any], parts: int) -> tuple[tuple[Any, ...], Any]:
    """Return an attention's inputs behind its `parts` caches: as many tensors of the chunk, or
    none, and its block ids, or None."""
    fresh = parts if len(given) >= parts else 0
    return tuple(given[:fresh]), given[fresh] if len(given) > fresh else None


def visible_pairs(queries: int, keys: int, window: int) -> int:
    """Count the pairs of a query and a key that it sees: the queries are the newest of `keys`
    tokens.

    Query i of 1..queries sees itself and what came before, keys - queries + i tokens, at most
    `window` of them where that is not 0. Exact for a ring too: it has lost only what no query of
    the chunk sees beyond its window.
    """
    first, last = max(keys - queries, 0), keys  # tokens before the first query; up to the last
    full = min(max(last - window, 0), last - first) if window else 0  # see a whole window
    rising = last - first - full  # see all that came before
    return rising * first + rising * (rising + 1) // 2 + full * window


def attention_workspace(q: Type, kept: Sequence[Type], parts: int, softcap: float) -> int:
    """Count the bytes besides the result, as the torch backend computes an attention over `parts`
    caches, the first of `kept`: cache and chunk joined (T = slots + S rows), K and V of quantised
    rows, a mask [B,S,T] and its bias for each query head of a group, and with a softcap
    the scores [B,nq,S,T]."""
    caches, chunk = kept[:parts], len(kept) > parts
    b, s, heads, d = map(int, q.shape)
    kv_heads, width = int(caches[0].shape[2]), ITEMSIZE[q.dtype]
    keys = int(caches[0].shape[0]) + (s if chunk else 0)
    joined = sum(t.nbytes() for t in kept) if chunk else 0
    made = 2 * keys * b * kv_heads * d * width if caches[0].dtype != q.dtype else 0
    mask = b * s * keys * (1 + heads // kv_heads * width)
    scores = b * heads * s * keys * 2 * (width + 4) if softcap else 0
    return joined + made + mask + scores


def require_groups(op: str, heads: Dim, groups: Dim) -> None:
    fits = isinstance(heads, int) and isinstance(groups, int) and heads % groups == 0
    require(fits, f"{op}: {heads} query heads do not divide into {groups} groups")


def attend(q: Any, keys: Any, values: Any, seen: Any, scale: float, softcap: float = 0.0) -> Any:
    """Return attention [B,S,nq,d] of q over keys and values [B,T,n,d]; `seen` broadcasts to the
    scores, bool [B,n,nq/n,S,T]. A query that sees nothing has equal weights."""
    b, s, heads, d = q.shape
    n = keys.shape[2]
    grouped = q.view(b, s, n, heads // n, d).permute(0, 2, 3, 1, 4)
    scores = grouped @ keys.permute(0, 2, 3, 1)[:, :, None] * scale
    if softcap:
        scores = torch.tanh(scores / softcap) * softcap
    scores = scores.masked_fill(~seen, torch.finfo(scores.dtype).min)
    out = wide(scores).softmax(-1).to(q.dtype) @ values.permute(0, 2, 1, 3)[:, :, None]
    return out.permute(0, 3, 1, 2, 4).flatten(2, 3)


#: of the samples: queries, their positions and tokens in the cache
_QUERY = "f32[2,5,4,8] i64[2,5]@9:14 i64[2]@9:10"


@op
class attention:
    """softmax(cap(q k^T * scale) + mask) v over the cache, then the fresh chunk where given

    q [B,S,nq,d]; positions i64[B,S] of the queries; written i64[B] tokens that the cache
    holds; cache_k, cache_v [C,B,n,d]; k, v [B,S,n,d] the chunk, not yet in the cache. Scores,
    probabilities and output are rounded to q's dtype, softmax is fp32 (rule 15). The mask
    comes from positions. A query without a visible key yields a finite value nobody reads.

    Caches and chunk may be quantised rows (see kv_quant.py), which are read as what they say,
    rounded to q's dtype. The chunk is as the caches are, so that it does not matter how tokens
    are cut into chunks.

    Behind these there may be block_ids i64[B,S]: adjacent tokens with the same number are a block,
    those with -1 are in none. A query also sees what follows it in its block; the window cuts off
    the past of a block as of anything else (rule 19). A block lies within one chunk.
    """

    budget = Budget(
        4,
        512,
        "scores, weights and output are rounded; a cache of other "
        "slots, or keys read after they were written, change the order of both products",
    )
    kind = "kv"
    rows = (0, 1)
    operands = "q positions written cache_k cache_v *chunk"
    attrs = MASKING
    held = (3, 5)

    @staticmethod
    def infer(
        q: Type,
        positions: Type,
        written: Type,
        *held: Type,
        window: int,
        scale: float,
        softcap: float,
    ) -> Type:
        cache_k, cache_v, *chunk = held
        require(q.rank == cache_k.rank == 4, f"attention: q {q}, cache {cache_k}: expected rank 4")
        require(window >= 0 and softcap >= 0, f"attention: window {window}, softcap {softcap}")
        b, s, heads, d = q.shape
        require(positions == Type("i64", (b, s)), f"attention: positions {positions}, q {q}")
        require(written == Type("i64", (b,)), f"attention: written {written}, q {q}")
        require(cache_k == cache_v, f"attention: caches {cache_k} and {cache_v} differ")
        n, read = cache_k.shape[2], as_read(cache_k, q.dtype)
        fits = read.shape[1:] == (b, n, d) and read.dtype == q.dtype
        require(fits, f"attention: cache {cache_k} does not fit q {q}")
        require_groups("attention", heads, n)
        fits = len(chunk) <= 3
        require(fits, "attention: fresh keys and values come together, block ids after them")
        fresh, block_ids = split_chunk(chunk, 2)
        for x in fresh:
            fits = x == cache_k.with_shape(b, s, *cache_k.shape[2:])
            require(fits, f"attention: fresh {x} does not fit q {q} and cache {cache_k}")
        fits = block_ids in (None, positions)
        require(fits, f"attention: block ids {block_ids}, positions {positions}")
        return q

    @staticmethod
    def reference(q: Any, positions: Any, written: Any, *held: Any, **masking: Any) -> Any:
        window, scale, softcap = (masking[name] for name in MASKING)
        cache_k, cache_v, *chunk = held
        fresh, block_ids = split_chunk(chunk, 2)
        key_pos = slot_positions(written, cache_k.shape[0])
        kept = [cache.transpose(0, 1) for cache in (cache_k, cache_v)]
        if fresh:
            kept = [torch.cat(both, 1) for both in zip(kept, fresh, strict=True)]
            key_pos = torch.cat((key_pos, positions.t()))
        last = None if block_ids is None else last_seen(positions, block_ids)
        mask = visible(key_pos, positions, window, last)
        keys, values = (numbers(rows, q.dtype) for rows in kept)
        return attend(q, keys, values, mask[:, None, None], scale, softcap)

    @staticmethod
    def flops(ins: Types, outs: Types, *, window: int, **_: Any) -> int:
        """Count two products over the keys that each query sees, without those ahead of it in a
        block: how long blocks are is not known here."""
        b, s, heads, d = (int(n) for n in ins[0].shape)
        keys = int(ins[3].shape[0]) + (s if len(ins) > 5 else 0)
        return 4 * b * heads * d * visible_pairs(s, keys, window)

    @staticmethod
    def workspace(ins: Types, outs: Types, *, softcap: float, **_: Any) -> int:
        return attention_workspace(ins[0], ins[3:], 2, softcap)

    samples = cases(
        f"{_QUERY} 2*f32[7,2,2,8] 2*f32[2,5,2,8] {{window=4, softcap=0.0}}",
        f"{_QUERY} 2*f32[7,2,2,8] 2*f32[2,5,2,8] i64[2,5]@-1:2 {{window=4, softcap=0.0}}",
        "f32[2,1,4,8] i64[2,1]@6:7 i64[2]@7:8 2*f32[16,2,1,8] {window=0, softcap=20.0}",
        "f32[1,1,4,8] i64[1,1]@29:30 i64[1]@30:31 2*f32[8,1,2,8] {window=8, softcap=0.0}",
        f"{_QUERY} 2*f8e4m3[7,2,2,8]@1:64 2*f8e4m3[2,5,2,8]@1:64 {{window=4, softcap=0.0}}",
        f"{_QUERY} 2*i8[7,2,2,10]@1:64 2*i8[2,5,2,10]@1:64 {{window=4, softcap=0.0}}",
        scale=1.0,
    )


@op
class cache_write:
    """The cache after the chunk: its last valid tokens in their slots, the rest unchanged

    cache [C,B,n,d]; new [B,S,n,d], of which row b has lengths[b] valid tokens that start at
    position start[b]. Padding is never written and a row of length 0 is untouched. Any S, also
    S > C: only the last C valid tokens of a sequence remain.
    """

    budget = MOVES
    kind = "kv"
    updates = ((0, 0),)

    @staticmethod
    def infer(cache: Type, new: Type, start: Type, lengths: Type) -> Type:
        require(cache.rank == 4, f"cache_write: {cache} is not [C, B, n, d]; new {new}")
        b, n, d = cache.shape[1:]
        fits = new.rank == 4 and (new.shape[0], *new.shape[2:]) == (b, n, d)
        require(fits and new.dtype == cache.dtype, f"cache_write: {new} does not fit {cache}")
        require(start == lengths == Type("i64", (b,)), f"cache_write: {start}, {lengths}")
        return cache

    @staticmethod
    def reference(cache: Any, new: Any, start: Any, lengths: Any) -> Any:
        source = slot_positions(start + lengths, cache.shape[0]) - start
        index = source.clamp(min=0, max=new.shape[1] - 1)
        picked = new[torch.arange(new.shape[0], device=new.device), index]
        return torch.where((source >= 0)[:, :, None, None], picked, cache)

    flops = free

    @staticmethod
    def traffic(ins: Types, outs: Types) -> Traffic:
        """Count the new tokens, read and written once; of more than there are slots, the last."""
        new = ins[1]
        rows = min(int(new.shape[1]), int(outs[0].shape[0]))
        moved = new.nbytes() // int(new.shape[1]) * rows
        return (0, moved, *(t.nbytes() for t in ins[2:])), (moved,)

    samples = cases(
        "f32[4,2,2,8] f32[2,6,2,8] i64[2]@3:9 i64[2]@0:7",
        "f32[4,2,2,8] f32[2,1,2,8] i64[2]@3:9 i64[2]@0:2",
        "f8e4m3[4,2,2,8] f8e4m3[2,6,2,8] i64[2]@3:9 i64[2]@0:7",
    )
