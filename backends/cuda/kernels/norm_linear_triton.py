"""A product of one row behind the norm that makes the row, in one kernel.

A program goes through tiles of the weight's rows, and the row that it multiplies them with stays in
its registers: each program makes it for itself, of what the kernel before has left, while the
loads of its first tiles are under way. So nothing is handed from one program to another; the
first one stores the residual, which later kernels read.

Error budget. The row is that of `norm_residual`, its sums are those of a product of one row.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch.library import triton_op

from g4ir.ops.linear import linear

from .codes_triton import (
    bits_of_16,
    dense,
    form_of,
    products,
    row_scaled,
    rows_of,
    scales_of,
)
from .launch import blocks, power_of_2, rounded, start, takes, zero
from .linear_triton import activated, gated
from .norms_triton import (
    after_residual,
    factor,
    parts_of,
    reciprocal_rms,
    reference,
    weight,
)

Tensor = torch.Tensor


@triton.jit
def normed(x, w_x, b, w_b, residual, w_post, scalar, w_pre, h, eps, K, PARTS, BLOCK, PRE):
    """fp32 [BLOCK]: the row that is multiplied; the residual behind the norm goes to h, which the
    first program stores."""
    i = tl.arange(0, BLOCK)
    keep = i < K
    g, by = weight(w_pre, i, keep), factor(scalar)
    row = after_residual(x, w_x, b, w_b, residual, w_post, h, 0, i, keep, eps, K, K, PARTS, 0)
    row = rounded(row * by, h)
    tl.store(h + i, row.to(h.dtype.element_ty), mask=keep & (tl.program_id(0) == 0))
    if PRE:
        row = rounded(row * reciprocal_rms(tl.sum(row * row, 0), eps, K) * g, h)
    return row


@triton.jit
def tile_of(w, at, live, j, K, FORM):
    """Whole rows `at` of a weight of K columns, as they are stored; j: its numbers, or words."""
    EACH: tl.constexpr = 8 if FORM == "int4" else 1
    return tl.load(
        rows_of(w, at, K, FORM)[:, None] + j[None, :],
        mask=live[:, None] & (j < K // EACH)[None, :],
        other=0.0,
        eviction_policy="evict_first",
    )


@triton.jit
def tile_sums(t, row, scales, at, live, exponent, K, W, BLOCK, R, FORM, GROUP):
    """fp32 [R]: the products of a row [BLOCK] with the tile t [R, W] of `tile_of`."""
    s = scales_of(scales, at, K, GROUP)
    t = products(t, row[None, :], s, live, 0, exponent, K, W, BLOCK, R, FORM, GROUP, 1)
    return row_scaled(tl.sum(t, 1), s, live, FORM, GROUP)


@triton.jit
def _norm_linear(
    x,
    w_x,
    b,
    w_b,
    residual,
    w_post,
    scalar,
    w_pre,
    w,
    scales,
    up,
    h,
    y,
    zeroed,
    count,
    eps,
    N: tl.constexpr,
    K: tl.constexpr,
    PARTS: tl.constexpr,
    R: tl.constexpr,
    BLOCK: tl.constexpr,
    STAGES: tl.constexpr,
    PRE: tl.constexpr,
    PACKED: tl.constexpr,
    ACT: tl.constexpr,
    FORM: tl.constexpr,
    GROUP: tl.constexpr,
):
    """x, residual, h [K], x [PARTS, K] if PARTS > 0; b [K], added to x, each with a norm of its
    own, w_x and w_b, or None; w [N, K], or [2N, K] if PACKED: gate rows, then up rows; up, y [N];
    zeroed [count] or None. R rows of w a tile. Grid: programs."""
    EACH: tl.constexpr = 8 if FORM == "int4" else 1
    W: tl.constexpr = BLOCK // EACH
    OUT: tl.constexpr = R // 2 if PACKED else R
    exponent = bits_of_16(w)
    own = tl.program_id(0)
    j, r, o = tl.arange(0, W), tl.arange(0, R), tl.arange(0, OUT)
    row = tl.zeros([BLOCK], tl.float32)
    for tile in tl.range(own, (N + OUT - 1) // OUT, tl.num_programs(0), num_stages=STAGES):
        if tile == own:
            row = normed(
                x, w_x, b, w_b, residual, w_post, scalar, w_pre, h, eps, K, PARTS, BLOCK, PRE
            )
        i = tile * OUT + r % OUT
        live, at = i < N, i + r // OUT * N
        t = tile_of(w, at, live, j, K, FORM)
        sums = tile_sums(t, row, scales, at, live, exponent, K, W, BLOCK, R, FORM, GROUP)
        i = tile * OUT + o
        if PACKED:
            sums, by = tl.split(tl.permute(tl.reshape(sums, (2, OUT)), (1, 0)))
            sums = gated(sums, rounded(by, y), y, ACT)
        elif ACT != "":
            by = tl.load(up + i, mask=i < N, other=0).to(tl.float32)
            sums = gated(sums, by, y, ACT)
        tl.store(y + i, sums.to(y.dtype.element_ty), mask=i < N)
    zero(zeroed, count, own, tl.num_programs(0))  # behind the first tile, which has waited


@triton_op("g4ir::norm_linear", mutates_args={"zeroed"})
def norm_linear(
    x: Tensor,
    residual: Tensor,
    w_post: Tensor,
    scalar: Tensor | None,
    weights: list[Tensor | None],
    w: Tensor,
    up: Tensor | None,
    act: str,
    eps: float,
    programs: int,
    block_n: int,
    warps: int,
    stages: int,
    zeroed: Tensor | None,
    scales: Tensor | None = None,
    w_x: Tensor | None = None,
    b: Tensor | None = None,
    w_b: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Compute the op `norm_linear` of one row: the product [1,1,n] and the residual [1,1,k]; of
    rms_norm(x, w_x) + rms_norm(b, w_b) instead of x the op `dual_norm_linear`

    x, residual, w_post, scalar as in `norm_residual`; weights: of the one pre-norm, or empty; w
    [n, k], or [2n, k] with `act` and without `up`, [1,1,n]; codes where there are scales. programs:
    the most that are started; block_n: rows of w at a time; zeroed: what is set to zeros.
    """
    k, packed = residual.shape[-1], bool(act) and up is None
    if not takes(residual):
        if zeroed is not None:
            zeroed.zero_()
        h, *normed = reference(x, residual, w_post, scalar, weights, eps, w_x, b, w_b)
        y = linear.reference(normed[0] if normed else h, dense(w, scales, x.dtype))
        return activated(y, up, act), h
    n = w.shape[0] // 2 if packed else w.shape[0]
    h, y = torch.empty_like(residual), residual.new_empty((*residual.shape[:-1], n))
    tiles = blocks(n * (1 + packed), block_n)
    start(
        _norm_linear,
        (blocks(tiles, blocks(tiles, programs)),),
        (
            x.contiguous(),
            w_x,
            b if b is None else b.contiguous(),
            w_b,
            residual.contiguous(),
            w_post,
            scalar,
            weights[0] if weights else None,
            w,
            w if scales is None else scales,
            w if up is None else up.contiguous(),
            h,
            y,
            zeroed,
            0 if zeroed is None else zeroed.numel(),
            eps,
        ),
        N=n,
        K=k,
        PARTS=parts_of(x, residual),
        R=block_n,
        BLOCK=power_of_2(k),
        STAGES=stages,
        PRE=bool(weights),
        PACKED=packed,
        ACT=act,
        **form_of(w, scales),
        num_warps=warps,
    )
    return y, h
