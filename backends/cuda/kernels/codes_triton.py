"""Loading and dequantising weights in Triton: a float dtype, or codes with scales
(g4ir/ops/codecs.py).

One decoder reads every quantised format from its bytes. A format is described by FORMAT, a tuple of
integers computed from the table of layouts (`record`). GROUP is how many codes share a scale; 0:
those of a row, whose scale is applied to the row's sum, or, with minima, to each tile.

The bits of a value are in one or two fields of a block, read as 32-bit words. A word has some
values at shifts: with each `join` of a word and its shifted copy the values of a tile double, until
all are there, and a reshape puts them in order. Bits become a float without a conversion: at the
top of the mantissa, below the exponent of 2^width, they are 2^width + value, exact in fp32; 2^width
is taken off with the format's zero point, in the multiply-add with the scale.

Products with one row of x keep code * scale exact; where tensor cores multiply, a weight is
rounded to x's dtype, which is the definition. One scale per row multiplies the row's sum instead.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl

from g4ir.ops.codecs import FORMATS, PAIRS_OF_INTEGERS, QuantFormat
from g4ir.ops.layouts import Bits, six_bits

Tensor = torch.Tensor

#: kinds of codes: floats, 8-bit integers, e4m3, bits of values in words
DENSE, INT8, E4M3, BITS = (tl.constexpr(i) for i in range(4))
#: kinds of shared integers (sub-block scales): signed bytes, 7 bits above a shift bit, e4m3, pairs
#: of 4 and of 6 bits
SIGNED, SHIFTED, FLOATS, NIBBLES, SIX_BITS = (tl.constexpr(i) for i in range(5))
#: positions in a record: kind; values and words of a block; of both fields: bits of a value, first
#: word and words in a block, shifts by bit of a value's index, five bits each (0: it selects the
#: word); zero point; values that share an integer, the kind and the first word of integers; whether
#: there are minima; length of a table and its values, a byte each; shift of a group's values
KIND, VALUES, WORDS = (tl.constexpr(i) for i in range(3))
LOW, HIGH = tl.constexpr(3), tl.constexpr(7)
ZERO, SHARED, INTEGERS, INTEGERS_AT, MINIMA = (tl.constexpr(i) for i in range(11, 16))
TABLE, TABLE_LOW, TABLE_HIGH, LEVEL_SHIFT = (tl.constexpr(i) for i in range(16, 20))


@triton.jit
def rows_of(w, row, K, FORMAT):
    """Pointers to rows of a weight of K columns; of formats of bits, to their 32-bit words."""
    if FORMAT[KIND] == BITS:
        w = w.to(tl.pointer_type(tl.int32), bitcast=True)
        w += row.to(tl.int64) * (K // FORMAT[VALUES] * FORMAT[WORDS])
    else:
        w += row.to(tl.int64) * K
    return w


@triton.jit
def scales_of(scales, row, K, FORMAT, GROUP):
    """Pointers to the first scale of rows of a weight of K columns."""
    return scales + row.to(tl.int64) * ((K // GROUP if GROUP else 1) * (1 + FORMAT[MINIMA]))


@triton.jit
def row_scaled(sums, scales, live, FORMAT, GROUP):
    """Multiply sums [R, M] by the rows' scales, if there is one per row and no minima."""
    if FORMAT[KIND] != DENSE and GROUP == 0 and not FORMAT[MINIMA]:
        sums = sums * tl.load(scales, mask=live, other=0.0).to(tl.float32)[:, None]
    return sums


@triton.jit
def exponent_of(w, FORMAT):
    """The bits of the float 2^width, computed from the pointer w to hide them from constant
    folding, so that mask and OR become one LOP3 instruction."""
    return tl.where(w.to(tl.int64) != 0, (127 + FORMAT[LOW] + FORMAT[HIGH]) << 23, 0)


@triton.jit
def _field(w, live, blocks, R, BLOCK_K, FORMAT, FIELD):
    """Words of a field, shifted so that each value's bits are lowest: int32 [R, BLOCK_K]."""
    EACH: tl.constexpr = FORMAT[FIELD + 2]
    j = tl.arange(0, BLOCK_K // FORMAT[VALUES] * EACH)
    t = tl.load(
        w[:, None] + (j // EACH * FORMAT[WORDS] + FORMAT[FIELD + 1] + j % EACH)[None, :],
        mask=live[:, None] & (j // EACH < blocks)[None, :],
        other=0,
        eviction_policy="evict_first",
    )
    for bit in tl.static_range(8):
        t = _with_bit(t, bit, (FORMAT[FIELD + 3] >> 5 * bit) & 31, R)
    return t


@triton.jit
def _with_bit(t, BIT, SHIFT, R):
    """Words [R, W] -> [R, 2W]: words for value indices with this bit clear, and shifted ones for
    those with it set; unchanged if the bit has no shift."""
    if SHIFT:
        N: tl.constexpr = t.shape[1] >> BIT
        t = tl.reshape(tl.join(t, t >> SHIFT), (R, N, 1 << BIT, 2))
        t = tl.reshape(tl.permute(t, (0, 1, 3, 2)), (R, N << (BIT + 1)))
    return t


@triton.jit
def _table_values(i, FORMAT):
    """The values of a table at indices, fp32."""
    word = tl.full(i.shape, FORMAT[TABLE_LOW], tl.int64)
    if FORMAT[TABLE] > 8:
        word = tl.where((i & 8) != 0, FORMAT[TABLE_HIGH], word)
    return (word >> ((i & 7) * 8)).to(tl.int8).to(tl.float32)


@triton.jit
def _values(w, live, at, K, exponent, R, BLOCK_K, FORMAT):
    """Values fp32 [R, BLOCK_K] of a format of bits from column `at`, 2^width too large unless they
    come from a table. w: row pointers."""
    w += at // FORMAT[VALUES] * FORMAT[WORDS]
    blocks = (K - at) // FORMAT[VALUES]
    WIDTH: tl.constexpr = FORMAT[LOW] + FORMAT[HIGH]
    UP: tl.constexpr = 0 if FORMAT[TABLE] else 23 - WIDTH
    MASK: tl.constexpr = ((1 << FORMAT[LOW]) - 1) << UP
    t = (_field(w, live, blocks, R, BLOCK_K, FORMAT, LOW) << UP) & MASK
    if FORMAT[HIGH]:
        high = _field(w, live, blocks, R, BLOCK_K, FORMAT, HIGH)
        t |= (high & ((1 << FORMAT[HIGH]) - 1)) << (UP + FORMAT[LOW])
    if FORMAT[TABLE]:
        t = _table_values(t, FORMAT)
    else:
        t = (t | exponent).to(tl.float32, bitcast=True)
    return t


@triton.jit
def _integers(w, live, at, K, N, FORMAT):
    """Shared integers [R, N] of the values from column `at` on, and the second ones (of minima, or
    shifts of values), 0 if there are none. w: row pointers."""
    PER_BLOCK: tl.constexpr = FORMAT[VALUES] // FORMAT[SHARED]
    SIX: tl.constexpr = FORMAT[INTEGERS] == SIX_BITS
    i = tl.arange(0, N)
    block, nth = i // PER_BLOCK, i % PER_BLOCK
    mask = live[:, None] & (block < (K - at) // FORMAT[VALUES])[None, :]
    at_word = (at // FORMAT[VALUES] + block) * FORMAT[WORDS] + FORMAT[INTEGERS_AT]
    words = w[:, None] + (at_word + (0 if SIX else nth // 4))[None, :]
    shift = (nth % 4 * 8)[None, :]
    first = tl.load(words, mask=mask, other=0) >> shift
    second = tl.zeros_like(first)
    if FORMAT[INTEGERS] == NIBBLES:
        second = (first >> 4) & 15
        first = first & 15
    elif SIX:
        second = tl.load(words + 1, mask=mask, other=0) >> shift
        last = tl.load(words + 2, mask=mask, other=0) >> shift
        lower = (nth < 4)[None, :]
        first = tl.where(lower, first & 63, (last & 15) | ((first >> 2) & 48))
        second = tl.where(lower, second & 63, ((last >> 4) & 15) | ((second >> 2) & 48))
    elif FORMAT[INTEGERS] == FLOATS:  # e4m3 bits in a float: 2^-120 of the value
        bits = ((first & 128) << 24) | ((first & 127) << 20)
        first = bits.to(tl.float32, bitcast=True) * 1.329227995784916e36
    else:
        if FORMAT[INTEGERS] == SHIFTED:
            second = -(first & 1) * FORMAT[LEVEL_SHIFT]
        first = (first << 24) >> (24 + FORMAT[INTEGERS])
    return first.to(tl.float32), second.to(tl.float32)


@triton.jit
def _scales(scales, live, at, K, N, R, FORMAT, GROUP, EACH):
    """Scales and minima fp32 [R, N], one for each EACH columns from column `at` on; minima are 0 if
    the format has none."""
    SPAN: tl.constexpr = GROUP // EACH if GROUP and GROUP // EACH < N else N
    g = at // GROUP + tl.arange(0, N // SPAN) if GROUP else tl.arange(0, 1)
    inside = live[:, None] & (g < (K // GROUP if GROUP else 1))[None, :]
    if not FORMAT[MINIMA]:
        s = tl.load(scales[:, None] + g[None, :], mask=inside, other=0.0).to(tl.float32)
        m = tl.zeros_like(s)
    elif scales.dtype.element_ty.primitive_bitwidth == 16:  # one 4-byte load, so cp.async applies
        pairs = scales.to(tl.pointer_type(tl.int32), bitcast=True)
        pair = tl.load(pairs[:, None] + g[None, :], mask=inside, other=0)
        s = pair.to(tl.int16).to(scales.dtype.element_ty, bitcast=True).to(tl.float32)
        m = (pair >> 16).to(tl.int16).to(scales.dtype.element_ty, bitcast=True).to(tl.float32)
    else:
        s = tl.load(scales[:, None] + 2 * g[None, :], mask=inside, other=0.0)
        m = tl.load(scales[:, None] + (2 * g + 1)[None, :], mask=inside, other=0.0)
    return _spread(s, R, N, SPAN), _spread(m, R, N, SPAN)


@triton.jit
def _spread(t, R, N, SPAN):
    """[R, N / SPAN] -> [R, N]: each value SPAN times."""
    return tl.reshape(tl.broadcast_to(t[:, :, None], (R, N // SPAN, SPAN)), (R, N))


@triton.jit
def _scaled(t, w, scales, live, at, K, R, BLOCK_K, FORMAT, GROUP):
    """Values t [R, BLOCK_K] of columns from `at`, a multiple of BLOCK_K, times their integers and
    scales, less their minima. w, scales: row pointers; a per-row scale without minima is not
    applied."""
    COMMON: tl.constexpr = FORMAT[SHARED] if FORMAT[SHARED] else GROUP
    EACH: tl.constexpr = COMMON if COMMON and COMMON < BLOCK_K else BLOCK_K
    N: tl.constexpr = BLOCK_K // EACH
    step, minus = tl.full((R, N), 1.0, tl.float32), tl.zeros((R, N), tl.float32)
    if FORMAT[SHARED]:
        step, minus = _integers(w, live, at, K, N, FORMAT)
    if FORMAT[LEVEL_SHIFT]:
        minus *= step
    if GROUP or FORMAT[MINIMA]:
        s, m = _scales(scales, live, at, K, N, R, FORMAT, GROUP, EACH)
        step *= s
        if FORMAT[MINIMA]:
            minus = m * minus if FORMAT[SHARED] else m
        else:
            minus *= s
    if FORMAT[KIND] == BITS and not FORMAT[TABLE]:
        minus += step * ((1 << (FORMAT[LOW] + FORMAT[HIGH])) + FORMAT[ZERO])
    t = tl.reshape(t, (R, N, EACH)) * step[:, :, None] - minus[:, :, None]
    return tl.reshape(t, (R, BLOCK_K))


@triton.jit
def weight_tile(w, scales, live, at, exponent, K, BLOCK_K, R, FORMAT, GROUP):
    """Tile [R, BLOCK_K] of a weight from column `at`: as stored, or dequantised to fp32. What is
    beyond the last column may be anything finite: x must be zero there. w, scales: row pointers
    (`rows_of`, `scales_of`); scales that `row_scaled` applies are left out. exponent:
    `exponent_of`."""
    if FORMAT[KIND] == BITS:
        t = _values(w, live, at, K, exponent, R, BLOCK_K, FORMAT)
    else:
        k = at + tl.arange(0, BLOCK_K)
        t = tl.load(
            w[:, None] + k[None, :],
            mask=live[:, None] & (k < K)[None, :],
            other=0,
            eviction_policy="evict_first",
        )
        if FORMAT[KIND] == INT8:
            t = t.to(tl.int8, bitcast=True).to(tl.float32)
        elif FORMAT[KIND] == E4M3:
            t = t.to(tl.float8e4nv, bitcast=True).to(tl.float32)
    if FORMAT[KIND] != DENSE:
        t = _scaled(t, w, scales, live, at, K, R, BLOCK_K, FORMAT, GROUP)
    return t


@triton.jit
def sums_of(x, real, w, scales, row, live, K, BLOCK_M, BLOCK_K, R, STAGES, FORMAT, GROUP):
    """fp32 [R, BLOCK_M]: sum over k of x[m][k] * weight[row][k].

    x: pointers to rows [BLOCK_M], of which the `real` ones are read; row [R]: indices of rows of w
    [.., K], of which the `live` ones are read. One row (BLOCK_M 1) multiplies and adds in fp32;
    more, from 16 on, go to tensor cores.
    """
    exponent = exponent_of(w, FORMAT)
    w, scales = rows_of(w, row, K, FORMAT), scales_of(scales, row, K, FORMAT, GROUP)
    WIDTH: tl.constexpr = BLOCK_K if BLOCK_M == 1 else BLOCK_M
    sums = tl.zeros([R, WIDTH], tl.float32)
    for at in tl.range(0, K, BLOCK_K, num_stages=STAGES):
        t = weight_tile(w, scales, live, at, exponent, K, BLOCK_K, R, FORMAT, GROUP)
        k = at + tl.arange(0, BLOCK_K)
        if BLOCK_M == 1:
            a = tl.load(x + k, mask=k < K, other=0.0).to(tl.float32)
            sums += t.to(tl.float32) * a[None, :]
        else:
            inside = real[None, :] & (k < K)[:, None]
            a = tl.load(x[None, :] + k[:, None], mask=inside, other=0.0)
            sums = tl.dot(t.to(a.dtype), a, sums, input_precision="ieee")
    if BLOCK_M == 1:
        sums = tl.sum(sums, 1)[:, None]
    return row_scaled(sums, scales, live, FORMAT, GROUP)


def _bit_shifts(bits: Bits, values: int) -> int:
    """Return, for each bit of a value's index, the shift of the value within a word if the bit is
    set, in five bits each; 0 for a bit that selects the word."""
    shifts, byte = [], 3
    for size, step in zip(reversed((values, *bits.axes)), reversed((0, *bits.steps)), strict=True):
        for i in range(size.bit_length() - 1):
            shifts.append(step << i if step else (1 << byte) & 31)
            byte += not step
    return sum(s << 5 * i for i, s in enumerate(shifts[: values.bit_length() - 1]))


def _integers_kind(fmt: QuantFormat) -> int:
    if fmt.scales > 1:
        unpack, _ = PAIRS_OF_INTEGERS.get(fmt.shared, (None, None))
        return (SIX_BITS if unpack is six_bits else NIBBLES).value
    if fmt.max_integer > 127:  # e4m3
        return FLOATS.value
    return SHIFTED.value if fmt.shift else SIGNED.value


@cache
def record(form: str) -> tuple[int, ...]:
    """Return the FORMAT of a quantised format (positions above); for "" that of float weights."""
    fmt = FORMATS.get(form, FORMATS["int8"])
    kinds = {"": DENSE.value, "int8": INT8.value, "fp8": E4M3.value}
    repeat = -(-4 // fmt.layout.nbytes)
    values, at = fmt.block_values * repeat, 0
    fields: dict[str, tuple[int, ...]] = {"high": (0, 0, 0, 0), "integers": (0, 0, 0, 0)}
    for name, (nbytes, bits) in fmt.layout.fields.items():
        words = nbytes * repeat // 4
        fields[name] = (bits.width, at, words, _bit_shifts(bits, values))
        at += words
    table = bytes(v & 255 for v in fmt.table).ljust(16, b"\0")
    halves = (int.from_bytes(table[i : i + 8], "little", signed=True) for i in (0, 8))
    return (
        *(kinds.get(form, BITS.value), values, at, *fields["low"], *fields["high"]),
        *(fmt.layout.zero, fmt.shared, _integers_kind(fmt), fields["integers"][1]),
        *(int(fmt.scales > 1), len(fmt.table), *halves, fmt.shift),
    )


def format_constants(
    w: Tensor, scales: Tensor | None, form: str, prefix: str = ""
) -> dict[str, Any]:
    """Return the constexprs FORMAT and GROUP of a weight; ValueError if it is not contiguous."""
    for t in (w, scales):
        if t is not None and not t.is_contiguous():
            raise ValueError(f"weight or scales: strides {t.stride()}, expected contiguous")
    groups = 1 if scales is None else scales.shape[-1] // FORMATS[form].scales
    group = columns(w, form) // groups if groups > 1 else 0
    return {f"{prefix}FORMAT": record(form), f"{prefix}GROUP": group}


def columns(w: Tensor, form: str) -> int:
    """Return the values per row of a weight; a quantised one is given as bytes in the format
    `form`."""
    if not form:
        return w.shape[-1]
    return w.shape[-1] // FORMATS[form].layout.nbytes * FORMATS[form].block_values
