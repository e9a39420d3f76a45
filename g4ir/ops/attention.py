"""Attention over a KV cache, and the cache's update.

A cache is `[C, B, n, d]`, slot-major: its first slots are contiguous, so a short context reads
only a prefix. Position p is stored in slot p mod C: a sliding-window (ring) cache if C is the
window or a few slots more, a linear one if C is at least the sequence length. A slot's position
follows from the number of tokens written, so no mask is stored and the order of slots is free.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from .base import Traffic, cases, free, op, require, upcast
from .budgets import MOVES, Budget
from .kv_quant import dequantize_rows, dequantized_type
from .types import ITEMSIZE, Dim, Type, Types, torch

#: attributes of attention: window in tokens, 0: full attention; scale and softcap of the scores
MASKING = {"window": "int", "scale": "float", "softcap": "float"}


def slot_positions(written: Any, slots: int) -> Any:
    """Return the position in each slot, [slots, B]: the newest p = slot (mod slots) with
    p < written; negative in empty slots."""
    j = torch.arange(slots, device=written.device)[:, None]
    return written - 1 - torch.remainder(written - 1 - j, slots)


def last_visible(positions: Any, block_ids: Any) -> Any:
    """Return the last position visible to each query, i64[B, S]: the end of its bidirectional
    block, else its own position (rule 19). block_ids i64[B, S]: equal within a block, -1 outside.
    """
    same = (block_ids[:, :, None] == block_ids[:, None]) & (block_ids >= 0)[:, :, None]
    ends = torch.where(same, positions[:, None], -1).amax(-1)
    return torch.maximum(positions, ends)


def visible(key_pos: Any, query_pos: Any, window: int, last: Any = None) -> Any:
    """Return the attention mask, bool [B, S, T]: causal, without empty slots, limited to the last
    `window` keys up to the query (rule 16); window 0: unlimited. `last` i64[B, S] replaces the
    queries' own positions as the causal limit."""
    key = key_pos.t()[:, None, :]
    query = query_pos[:, :, None]
    mask = (key >= 0) & (key <= (query if last is None else last[:, :, None]))
    return mask & (key > query - window) if window else mask


def split_chunk(inputs: Sequence[Any], parts: int) -> tuple[tuple[Any, ...], Any]:
    """Split an attention's inputs after its `parts` caches into the chunk's tensors (`parts` of
    them, or none) and its block ids (or None)."""
    fresh = parts if len(inputs) >= parts else 0
    return tuple(inputs[:fresh]), inputs[fresh] if len(inputs) > fresh else None


def visible_pairs(queries: int, keys: int, window: int) -> int:
    """Count the (query, key) pairs that the mask admits; the queries are the newest of `keys`
    tokens.

    Query i of 1..queries attends to keys - queries + i tokens, itself included, at most `window`
    of them unless that is 0. Exact for a ring cache too: the tokens it has overwritten are outside
    every query's window.
    """
    first, last = max(keys - queries, 0), keys  # tokens before the first query, up to the last
    full = min(max(last - window, 0), last - first) if window else 0  # queries with a full window
    rising = last - first - full  # queries that attend to all previous tokens
    return rising * first + rising * (rising + 1) // 2 + full * window


def attention_workspace(q: Type, operands: Sequence[Type], parts: int, softcap: float) -> int:
    """Return the bytes of temporaries of the torch backend's attention; the first `parts` of
    `operands` are caches. The temporaries: with a chunk, cache and chunk concatenated (T = slots +
    S; else T = slots); K and V if dequantised; a mask [B,S,T] and its bias for each query head of a
    group; with a softcap the scores [B,nq,S,T]."""
    caches, chunk = operands[:parts], len(operands) > parts
    b, s, heads, d = map(int, q.shape)
    kv_heads, width = int(caches[0].shape[2]), ITEMSIZE[q.dtype]
    keys = int(caches[0].shape[0]) + (s if chunk else 0)
    joined = sum(t.nbytes() for t in operands) if chunk else 0
    dequantized = 2 * keys * b * kv_heads * d * width if caches[0].dtype != q.dtype else 0
    mask = b * s * keys * (1 + heads // kv_heads * width)
    scores = b * heads * s * keys * 2 * (width + 4) if softcap else 0
    return joined + dequantized + mask + scores


def require_groups(op: str, heads: Dim, groups: Dim) -> None:
    fits = isinstance(heads, int) and isinstance(groups, int) and heads % groups == 0
    require(fits, f"{op}: {heads} query heads are no multiple of {groups} KV heads")


def attend(q: Any, keys: Any, values: Any, mask: Any, scale: float, softcap: float = 0.0) -> Any:
    """Return scaled dot-product attention [B,S,nq,d] of q over keys and values [B,T,n,d]; the bool
    `mask` broadcasts to the scores [B,n,nq/n,S,T]. A fully masked query gets uniform weights."""
    b, s, heads, d = q.shape
    n = keys.shape[2]
    grouped = q.view(b, s, n, heads // n, d).permute(0, 2, 3, 1, 4)
    scores = grouped @ keys.permute(0, 2, 3, 1)[:, :, None] * scale
    if softcap:
        scores = torch.tanh(scores / softcap) * softcap
    scores = scores.masked_fill(~mask, torch.finfo(scores.dtype).min)
    out = upcast(scores).softmax(-1).to(q.dtype) @ values.permute(0, 2, 1, 3)[:, :, None]
    return out.permute(0, 3, 1, 2, 4).flatten(2, 3)


def probabilities(
    q: Any, positions: Any, written: Any, cache_k: Any, cache_v: Any, *chunk: Any, **masking: Any
) -> Any:
    """Return the softmax's output [B,S,nq,C] of the op `attention` by position of the key, on
    caches with a slot for each position: V is replaced by the unit vector of its position, so that
    each output is one probability, unchanged."""
    unit = torch.eye(cache_k.shape[0], dtype=q.dtype, device=q.device)
    cache = unit[:, None, None].expand(-1, q.shape[0], 1, -1)
    fresh, block_ids = split_chunk(chunk, 2)
    chunk = (*fresh[:1], *(unit[positions][:, :, None] for _ in fresh[1:]))
    chunk += () if block_ids is None else (block_ids,)
    return attention.reference(q, positions, written, cache_k, cache, *chunk, **masking)


#: in samples: types of query, positions, and number of cached tokens
_QUERY = "f32[2,5,4,8] i64[2,5]@9:14 i64[2]@9:10"


@op
class attention:
    """softmax(cap(q k^T * scale) + mask) v over the cache and, if passed, the current chunk

    q [B,S,nq,d]; positions i64[B,S] of the queries; written i64[B], tokens in the cache; cache_k,
    cache_v [C,B,n,d]; k, v [B,S,n,d] of the chunk, which is not in the cache yet. Scores,
    probabilities and output are rounded to q's dtype, softmax is fp32 (rule 15). The mask follows
    from positions. A query without a visible key yields a finite value that is never read.

    Caches and chunk may be quantised (kv_quant.py); their rows are dequantised to q's dtype. The
    chunk has the cache's dtype, so that results do not depend on the chunk size.

    The last input may be block_ids i64[B,S]: adjacent tokens with the same id form a bidirectional
    block, tokens with -1 are in none. A query also attends to later tokens of its block; the
    window still limits the past (rule 19). A block lies within one chunk.
    """

    budget = Budget(
        4,
        512,
        "scores, weights and output are rounded; a cache of another "
        "size, or keys read after they were written, change the order of both products",
    )
    kind = "kv"
    rows = (0, 1)
    operands = "q positions written cache_k cache_v *chunk"
    attrs = MASKING
    cache_range = (3, 5)

    @staticmethod
    def infer(
        q: Type,
        positions: Type,
        written: Type,
        *caches: Type,
        window: int,
        scale: float,
        softcap: float,
    ) -> Type:
        cache_k, cache_v, *chunk = caches
        require(q.rank == cache_k.rank == 4, f"attention: q {q}, cache {cache_k}: expected rank 4")
        bounds = f"attention: window {window}, softcap {softcap}: expected 0 or more"
        require(window >= 0 and softcap >= 0, bounds)
        b, s, heads, d = q.shape
        require(positions == Type("i64", (b, s)), f"attention: {positions} does not fit q {q}")
        require(written == Type("i64", (b,)), f"attention: written {written} does not fit q {q}")
        require(cache_k == cache_v, f"attention: caches {cache_k} and {cache_v} differ")
        n, read = cache_k.shape[2], dequantized_type(cache_k, q.dtype)
        fits = read.shape[1:] == (b, n, d) and read.dtype == q.dtype
        require(fits, f"attention: cache {cache_k} does not fit q {q}")
        require_groups("attention", heads, n)
        fits = len(chunk) <= 3
        require(fits, "attention: after the caches come at most k, v and block_ids of the chunk")
        fresh, block_ids = split_chunk(chunk, 2)
        for x in fresh:
            fits = x == cache_k.with_shape(b, s, *cache_k.shape[2:])
            require(fits, f"attention: chunk {x} does not fit q {q} and cache {cache_k}")
        fits = block_ids in (None, positions)
        require(fits, f"attention: block ids {block_ids} do not fit {positions}")
        return q

    @staticmethod
    def reference(q: Any, positions: Any, written: Any, *caches: Any, **masking: Any) -> Any:
        window, scale, softcap = (masking[name] for name in MASKING)
        cache_k, cache_v, *chunk = caches
        fresh, block_ids = split_chunk(chunk, 2)
        key_pos = slot_positions(written, cache_k.shape[0])
        cached = [cache.transpose(0, 1) for cache in (cache_k, cache_v)]
        if fresh:
            cached = [torch.cat(both, 1) for both in zip(cached, fresh, strict=True)]
            key_pos = torch.cat((key_pos, positions.t()))
        last = None if block_ids is None else last_visible(positions, block_ids)
        mask = visible(key_pos, positions, window, last)
        keys, values = (dequantize_rows(rows, q.dtype) for rows in cached)
        return attend(q, keys, values, mask[:, None, None], scale, softcap)

    @staticmethod
    def flops(ins: Types, outs: Types, *, window: int, **_: Any) -> int:
        """Count two matmuls over the visible keys, without the later keys of a block: block lengths
        are only known at run time."""
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
    """The cache with the chunk's valid tokens written to their slots

    cache [C,B,n,d]; new [B,S,n,d], in which sequence b has lengths[b] valid tokens that start at
    position start[b]. Padding is never written; length 0 writes nothing. S may exceed C: only the
    last C valid tokens of a sequence remain.
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
        require(
            start == lengths == Type("i64", (b,)), f"cache_write: {start}, {lengths} are not i64[B]"
        )
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
        """Count the tokens that are stored, at most one per slot, read and written once."""
        new = ins[1]
        rows = min(int(new.shape[1]), int(outs[0].shape[0]))
        moved = new.nbytes() // int(new.shape[1]) * rows
        return (0, moved, *(t.nbytes() for t in ins[2:])), (moved,)

    samples = cases(
        "f32[4,2,2,8] f32[2,6,2,8] i64[2]@3:9 i64[2]@0:7",
        "f32[4,2,2,8] f32[2,1,2,8] i64[2]@3:9 i64[2]@0:2",
        "f8e4m3[4,2,2,8] f8e4m3[2,6,2,8] i64[2]@3:9 i64[2]@0:7",
    )
