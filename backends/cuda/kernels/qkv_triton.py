"""The steps from a projection to attention: per-head norms, rotation, the write into the caches.

One program per row and head, in the projection's order: query heads, key heads, value heads where V
has a projection of its own; else the program of a key head makes V too. A head is read once, as two
tiles, elements i and i + d/2, so that the rotation needs no exchange between threads; every load is
started before the first sum. Query programs also zero the counters of the attention that follows.

Error budget. The roundings are those of the ops `rms_norm` and `rope`; the order in which squares
are added differs, and the reciprocal root, within two fp32 units. An fp32 result is within 1e-6 of
the head's rms. A bf16 result equals the op's but for one value in some thousand, by one unit, which
a rotation passes on to both elements of the pair.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch.library import triton_op

from g4ir.ops.attention import cache_write
from g4ir.ops.latent import latent_row
from g4ir.ops.norm import rms_norm
from g4ir.ops.qkv import APART
from g4ir.ops.rope import rope

from .launch import power_of_2, rounded, takes
from .launch import start as start_kernel

Tensor = torch.Tensor


@triton.jit
def _halves(x, i, keep, D):
    """fp32 elements i and i + D/2 of the head at x."""
    low = tl.load(x + i, mask=keep, other=0).to(tl.float32)
    high = tl.load(x + D // 2 + i, mask=keep, other=0).to(tl.float32)
    return low, high


@triton.jit
def _put(y, low, high, i, keep, SPAN):
    """Store two halves at y, SPAN elements apart, rounded."""
    tl.store(y + i, low.to(y.dtype.element_ty), mask=keep)
    tl.store(y + SPAN + i, high.to(y.dtype.element_ty), mask=keep)


@triton.jit
def _reciprocal_rms(low, high, eps, D):
    """(mean(x^2) + eps)^-0.5 of both halves of a head."""
    return tl.rsqrt(tl.sum(low * low + high * high, 0) / D + eps)


@triton.jit
def _rotated(low, high, w, cos, sin, like):
    """Normed halves [BLOCK] times the halves w of the weight, rotated by the halves of the tables.

    Rounded after the weight and after each product; the sums are left to their store.
    """
    low, high = rounded(low * w[0], like), rounded(high * w[1], like)
    x = rounded(low * cos[0], like) - rounded(high * sin[0], like)
    y = rounded(high * cos[1], like) + rounded(low * sin[1], like)
    return x, y


@triton.jit
def _query(x, w, cos, sin, y, count, head, eps, KV, D, H):
    """y = rope(rms_norm(x, w)) of the head at x; the counters `count` [KV] of its row are zeroed by
    the first KV heads."""
    i = tl.arange(0, H)
    keep = i < D // 2
    low, high = _halves(x, i, keep, D)
    g, c, s = _halves(w, i, keep, D), _halves(cos, i, keep, D), _halves(sin, i, keep, D)
    if head < KV:
        tl.store(count + head, 0)
    r = _reciprocal_rms(low, high, eps, D)
    low, high = _rotated(low * r, high * r, g, c, s, y)
    _put(y, low, high, i, keep, D // 2)


@triton.jit
def _slot(cache, slot, row, head, by_slot, by_row, by_head):
    """The elements of a cache that belong to a head of a row in a slot; strides in elements."""
    return cache + slot * by_slot + row.to(tl.int64) * by_row + head.to(tl.int64) * by_head


@triton.jit
def _qkv_write(
    qkv,
    norm_q,
    norm_k,
    cos,
    sin,
    start,
    lengths,
    first,
    second,
    q,
    arrivals,
    slots,
    slot_1,
    row_1,
    head_1,
    slot_2,
    row_2,
    head_2,
    eps,
    HEADS: tl.constexpr,
    KV: tl.constexpr,
    VALUES: tl.constexpr,
    FORM: tl.constexpr,
    P: tl.constexpr,
    D: tl.constexpr,
    H: tl.constexpr,
):
    """qkv [B, N, D], N = HEADS + KV [+ KV if VALUES]; norm_q, norm_k [D]; cos, sin [B, D]; start,
    lengths [B]; q [B, HEADS, D]; arrivals [B, KV]. Grid: N, B.

    first, second: the caches, [slots, B, KV, width] of any strides but the last; second is None
    in the form `value`. V of the form `unnormed` is not normed. FORM is empty where all heads are
    queries. H: power of two, at least D/2.
    """
    head, row = tl.program_id(0), tl.program_id(1)
    x = qkv + (row.to(tl.int64) * tl.num_programs(0) + head) * D
    cos += row * D
    sin += row * D
    if head < HEADS:
        y = q + (row.to(tl.int64) * HEADS + head) * D
        _query(x, norm_q, cos, sin, y, arrivals + row * KV, head, eps, KV, D, H)
    elif FORM != "":
        i = tl.arange(0, H)
        keep = i < D // 2
        is_key = head < HEADS + KV
        turned = is_key & (i < (P if FORM == "value" else D // 2))
        place, length = tl.load(start + row), tl.load(lengths + row)
        low, high = _halves(x, i, keep, D)
        w, c = _halves(norm_k, i, turned, D), _halves(cos, i, turned, D)
        s = _halves(sin, i, turned, D)
        r = _reciprocal_rms(low, high, eps, D)
        # after the loads, which would wait for it; a division of 64 bits is a slow loop
        slot, j = (place.to(tl.int32) % slots).to(tl.int64), (head - HEADS) % KV
        keep, turned = keep & (length > 0), turned & (length > 0)
        to = _slot(first, slot, row, j, slot_1, row_1, head_1)
        if FORM != "value":
            also = _slot(second, slot, row, j, slot_2, row_2, head_2)
        v_low, v_high = low, high
        low, high = low * r, high * r
        k_low, k_high = _rotated(low, high, w, c, s, first)
        if FORM != "unnormed":
            v_low, v_high = low, high
        if FORM == "value":
            _put(to, v_low, v_high, i, keep, D // 2)
            _put(to + D, k_low, k_high, i, turned, P)
        else:
            _put(to, k_low, k_high, i, turned, D // 2)
            _put(also, v_low, v_high, i, keep & (is_key != VALUES), D // 2)


def _start(
    x: Tensor,
    norms: tuple[Tensor, Tensor | None],
    tables: tuple[Tensor, Tensor],
    places: tuple[Tensor | None, Tensor | None],
    caches: list[Tensor],
    heads: int,
    eps: float,
    warps: int,
    kv_heads: int,
    values: bool = False,
    form: str = "",
    pairs: int = 0,
) -> tuple[Tensor, Tensor]:
    """Return q [B,1,nq,d], and arrivals i64[B,n]; places: where tokens begin, and how many."""
    rows, d = x.shape[0], norms[0].shape[0]
    q = x.new_empty((rows, 1, heads, d))
    arrivals = x.new_empty((rows, kv_heads), dtype=torch.int64)
    first, second = (*caches, None, None)[:2]
    strides = [s for c in (first, second) for s in (c.stride()[:3] if c is not None else (0, 0, 0))]
    slots = 0 if first is None else first.shape[0]
    given = (t if t is None else t.contiguous() for t in (*tables, *places))
    start_kernel(
        _qkv_write,
        (x.shape[1:].numel() // d, rows),
        (x.contiguous(), *norms, *given, first, second, q, arrivals, slots, *strides, eps),
        HEADS=heads,
        KV=kv_heads,
        VALUES=values,
        FORM=form,
        P=pairs,
        D=d,
        H=power_of_2(d // 2),
        num_warps=warps,
    )
    return q, arrivals


def _norm_rope(x: Tensor, w: Tensor, cos: Tensor, sin: Tensor, eps: float) -> Tensor:
    """Compute the expansion of the op `norm_rope`."""
    y: Tensor = rope.reference(rms_norm.reference(x, w, eps=eps), cos, sin)
    return y


def _q_reference(
    q: Tensor, norm_q: Tensor, cos: Tensor, sin: Tensor, heads: int, kv_heads: int, eps: float
) -> tuple[Tensor, Tensor]:
    x = q.unflatten(-1, (heads, norm_q.shape[0]))
    arrivals = torch.zeros(q.shape[0], kv_heads, dtype=torch.int64, device=q.device)
    return _norm_rope(x, norm_q, cos, sin, eps), arrivals


def _rows(
    k: Tensor,
    v: Tensor,
    norm_k: Tensor,
    cos: Tensor,
    sin: Tensor,
    form: str,
    pairs: int,
    eps: float,
) -> list[Any]:
    """Return the rows that the caches of a form hold of the projections k, v [B,1,n,d]."""
    key = _norm_rope(k, norm_k, cos, sin, eps)
    value = v if form == "unnormed" else rms_norm.reference(v, eps=eps)
    return [key, value] if form in APART else [latent_row.reference(value, key, pairs=pairs)]


@triton_op("g4ir::qkv_write", mutates_args={"caches"})
def qkv_write(
    qkv: Tensor,
    norm_q: Tensor,
    norm_k: Tensor,
    cos: Tensor,
    sin: Tensor,
    start: Tensor,
    lengths: Tensor,
    caches: list[Tensor],
    heads: int,
    kv_heads: int,
    values: bool,
    form: str,
    pairs: int,
    eps: float,
    warps: int,
) -> tuple[Tensor, Tensor]:
    """Return (norm_rope of the query heads [B,1,nq,d], zeros i32[B,n]); K and V go into their
    caches

    qkv [B,1,(nq + n [+ n]) d]: query heads, key heads, value heads if `values`; otherwise V is of
    the keys' projection. norm_q, norm_k [d]; cos, sin [B,1,d]; start i64[B] the position of the
    token, below 2^31, and so its slot, modulo C; lengths i64[B], 0 for a row that leaves its caches
    as they are and 1 for the others. caches [C,B,n,*], any strides but the last, of one of three
    forms: `plain` k, v of width d; `unnormed` the same, v as projected; `value` one of d + 2 pairs,
    the `latent_row`. The zeros are counters of the attention that reads the caches.
    """
    d = norm_q.shape[0]
    if not takes(qkv):
        q, k, *v = qkv.split([n * d for n in (heads, kv_heads, *[kv_heads] * values)], -1)
        k, value = (x.unflatten(-1, (kv_heads, d)) for x in (k, v[0] if values else k))
        rows = _rows(k, value, norm_k, cos, sin, form, pairs, eps)
        for cache, row in zip(caches, rows, strict=True):
            cache.copy_(cache_write.reference(cache, row, start, lengths))
        return _q_reference(q, norm_q, cos, sin, heads, kv_heads, eps)
    norms, tables, places = (norm_q, norm_k), (cos, sin), (start, lengths)
    sizes = (heads, eps, warps, kv_heads, values, form, pairs)
    return _start(qkv, norms, tables, places, caches, *sizes)


@triton_op("g4ir::q_heads", mutates_args={})
def q_heads(
    q: Tensor,
    norm_q: Tensor,
    cos: Tensor,
    sin: Tensor,
    heads: int,
    kv_heads: int,
    eps: float,
    warps: int,
) -> tuple[Tensor, Tensor]:
    """Return the results of `qkv_write` for a layer that reads other caches; q [B,1,nq d]."""
    if not takes(q):
        return _q_reference(q, norm_q, cos, sin, heads, kv_heads, eps)
    return _start(q, (norm_q, None), (cos, sin), (None, None), [], heads, eps, warps, kv_heads)
