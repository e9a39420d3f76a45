"""Routed experts, sorted by expert first: one form for a single token and for a chunk.

A slot is a token's choice of one expert; slot s belongs to token s // TOP_K. Everything between the
products lies in the order of the slots, so that nothing has to be sorted back: `moe_sort` lists the
slots by expert, the grouped products take their rows through that list, and weights are applied
last, in fp32 and in the order of rank. Nothing is added by atomics: equal inputs give equal bits.

Whoever times a plugin may do so with indices that mean nothing, so each one is put into its range
before anything is read by it.

The products are those of `torch_compile/kernels/moe_sorted_triton.py`, with their error budgets.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ...torch_compile.kernels.moe_sorted_triton import _sum_slots, _tile_glu, _tile_linear

#: out[row] = sum over the slots of weight * part: its parameters are in a plugin's order already
moe_combine = _sum_slots


@triton.jit
def _within(i, count):
    """i, or the nearest of 0 .. count - 1, i64."""
    return tl.minimum(tl.maximum(i, 0), count - 1).to(tl.int64)


@triton.jit
def moe_sort(index, count, order, offsets, EXPERTS: tl.constexpr, BLOCK: tl.constexpr):
    """The slots of one expert; grid (EXPERTS). A counting sort in which every program counts for
    itself: a few thousand indices lie in L2, and nobody waits for anybody.

    index i32[count]; order i32[count]: the slots by expert, those of one ascending;
    offsets i32[EXPERTS + 1]: where an expert's slots begin in it.
    """
    expert = tl.program_id(0)
    before = tl.zeros([BLOCK], tl.int32)
    for i0 in range(0, count, BLOCK):
        before += (_experts_of(index, i0, count, EXPERTS, BLOCK) < expert).to(tl.int32)
    at = tl.sum(before, 0)
    tl.store(offsets + expert, at)
    for i0 in range(0, count, BLOCK):
        mine = (_experts_of(index, i0, count, EXPERTS, BLOCK) == expert).to(tl.int32)
        place = at + tl.cumsum(mine, 0) - mine
        tl.store(order + place, i0 + tl.arange(0, BLOCK), mask=mine == 1)
        at += tl.sum(mine, 0)
    if expert == EXPERTS - 1:
        tl.store(offsets + EXPERTS, at)


@triton.jit
def _experts_of(index, first, count, EXPERTS: tl.constexpr, BLOCK: tl.constexpr):
    """The experts of slots first .. first + BLOCK - 1; EXPERTS, which nobody is, past the end."""
    i = first + tl.arange(0, BLOCK)
    expert = tl.load(index + i, mask=i < count, other=0)
    return tl.where(i < count, tl.minimum(tl.maximum(expert, 0), EXPERTS - 1), EXPERTS)


@triton.jit
def _tile_of(
    order, offsets, count, EXPERTS: tl.constexpr, E_P: tl.constexpr, BLOCK_M: tl.constexpr
):
    """(expert, which of BLOCK_M rows are real, their slots) of tile program_id(0): experts' slots
    are cut into tiles one expert after the other; past the last tile no row is real."""
    tile = tl.program_id(0)
    e = tl.arange(0, E_P)
    start = tl.load(offsets + e, mask=e < EXPERTS, other=0)
    stop = tl.load(offsets + e + 1, mask=e < EXPERTS, other=0)
    tiles = (stop - start + BLOCK_M - 1) // BLOCK_M
    upto = tl.cumsum(tiles, 0)
    expert = tl.sum((upto <= tile).to(tl.int32), 0)
    mine = e == expert
    first = tl.sum(tl.where(mine, start + (tile - upto + tiles) * BLOCK_M, 0), 0)
    end = tl.sum(tl.where(mine, stop, 0), 0)
    at = first + tl.arange(0, BLOCK_M)
    live = (at >= 0) & (at < tl.minimum(end, count))
    return _within(expert, EXPERTS), live, _within(tl.load(order + at, mask=live, other=0), count)


@triton.jit
def moe_gate_up_grouped(
    x,
    order,
    offsets,
    gate_up,
    count,
    act,
    HIDDEN: tl.constexpr,
    INNER: tl.constexpr,
    EXPERTS: tl.constexpr,
    E_P: tl.constexpr,
    TOP_K: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    ACT: tl.constexpr,
    STAGES: tl.constexpr,
):
    """BLOCK_M slots of one expert, BLOCK_N columns; grid (tiles, blocks of columns).

    x [tokens, HIDDEN], order and offsets of `moe_sort`; act [tokens, TOP_K, INNER].
    """
    expert, live, slot = _tile_of(order, offsets, count, EXPERTS, E_P, BLOCK_M)
    if tl.max(live.to(tl.int32), 0) == 1:
        _tile_glu(
            x + slot // TOP_K * HIDDEN,
            gate_up,
            gate_up,
            expert * (2 * INNER),
            act + slot * INNER,
            live,
            tl.program_id(1) * BLOCK_N,
            INNER,
            HIDDEN,
            BLOCK_M,
            BLOCK_N,
            BLOCK_K,
            ACT,
            STAGES,
            "",
            0,
        )


@triton.jit
def moe_down_grouped(
    act,
    order,
    offsets,
    down,
    count,
    parts,
    HIDDEN: tl.constexpr,
    INNER: tl.constexpr,
    EXPERTS: tl.constexpr,
    E_P: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr,
):
    """BLOCK_M slots of one expert, BLOCK_N columns; grid (tiles, blocks of columns).

    act [tokens, TOP_K, INNER]; parts [tokens, TOP_K, HIDDEN], rounded and not yet weighted.
    """
    expert, live, slot = _tile_of(order, offsets, count, EXPERTS, E_P, BLOCK_M)
    if tl.max(live.to(tl.int32), 0) == 1:
        _tile_linear(
            act + slot * INNER,
            down,
            down,
            expert * HIDDEN,
            parts + slot * HIDDEN,
            live,
            tl.program_id(1) * BLOCK_N,
            HIDDEN,
            INNER,
            BLOCK_M,
            BLOCK_N,
            BLOCK_K,
            STAGES,
            "",
            0,
        )
