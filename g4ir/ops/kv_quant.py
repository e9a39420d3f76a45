"""Quantised rows of a KV cache: made once, from then on moved as they are.

A row of d numbers is held as `bf16` or `f8e4m3` [.., d], each number rounded to the nearest and
those beyond the dtype's range to its end; or as `i8` [.., d + 2 ceil(d / 32)]: a code for each
number, then the scales of groups of 32, in bf16, low byte first. Scales lie in the row, so that a
cache stays one tensor whose slots are written whole. They are in bf16 whatever the model's dtype:
codes follow from the scale as it is stored, and its error is not theirs.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .base import Sample, free, op, require
from .budgets import Budget
from .codecs import quantized
from .types import FLOATS, ITEMSIZE, Type, torch, torch_dtype

#: dtype of a cache -> largest finite number; of codes none, as scales follow the numbers
NARROW: Mapping[str, float | None] = {"bf16": 3.3895313892515355e38, "f8e4m3": 448.0, "i8": None}
#: codes that share a scale, and the bytes of a scale
GROUP, SCALE_BYTES = 32, 2


def narrow_width(width: int, dtype: str) -> int:
    """Return the elements of a row of `width` numbers that is held in a dtype."""
    return width + SCALE_BYTES * -(-width // GROUP) if dtype == "i8" else width


def held_width(t: Type) -> int:
    """Return the numbers that a row of a cache says, the inverse of `narrow_width`."""
    return numbers_in(int(t.shape[-1])) if t.dtype == "i8" else int(t.shape[-1])


def numbers_in(size: int) -> int:
    """Return the numbers of a row of so many bytes."""
    return size - SCALE_BYTES * -(-size // (GROUP + SCALE_BYTES))


def as_held(t: Type, dtype: str) -> Type:
    """Return the type of a cache, or of rows, once its rows are held in a dtype."""
    return Type(dtype, (*t.shape[:-1], narrow_width(int(t.shape[-1]), dtype)))


def as_read(t: Type, dtype: str) -> Type:
    """Return the type of the numbers that a cache, or rows, say to a reader of this dtype. A cache
    in a wider dtype than its reader's stays what it is, and does not fit."""
    if t.dtype not in NARROW or t.rank == 0 or not isinstance(t.shape[-1], int):
        return t
    narrower = ITEMSIZE[t.dtype] < ITEMSIZE[dtype]
    return Type(dtype, (*t.shape[:-1], held_width(t))) if narrower else t


@op
class narrow_row:
    """x as a quantised KV cache holds it: `bf16`, `f8e4m3`, or `i8` with scales (see kv_quant.py)

    Of float64 it makes the same numbers, floats in float64: this rounding is what is meant.
    """

    budget = Budget(0, 0, "rounding may go the other way, by one step of the grid", grid=2.0**-3)
    kind = "kv"
    rows = (0,)

    @staticmethod
    def infer(x: Type, *, to: str) -> Type:
        require(to in NARROW, f"narrow_row: to {to!r}: one of {', '.join(NARROW)}")
        fits = x.dtype in FLOATS and x.rank > 0 and isinstance(x.shape[-1], int)
        require(fits and ITEMSIZE[to] < ITEMSIZE[x.dtype], f"narrow_row: {x} to {to}")
        return as_held(x, to)

    @staticmethod
    def reference(x: Any, *, to: str) -> Any:
        most = NARROW[to]
        if most is None:
            return coded(x)
        # The cast alone makes NaN of what is beyond the range of f8e4m3.
        made = x.clamp(-most, most).to(torch_dtype(to))
        return made.double() if x.dtype == torch.float64 else made

    flops = free
    samples = [Sample(("f32[2,3,2,40]",), {"to": to}) for to in ("f8e4m3", "i8")]


def coded(x: Any) -> Any:
    """Return rows [.., d] as codes and the bytes of their scales, i8 [.., d + 2 ceil(d / 32)]."""
    width = x.shape[-1]
    padded = torch.nn.functional.pad(x, (0, -width % GROUP))
    codes, scales = quantized(padded, "int8", GROUP, "bf16")
    bits = scales.to(torch.bfloat16).view(torch.int16)
    data = torch.stack((bits.to(torch.int8), (bits >> 8).to(torch.int8)), -1).flatten(-2)
    return torch.cat((codes[..., :width], data), -1)


def numbers(rows: Any, dtype: Any = None) -> Any:
    """Return the numbers of rows [.., d] as a cache holds them, in a torch dtype, fp32 by default;
    products of code and scale are exact in fp32 and rounded once."""
    dtype = dtype or torch.float32
    if rows.dtype != torch.int8:
        return rows.to(dtype)
    size = rows.shape[-1]
    width = numbers_in(size)
    codes, data = rows.split([width, size - width], -1)
    low, high = data.to(torch.int32).unflatten(-1, (-1, SCALE_BYTES)).unbind(-1)
    scales = (((high << 8) | (low & 255)) << 16).view(torch.float32)
    spread = scales[..., None].expand(*scales.shape, GROUP).flatten(-2)[..., :width]
    return (codes.to(torch.float32) * spread).to(dtype)


def comparable(value: Any) -> Any:
    """Return a tensor that can be compared: what rows in 8 bits say in fp32, others as they are."""
    return numbers(value) if value.dtype in (torch.int8, torch.float8_e4m3fn) else value
