"""Bit layouts of quantised weights, g4ir's and GGUF's, in one table.

Readers, writers and conversions follow from `LAYOUTS`. GGUF's layouts are those of ggml's
`ggml-common.h` and `ggml-quants.c`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import reduce
from typing import Any

from .types import torch


@dataclass(frozen=True)
class Bits:
    """A bit field of `width` bits per value. A block's values form an array of shape `axes`. Along
    an axis with a step, index * step is the shift within the byte; the indices along the other axes
    select the byte."""

    width: int
    axes: tuple[int, ...]
    steps: tuple[int, ...]

    def read(self, data: Any) -> Any:
        """Unpack bytes u8 [.., bytes] of any number of such arrays into u8 [.., values]."""
        sizes = [size for size, step in zip(self.axes, self.steps, strict=True) if not step]
        return self._read(data.unflatten(-1, (-1, *sizes)), 0, 0).flatten(-1 - len(self.axes))

    def _read(self, data: Any, axis: int, shift: int) -> Any:
        while axis < len(self.axes) and not self.steps[axis]:
            axis += 1
        if axis == len(self.axes):
            shifted = data >> shift if shift else data
            return shifted & (1 << self.width) - 1 if shift + self.width < 8 else shifted
        shifts = [shift + i * self.steps[axis] for i in range(self.axes[axis])]
        return torch.stack([self._read(data, axis + 1, s) for s in shifts], axis - len(self.axes))

    def write(self, values: Any) -> Any:
        """Pack values u8 [.., values] of `width` bits into u8 [.., bytes]."""
        data = values.unflatten(-1, (-1, *self.axes))
        for axis, step in enumerate(self.steps):
            if step:
                slices = data.unbind(axis - len(self.axes))
                data = reduce(torch.bitwise_or, (x << i * step for i, x in enumerate(slices)))
        return data.flatten(-1 - self.steps.count(0))


@dataclass(frozen=True)
class Layout:
    """A block of `values` values, each stored as value + `zero`. `fields` maps a name to (bytes,
    bits), in order: `low` and `high` are the values' bits, `high` those above `low`; `integers`
    (sub-block scales, and minima if the format has them) and `scales` (the block's) are bytes."""

    values: int
    zero: int
    fields: Mapping[str, tuple[int, Bits]]

    @property
    def nbytes(self) -> int:
        return sum(nbytes for nbytes, _ in self.fields.values())

    @property
    def low_width(self) -> int:
        return self.fields["low"][1].width

    def split(self, blocks: Any) -> dict[str, Any]:
        """Return the fields of blocks [.., nbytes], as views."""
        sizes = [nbytes for nbytes, _ in self.fields.values()]
        return dict(zip(self.fields, blocks.split(sizes, -1), strict=True))

    def read(self, blocks: Any) -> Any:
        """Unpack blocks [.., nbytes] into stored values, u8 [.., values]: each value + `zero`."""
        parts = self.split(blocks)
        low, *high = (self.fields[n][1].read(parts[n]) for n in ("low", "high") if n in parts)
        return low | high[0] << self.low_width if high else low

    def write(self, values: Any, **shared: Any) -> Any:
        """Pack stored values u8 [.., values], each value + `zero`, and the bytes of other fields
        (`shared`) into blocks u8 [.., nbytes]."""
        parts = {"low": values, "high": values >> self.low_width}
        for name in parts.keys() & self.fields.keys():
            bits = self.fields[name][1]
            shared[name] = bits.write(parts[name] & (1 << bits.width) - 1)
        return torch.cat([shared[name] for name in self.fields], -1)

    def convert(self, blocks: Any, to: Layout) -> Any:
        """Repack each block of [.., nbytes] into n blocks of the layout `to`, [.., n * to.nbytes],
        which has the same `zero`, a subset of the fields, and 1/n of the values per block."""
        parts, count = self.split(blocks), self.values // to.values
        for name, (_, bits) in to.fields.items():
            if (source := self.fields[name][1]) != bits:
                parts[name] = bits.write(source.read(parts[name]))
            parts[name] = parts[name].unflatten(-1, (count, -1))
        return torch.cat([parts[name] for name in to.fields], -1).flatten(-2)


def six_bits(data: Any) -> tuple[Any, Any]:
    """Unpack B groups of 12 bytes, [.., 12 B], into the 6-bit integers of 8 scales and 8 minima per
    group, [.., 8 B] each. A group has the first four scales, then the first four minima, a byte
    each, with the upper 2 bits of the last four above them, then the last four's lower bits."""
    *first, last = data.unflatten(-1, (-1, 3, 4)).unbind(-2)
    scales, minima = (
        torch.cat((low & 63, high | low >> 6 << 4), -1).flatten(-2)
        for low, high in zip(first, (last & 15, last >> 4), strict=True)
    )
    return scales, minima


def in_six_bits(scales: Any, minima: Any) -> Any:
    """Pack 6-bit scales and minima [.., 8 B] into bytes [.., 12 B], the inverse of `six_bits`."""
    pairs = [t.to(torch.uint8).unflatten(-1, (-1, 2, 4)).unbind(-2) for t in (scales, minima)]
    first = [low | high >> 4 << 6 for low, high in pairs]
    last = pairs[0][1] & 15 | (pairs[1][1] & 15) << 4
    return torch.cat((*first, last), -1).flatten(-2)


def nibble_pairs(data: Any) -> tuple[Any, Any]:
    """Unpack bytes into 4-bit integers of scales (low bits) and of minima (high bits)."""
    return data & 15, data >> 4


def in_nibble_pairs(scales: Any, minima: Any) -> Any:
    """Pack 4-bit scales and minima into bytes, the inverse of `nibble_pairs`."""
    return scales.to(torch.uint8) | minima.to(torch.uint8) << 4


def in_order(width: int) -> Bits:
    """Field of values of 1, 2, 4 or 8 bits in order, the first in the lowest bits."""
    return Bits(width, (8 // width,), (width,))


def unpack_dense(data: Any, width: int) -> Any:
    """Unpack values of `width` (1 to 8) bits that follow each other without padding, low bits
    first, also across bytes: u8 [.., bytes] to u8 [.., values]. For widths that do not divide 8 the
    bytes are padded to a multiple of `width` (8 values), and the values with zeros."""
    if 8 % width == 0:
        return in_order(width).read(data)
    data = torch.nn.functional.pad(data, (0, -data.shape[-1] % width))
    words = data.unflatten(-1, (-1, width)).to(torch.int16)
    after = torch.nn.functional.pad(words[..., 1:], (0, 1))
    pairs, starts = words | after << 8, range(0, 8 * width, width)
    values = [pairs[..., at // 8] >> at % 8 & (1 << width) - 1 for at in starts]
    return torch.stack(values, -1).to(torch.uint8).flatten(-2)


def halves(n: int) -> Bits:
    """Field of n values in the low nibbles of bytes, and the next n in the high ones."""
    return Bits(4, (2, n), (4, 0))


def fifth(n: int) -> Bits:
    """One bit of each of n values: that of value a n / 4 + 2 i + p is bit 2 a + p of byte i."""
    return Bits(1, (4, n // 8, 2), (2, 0, 1))


def _layout(values: int, zero: int = 0, **fields: tuple[int, Bits] | int) -> Layout:
    """Build a layout; an int field is a count of bytes."""
    bits = {n: (f, BYTES) if isinstance(f, int) else f for n, f in fields.items()}
    return Layout(values, zero, bits)


BYTES, PAIRS, FOURS, SINGLE = Bits(8, (), ()), in_order(4), in_order(2), in_order(1)
#: one bit of each of 32 values: that of value 16 a + 4 t + c is bit 4 a + c of byte t
THIRD = Bits(1, (2, 4, 4), (4, 0, 1))
#: 2 bits of each of 128 values, one of each of 256; values with indices equal mod 32 share a byte
QUARTERS, EIGHTHS = Bits(2, (4, 32), (2, 0)), Bits(1, (8, 32), (1, 0))
#: one bit of each of 128 values; values with indices equal mod 16 share a byte
SIXTEENTHS = Bits(1, (8, 16), (1, 0))
#: one bit of each of 128 values: that of value 32 b + 16 h + i is bit b + 4 h of byte i
THIRDS = Bits(1, (4, 2, 16), (1, 4, 0))

LAYOUTS = {
    # g4ir's
    "int8": _layout(1, low=1),
    "fp8": _layout(1, low=1),
    "int2": _layout(32, 2, low=(8, FOURS)),
    "int3": _layout(32, 4, low=(8, FOURS), high=(4, THIRD)),
    "int4": _layout(2, 8, low=(1, PAIRS)),
    "int5": _layout(32, 16, low=(16, PAIRS), high=(4, fifth(32))),
    "int3k": _layout(128, 4, low=(32, QUARTERS), high=(16, THIRDS), integers=8),
    "int6": _layout(128, 32, low=(64, halves(64)), high=(32, QUARTERS), integers=8),
    "iq4": _layout(32, low=(16, PAIRS)),
    "fp4": _layout(64, low=(32, PAIRS), integers=4),
    "min4": _layout(32, low=(16, PAIRS)),
    "min5": _layout(32, low=(16, PAIRS), high=(4, fifth(32))),
    "uint2": _layout(128, low=(32, QUARTERS), integers=8),
    "uint4": _layout(256, low=(128, PAIRS), integers=12),
    "uint5": _layout(256, low=(128, PAIRS), high=(32, fifth(256)), integers=12),
    "nl4": _layout(128, low=(64, halves(64)), integers=4),
    "nl3": _layout(128, low=(32, QUARTERS), high=(16, SIXTEENTHS), integers=4),
    "nl2": _layout(128, low=(32, QUARTERS), integers=4),
    # GGUF's
    "Q8_0": _layout(32, scales=2, low=32),
    "Q4_0": _layout(32, 8, scales=2, low=(16, halves(16))),
    "Q4_1": _layout(32, scales=4, low=(16, halves(16))),
    "Q5_0": _layout(32, 16, scales=2, high=(4, SINGLE), low=(16, halves(16))),
    "Q5_1": _layout(32, scales=4, high=(4, SINGLE), low=(16, halves(16))),
    "Q2_K": _layout(256, integers=16, low=(64, QUARTERS), scales=4),
    "Q3_K": _layout(256, 4, high=(32, EIGHTHS), low=(64, QUARTERS), integers=12, scales=2),
    "Q4_K": _layout(256, scales=4, integers=12, low=(128, halves(32))),
    "Q5_K": _layout(256, scales=4, integers=12, high=(32, EIGHTHS), low=(128, halves(32))),
    "Q6_K": _layout(256, 32, low=(128, halves(64)), high=(64, QUARTERS), integers=16, scales=2),
    "MXFP4": _layout(32, scales=1, low=(16, halves(16))),
    "NVFP4": _layout(64, integers=4, low=(32, halves(8))),
    "IQ4_NL": _layout(32, scales=2, low=(16, halves(16))),
    "IQ4_XS": _layout(256, scales=2, integers=6, low=(128, halves(16))),
    # the 6-bit sub-block scales (field `integers`) of a block of Q3_K or IQ4_XS
    "Q3_K integers": _layout(16, 32, low=(8, halves(8)), high=(4, Bits(2, (4, 4), (2, 0)))),
    "IQ4_XS integers": _layout(8, 32, high=(2, FOURS), low=(4, PAIRS)),
}
