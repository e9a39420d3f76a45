"""From the end of one block to the input of the next in one kernel: norm, sum, scalar, pre-norms.

The kernels are those of `torch_compile/kernels/norms_triton.py`, with their error budgets. Each
form has parameters of its own here, since a plugin has no tensor that may be absent.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ...torch_compile.kernels.norms_triton import _norm_residual


@triton.jit
def _after(x, w_x, b, w_b, residual, w, scalar, w1, w2, w3, y, y1, y2, y3, EPS, D, BLOCK):
    _norm_residual(
        *(x, w_x, b, w_b, residual, w, scalar, w1, w2, w3, y, y1, y2, y3, EPS, D, 0, 0, BLOCK)
    )


@triton.jit
def norm_residual(x, residual, w, y, EPS: tl.constexpr, D: tl.constexpr, BLOCK: tl.constexpr):
    """y = residual + rms_norm(x, w), all [tokens, D] but w [D]; grid (tokens)."""
    _after(
        x, None, None, None, residual, w, None, None, None, None, y, None, None, None, EPS, D, BLOCK
    )


@triton.jit
def norm_residual_norm(
    x, residual, w, w1, y, y1, EPS: tl.constexpr, D: tl.constexpr, BLOCK: tl.constexpr
):
    """As norm_residual; y1 = rms_norm(y, w1)."""
    _after(x, None, None, None, residual, w, None, w1, None, None, y, y1, None, None, EPS, D, BLOCK)


@triton.jit
def norm_residual_scaled_norm(
    x, residual, w, scalar, w1, y, y1, EPS: tl.constexpr, D: tl.constexpr, BLOCK: tl.constexpr
):
    """As norm_residual_norm, y times scalar [1]."""
    _after(
        x, None, None, None, residual, w, scalar, w1, None, None, y, y1, None, None, EPS, D, BLOCK
    )


@triton.jit
def norm_residual_norms(
    x, residual, w, w1, w2, y, y1, y2, y3, EPS: tl.constexpr, D: tl.constexpr, BLOCK: tl.constexpr
):
    """As norm_residual_norm; y2 = rms_norm(y, w2), y3 = rms_norm(y)."""
    _after(x, None, None, None, residual, w, None, w1, w2, None, y, y1, y2, y3, EPS, D, BLOCK)


@triton.jit
def dual_norm_residual_scaled_norm(
    a,
    w_a,
    b,
    w_b,
    w,
    residual,
    scalar,
    w1,
    y,
    y1,
    EPS: tl.constexpr,
    D: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """As norm_residual_scaled_norm with x = rms_norm(a, w_a) + rms_norm(b, w_b)."""
    _after(a, w_a, b, w_b, residual, w, scalar, w1, None, None, y, y1, None, None, EPS, D, BLOCK)
