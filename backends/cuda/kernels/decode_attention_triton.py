"""Split-KV decode attention, over a plain or latent KV cache (g4ir/ops/latent.py).

A program handles one sequence, one KV head and one split of the visible keys; the query heads of
the group (GQA) are the rows of its dot products, so that a key is read once. Splits are computed on
the device from the number of tokens: one captured graph serves all lengths, and only visible slots
are read. The last program to arrive (an atomic counter per sequence and KV head in
`arrivals`, 0 before and after) reduces the partial results in the order of the splits.

Numerics: fp32 scores, running maximum in base 2, fp32 sums; probabilities are rounded to the
query's dtype before they multiply V. In bf16 the rms error against float64 is at most 1.5 times
that of the op's reference, which rounds scores to bf16: at the models' head dims 0.2 to 0.5 of it
over plain caches, 0.3 to 0.8 over latent ones, where q * w is rounded instead of V * w. In fp32 it
is at most 5e-6 of the result's rms.
"""

from __future__ import annotations

from math import e, log2
from typing import Any

import torch
import triton
import triton.language as tl
from torch.library import triton_op

from g4ir.ops.attention import attention
from g4ir.ops.kv_quant import GROUP as CODES
from g4ir.ops.kv_quant import dequantize_rows, values_in_row
from g4ir.ops.latent import keys_values

from .launch import is_last, power_of_2, start, takes, tanh

Tensor = torch.Tensor

#: Limits of the partial results that the reduction has in flight (prefetches): bytes, number.
IN_FLIGHT_BYTES, AHEAD = 64 * 1024, 8

#: EACH: codes per scale of int8 cache rows. CODED_KEYS: maximum int8 latent rows per tile, which
#: need twice the registers while they are dequantised.
EACH, CODED_KEYS = tl.constexpr(CODES), 16


@triton.jit
def _span(end, slots, split, WINDOW, SPLITS, N):
    """Return the first visible position, this split's keys lo and hi (exclusive), relative to it,
    and the number of non-empty splits (at least 1). Visible positions: first .. end - 1."""
    visible = tl.minimum(end, slots)
    if WINDOW > 0:
        visible = tl.minimum(visible, WINDOW)
    visible = tl.maximum(visible, 0)
    first = end - visible
    visible = visible.to(tl.int32)
    per_split = tl.maximum(tl.cdiv(visible, SPLITS), N)
    used = tl.maximum(tl.cdiv(visible, per_split), 1)
    return first, split * per_split, tl.minimum((split + 1) * per_split, visible), used


@triton.jit
def _slots(i, origin, slots):
    """Ring slots (i64) of keys i < slots; key 0 is in slot `origin`."""
    slot = origin + i
    return tl.where(slot >= slots, slot - slots, slot).to(tl.int64)


@triton.jit
def _tile(rows, real, cols, WIDTH):
    """Load columns `cols` of rows at pointers `rows`; 0 where `real` is false or cols >= WIDTH."""
    mask = real[:, None]
    if cols.shape[0] > WIDTH:
        mask = mask & (cols < WIDTH)[None, :]
    return tl.load(rows[:, None] + cols[None, :], mask=mask, other=0.0)


@triton.jit
def _dequantized_tile(rows, real, cols, AT, WIDTH, ROW, like):
    """Load columns AT + cols (below AT + WIDTH) of cache rows, dequantised to `like`'s dtype. ROW:
    codes of an int8 row, after which its scales follow (ops/kv_quant.py); 0: rows have no
    scales."""
    t = _tile(rows + AT, real, cols, WIDTH)
    if ROW > 0:
        N: tl.constexpr = t.shape[0]
        C: tl.constexpr = t.shape[1]
        G: tl.constexpr = C // EACH
        scales = (rows + ROW).to(tl.pointer_type(tl.int16), bitcast=True)
        bits = _tile(scales + AT // EACH, real, tl.arange(0, G), (WIDTH + EACH - 1) // EACH)
        scale = (bits.to(tl.int32) << 16).to(tl.float32, bitcast=True)
        t = tl.reshape(t.to(tl.float32), (N, G, EACH)) * scale[:, :, None]
        t = tl.reshape(t, (N, C))
    return t.to(like.dtype)


@triton.jit
def _weigh(s, real, top, total, inner, outer, CAPPED):
    """Online softmax step. Return 2^(scores - new maximum) [M, N], the new maximum [M], the new
    sums [M, N], and the factor [M] that rescales earlier sums. Sums stay per column: a reduction
    over columns takes two barriers, so it runs once, at the end."""
    if CAPPED:
        s = outer * tanh(s * inner)
    else:
        s = s * inner
    s = tl.where(real[None, :], s, float("-inf"))
    highest = tl.maximum(top, tl.max(s, 1))
    p = tl.exp2(s - highest[:, None])
    fade = tl.exp2(top - highest)
    return p, highest, total * fade[:, None] + p, fade


@triton.jit
def _write(out, o, total, GROUP, D):
    """Store the output of a group of query heads, o / total; 0 if no key was visible."""
    h, cols = tl.arange(0, o.shape[0])[:, None], tl.arange(0, o.shape[1])[None, :]
    o = o / tl.where(total > 0, total, 1.0)[:, None]
    tl.store(out + h * D + cols, o.to(out.dtype.element_ty), mask=(h < GROUP) & (cols < D))


@triton.jit
def _put(parts, stats, i, o, top, total, GROUP, D):
    """Store the partial result of split i: o [M, DP], maximum and sum [M]."""
    h, cols = tl.arange(0, o.shape[0]), tl.arange(0, o.shape[1])[None, :]
    tl.store(stats + 2 * i * GROUP + h, top, mask=h < GROUP)
    tl.store(stats + (2 * i + 1) * GROUP + h, total, mask=h < GROUP)
    h = h[:, None]
    tl.store(parts + (i * GROUP + h) * D + cols, o, mask=(h < GROUP) & (cols < D))


@triton.jit
def _merge(parts, stats, number, GROUP, D, DP, STAGES):
    """Merge `number` partial results; return o and the softmax sum."""
    H: tl.constexpr = triton.next_power_of_2(GROUP)
    h, cols = tl.arange(0, H), tl.arange(0, DP)[None, :]
    real = (h < GROUP)[:, None] & (cols < D)
    o = tl.zeros([H, DP], tl.float32)
    top = tl.full([H], float("-inf"), tl.float32)
    total = tl.zeros([H], tl.float32)
    for i in tl.range(0, number, num_stages=STAGES):
        at = stats + 2 * i * GROUP + h
        its = tl.load(at, mask=h < GROUP, other=0.0, cache_modifier=".cg")
        sums = tl.load(at + GROUP, mask=h < GROUP, other=0.0, cache_modifier=".cg")
        part = tl.load(
            parts + (i * GROUP + h[:, None]) * D + cols, mask=real, other=0.0, cache_modifier=".cg"
        )
        highest = tl.maximum(top, its)
        fade, gain = tl.exp2(top - highest), tl.exp2(its - highest)
        o = o * fade[:, None] + part * gain[:, None]
        top, total = highest, total * fade + sums * gain
    return o, total


@triton.jit
def _finish(sums, out, work, split, used, pair, GROUP, D, SPLITS, STAGES):
    """Store a split's partial result (o [M, DP], maximum and sum [M]); the last program of the pair
    (sequence, KV head) merges all of them and stores the output. The result of the only split is
    stored as the output. work: partial results, their maxima and sums, arrival counters."""
    o, top, total = sums
    parts, stats, arrivals = work
    DP: tl.constexpr = o.shape[1]
    out += pair * (GROUP * D)
    if SPLITS == 1 or used == 1:
        _write(out, o, total, GROUP, D)
    else:
        parts += pair * (SPLITS * GROUP * D)
        stats += pair * (SPLITS * GROUP * 2)
        arrivals += pair
        _put(parts, stats, split, o, top, total, GROUP, D)
        if is_last(arrivals, used):
            o1, total1 = _merge(parts, stats, used, GROUP, D, DP, STAGES)
            _write(out, o1, total1, GROUP, D)
            tl.store(arrivals, 0)


@triton.jit
def _no_keys(M, DP, N):
    """Initial o [M, DP], maximum [M] and sums [M, N]."""
    top = tl.full([M], float("-inf"), tl.float32)
    return tl.zeros([M, DP], tl.float32), top, tl.zeros([M, N], tl.float32)


@triton.jit
def _attended(query, caches, share, sums, factors, CAPPED, D, N, ROW: tl.constexpr):
    """Attend to the keys of a split; return o [M, DP], maximum [M] and sums [M, N]. share: lo, hi,
    the slot of key 0, and the number of slots."""
    keys, values, by_slot = caches
    lo, hi, origin, slots = share
    inner, outer = factors
    o, top, total = sums
    cols = tl.arange(0, o.shape[1])
    for at in range(lo, hi, N):
        i = at + tl.arange(0, N)
        slot = _slots(i, origin, slots)
        rows = keys + slot * by_slot
        k = _dequantized_tile(rows, i < hi, cols, 0, D, ROW, query)
        v = _dequantized_tile(values + slot * by_slot, i < hi, cols, 0, D, ROW, query)
        s = tl.dot(query, tl.trans(k), input_precision="ieee")
        p, top, total, fade = _weigh(s, i < hi, top, total, inner, outer, CAPPED)
        o = tl.dot(p.to(v.dtype), v, o * fade[:, None], input_precision="ieee")
    return o, top, total


@triton.jit
def _still_query(q, w, cols, P, D):
    """Return the query whose product with a row of V is that of q with K's unrotated dims (V * w):
    q * w, rounded, on them, and 0 on K's rotated dims."""
    weight = tl.load(w + cols, mask=cols < D, other=0.0).to(tl.float32)
    j = tl.where(cols < D // 2, cols, cols - D // 2)
    still = q.to(tl.float32) * tl.where(j < P, 0.0, weight)[None, :]
    return still.to(q.dtype)


@triton.jit
def _attended_latent(q, w, cache, by_slot, share, factors, CAPPED, GROUP, D, P, PP, M, DP, N, ROW):
    """`_attended` over a latent cache: a row is V and K's 2 P rotated dims (PP: padded); one tile
    of V serves both products, with `_still_query` for K's other dims."""
    lo, hi, origin, slots = share
    inner, outer = factors
    o, top, total = _no_keys(M, DP, N)
    h, cols, dims = tl.arange(0, M), tl.arange(0, DP), tl.arange(0, PP)
    still = _still_query(_tile(q + h * D, h < GROUP, cols, D), w, cols, P, D)
    if P > 0:
        turned_dims = tl.where(dims < P, dims, dims + (D // 2 - P))
        real = (h < GROUP)[:, None] & (dims < 2 * P)[None, :]
        turned = tl.load(q + h[:, None] * D + turned_dims[None, :], mask=real, other=0.0)
    for at in range(lo, hi, N):
        i = at + tl.arange(0, N)
        rows = cache + _slots(i, origin, slots) * by_slot
        v = _dequantized_tile(rows, i < hi, cols, 0, D, ROW, still)
        s = tl.dot(still, tl.trans(v), input_precision="ieee")
        if P > 0:
            k = _dequantized_tile(rows, i < hi, dims, D, 2 * P, ROW, still)
            s = tl.dot(turned, tl.trans(k), s, input_precision="ieee")
        p, top, total, fade = _weigh(s, i < hi, top, total, inner, outer, CAPPED)
        o = tl.dot(p.to(v.dtype), v, o * fade[:, None], input_precision="ieee")
    return o, top, total


@triton.jit
def _decode(
    q,
    ends,
    w,
    keys,
    values,
    arrivals,
    parts,
    stats,
    out,
    slots,
    by_slot,
    by_row,
    by_head,
    inner,
    outer,
    LATENT: tl.constexpr,
    P: tl.constexpr,
    PP: tl.constexpr,
    WINDOW: tl.constexpr,
    CAPPED: tl.constexpr,
    GROUP: tl.constexpr,
    M: tl.constexpr,
    D: tl.constexpr,
    DP: tl.constexpr,
    N: tl.constexpr,
    SPLITS: tl.constexpr,
    STAGES: tl.constexpr,
    ROW: tl.constexpr,
):
    """Attend to one split of one sequence and KV head; grid (SPLITS, n, B). LATENT: `keys` contains
    V too, and `values` is None."""
    split, head, row = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    first, lo, hi, used = _span(tl.load(ends + row), slots, split, WINDOW, SPLITS, N)
    if split < used:
        q += (row * tl.num_programs(1) + head) * GROUP * D
        keys += row * by_row + head * by_head
        if not LATENT:
            values += row * by_row + head * by_head
        share, factors = (lo, hi, (first % slots).to(tl.int32), slots), (inner, outer)
        if not LATENT:
            caches = (keys, values, by_slot)
            h, sums = tl.arange(0, M), _no_keys(M, DP, N)
            query = _tile(q + h * D, h < GROUP, tl.arange(0, DP), D)
            o, top, total = _attended(query, caches, share, sums, factors, CAPPED, D, N, ROW)
        else:
            o, top, total = _attended_latent(
                *(q, w, keys, by_slot, share, factors), *(CAPPED, GROUP, D, P, PP, M, DP, N, ROW)
            )
        work, pair = (parts, stats, arrivals), row * tl.num_programs(1) + head
        sums = (o, top, tl.sum(total, 1))
        _finish(sums, out, work, split, used, pair, GROUP, D, SPLITS, STAGES)


def workspace(out: Tensor, kv_heads: int, splits: int) -> tuple[Tensor, Tensor, dict[str, int]]:
    """Allocate the partial results and their maxima and sums, for an output [B,1,nq,d]; return both
    and the constexprs of the reduction."""
    b, _, heads, d = out.shape
    group = heads // kv_heads
    ahead = max(2, min(AHEAD, splits, IN_FLIGHT_BYTES // (4 * group * d)))
    stored = splits if splits > 1 else 0
    parts = out.new_empty((b, kv_heads, stored, group, d), dtype=torch.float32)
    stats = out.new_empty((b, kv_heads, stored, 2, group), dtype=torch.float32)
    return parts, stats, {"SPLITS": splits, "STAGES": ahead + 1}


def constants(out: Tensor, kv_heads: int, window: int, softcap: float) -> dict[str, Any]:
    """Return the constexprs for an output [B,1,nq,d]."""
    d, group = out.shape[3], out.shape[2] // kv_heads
    sizes = {"M": max(16, power_of_2(group)), "D": d, "DP": max(16, power_of_2(d))}
    return {"WINDOW": window, "CAPPED": softcap > 0, "GROUP": group, **sizes}


def factors(scale: float, softcap: float) -> tuple[float, float]:
    """Return (inner, outer): the base-2 score of a dot product x is inner * x, or with a softcap
    outer * tanh(inner * x)."""
    return (scale / softcap, softcap * log2(e)) if softcap else (scale * log2(e), 0.0)


def _layout(q: Tensor, cache: Tensor, latent: bool, n: int) -> dict[str, Any]:
    """Return the constexprs of a cache's layout; N: keys per block, at most n."""
    row = values_in_row(cache.shape[3]) if cache.dtype == torch.int8 else 0
    if not latent:
        return {"P": 0, "PP": 16, "ROW": row, "N": n}
    pairs = ((row or cache.shape[3]) - q.shape[3]) // 2
    padded = max(CODES if row else 16, power_of_2(2 * pairs))
    return {"P": pairs, "PP": padded, "ROW": row, "N": min(n, CODED_KEYS) if row else n}


@triton_op("g4ir::decode_attention", mutates_args={"arrivals"})
def decode_attention(
    q: Tensor,
    end: Tensor,
    w: Tensor | None,
    caches: list[Tensor],
    arrivals: Tensor,
    window: int,
    scale: float,
    softcap: float,
    splits: int,
    block_n: int,
    warps: int,
    stages: int,
) -> Tensor:
    """Compute `attention` of each sequence's newest token over its KV cache: [B,1,nq,d].

    q [B,1,nq,d]; end i64[B] tokens written to the cache, the query's among them: its position is
    end - 1; caches k, v [C,B,n,d] of equal strides, contiguous in the last dim, or quantised rows
    (ops/kv_quant.py; int8: d a multiple of 32); arrivals: at least B * n elements of i64, 0 before
    and after. A sequence without tokens yields 0. splits: maximum programs per sequence and KV
    head, each but the last of at least block_n keys.

    With w [d], the weight of K's norm, computes `attention_latent` over one cache [C,B,n,d+2p].
    """
    if not takes(q):
        arrivals.zero_()
        both = caches if w is None else keys_values(dequantize_rows(caches[0], q.dtype), w)
        return attention.reference(
            *(q, end[:, None] - 1, end, *both), window=window, scale=scale, softcap=softcap
        )
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    slots, b, n, _ = caches[0].shape
    parts, stats, sums = workspace(out, n, splits)
    keys, values = caches if len(caches) == 2 else (caches[0], None)
    if values is not None and values.stride() != keys.stride():
        raise ValueError(f"K and V caches: unequal strides {keys.stride()}, {values.stride()}")
    operands: list[Any] = [q.contiguous(), end, w, keys, values, arrivals, parts, stats, out]
    operands += [slots, *keys.stride()[:3], *factors(scale, softcap)]
    start(
        _decode,
        (splits, n, b),
        operands,
        LATENT=w is not None,
        **_layout(q, keys, w is not None, block_n),
        **constants(out, n, window, softcap),
        **sums,
        num_warps=warps,
        num_stages=stages,
    )
    return out
