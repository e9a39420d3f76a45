"""The MoE block of a decode step of several rows, sorted by expert.

`moe_sort` (moe_order_triton.py) does the top-k of all rows and lists the experts in use; these
kernels read the weights of each once, for all rows together. A row chooses an expert at most once,
so an expert never has more rows than there are rows. Errors as in moe_triton.py.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch.library import triton_op

from .codes_triton import (
    bits_of_16,
    columns,
    dense,
    fetch_rows,
    row_scaled,
    rows_of,
    scales_of,
    weight_tile,
)
from .launch import activate, begin, blocks, power_of_2, ready, rounded, start, takes, tile
from .moe_order_triton import _rows
from .moe_triton import _down_reference, _forms, _gate_up_reference, _operands

Tensor = torch.Tensor


@triton.jit
def _tile_sums(x, live, w, scales, row, inside, K, R, BLOCK_M, BLOCK_K, STAGES, FORM, GROUP):
    """fp32 [R, BLOCK_M]: rows of a weight, times x[m] for live m; x: pointers per row m."""
    exponent = bits_of_16(w)
    w = rows_of(w, row, K, FORM)
    scales = scales_of(scales, row, K, GROUP)
    acc = tl.zeros([R, BLOCK_M], tl.float32)
    for k0 in tl.range(0, K, BLOCK_K, num_stages=STAGES):
        k = (k0 + tl.arange(0, BLOCK_K))[None, :]
        a = tl.load(x[:, None] + k, mask=live[:, None] & (k < K), other=0.0)
        t = weight_tile(w, scales, inside, k0, exponent, K, BLOCK_K, R, FORM, GROUP)
        acc = tl.dot(t.to(a.dtype), tl.trans(a), acc, input_precision="ieee")
    return row_scaled(acc, scales, inside, FORM, GROUP)


@triton.jit
def _tile_glu(
    x,
    w,
    scales,
    base,
    out,
    live,
    n0,
    N: tl.constexpr,
    K: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    ACT: tl.constexpr,
    STAGES: tl.constexpr,
    FORM: tl.constexpr,
    GROUP: tl.constexpr,
):
    """out[m][n] = act(w[base + n] @ x[m]) * (w[base + N + n] @ x[m]) for live m; x and out:
    pointers per row m.

    Gate and up rows alternate in one tile, so that a pair ends up in one thread.
    """
    R: tl.constexpr = 2 * BLOCK_N
    r = tl.arange(0, R)
    wn = n0 + r // 2
    row = base + r % 2 * N + wn
    acc = _tile_sums(x, live, w, scales, row, wn < N, K, R, BLOCK_M, BLOCK_K, STAGES, FORM, GROUP)
    gate, up = tl.split(tl.permute(tl.reshape(acc, (BLOCK_N, 2, BLOCK_M)), (0, 2, 1)))
    y = rounded(activate(rounded(gate, out), ACT), out) * rounded(up, out)
    n = n0 + tl.arange(0, BLOCK_N)
    inside = live[None, :] & (n < N)[:, None]
    tl.store(out[None, :] + n[:, None], y.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _tile_linear(
    x,
    w,
    scales,
    base,
    out,
    live,
    n0,
    N: tl.constexpr,
    K: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr,
    FORM: tl.constexpr,
    GROUP: tl.constexpr,
):
    """out[m][n] = w[base + n] @ x[m] for live m; x and out: pointers per row m."""
    n = n0 + tl.arange(0, BLOCK_N)
    acc = _tile_sums(
        x, live, w, scales, base + n, n < N, K, BLOCK_N, BLOCK_M, BLOCK_K, STAGES, FORM, GROUP
    )
    inside = live[None, :] & (n < N)[:, None]
    tl.store(out[None, :] + n[:, None], acc.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _slots_of(index, expert, m, rows, TOP_K: tl.constexpr, S: tl.constexpr):
    """Per row m: whether it chose the expert, and in which slot."""
    slots = tl.arange(0, S)[None, :]
    inside = (m < rows)[:, None] & (slots < TOP_K)
    hit = tl.load(index + m[:, None] * TOP_K + slots, mask=inside, other=-2) == expert
    return tl.max(hit.to(tl.int32), 1) == 1, tl.sum(tl.where(hit, slots, 0), 1)


@triton.jit
def _gate_up_sorted(
    x_dense,
    x_moe,
    index,
    listed,
    w_dense,
    dense_scales,
    gate_up,
    scales,
    out,
    rows,
    HIDDEN: tl.constexpr,
    INNER: tl.constexpr,
    DENSE: tl.constexpr,
    TOP_K: tl.constexpr,
    S: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    ACT: tl.constexpr,
    STAGES: tl.constexpr,
    DENSE_FORM: tl.constexpr,
    DENSE_GROUP: tl.constexpr,
    FORM: tl.constexpr,
    GROUP: tl.constexpr,
    AHEAD: tl.constexpr = False,
):
    """BLOCK_M rows, BLOCK_N columns of the dense MLP or of a listed expert."""
    begin(AHEAD)
    block = tl.program_id(0)
    m = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    row = m.to(tl.int64)
    out += row * (TOP_K * INNER + DENSE)
    dense_blocks: tl.constexpr = (DENSE + BLOCK_N - 1) // BLOCK_N
    if block < dense_blocks:
        r = tl.arange(0, 2 * BLOCK_N)
        i = block * BLOCK_N + r // 2
        own = i + r % 2 * DENSE
        fetch_rows(w_dense, own, i < DENSE, 0, HIDDEN, HIDDEN, STAGES * BLOCK_K, DENSE_FORM, AHEAD)
    ready(AHEAD)
    if block < dense_blocks:
        _tile_glu(
            x_dense + row * HIDDEN,
            w_dense,
            dense_scales,
            0,
            out + TOP_K * INNER,
            m < rows,
            block * BLOCK_N,
            DENSE,
            HIDDEN,
            BLOCK_M,
            BLOCK_N,
            BLOCK_K,
            ACT,
            STAGES,
            DENSE_FORM,
            DENSE_GROUP,
        )
    else:
        per_expert: tl.constexpr = (INNER + BLOCK_N - 1) // BLOCK_N
        expert = tl.load(listed + (block - dense_blocks) // per_expert).to(tl.int64)
        live, slot = _slots_of(index, expert, m, rows, TOP_K, S)
        if tl.max(live.to(tl.int32), 0) == 1:
            _tile_glu(
                x_moe + row * HIDDEN,
                gate_up,
                scales,
                expert * (2 * INNER),
                out + slot * INNER,
                live,
                (block - dense_blocks) % per_expert * BLOCK_N,
                INNER,
                HIDDEN,
                BLOCK_M,
                BLOCK_N,
                BLOCK_K,
                ACT,
                STAGES,
                FORM,
                GROUP,
            )


@triton.jit
def _down_sorted(
    act,
    index,
    listed,
    w_dense,
    dense_scales,
    down,
    scales,
    dense,
    parts,
    rows,
    HIDDEN: tl.constexpr,
    INNER: tl.constexpr,
    DENSE: tl.constexpr,
    TOP_K: tl.constexpr,
    S: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr,
    DENSE_FORM: tl.constexpr,
    DENSE_GROUP: tl.constexpr,
    FORM: tl.constexpr,
    GROUP: tl.constexpr,
    AHEAD: tl.constexpr = False,
):
    """BLOCK_M rows, BLOCK_N columns of the dense MLP or of a listed expert: parts [rows, TOP_K,
    HIDDEN], rounded and not yet weighted."""
    begin(AHEAD)
    block = tl.program_id(0)
    m = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    row = m.to(tl.int64)
    act += row * (TOP_K * INNER + DENSE)
    per_expert: tl.constexpr = (HIDDEN + BLOCK_N - 1) // BLOCK_N
    n0 = block % per_expert * BLOCK_N
    if block < per_expert:
        n = n0 + tl.arange(0, BLOCK_N)
        fetch_rows(w_dense, n, n < HIDDEN, 0, DENSE, DENSE, STAGES * BLOCK_K, DENSE_FORM, AHEAD)
    ready(AHEAD)
    if block < per_expert:
        _tile_linear(
            act + TOP_K * INNER,
            w_dense,
            dense_scales,
            0,
            dense + row * HIDDEN,
            m < rows,
            n0,
            HIDDEN,
            DENSE,
            BLOCK_M,
            BLOCK_N,
            BLOCK_K,
            STAGES,
            DENSE_FORM,
            DENSE_GROUP,
        )
    else:
        expert = tl.load(listed + block // per_expert - 1).to(tl.int64)
        live, slot = _slots_of(index, expert, m, rows, TOP_K, S)
        if tl.max(live.to(tl.int32), 0) == 1:
            _tile_linear(
                act + slot * INNER,
                down,
                scales,
                expert * HIDDEN,
                parts + (row * TOP_K + slot) * HIDDEN,
                live,
                n0,
                HIDDEN,
                INNER,
                BLOCK_M,
                BLOCK_N,
                BLOCK_K,
                STAGES,
                FORM,
                GROUP,
            )


@triton.jit
def _sum_slots(
    parts,
    weights,
    out,
    HIDDEN: tl.constexpr,
    TOP_K: tl.constexpr,
    BLOCK: tl.constexpr,
    AHEAD: tl.constexpr = False,
):
    """out[row] = sum over the slots of weight * part, in the order of rank; nobody has written the
    part of a slot that weighs nothing."""
    begin(AHEAD)
    ready(AHEAD)
    row = tl.program_id(0).to(tl.int64)
    n = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], tl.float32)
    for j in tl.static_range(TOP_K):
        slot = row * TOP_K + j
        y = tl.load(parts + slot * HIDDEN + n, mask=n < HIDDEN, other=0.0)
        weight = tl.load(weights + slot)
        total += tl.where(weight == 0.0, 0.0, weight * y.to(tl.float32))
    tl.store(out + row * HIDDEN + n, total.to(out.dtype.element_ty), mask=n < HIDDEN)


def _most_in_use(listed: Tensor, index: Tensor) -> Any:
    """Count the experts that can be in use: all, or one per slot of every row."""
    return torch.sym_min(listed.shape[0], index.numel())


@triton_op("g4ir::moe_gate_up_sorted", mutates_args={})
def moe_gate_up_sorted(
    x_dense: Tensor,
    x_moe: Tensor,
    index: Tensor,
    listed: Tensor,
    w_dense: Tensor,
    gate_up: Tensor,
    act: str,
    block_m: int,
    block_n: int,
    block_k: int,
    warps: int,
    stages: int,
    dense_scales: Tensor | None = None,
    scales: Tensor | None = None,
) -> Tensor:
    """Compute `moe_gate_up` from `moe_sort`'s index and list; block_m at least 16."""
    if not takes(x_moe):
        weights = dense(w_dense, dense_scales, x_moe.dtype), dense(gate_up, scales, x_moe.dtype)
        return _gate_up_reference(x_dense, x_moe, index, *weights, act)
    double, hidden = gate_up.shape[1], x_moe.shape[-1]
    top_k, rows = index.shape[-1], _rows(x_moe)
    inner, width = double // 2, w_dense.shape[0] // 2
    out = x_moe.new_empty((rows, top_k * inner + width))
    programs = blocks(width, block_n) + _most_in_use(listed, index) * blocks(inner, block_n)
    start(
        _gate_up_sorted,
        (programs, blocks(rows, block_m)),
        (
            x_dense,
            x_moe,
            index,
            listed,
            *_operands(w_dense, dense_scales, gate_up, scales),
            out,
            rows,
        ),
        HIDDEN=hidden,
        INNER=inner,
        DENSE=width,
        TOP_K=top_k,
        S=power_of_2(top_k),
        ACT=act,
        **_forms(w_dense, dense_scales, gate_up, scales),
        **tile(block_n, block_k, warps, stages, block_m),
    )
    return out


@triton_op("g4ir::moe_down_sorted", mutates_args={})
def moe_down_sorted(
    act: Tensor,
    weights: Tensor,
    index: Tensor,
    listed: Tensor,
    w_dense: Tensor,
    down: Tensor,
    block_m: int,
    block_n: int,
    block_k: int,
    warps: int,
    stages: int,
    dense_scales: Tensor | None = None,
    scales: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Compute `moe_down` from `moe_sort`'s results; block_m at least 16. Two kernels."""
    if not takes(act):
        matrices = dense(w_dense, dense_scales, act.dtype), dense(down, scales, act.dtype)
        return _down_reference(act, weights, index, *matrices)
    hidden, top_k, rows = down.shape[1], index.shape[-1], _rows(index)
    inner, width = columns(down), columns(w_dense)
    y_dense, y_moe = (act.new_empty((*index.shape[:-1], hidden)) for _ in range(2))
    parts = act.new_empty((rows, top_k, hidden))
    programs = (1 + _most_in_use(listed, index)) * blocks(hidden, block_n)
    start(
        _down_sorted,
        (programs, blocks(rows, block_m)),
        (
            act,
            index,
            listed,
            *_operands(w_dense, dense_scales, down, scales),
            y_dense,
            parts,
            rows,
        ),
        HIDDEN=hidden,
        INNER=inner,
        DENSE=width,
        TOP_K=top_k,
        S=power_of_2(top_k),
        **_forms(w_dense, dense_scales, down, scales),
        **tile(block_n, block_k, warps, stages, block_m),
    )
    block = 256
    start(
        _sum_slots,
        (rows, blocks(hidden, block)),
        (parts, weights, y_moe),
        HIDDEN=hidden,
        TOP_K=top_k,
        BLOCK=block,
        num_warps=1,
        num_stages=1,
    )
    return y_dense, y_moe
