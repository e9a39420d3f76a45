"""Quantised KV cache rows: quantised once when written, then moved bit for bit.

A row of d values is stored as `bf16` or `f8e4m3` [.., d], rounded to nearest and saturated; or as
`i8` [.., d + 2 ceil(d / 32)]: a code for each value, then the scales of groups of 32 as bf16, low
byte first. Scales are part of the row, so that a cache stays one tensor and a slot is written in
one piece. They are bf16 for any model dtype: codes are computed from the rounded scale, so a code
is off by half a step at most all the same.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .base import Sample, free, op, require
from .budgets import Budget
from .codecs import quantize_values
from .types import FLOATS, ITEMSIZE, Type, is_float, torch, torch_dtype

#: dtype of a quantised cache -> its largest finite value; None: scaled integers
NARROW: Mapping[str, float | None] = {"bf16": 3.3895313892515355e38, "f8e4m3": 448.0, "i8": None}
#: values that share a scale, bytes of a scale
GROUP, SCALE_BYTES = 32, 2


def quantized_width(width: int, dtype: str) -> int:
    """Return the stored elements of a cache row of `width` values: for `i8` also scales' bytes."""
    return width + SCALE_BYTES * -(-width // GROUP) if dtype == "i8" else width


def dequantized_width(t: Type) -> int:
    """Return the number of values in a row of a cache, the inverse of `quantized_width`."""
    return values_in_row(int(t.shape[-1])) if t.dtype == "i8" else int(t.shape[-1])


def values_in_row(size: int) -> int:
    """Return the number of values in an `i8` row of `size` bytes."""
    return size - SCALE_BYTES * -(-size // (GROUP + SCALE_BYTES))


def quantized_type(t: Type, dtype: str) -> Type:
    """Return the type of a cache or of rows after quantisation to a dtype."""
    return Type(dtype, (*t.shape[:-1], quantized_width(int(t.shape[-1]), dtype)))


def dequantized_type(t: Type, dtype: str) -> Type:
    """Return the type of a cache or of rows after dequantisation to a dtype; `t` itself if it is
    no type of a quantised cache (NARROW), or if that dtype is not wider."""
    if t.dtype not in NARROW or t.rank == 0 or not isinstance(t.shape[-1], int):
        return t
    narrower = ITEMSIZE[t.dtype] < ITEMSIZE[dtype]
    return Type(dtype, (*t.shape[:-1], dequantized_width(t))) if narrower else t


@op
class narrow_row:
    """Rows of x in the format of a quantised KV cache: `bf16`, `f8e4m3`, or `i8` with scales

    float64 is rounded to the same values; bf16 and f8e4m3 results stay float64.
    """

    budget = Budget(0, 0, "rounding may go the other way, by one step of the grid", grid=2.0**-3)
    kind = "kv"
    rows = (0,)

    @staticmethod
    def infer(x: Type, *, to: str) -> Type:
        require(to in NARROW, f"narrow_row: to {to!r}: expected one of {', '.join(NARROW)}")
        fits = x.dtype in FLOATS and x.rank > 0 and isinstance(x.shape[-1], int)
        expected = f"expected floats with a known last dim, wider than {to}, found {x}"
        require(fits and ITEMSIZE[to] < ITEMSIZE[x.dtype], f"narrow_row: {expected}")
        return quantized_type(x, to)

    @staticmethod
    def reference(x: Any, *, to: str) -> Any:
        max_value = NARROW[to]
        if max_value is None:
            return quantize_rows(x)
        # A cast to f8e4m3 turns values out of range into NaN.
        rounded = x.clamp(-max_value, max_value).to(torch_dtype(to))
        return rounded.double() if x.dtype == torch.float64 else rounded

    flops = free
    samples = [Sample(("f32[2,3,2,40]",), {"to": to}) for to in ("f8e4m3", "i8")]


def quantize_rows(x: Any) -> Any:
    """Quantise rows [.., d] to codes and the bytes of their scales, i8 [.., d + 2 ceil(d / 32)]."""
    width = x.shape[-1]
    padded = torch.nn.functional.pad(x, (0, -width % GROUP))
    codes, scales = quantize_values(padded, "int8", GROUP, "bf16")
    bits = scales.to(torch.bfloat16).view(torch.int16)
    data = torch.stack((bits.to(torch.int8), (bits >> 8).to(torch.int8)), -1).flatten(-2)
    return torch.cat((codes[..., :width], data), -1)


def dequantize_rows(rows: Any, dtype: Any = None) -> Any:
    """Return the values of quantised rows in a torch dtype, fp32 by default. Products of code and
    scale are exact in fp32 and rounded once."""
    dtype = dtype or torch.float32
    if rows.dtype != torch.int8:
        return rows.to(dtype)
    size = rows.shape[-1]
    width = values_in_row(size)
    codes, data = rows.split([width, size - width], -1)
    low, high = data.to(torch.int32).unflatten(-1, (-1, SCALE_BYTES)).unbind(-1)
    scales = (((high << 8) | (low & 255)) << 16).view(torch.float32)
    spread = scales[..., None].expand(*scales.shape, GROUP).flatten(-2)[..., :width]
    return (codes.to(torch.float32) * spread).to(dtype)


def to_comparable(value: Any) -> Any:
    """Return a tensor in a form that can be compared by value: int8 and float8_e4m3fn dequantised
    to fp32 as KV cache rows (also if they are weights), quantised weights in other dtypes of floats
    as bytes, others unchanged."""
    if value.is_floating_point() and not is_float(value):
        return value.view(torch.uint8)
    return dequantize_rows(value) if value.dtype in (torch.int8, torch.float8_e4m3fn) else value
