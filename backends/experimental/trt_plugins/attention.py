"""Attention of new tokens over a full-length cache [B, n, M, d], in two kernels.

`decode_parts` splits the keys that a token sees among programs, each for all query heads of one key
head; `decode_merge` adds their partial results in the order of the shares. A single token's keys
are shared by SPLITS programs, those of a token of a chunk by fewer: there are enough programs then.
So one form serves decode and prefill, and no conditional, which cannot be recorded, chooses. It is
made for decode: tokens of a chunk read K and V each for itself. A plugin has no memory of its own
that is 0 before it starts, so the counter by which the last program of
`torch_compile/kernels/decode_attention_triton.py` does this in the first kernel has no place here.
A program computes the same as that kernel, with the same numerics.

Key j is visible if j <= position and j < C, the slots that this step looks at; a position that
means nothing, as when somebody times the kernels, is put into this range.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ...torch_compile.kernels.decode_attention_triton import (
    _merge,
    _put,
    _span,
    _tile,
    _weigh,
    _write,
)


@triton.jit
def _end(positions, row, looked_at, SLOTS: tl.constexpr):
    """How many keys the token sees, at least one."""
    end = tl.minimum(tl.load(positions + row), tl.minimum(looked_at, SLOTS) - 1) + 1
    return tl.maximum(end, 1)


@triton.jit
def decode_parts(
    q,
    keys,
    values,
    positions,
    slots,
    looked_at,
    tokens,
    parts,
    stats,
    INNER: tl.constexpr,
    OUTER: tl.constexpr,
    CAPPED: tl.constexpr,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    M: tl.constexpr,
    D: tl.constexpr,
    DP: tl.constexpr,
    SLOTS: tl.constexpr,
    N: tl.constexpr,
    SPLITS: tl.constexpr,
    WINDOW: tl.constexpr,
):
    """One share of one token and key head; grid (B * S, HEADS, shares), shares = SPLITS / S rounded
    up.

    q [B, S, HEADS * GROUP, D], S is `tokens`; keys, values [B, HEADS, SLOTS, D]; positions
    i32[B, S]; slots i32[C] is there for its length, `looked_at`. parts f32[B, S, HEADS, shares,
    GROUP, D] and stats f32[B, S, HEADS, shares, 2, GROUP], maximum and sum: what a share without
    keys has is not written.
    """
    row, head, split = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.program_id(2)
    shares = tl.cdiv(SPLITS, tokens)
    end = _end(positions, row, looked_at, SLOTS)
    first, lo, hi, used = _span(end, end, split, WINDOW, shares, N)
    if split < used:
        pair = row * HEADS + head
        cache = (row // tokens * HEADS + head) * (SLOTS * D)
        h, cols = tl.arange(0, M), tl.arange(0, DP)
        query = _tile(q + (pair * GROUP + h) * D, h < GROUP, cols, D)
        keys += cache
        values += cache
        o = tl.zeros([M, DP], tl.float32)
        top = tl.full([M], float("-inf"), tl.float32)
        total = tl.zeros([M, N], tl.float32)
        for at in range(lo, hi, N):
            i = at + tl.arange(0, N)
            slot = (first + i).to(tl.int64) * D
            k = _tile(keys + slot, i < hi, cols, D)
            v = _tile(values + slot, i < hi, cols, D)
            s = tl.dot(query, tl.trans(k), input_precision="ieee")
            p, top, total, fade = _weigh(s, i < hi, top, total, INNER, OUTER, CAPPED)
            o = tl.dot(p.to(v.dtype), v, o * fade[:, None], input_precision="ieee")
        parts += pair * shares * (GROUP * D)
        stats += pair * shares * (GROUP * 2)
        _put(parts, stats, split, o, top, tl.sum(total, 1), GROUP, D)


@triton.jit
def decode_merge(
    parts,
    stats,
    positions,
    slots,
    looked_at,
    tokens,
    out,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    D: tl.constexpr,
    SLOTS: tl.constexpr,
    N: tl.constexpr,
    SPLITS: tl.constexpr,
    WINDOW: tl.constexpr,
    BLOCK: tl.constexpr,
    STAGES: tl.constexpr,
):
    """BLOCK columns of one token and key head; grid (B * S, HEADS, D / BLOCK); BLOCK divides D.

    parts and stats of `decode_parts`, of the same SPLITS, N and WINDOW;
    out [B, S, HEADS * GROUP, D].
    """
    row, head, first = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.program_id(2) * BLOCK
    shares = tl.cdiv(SPLITS, tokens)
    end = _end(positions, row, looked_at, SLOTS)
    used = _span(end, end, 0, WINDOW, shares, N)[3]
    pair = row * HEADS + head
    parts += pair * shares * (GROUP * D) + first
    stats += pair * shares * (GROUP * 2)
    o, _, total = _merge(parts, stats, 0, used, GROUP, D, BLOCK, STAGES)
    _write(out + pair * (GROUP * D) + first, o, total, GROUP, D)
