"""Matmul of a few rows with a weight, memory-bandwidth bound: the weight is read once.

`block_m` chooses the inner loop. 1, for one row: multiply and add in fp32, one reduction at the
end. 16 to 64, for as many rows: tensor cores, with the weight as the left operand, whose tile may
be 64 rows and more while x has 16. More rows than `block_m` read the weight again. With `stages`
above 1 the loads of later steps are in flight, by asynchronous copies.

Tolerance. Every sum is in fp32 and rounded once. Its error, for k of some thousand, is within 1e-5
of the rms of the sums, far below the rounding of bf16 (2^-9 relative), so a bf16 result is the
exact sum's nearest neighbour except where that sum is within this tolerance of a tie.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch.library import triton_op

from g4ir.ops.linear import linear
from g4ir.ops.mlp import glu

from .codes_triton import format_constants, sums_of
from .launch import activate, blocks, rounded, start, takes
from .rows_triton import dense

Tensor = torch.Tensor


@triton.jit
def _skinny(
    x,
    w,
    scales,
    up,
    y,
    rows,
    N: tl.constexpr,
    K: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr,
    PACKED: tl.constexpr,
    ACT: tl.constexpr,
    FORMAT: tl.constexpr,
    GROUP: tl.constexpr,
):
    """Compute BLOCK_N columns of y for BLOCK_M rows.

    x [rows, K]; w [N, K], or [2N, K] if PACKED: gate rows, then up rows, in a FORMAT with
    a scale for each GROUP (codes_triton.py); up [rows, N], read if ACT is given and not PACKED; y
    [rows, N]. Grid: columns, rows.
    """
    m = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    R: tl.constexpr = 2 * BLOCK_N if PACKED else BLOCK_N
    r = tl.arange(0, R)
    i = tl.program_id(0) * BLOCK_N + r % BLOCK_N
    live = i < N
    row = i + r // BLOCK_N * N
    x += m.to(tl.int64) * K
    sums = sums_of(
        *(x, m < rows, w, scales, row, live, K), *(BLOCK_M, BLOCK_K, R, STAGES, FORMAT, GROUP)
    )
    i = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    mask = (i < N)[:, None] & (m < rows)[None, :]
    at = m.to(tl.int64)[None, :] * N + i[:, None]
    if PACKED:
        halves = tl.permute(tl.reshape(sums, (2, BLOCK_N, BLOCK_M)), (1, 2, 0))
        sums, by = tl.split(halves)
        sums = gated(sums, rounded(by, y), y, ACT)
    elif ACT != "":
        by = tl.load(up + at, mask=mask, other=0).to(tl.float32)
        sums = gated(sums, by, y, ACT)
    tl.store(y + at, sums.to(y.dtype.element_ty), mask=mask)


@triton.jit
def gated(gate, up, like, ACT):
    """act(gate) * up with the roundings of the ops `linear` and `glu`, all but the last."""
    return rounded(activate(rounded(gate, like), ACT), like) * up


@triton_op("g4ir::skinny_linear", mutates_args={})
def skinny_linear(
    x: Tensor,
    w: Tensor,
    up: Tensor | None,
    act: str,
    block_m: int,
    block_n: int,
    block_k: int,
    warps: int,
    stages: int,
    scales: Tensor | None = None,
    form: str = "",
) -> Tensor:
    """Compute the op `linear`: x [..., k], w [n, k] -> [..., n]; w may be the bytes of codes of a
    format, with scales.

    With `act`, then compute `glu` of the product and up [..., n]; without up `glu_packed`, with w
    [2n, k].
    """
    packed, k = bool(act) and up is None, x.shape[-1]
    if not takes(x):
        product: Tensor = linear.reference(x, dense(w, scales, form, x.dtype))
        return activated(product, up, act)
    n, rows = w.shape[0] // (1 + packed), x.numel() // k
    y = x.new_empty((*x.shape[:-1], n))
    scale_operand, other = w if scales is None else scales, x if up is None else up.contiguous()
    start(
        _skinny,
        (blocks(n, block_n), blocks(rows, block_m)),
        (x.contiguous(), w, scale_operand, other, y, rows),
        N=n,
        K=k,
        BLOCK_M=block_m,
        BLOCK_N=block_n,
        BLOCK_K=block_k,
        STAGES=stages,
        PACKED=packed,
        ACT=act,
        **format_constants(w, scales, form),
        num_warps=warps,
    )
    return y


def activated(gate: Tensor, up: Tensor | None, act: str) -> Any:
    """Compute the op `glu` of gate and up, or `glu_packed` without up; return gate itself without
    act."""
    if not act:
        return gate
    if up is None:
        gate, up = gate.chunk(2, -1)
    return glu.reference(gate, up, act=act)
