"""The MoE block of a decode step of several rows, sorted by expert.

`moe_sort` (moe_order_triton.py) does the top-k of all rows and lists the experts in use; these
kernels read the weights of each once, for all rows together. A row chooses an expert at most once,
so an expert never has more rows than there are rows. Errors as in moe_triton.py.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .codes_triton import bits_of_16, row_scaled, rows_of, scales_of, weight_tile
from .launch import activate, rounded


@triton.jit
def glu_rows(n0, N, BLOCK_M, BLOCK_N):
    """Columns n0 .. and the rows of gate and up that a tile has of them: first all of gate; in a
    tile of several rows of x in turn, so that a pair ends up in one thread."""
    r = tl.arange(0, 2 * BLOCK_N)
    if BLOCK_M == 1:
        i, up = n0 + r % BLOCK_N, r // BLOCK_N
    else:
        i, up = n0 + r // 2, r % 2
    return i, i + up * N


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
    x, w, scales, base, out, live, n0, N, K, BLOCK_M, BLOCK_N, BLOCK_K, ACT, STAGES, FORM, GROUP
):
    """out[m][n] = act(w[base + n] @ x[m]) * (w[base + N + n] @ x[m]) for live m; x and out:
    pointers per row m."""
    R: tl.constexpr = 2 * BLOCK_N
    wn, row = glu_rows(n0, N, BLOCK_M, BLOCK_N)
    row += base
    acc = _tile_sums(x, live, w, scales, row, wn < N, K, R, BLOCK_M, BLOCK_K, STAGES, FORM, GROUP)
    gate, up = tl.split(tl.permute(tl.reshape(acc, (BLOCK_N, 2, BLOCK_M)), (0, 2, 1)))
    y = rounded(activate(rounded(gate, out), ACT), out) * rounded(up, out)
    n = n0 + tl.arange(0, BLOCK_N)
    inside = live[None, :] & (n < N)[:, None]
    tl.store(out[None, :] + n[:, None], y.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _tile_linear(
    x, w, scales, base, out, live, n0, N, K, BLOCK_M, BLOCK_N, BLOCK_K, STAGES, FORM, GROUP
):
    """out[m][n] = w[base + n] @ x[m] for live m; x and out: pointers per row m."""
    n = n0 + tl.arange(0, BLOCK_N)
    acc = _tile_sums(
        x, live, w, scales, base + n, n < N, K, BLOCK_N, BLOCK_M, BLOCK_K, STAGES, FORM, GROUP
    )
    inside = live[None, :] & (n < N)[:, None]
    tl.store(out[None, :] + n[:, None], acc.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _slots_of(index, expert, m, rows, TOP_K, S):
    """Per row m: whether it chose the expert, and in which slot."""
    slots = tl.arange(0, S)[None, :]
    inside = (m < rows)[:, None] & (slots < TOP_K)
    hit = tl.load(index + m[:, None] * TOP_K + slots, mask=inside, other=-2) == expert
    return tl.max(hit.to(tl.int32), 1) == 1, tl.sum(tl.where(hit, slots, 0), 1)


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
):
    """BLOCK_M rows, BLOCK_N columns of the dense MLP or of a listed expert: parts [rows, TOP_K,
    HIDDEN], rounded and not yet weighted."""
    block = tl.program_id(0)
    m = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    row = m.to(tl.int64)
    act += row * (TOP_K * INNER + DENSE)
    per_expert: tl.constexpr = (HIDDEN + BLOCK_N - 1) // BLOCK_N
    n0 = block % per_expert * BLOCK_N
    if block < per_expert:
        _tile_linear(
            *(act + TOP_K * INNER, w_dense, dense_scales, 0, dense + row * HIDDEN, m < rows, n0),
            *(HIDDEN, DENSE, BLOCK_M, BLOCK_N, BLOCK_K, STAGES, DENSE_FORM, DENSE_GROUP),
        )
    else:
        expert = tl.load(listed + block // per_expert - 1).to(tl.int64)
        live, slot = _slots_of(index, expert, m, rows, TOP_K, S)
        if tl.max(live.to(tl.int32), 0) == 1:
            out = parts + (row * TOP_K + slot) * HIDDEN
            _tile_linear(
                *(act + slot * INNER, down, scales, expert * HIDDEN, out, live, n0),
                *(HIDDEN, INNER, BLOCK_M, BLOCK_N, BLOCK_K, STAGES, FORM, GROUP),
            )


@triton.jit
def _sum_slots(
    parts,
    weights,
    out,
    HIDDEN: tl.constexpr,
    TOP_K: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """out[row] = sum over the slots of weight * part, in the order of rank; nobody has written the
    part of a slot that weighs nothing."""
    row = tl.program_id(0).to(tl.int64)
    n = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], tl.float32)
    for j in tl.static_range(TOP_K):
        slot = row * TOP_K + j
        y = tl.load(parts + slot * HIDDEN + n, mask=n < HIDDEN, other=0.0)
        weight = tl.load(weights + slot)
        total += tl.where(weight == 0.0, 0.0, weight * y.to(tl.float32))
    tl.store(out + row * HIDDEN + n, total.to(out.dtype.element_ty), mask=n < HIDDEN)
