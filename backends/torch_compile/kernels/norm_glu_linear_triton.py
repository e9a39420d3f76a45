"""A gated product of one row behind its norm, and the product of the gated row, in one kernel.

The first programs make the gated row, each a few numbers of it, as those of `norm_linear` do. The
others each make a few results of the second product, of which every one needs the whole row; they
have read their rows of that weight by then, and wait for the numbers. A number is handed over in a
word that says by itself that it has arrived: it is no longer zero. So nothing else has to be
ordered or counted: a number is on its way for as long as a word takes to L2 and from there.

Programs that wait keep the room that they have. Those that they wait for wait for nobody, come
first in the grid, whose order is that in which a GPU begins programs, and with the shipped settings
all of them together have room on one at the same time, in whatever order they begin.

Error budget. Sums and roundings are those of `norm_linear` and of a product of one row.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch.library import triton_op

from g4ir.ops.linear import linear

from .codes_triton import bits_of_16, dense, form_of
from .launch import begin, blocks, fetch_row, power_of_2, ready, rounded, start, takes
from .linear_triton import gated
from .norm_linear_triton import norm_linear, normed, tile_of, tile_sums
from .norms_triton import parts_of

Tensor = torch.Tensor
#: a bit of a word that holds a number: not one of the number's
FULL = tl.constexpr(1 << 32)


@triton.jit
def _hand_over(words, i, live, value):
    """Store fp32 numbers i in their words."""
    bits = value.to(tl.int32, bitcast=True).to(tl.int64) & 0xFFFFFFFF
    tl.atomic_xchg(words + i, bits | FULL, mask=live, sem="relaxed")


@triton.jit
def _handed_over(words, i, live):
    """fp32: the numbers i, once all are there."""
    found = tl.load(words + i, mask=live, other=FULL, volatile=True)
    while tl.min(found, 0) == 0:
        found = tl.load(words + i, mask=live, other=FULL, volatile=True)
    return (found & 0xFFFFFFFF).to(tl.int32).to(tl.float32, bitcast=True)


@triton.jit
def _gate(
    x,
    residual,
    w_post,
    scalar,
    w_pre,
    w,
    scales,
    up,
    h,
    words,
    y,
    eps,
    N: tl.constexpr,
    K: tl.constexpr,
    PARTS: tl.constexpr,
    R: tl.constexpr,
    BLOCK: tl.constexpr,
    PRE: tl.constexpr,
    ACT: tl.constexpr,
    FORM: tl.constexpr,
    GROUP: tl.constexpr,
    AHEAD: tl.constexpr,
):
    """A program's numbers of the gated row, to their words; the first one stores h."""
    W: tl.constexpr = BLOCK // 8 if FORM == "int4" else BLOCK
    at = tl.program_id(0) * R + tl.arange(0, R)
    live, exponent = at < N, bits_of_16(w)
    t = tile_of(w, at, live, tl.arange(0, W), K, FORM)
    fetch_row(w_post, K, AHEAD)
    ready(AHEAD)
    by = tl.load(up + at, mask=live, other=0).to(tl.float32)  # with what the row is made of
    row = normed(
        *(x, None, None, None, residual, w_post, scalar, w_pre, h),
        *(eps, K, PARTS, BLOCK, PRE, False),
    )
    sums = tile_sums(t, row, scales, at, live, exponent, K, W, BLOCK, R, FORM, GROUP)
    _hand_over(words, at, live, rounded(gated(sums, by, y, ACT), y))


@triton.jit
def _project(
    w,
    scales,
    words,
    y,
    tile,
    N: tl.constexpr,
    K: tl.constexpr,
    R: tl.constexpr,
    BLOCK: tl.constexpr,
    FORM: tl.constexpr,
    GROUP: tl.constexpr,
    AHEAD: tl.constexpr,
):
    """A tile of y [N]: its rows of w [N, K] with the row that is handed over."""
    W: tl.constexpr = BLOCK // 8 if FORM == "int4" else BLOCK
    at, i = tile * R + tl.arange(0, R), tl.arange(0, BLOCK)
    live, exponent = at < N, bits_of_16(w)
    t = tile_of(w, at, live, tl.arange(0, W), K, FORM)
    ready(AHEAD)
    row = _handed_over(words, i, i < K)
    sums = tile_sums(t, row, scales, at, live, exponent, K, W, BLOCK, R, FORM, GROUP)
    tl.store(y + at, sums.to(y.dtype.element_ty), mask=live)


@triton.jit
def _norm_glu_linear(
    x,
    residual,
    w_post,
    scalar,
    w_pre,
    w,
    scales,
    w_out,
    out_scales,
    up,
    h,
    words,
    y,
    eps,
    N: tl.constexpr,
    K: tl.constexpr,
    N_OUT: tl.constexpr,
    PARTS: tl.constexpr,
    R: tl.constexpr,
    R_OUT: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_OUT: tl.constexpr,
    PRE: tl.constexpr,
    ACT: tl.constexpr,
    FORM: tl.constexpr,
    GROUP: tl.constexpr,
    OUT_FORM: tl.constexpr,
    OUT_GROUP: tl.constexpr,
    AHEAD: tl.constexpr = False,
):
    """x, residual, h [K], x [PARTS, K] if PARTS > 0; w [N, K]; up [N]; words [N], zeros; w_out
    [N_OUT, N]; y [N_OUT]. Grid: tiles of R rows of w, then tiles of R_OUT rows of w_out."""
    begin(AHEAD)
    GATES: tl.constexpr = (N + R - 1) // R
    own = tl.program_id(0)
    if own < GATES:
        _gate(
            *(x, residual, w_post, scalar, w_pre, w, scales, up, h, words, y, eps),
            *(N, K, PARTS, R, BLOCK, PRE, ACT, FORM, GROUP, AHEAD),
        )
    else:
        _project(
            *(w_out, out_scales, words, y, own - GATES),
            *(N_OUT, N, R_OUT, BLOCK_OUT, OUT_FORM, OUT_GROUP, AHEAD),
        )


@triton_op("g4ir::norm_glu_linear", mutates_args={"words"})
def norm_glu_linear(
    x: Tensor,
    residual: Tensor,
    w_post: Tensor,
    scalar: Tensor | None,
    weights: list[Tensor | None],
    w: Tensor,
    w_out: Tensor,
    up: Tensor,
    words: Tensor,
    act: str,
    eps: float,
    block_n: int,
    block_out: int,
    warps: int,
    scales: Tensor | None = None,
    out_scales: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Compute the op `norm_glu_linear` of one row: product [1,1,n_out] and residual [1,1,k].

    x, residual, w_post, scalar, weights as in `norm_linear`; w [n, k], w_out [n_out, n], or codes
    where there are scales; up [1,1,n]; words i64[1,n]: zeros, which are used up. block_n,
    block_out: rows of w and of w_out of a program.
    """
    if not takes(residual):
        norm = (x, residual, w_post, scalar, weights)
        row, h = norm_linear(*norm, w, up, act, eps, 1, block_n, warps, 1, None, scales)
        return linear.reference(row, dense(w_out, out_scales, row.dtype)), h
    k, n, n_out = residual.shape[-1], w.shape[0], w_out.shape[0]
    h, y = torch.empty_like(residual), residual.new_empty((*residual.shape[:-1], n_out))
    start(
        _norm_glu_linear,
        (blocks(n, block_n) + blocks(n_out, block_out),),
        (
            x.contiguous(),
            residual.contiguous(),
            w_post,
            scalar,
            weights[0] if weights else None,
            w,
            w if scales is None else scales,
            w_out,
            w_out if out_scales is None else out_scales,
            up.contiguous(),
            h,
            words,
            y,
            eps,
        ),
        N=n,
        K=k,
        N_OUT=n_out,
        PARTS=parts_of(x, residual),
        R=block_n,
        R_OUT=block_out,
        BLOCK=power_of_2(k),
        BLOCK_OUT=power_of_2(n),
        PRE=bool(weights),
        ACT=act,
        **form_of(w, scales),
        **form_of(w_out, out_scales, "OUT_"),
        num_warps=warps,
    )
    return y, h
