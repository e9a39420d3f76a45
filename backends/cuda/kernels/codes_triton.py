"""Loading and dequantising weights in Triton: a float dtype, or codes with scales
(g4ir/ops/codecs.py).

FORM is empty for a float dtype, else the form of the codes. GROUP is how many codes share a scale;
0: those of a row, whose scale is applied to the row's sum. Products with one row of x keep code *
scale exact; where tensor cores multiply, a weight in groups is rounded to x's dtype, which is the
definition.

int4 is read in words of eight codes. Four bits become a float without a conversion: put below the
exponent of 16.0 they are 16 + (code + 8), exact in fp32; 24 is taken off by one multiplication with
the sum of eight x, or in the multiply-add with the scale.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from g4ir.ops.codecs import FORMAT_OF, FORMATS, PACKED, dequantize_codes
from g4ir.ops.types import torch_dtype

Tensor = torch.Tensor
#: dtype of codes -> format
CODED = {torch_dtype(codes): FORMAT_OF[codes] for codes in PACKED}


@triton.jit
def rows_of(w, row, K, FORMAT):
    """Pointers to rows of a weight of K columns; int4: to words of eight codes."""
    if FORMAT == "int4":
        w = w.to(tl.pointer_type(tl.int32), bitcast=True)
    return w + row.to(tl.int64) * (K // 8 if FORMAT == "int4" else K)


@triton.jit
def scales_of(scales, row, K, GROUP):
    """Pointers to the scales of rows."""
    return scales + row.to(tl.int64) * (K // GROUP if GROUP else 1)


@triton.jit
def row_scaled(sums, scales, live, FORMAT, GROUP):
    """Multiply sums [R, M] by the rows' scale, if there is one per row."""
    if FORMAT != "" and GROUP == 0:
        sums = sums * tl.load(scales, mask=live, other=0.0).to(tl.float32)[:, None]
    return sums


@triton.jit
def _scaled(t, scales, live, at, K, C, BLOCK_K, R, GROUP, OFFSET):
    """(t - OFFSET) * group scales; t [R, C] covers BLOCK_K columns from `at`, a multiple of
    BLOCK_K."""
    EACH: tl.constexpr = GROUP if GROUP < BLOCK_K else BLOCK_K
    G: tl.constexpr = BLOCK_K // EACH
    g = at // GROUP + tl.arange(0, G)
    inside = live[:, None] & (g < K // GROUP)[None, :]
    s = tl.load(scales[:, None] + g[None, :], mask=inside, other=0.0).to(tl.float32)[:, :, None]
    t = tl.reshape(t, (R, G, C // G)) * s
    if OFFSET:
        t -= s * OFFSET
    return tl.reshape(t, (R, C))


@triton.jit
def bits_of_16(w):
    """The bits of 16.0, hidden from constant folding, so that mask and OR become one LOP3
    instruction."""
    return tl.where(w.to(tl.int64) != 0, 0x41800000, 0)


@triton.jit
def _nibble(word, NTH: tl.constexpr, exponent):
    """16 + the NTH 4 bits of a word, fp32."""
    if NTH < 5:
        bits = word << (19 - 4 * NTH)
    else:
        bits = word >> (4 * NTH - 19)
    return ((bits & 0x00780000) | exponent).to(tl.float32, bitcast=True)


@triton.jit
def _eighths(x, W):
    """[1, 8 W] -> eight [1, W]: columns 0, 8, ..; 1, 9, ..; and so on."""
    even, odd = tl.split(tl.reshape(x, (1, W, 4, 2)))
    a, c = tl.split(tl.reshape(even, (1, W, 2, 2)))
    b, d = tl.split(tl.reshape(odd, (1, W, 2, 2)))
    x0, x4 = tl.split(a)
    x1, x5 = tl.split(b)
    x2, x6 = tl.split(c)
    x3, x7 = tl.split(d)
    return x0, x1, x2, x3, x4, x5, x6, x7


@triton.jit
def _word_products(word, x, exponent, W):
    """Dot product of each word's eight codes with eight columns of x [1, 8 W], fp32."""
    x0, x1, x2, x3, x4, x5, x6, x7 = _eighths(x, W)
    sums = _nibble(word, 0, exponent) * x0
    sums += _nibble(word, 1, exponent) * x1
    sums += _nibble(word, 2, exponent) * x2
    sums += _nibble(word, 3, exponent) * x3
    sums += _nibble(word, 4, exponent) * x4
    sums += _nibble(word, 5, exponent) * x5
    sums += _nibble(word, 6, exponent) * x6
    sums += _nibble(word, 7, exponent) * x7
    return sums - 24.0 * ((x0 + x1) + (x2 + x3) + (x4 + x5) + (x6 + x7))


@triton.jit
def _one_row(x, w, scales, live, exponent, K, BLOCK_K, R, STAGES, FORMAT, GROUP):
    """GEMV of `sums_of` for one row of x, fp32 [R, 1], without per-row scales."""
    EACH: tl.constexpr = 8 if FORMAT == "int4" else 1
    W: tl.constexpr = BLOCK_K // EACH
    j, k = tl.arange(0, W), tl.arange(0, BLOCK_K)
    sums = tl.zeros([R, W], tl.float32)
    for at in tl.range(0, K, BLOCK_K, num_stages=STAGES):
        columns = at + k
        a = tl.load(x + columns, mask=columns < K, other=0.0).to(tl.float32)[None, :]
        here = at // EACH + j
        t = tl.load(
            w[:, None] + here[None, :],
            mask=live[:, None] & (here < K // EACH)[None, :],
            other=0.0,
            eviction_policy="evict_first",
        )
        t = _word_products(t, a, exponent, W) if FORMAT == "int4" else t.to(tl.float32) * a
        if GROUP:
            t = _scaled(t, scales, live, at, K, W, BLOCK_K, R, GROUP, 0)
        sums += t
    return tl.sum(sums, 1)[:, None]


@triton.jit
def sums_of(x, real, w, scales, row, live, K, BLOCK_M, BLOCK_K, R, STAGES, FORMAT, GROUP):
    """fp32 [R, BLOCK_M]: sum over k of x[m][k] * weight[row][k].

    x: pointers to rows [BLOCK_M], those that are `real`; row [R]: rows of w [.., K], those that are
    `live`. One row multiplies and adds in fp32; more, from 16 on, go to tensor cores.
    """
    exponent = bits_of_16(w)
    w, scales = rows_of(w, row, K, FORMAT), scales_of(scales, row, K, GROUP)
    if BLOCK_M == 1:
        sums = _one_row(x, w, scales, live, exponent, K, BLOCK_K, R, STAGES, FORMAT, GROUP)
    else:
        sums = tl.zeros([R, BLOCK_M], tl.float32)
        for at in tl.range(0, K, BLOCK_K, num_stages=STAGES):
            t = weight_tile(w, scales, live, at, exponent, K, BLOCK_K, R, FORMAT, GROUP)
            k = at + tl.arange(0, BLOCK_K)
            inside = real[None, :] & (k < K)[:, None]
            a = tl.load(x[None, :] + k[:, None], mask=inside, other=0.0)
            sums = tl.dot(t.to(a.dtype), a, sums, input_precision="ieee")
    return row_scaled(sums, scales, live, FORMAT, GROUP)


@triton.jit
def weight_tile(w, scales, live, at, exponent, K, BLOCK_K, R, FORMAT, GROUP):
    """Tile [R, BLOCK_K] of a weight from column `at`: as stored, or dequantised to fp32. Zero
    beyond the last column, except int4 with one scale per row, where x must be zero. w, scales: row
    pointers (`rows_of`, `scales_of`); a per-row scale is not applied. exponent: `bits_of_16`."""
    EACH: tl.constexpr = 8 if FORMAT == "int4" else 1
    W: tl.constexpr = BLOCK_K // EACH
    here = at // EACH + tl.arange(0, W)
    t = tl.load(
        w[:, None] + here[None, :],
        mask=live[:, None] & (here < K // EACH)[None, :],
        other=0.0,
        eviction_policy="evict_first",
    )
    if FORMAT == "int4":
        t = _dequantize_words(t, exponent, R, BLOCK_K)
        if not GROUP:
            t -= 24.0
    elif FORMAT != "":
        t = t.to(tl.float32)
    if GROUP:
        OFFSET: tl.constexpr = 24 if FORMAT == "int4" else 0
        t = _scaled(t, scales, live, at, K, BLOCK_K, BLOCK_K, R, GROUP, OFFSET)
    return t


@triton.jit
def _dequantize_words(word, exponent, R, BLOCK_K):
    """24 + each code, fp32 [R, BLOCK_K], of words [R, BLOCK_K / 8]."""
    a = tl.join(_nibble(word, 0, exponent), _nibble(word, 4, exponent))
    b = tl.join(_nibble(word, 1, exponent), _nibble(word, 5, exponent))
    c = tl.join(_nibble(word, 2, exponent), _nibble(word, 6, exponent))
    d = tl.join(_nibble(word, 3, exponent), _nibble(word, 7, exponent))
    return tl.reshape(tl.join(tl.join(a, c), tl.join(b, d)), (R, BLOCK_K))


def format_constants(w: Tensor, scales: Tensor | None, prefix: str = "") -> dict[str, Any]:
    """Return the constexprs FORMAT and GROUP of a weight; ValueError if it is not contiguous."""
    for t in (w, scales):
        if t is not None and not t.is_contiguous():
            raise ValueError(f"weight of strides {t.stride()}: it must be contiguous")
    if scales is None:
        return {f"{prefix}FORMAT": "", f"{prefix}GROUP": 0}
    groups = scales.shape[-1]
    return {
        f"{prefix}FORMAT": CODED[w.dtype],
        f"{prefix}GROUP": columns(w) // groups if groups > 1 else 0,
    }


def columns(w: Tensor) -> int:
    """Return the number of columns of a weight, packed codes unpacked."""
    return w.shape[-1] * FORMATS[CODED[w.dtype]].block_values if w.dtype in CODED else w.shape[-1]


def dense(w: Tensor, scales: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Return a weight in `dtype`, dequantised if needed."""
    weight: Tensor = w if scales is None else dequantize_codes(w, scales, dtype)
    return weight
