"""Attention of one new token per row, from its projection on: norms, rotation, the write, the rest.

As decode_attention_triton.py, whose shares and sums these are; only where queries and the newest
key come from differs. Each program norms and rotates the queries of its group. The newest key and
value are made by the program with the last share alone: it writes them into the caches for later
steps, and begins its share with them as they lie in its registers, so that no program reads what
the kernel writes. In a ring the slot that is overwritten is one that the query no longer sees.

The counters have to be zero before: the product in front sets them, whose kernel has ended.

Numerics: the roundings of `qkv_write`, then those of `decode_attention`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch.library import triton_op

from .decode_attention_triton import (
    _attended,
    _finish,
    _prepared,
    _span,
    decode_attention,
)
from .launch import begin, fetch_row, ready, rounded, start, takes, tanh
from .qkv_triton import q_heads, qkv_write

Tensor = torch.Tensor


@triton.jit
def _head(x, real, cols, eps, like, D: tl.constexpr):
    """Heads at x [R, 1], of which `real` [R, 1] exist: their elements `cols` [1, DP] and those that
    a rotation pairs with them, normed."""
    mask = real & (cols < D)
    other = tl.where(cols < D // 2, cols + D // 2, cols - D // 2)
    own = tl.load(x + cols, mask=mask, other=0.0).to(tl.float32)
    pair = tl.load(x + other, mask=mask, other=0.0).to(tl.float32)
    r = tl.rsqrt(tl.sum(own * own, 1) / D + eps)[:, None]
    return own * r, pair * r


@triton.jit
def _turned(own, pair, w, cos, sin, cols, like, D: tl.constexpr):
    """Normed elements and their pairs [R, DP], times the weight, rotated; rounded after each."""
    mask = cols < D
    other = tl.where(cols < D // 2, cols + D // 2, cols - D // 2)
    g = tl.load(w + cols, mask=mask, other=0.0).to(tl.float32)
    h = tl.load(w + other, mask=mask, other=0.0).to(tl.float32)
    c = tl.load(cos + cols, mask=mask, other=0.0).to(tl.float32)
    s = tl.load(sin + cols, mask=mask, other=0.0).to(tl.float32)
    turn = rounded(rounded(pair * h, like) * s, like)
    y = rounded(rounded(own * g, like) * c, like) + tl.where(cols < D // 2, -turn, turn)
    return y.to(like.dtype.element_ty)


@triton.jit
def _begun(query, k, v, inner, outer, o, top, total, CAPPED: tl.constexpr):
    """o, maximum and sums of one key k and its value v [1, DP]."""
    s = tl.sum(query.to(tl.float32) * k.to(tl.float32), 1)
    if CAPPED:
        s = outer * tanh(s * inner)
    else:
        s = s * inner
    first = (tl.arange(0, total.shape[1]) == 0)[None, :]
    return o + v.to(tl.float32), s, total + tl.where(first, 1.0, 0.0)


@triton.jit
def _qkv_decode(
    x,
    norm_q,
    norm_k,
    cos,
    sin,
    lengths,
    ends,
    keys,
    values,
    arrivals,
    parts,
    stats,
    out,
    slots,
    k_slot,
    k_row,
    k_head,
    v_slot,
    v_row,
    v_head,
    inner,
    outer,
    eps,
    NEW: tl.constexpr,
    HEADS: tl.constexpr,
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
    """One share of one row and key head, grid (SPLITS, n, B); x [B, HEADS, D], cos, sin [B, D].

    NEW: 0, where another layer writes the caches: x has the queries alone; 1 where K and V are of
    the same heads of x, behind the queries; 2 where V has heads of its own behind them.
    """
    split, head, row = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    begin(AHEAD)
    fetch_row(norm_q, D, AHEAD)
    fetch_row(norm_k, D, AHEAD)
    ready(AHEAD)
    end = tl.load(ends + row)
    first, lo, hi, used = _span(end, slots, split, WINDOW, SPLITS, N)
    if split < used:
        origin = (first % slots).to(tl.int32)
        h, cols = tl.arange(0, M)[:, None], tl.arange(0, DP)
        x += row * (HEADS * D)
        cos += row * D
        sin += row * D
        heads = x + (head * GROUP + h) * D
        own, pair = _head(heads, h < GROUP, cols[None, :], eps, x, D)
        query = _turned(own, pair, norm_q, cos, sin, cols[None, :], x, D)
        keys += row * k_row + head * k_head
        values += row * v_row + head * v_head
        o = tl.zeros([M, DP], tl.float32)
        top = tl.full([M], float("-inf"), tl.float32)
        total = tl.zeros([M, N], tl.float32)
        if NEW > 0:
            last = (split == used - 1) & (tl.load(lengths + row) > 0)
            if last:
                hi -= 1
                at = x + ((tl.num_programs(1) * GROUP + head) * D + tl.zeros([1, 1], tl.int32))
                line, real = cols[None, :], tl.full([1, 1], 1, tl.int1)
                k_own, k_pair = _head(at, real, line, eps, x, D)
                k = _turned(k_own, k_pair, norm_k, cos, sin, line, x, D)
                if NEW == 2:
                    k_own, _ = _head(at + tl.num_programs(1) * D, real, line, eps, x, D)
                v = k_own.to(x.dtype.element_ty)
                slot = ((end - 1) % slots).to(tl.int64)
                tl.store(keys + slot * k_slot + line, k, mask=line < D)
                tl.store(values + slot * v_slot + line, v, mask=line < D)
                o, top, total = _begun(query, k, v, inner, outer, o, top, total, CAPPED)
        o, top, total = _attended(
            query,
            keys,
            values,
            lo,
            hi,
            origin,
            slots,
            k_slot,
            v_slot,
            o,
            top,
            total,
            cols,
            inner,
            outer,
            CAPPED,
            D,
            N,
        )
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


def _start(
    x: Tensor,
    heads: int,
    norms: tuple[Tensor, Tensor],
    tables: tuple[Tensor, Tensor],
    lengths: Tensor,
    written: Tensor,
    caches: list[Tensor],
    arrivals: Tensor,
    eps: float,
    new: int,
    rules: tuple[int, float, float],
    use: tuple[int, int, int, int],
) -> Tensor:
    """Fill and return the result; rules: window, scale, softcap; use: splits, block_n, warps,
    stages."""
    d = norms[0].shape[0]
    out = x.new_empty((x.shape[0], 1, heads, d))
    grid, operands, constants = _prepared(out, (), caches, arrivals, rules, use)
    start(
        _qkv_decode,
        grid,
        (
            x.contiguous(),
            *norms,
            *(t.contiguous() for t in (*tables, lengths, written)),
            *caches,
            *operands,
            eps,
        ),
        NEW=new,
        HEADS=x.shape[1:].numel() // d,
        **constants,
    )
    return out


@triton_op("g4ir::qkv_attention", mutates_args={"caches", "arrivals"})
def qkv_attention(
    qkv: Tensor,
    norm_q: Tensor,
    norm_k: Tensor,
    cos: Tensor,
    sin: Tensor,
    begin: Tensor,
    lengths: Tensor,
    written: Tensor,
    caches: list[Tensor],
    arrivals: Tensor,
    heads: int,
    kv_heads: int,
    values: bool,
    eps: float,
    window: int,
    scale: float,
    softcap: float,
    splits: int,
    block_n: int,
    warps: int,
    stages: int,
) -> Tensor:
    """Compute `qkv_attention`, [B,1,nq,d]; K and V go into the caches

    Operands to `lengths` as in the kernel `qkv_write`; written i64[B] tokens in the caches
    afterwards; arrivals i64[B,n], 0 before and after, and the rest as in `decode_attention`.
    """
    if not takes(qkv):
        arrivals.zero_()
        given = (qkv, norm_q, norm_k, cos, sin, begin, lengths, caches)
        q, _ = qkv_write(*given, heads, kv_heads, values, "plain", 0, eps, 1)
        use = (splits, block_n, warps, stages)
        out: Tensor = decode_attention(q, written, *caches, arrivals, window, scale, softcap, *use)
        return out
    return _start(
        qkv,
        heads,
        (norm_q, norm_k),
        (cos, sin),
        lengths,
        written,
        caches,
        arrivals,
        eps,
        1 + values,
        (window, scale, softcap),
        (splits, block_n, warps, stages),
    )


@triton_op("g4ir::q_attention", mutates_args={"arrivals"})
def q_attention(
    q: Tensor,
    norm_q: Tensor,
    cos: Tensor,
    sin: Tensor,
    written: Tensor,
    caches: list[Tensor],
    arrivals: Tensor,
    eps: float,
    window: int,
    scale: float,
    softcap: float,
    splits: int,
    block_n: int,
    warps: int,
    stages: int,
) -> Tensor:
    """Compute `q_attention` of projected queries [B,1,nq,d]; operands as in `qkv_attention`."""
    heads = q.shape[2]
    if not takes(q):
        arrivals.zero_()
        kv_heads, use = caches[0].shape[2], (splits, block_n, warps, stages)
        made, _ = q_heads(q.flatten(-2), norm_q, cos, sin, heads, kv_heads, eps, 1)
        out: Tensor = decode_attention(
            made, written, *caches, arrivals, window, scale, softcap, *use
        )
        return out
    return _start(
        q,
        heads,
        (norm_q, norm_q),
        (cos, sin),
        written,
        written,
        caches,
        arrivals,
        eps,
        0,
        (window, scale, softcap),
        (splits, block_n, warps, stages),
    )
