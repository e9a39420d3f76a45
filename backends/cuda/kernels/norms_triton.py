"""RMS norms: alone, and from the end of one block to the input of the next.

One program per row, which stays in registers from its only reading on; all loads, weights first,
stand before the first sum over the row: none can move across its barrier. All pre-norms norm the
same h: they share its reciprocal rms.

Error budget. The roundings are those of the ops `rms_norm`, `add` and `mul`; the order in which
squares are added differs, and the reciprocal root, within two fp32 units. An fp32 result is within
1e-6 of the row's rms. A bf16 result equals the op's but for one value in some thousand, by one
unit, which each later rounding may turn into another one.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from functools import reduce

import torch
import triton
import triton.language as tl
from torch.library import triton_op

from g4ir.ops import norm

from .launch import power_of_2, rounded, start, takes

Tensor = torch.Tensor
#: most pre-norms that a kernel makes: of the dense MLP, of the router and of the experts
PRE_NORMS = 3


@triton.jit
def weight(w, i, keep):
    """Elements i of a weight in its own type, or 1 where there is none.

    The weights of all norms are a few MB, read once a step: worth keeping in L2.
    """
    if w is None:
        g = tl.full([1], 1.0, tl.float32)
    else:
        g = tl.load(w + i, mask=keep, other=0, eviction_policy="evict_last")
    return g


@triton.jit
def factor(scalar):
    """The scalar in fp32, or 1."""
    if scalar is None:
        s = tl.full([], 1.0, tl.float32)
    else:
        s = tl.load(scalar).to(tl.float32)
    return s


@triton.jit
def _row(x, like, at, i, keep, apart, PARTS):
    """fp32 row of x [rows, D] from `at` on; of partial sums [PARTS, rows, D], `apart` elements from
    each other, that of their sum.

    The sum is taken in the order of the parts and rounded through the type of `like`.
    """
    h = tl.load(x + at + i, mask=keep, other=0).to(tl.float32)
    for _ in tl.static_range(1, PARTS):
        at += apart
        h += tl.load(x + at + i, mask=keep, other=0)
    if PARTS > 0:
        h = rounded(h, like)
    return h


@triton.jit
def reciprocal_rms(square, eps, D):
    """(square / D + eps)^-0.5 of a sum of squares"""
    return tl.rsqrt(square / D + eps)


@triton.jit
def _both(a, b, c, d):
    return a + c, b + d


@triton.jit
def _store_product(y, h, g, at, i, keep):
    """The row of y that starts at `at` = h * g, rounded; nothing where there is no y."""
    if y is not None:
        tl.store(y + at + i, (h * g).to(y.dtype.element_ty), mask=keep)


@triton.jit
def end(h, by, g1, g2, g3, y, y1, y2, y3, at, i, keep, eps, D):
    """Store y = h * by and its pre-norms; h is rounded already, g1 to g3 are weights."""
    h = rounded(h * by, y)
    tl.store(y + at + i, h.to(y.dtype.element_ty), mask=keep)
    if y1 is not None:
        h *= reciprocal_rms(tl.sum(h * h, 0), eps, D)
        _store_product(y1, h, g1, at, i, keep)
        _store_product(y2, h, g2, at, i, keep)
        _store_product(y3, h, g3, at, i, keep)


@triton.jit
def added(h, h_b, r, g_x, g_b, g, like, eps, D):
    """fp32 row r + rms_norm(h, g), rounded through the type of `like`; with h_b, of
    rms_norm(h, g_x) + rms_norm(h_b, g_b) instead of h."""
    if h_b is not None:
        squares, squares_b = tl.reduce((h * h, h_b * h_b), 0, _both)
        h *= reciprocal_rms(squares, eps, D)
        h_b *= reciprocal_rms(squares_b, eps, D)
        h = rounded(rounded(h * g_x, like) + rounded(h_b * g_b, like), like)
    h *= reciprocal_rms(tl.sum(h * h, 0), eps, D)
    return rounded(r.to(tl.float32) + rounded(h * g, like), like)


@triton.jit
def after_residual(x, w_x, b, w_b, residual, w, like, at, i, keep, eps, apart, D, PARTS, PARTS_B):
    """fp32 row of residual + rms_norm(x, w) from `at` on, rounded through the type of `like`;
    with b, of rms_norm(x, w_x) + rms_norm(b, w_b) instead of x. Waits for the kernels in front."""
    g_x, g_b, g = weight(w_x, i, keep), weight(w_b, i, keep), weight(w, i, keep)
    r = tl.load(residual + at + i, mask=keep, other=0)
    h, h_b = _row(x, residual, at, i, keep, apart, PARTS), None
    if b is not None:
        h_b = _row(b, residual, at, i, keep, apart, PARTS_B)
    return added(h, h_b, r, g_x, g_b, g, like, eps, D)


@triton.jit
def _rms_norm(x, w, y, eps, D: tl.constexpr, BLOCK: tl.constexpr):
    """x, y [rows, D]; w [D] or None. Grid: rows."""
    at = tl.program_id(0).to(tl.int64) * D
    i = tl.arange(0, BLOCK)
    keep = i < D
    g = weight(w, i, keep)
    h = _row(x, x, at, i, keep, 0, 0)
    h *= reciprocal_rms(tl.sum(h * h, 0), eps, D)
    _store_product(y, h, g, at, i, keep)


@triton.jit
def _norm_residual(
    x,
    w_x,
    b,
    w_b,
    residual,
    w,
    scalar,
    w1,
    w2,
    w3,
    y,
    y1,
    y2,
    y3,
    eps,
    D: tl.constexpr,
    PARTS: tl.constexpr,
    PARTS_B: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """x [rows, D], or [PARTS, rows, D] if PARTS > 0; residual, y, y1 to y3 [rows, D]. Grid: rows.
    b, PARTS_B as x, PARTS: x and b have norms of their own, w_x and w_b, or b is None.

    y1 to y3 are None beyond the number of pre-norms; scalar [1] and w1 to w3 [D] may be.
    """
    at, apart = tl.program_id(0).to(tl.int64) * D, tl.num_programs(0).to(tl.int64) * D
    i = tl.arange(0, BLOCK)
    keep = i < D
    g1, g2, g3 = weight(w1, i, keep), weight(w2, i, keep), weight(w3, i, keep)
    by = factor(scalar)
    h = after_residual(x, w_x, b, w_b, residual, w, y, at, i, keep, eps, apart, D, PARTS, PARTS_B)
    end(h, by, g1, g2, g3, y, y1, y2, y3, at, i, keep, eps, D)


def parts_of(x: Tensor, like: Tensor) -> int:
    """Count the partial sums of which x [P, *like.shape] is a stack; 0: x is like `like`."""
    return x.shape[0] if x.dim() > like.dim() else 0


def three(values: Sequence[Tensor | None]) -> list[Tensor | None]:
    """Return the values of the pre-norms, then None for those that there are not."""
    if len(values) > PRE_NORMS:
        raise ValueError(f"{len(values)} pre-norms after a residual; a kernel makes {PRE_NORMS}")
    return [*values, *[None] * (PRE_NORMS - len(values))]


def _whole(x: Tensor, like: Tensor) -> Tensor:
    """Add partial sums in their order and round; return anything else as it is."""
    return reduce(operator.add, x.unbind()).to(like.dtype) if parts_of(x, like) else x


def reference(
    x: Tensor,
    residual: Tensor,
    w_post: Tensor,
    scalar: Tensor | None,
    weights: Sequence[Tensor | None],
    eps: float,
    w_x: Tensor | None = None,
    b: Tensor | None = None,
    w_b: Tensor | None = None,
) -> list[Tensor]:
    """Compute the expansion of the op `norm_residual`, or, with b, of `dual_norm_residual`."""
    x = _whole(x, residual)
    if b is not None:
        x = norm.rms_norm.reference(x, w_x, eps=eps)
        x = x + norm.rms_norm.reference(_whole(b, residual), w_b, eps=eps)
    h: Tensor = residual + norm.rms_norm.reference(x, w_post, eps=eps)
    if scalar is not None:
        h = h * scalar
    return [h, *(norm.rms_norm.reference(h, w, eps=eps) for w in weights)]


@triton_op("g4ir::rms_norm", mutates_args={})
def rms_norm(x: Tensor, w: Tensor | None, eps: float, warps: int) -> Tensor:
    """Return y = x * (mean(x^2) + eps)^-0.5 [* w], rounded once; x, y [..., D], w [D]"""
    if not takes(x):
        y: Tensor = norm.rms_norm.reference(x, w, eps=eps)
        return y
    x, d = x.contiguous(), x.shape[-1]
    y = torch.empty_like(x)
    start(_rms_norm, (x.numel() // d,), (x, w, y, eps), D=d, BLOCK=power_of_2(d), num_warps=warps)
    return y


@triton_op("g4ir::norm_residual", mutates_args={})
def norm_residual(
    x: Tensor,
    residual: Tensor,
    w_post: Tensor,
    scalar: Tensor | None,
    weights: list[Tensor | None],
    eps: float,
    warps: int,
    w_x: Tensor | None = None,
    b: Tensor | None = None,
    w_b: Tensor | None = None,
) -> list[Tensor]:
    """Return h = (residual + rms_norm(x, w_post)) [* scalar], then rms_norm(h [, w]) per entry of
    weights; with b, of rms_norm(x, w_x) + rms_norm(b, w_b), rounded, instead of x

    residual and results [..., D]; x and b like residual, or fp32 partial sums [P, ..., D], added in
    their order and rounded to the type of residual first; w_post, w [D]; scalar [1].
    ValueError for more than three pre-norms on a GPU.
    """
    if not takes(residual):
        return reference(x, residual, w_post, scalar, weights, eps, w_x, b, w_b)
    residual, d = residual.contiguous(), residual.shape[-1]
    pre = three(weights)
    y, *norms = [torch.empty_like(residual) for _ in range(1 + len(weights))]
    summed = (x.contiguous(), w_x, b if b is None else b.contiguous(), w_b)
    start(
        _norm_residual,
        (residual.numel() // d,),
        (*summed, residual, w_post, scalar, *pre, y, *three(norms), eps),
        D=d,
        PARTS=parts_of(x, residual),
        PARTS_B=0 if b is None else parts_of(b, residual),
        BLOCK=power_of_2(d),
        num_warps=warps,
    )
    return [y, *norms]
