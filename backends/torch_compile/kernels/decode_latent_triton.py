"""Attention of one new token per row over a latent cache (g4ir/ops/latent.py), split over the keys.

Splits, partial results and numerics are those of decode_attention_triton.py: the form `value` holds
V and K's rotated dims, the form `raw` the projection before its norm. `raw` multiplies scores and
probabilities by the reciprocal rms, and rounds K's rotated dims as the ops do.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch.library import triton_op

from g4ir.ops.attention import attention, slot_positions
from g4ir.ops.kv_quant import GROUP as CODES
from g4ir.ops.kv_quant import numbers
from g4ir.ops.latent import keys_values_of_value

from .decode_attention_triton import (
    CODED_KEYS,
    _finish,
    _numbers,
    _prepared,
    _row,
    _slots,
    _span,
    _strides,
    _tile,
    _weigh,
)
from .launch import begin, fetch_row, power_of_2, ready, rounded, start, takes

Tensor = torch.Tensor


@triton.jit
def _still_query(q, w, cols, P: tl.constexpr, D: tl.constexpr):
    """The query for V: q * w, rounded, where K is not rotated, else 0."""
    weight = tl.load(w + cols, mask=cols < D, other=0.0).to(tl.float32)
    j = tl.where(cols < D // 2, cols, cols - D // 2)
    still = q.to(tl.float32) * tl.where(j < P, 0.0, weight)[None, :]
    return still.to(q.dtype)


@triton.jit
def _decode_value(
    q,
    ends,
    w,
    cache,
    arrivals,
    parts,
    stats,
    out,
    slots,
    q_row,
    q_head,
    c_slot,
    c_row,
    c_head,
    inner,
    outer,
    P: tl.constexpr,
    P2: tl.constexpr,
    WINDOW: tl.constexpr,
    CAPPED: tl.constexpr,
    GROUP: tl.constexpr,
    M: tl.constexpr,
    D: tl.constexpr,
    DP: tl.constexpr,
    N: tl.constexpr,
    SPLITS: tl.constexpr,
    FAN: tl.constexpr,
    BITS: tl.constexpr,
    STAGES: tl.constexpr,
    ROW: tl.constexpr,
    AHEAD: tl.constexpr = False,
):
    """`_decode` over rows of V and K's 2 P rotated dims (P2: padded): one tile of V is both."""
    split, head, row = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    begin(AHEAD)
    fetch_row(w, D, AHEAD)
    ready(AHEAD)
    first, lo, hi, used = _span(tl.load(ends + row), slots, split, WINDOW, SPLITS, N)
    if split < used:
        origin = (first % slots).to(tl.int32)
        h, cols, both = tl.arange(0, M), tl.arange(0, DP), tl.arange(0, P2)
        q += row * q_row + head * GROUP * q_head
        still = _still_query(_tile(q + h * q_head, h < GROUP, cols, D), w, cols, P, D)
        if P > 0:
            at = tl.where(both < P, both, both + (D // 2 - P))
            real = (h < GROUP)[:, None] & (both < 2 * P)[None, :]
            turned = tl.load(q + h[:, None] * q_head + at[None, :], mask=real, other=0.0)
        cache += row * c_row + head * c_head
        o = tl.zeros([M, DP], tl.float32)
        top = tl.full([M], float("-inf"), tl.float32)
        total = tl.zeros([M, N], tl.float32)
        for at in range(lo, hi, N):
            i = at + tl.arange(0, N)
            rows = cache + _slots(i, origin, slots) * c_slot
            v = _numbers(rows, i < hi, cols, 0, D, ROW, still)
            s = tl.dot(still, tl.trans(v), input_precision="ieee")
            if P > 0:
                k = _numbers(rows, i < hi, both, D, 2 * P, ROW, still)
                s = tl.dot(turned, tl.trans(k), s, input_precision="ieee")
            p, top, total, fade = _weigh(s, i < hi, top, total, inner, outer, CAPPED)
            o = tl.dot(p.to(v.dtype), v, o * fade[:, None], input_precision="ieee")
        _finish(
            o,
            top,
            tl.sum(total, 1),
            out,
            parts,
            stats,
            arrivals,
            split,
            used,
            row * tl.num_programs(1) + head,
            GROUP,
            D,
            SPLITS,
            FAN,
            BITS,
            STAGES,
        )


@triton.jit
def _cos_sin(x):
    """cos and sin of fp32 0 <= x < 2^18, off by less than 2e-7.

    x - k pi / 2 in three steps: the first two parts of pi / 2 have 8 bits each, so that fused, or
    for k < 2^16, what remains is exact; then Taylor's sums on [-pi / 4, pi / 4]. The library's
    functions take a slow path through local memory for the angles of late positions.
    """
    k = tl.floor(x * 0.6366197723675814 + 0.5)
    r = tl.fma(k, -1.5703125, x)
    r = tl.fma(k, -0.0004825592041015625, r)
    r = tl.fma(k, -1.2675907950567314e-06, r)
    z = r * r
    cos = 1 + z * (-1 / 2 + z * (1 / 24 + z * (-1 / 720 + z * (1 / 40320))))
    sin = r + r * z * (-1 / 6 + z * (1 / 120 + z * (-1 / 5040 + z * (1 / 362880))))
    quarter = k.to(tl.int32) & 3
    odd = (quarter & 1) == 1
    c, s = tl.where(odd, sin, cos), tl.where(odd, cos, sin)
    return tl.where((quarter == 1) | (quarter == 2), -c, c), tl.where(quarter >= 2, -s, s)


@triton.jit
def _turned_keys(rows, real, factor, position, w, freqs, pair, P: tl.constexpr, D: tl.constexpr):
    """The rotated dims of K at `position`, low and high [N, pairs], from raw rows and their
    reciprocal rms, with the roundings of the norm, the table and the rotation."""
    dtype = w.dtype.element_ty
    angle = position.to(tl.float32)[:, None] * tl.load(freqs + pair, mask=pair < P, other=0.0)
    cos, sin = _cos_sin(angle)
    cos, sin = rounded(cos, w), rounded(sin, w)
    w_low = tl.load(w + pair, mask=pair < P, other=0.0).to(tl.float32)
    w_high = tl.load(w + D // 2 + pair, mask=pair < P, other=0.0).to(tl.float32)
    low = _tile(rows, real, pair, P).to(tl.float32) * factor[:, None] * w_low
    high = _tile(rows + D // 2, real, pair, P).to(tl.float32) * factor[:, None] * w_high
    low, high = rounded(low, w), rounded(high, w)
    k_low = rounded(low * cos, w) - rounded(high * sin, w)
    k_high = rounded(high * cos, w) + rounded(low * sin, w)
    return k_low.to(dtype), k_high.to(dtype)


@triton.jit
def _decode_raw(
    q,
    ends,
    w,
    freqs,
    cache,
    rms,
    arrivals,
    parts,
    stats,
    out,
    slots,
    q_row,
    q_head,
    c_slot,
    c_row,
    c_head,
    r_slot,
    r_row,
    r_head,
    inner,
    outer,
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
    FAN: tl.constexpr,
    BITS: tl.constexpr,
    STAGES: tl.constexpr,
    AHEAD: tl.constexpr = False,
):
    """`_decode` over raw rows, V = raw * rms: the reciprocal rms multiplies scores and
    probabilities, and K's P rotated pairs (PP: padded) are made again."""
    split, head, row = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    begin(AHEAD)
    fetch_row(w, D, AHEAD)
    ready(AHEAD)
    first, lo, hi, used = _span(tl.load(ends + row), slots, split, WINDOW, SPLITS, N)
    if split < used:
        origin = (first % slots).to(tl.int32)
        h, cols, pair = tl.arange(0, M), tl.arange(0, DP), tl.arange(0, PP)
        q += row * q_row + head * GROUP * q_head
        still = _still_query(_tile(q + h * q_head, h < GROUP, cols, D), w, cols, P, D)
        if P > 0:
            q_low = _tile(q + h * q_head, h < GROUP, pair, P)
            q_high = _tile(q + D // 2 + h * q_head, h < GROUP, pair, P)
        cache += row * c_row + head * c_head
        rms += row * r_row + head * r_head
        o = tl.zeros([M, DP], tl.float32)
        top = tl.full([M], float("-inf"), tl.float32)
        total = tl.zeros([M, N], tl.float32)
        for at in range(lo, hi, N):
            i = at + tl.arange(0, N)
            slot = _slots(i, origin, slots)
            rows = cache + slot * c_slot
            raw = _tile(rows, i < hi, cols, D)
            factor = tl.load(rms + slot * r_slot, mask=i < hi, other=0.0)
            s = tl.dot(still, tl.trans(raw), input_precision="ieee") * factor[None, :]
            if P > 0:
                low, high = _turned_keys(rows, i < hi, factor, first + i, w, freqs, pair, P, D)
                s = tl.dot(q_low, tl.trans(low), s, input_precision="ieee")
                s = tl.dot(q_high, tl.trans(high), s, input_precision="ieee")
            p, top, total, fade = _weigh(s, i < hi, top, total, inner, outer, CAPPED)
            p = (p * factor[None, :]).to(raw.dtype)
            o = tl.dot(p, raw, o * fade[:, None], input_precision="ieee")
        _finish(
            o,
            top,
            tl.sum(total, 1),
            out,
            parts,
            stats,
            arrivals,
            split,
            used,
            row * tl.num_programs(1) + head,
            GROUP,
            D,
            SPLITS,
            FAN,
            BITS,
            STAGES,
        )


def _of_raw(
    raw: Tensor, rms: Tensor, w: Tensor, freqs: Tensor, end: Tensor
) -> tuple[Tensor, Tensor]:
    """Return K and V of rows in the form `raw`, as the op's reference makes them."""
    half, pairs = w.shape[0] // 2, freqs.shape[0]
    h = raw.float() * rms
    low, rest1, high, rest2 = (
        (h * w.float()).to(w.dtype).split([pairs, half - pairs, pairs, half - pairs], -1)
    )
    angle = slot_positions(end, raw.shape[0]).float()[..., None] * freqs
    cos, sin = (x.to(w.dtype)[:, :, None] for x in (angle.cos(), angle.sin()))
    turned = (low * cos - high * sin, rest1, high * cos + low * sin, rest2)
    return torch.cat(turned, -1), h.to(w.dtype)


@triton_op("g4ir::decode_attention_latent", mutates_args={"arrivals"})
def decode_attention_latent(
    q: Tensor,
    end: Tensor,
    w: Tensor,
    caches: list[Tensor],
    arrivals: Tensor,
    freqs: Tensor,
    form: str,
    window: int,
    scale: float,
    softcap: float,
    splits: int,
    block_n: int,
    warps: int,
    stages: int,
) -> Tensor:
    """Compute `decode_attention` over caches in the form `value` or `raw` of `attention_latent`

    w [d] the weight of K's norm, of q's dtype as the table was; caches [C,B,n,d+2p], or [C,B,n,d]
    and f32 [C,B,n,1]; freqs f32[p] the inverse frequencies of the rotated pairs, which only the
    form `raw` reads.
    """
    if not takes(q):
        arrivals.zero_()
        if form == "value":
            keys, values = keys_values_of_value(numbers(caches[0], q.dtype), w)
        else:
            keys, values = _of_raw(caches[0], caches[1], w, freqs, end)
        out: Tensor = attention.reference(
            q, end[:, None] - 1, end, keys, values, window=window, scale=scale, softcap=softcap
        )
        return out
    rules, use = (window, scale, softcap), (splits, block_n, warps, stages)
    made, strides = torch.empty(q.shape, dtype=q.dtype, device=q.device), _strides(q)
    grid, operands, constants = _prepared(made, strides, caches, arrivals, rules, use)
    if form == "value":
        row = _row(caches[0])
        pairs = ((row["ROW"] or caches[0].shape[3]) - q.shape[3]) // 2
        constants |= {"P": pairs, "P2": max(16, power_of_2(2 * pairs)), **row}
        if row["ROW"]:
            constants |= {"P2": max(CODES, constants["P2"]), "N": min(block_n, CODED_KEYS)}
        start(_decode_value, grid, (q, end, w, *caches, *operands), **constants)
    else:
        pairs = freqs.shape[0]
        constants |= {"P": pairs, "PP": max(16, power_of_2(pairs))}
        start(_decode_raw, grid, (q, end, w, freqs, *caches, *operands), **constants)
    return made
