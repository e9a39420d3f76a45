"""Turns the blocks of GGUF files into values, and into codes and scales where that loses nothing.

Layouts are those of ggml's `ggml-common.h` and `ggml-quants.c`. A block is a row of bytes. Types
whose minima are float16 too (Q4_1, Q5_1) become values. Every product is exact in float32.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from g4ir.ops.codecs import dequantized, in_fives, packed, to_blocks
from g4ir.ops.types import torch
from g4ir.quant.recipe import Scheme

#: u8[n, bytes of a block] -> something of each of the n blocks, [n, ..]
Part = Callable[["torch.Tensor"], "torch.Tensor"]

#: bytes of blocks that are looked at together: few enough to stay in a core's cache
PIECE = 1 << 18


def _half(b: torch.Tensor, at: int, count: int = 1) -> torch.Tensor:
    """Return the float16 from a byte of each block on: f16[n, count]."""
    return b[:, at : at + 2 * count].contiguous().view(torch.float16)


def _first(b: torch.Tensor) -> torch.Tensor:
    return _half(b, 0)


@dataclass(frozen=True)
class BlockFormat:
    """A type that is codes times scales: codes in the form of ops/codecs.py, scales [n, groups]."""

    scheme: Scheme
    codes: Part
    scales: Part = _first

    def numbers(self, blocks: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = dequantized(self.codes(blocks), self.scales(blocks), torch.float32)
        return made


def _shifted(b: torch.Tensor, shifts: range, each: int) -> torch.Tensor:
    """Return `each` bytes shifted right by the first, then by the next, then the next bytes."""
    by = torch.tensor(shifts, dtype=torch.uint8)[:, None]
    return (b.unflatten(-1, (-1, 1, each)) >> by).flatten(1)


def _nibbles(b: torch.Tensor, each: int) -> torch.Tensor:
    """Return the low halves of `each` bytes, then their high halves: u8[n, 2 bytes]."""
    return _shifted(b, range(0, 8, 4), each) & 15


def _bits(b: torch.Tensor, each: int) -> torch.Tensor:
    """Return the fifth bits of numbers, each as 16; `each` 1: those of a little-endian u32."""
    return (_shifted(b, range(8), each) & 1) << 4


def _signed(b: torch.Tensor, zero: int) -> torch.Tensor:
    return b.to(torch.int8) - zero


def _i8(b: torch.Tensor) -> torch.Tensor:
    return b.view(torch.int8)


def _q6_k(b: torch.Tensor) -> torch.Tensor:
    """Return the halves of blocks one after the other: i64[n, 26]."""
    parts = (b[:, at : at + 2 * each].unflatten(-1, (2, each)) for at, each in _Q6_K)
    return torch.cat([*parts], -1).flatten(1).view(torch.int64)


#: where the parts of int6 lie in a block of Q6_K, and their bytes in each half of it
_Q6_K = ((0, 64), (128, 32), (192, 8))
_IQ4 = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)


def _iq4(nibbles: torch.Tensor) -> torch.Tensor:
    return torch.tensor(_IQ4, dtype=torch.int8)[nibbles.int()]


def _iq4_xs_scales(b: torch.Tensor) -> torch.Tensor:
    high = (_shifted(b[:, 2:4], range(0, 8, 2), 1) & 3) << 4
    return _half(b, 0).float() * _signed(_nibbles(b[:, 4:8], 1) | high, 32)


def _with_minimum(q: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return q * _half(b, 0).float() + _half(b, 2).float()


_INT8 = Scheme("int8", 32, "f16")
CODED = {
    "Q8_0": BlockFormat(_INT8, lambda b: _i8(b[:, 2:])),
    "Q4_0": BlockFormat(
        Scheme("int4", 32, "f16"), lambda b: packed(_signed(_nibbles(b[:, 2:], 16), 8))
    ),
    "Q5_0": BlockFormat(
        Scheme("int5", 32, "f16"),
        lambda b: in_fives(_signed(_nibbles(b[:, 6:], 16) | _bits(b[:, 2:6], 1), 16)),
    ),
    "Q4_K": BlockFormat(
        Scheme("uint4", 256, "f16"),
        lambda b: to_blocks(_nibbles(b[:, 16:], 32), b[:, 4:16], "uint4"),
        lambda b: _half(b, 0, 2),
    ),
    "Q5_K": BlockFormat(
        Scheme("uint5", 256, "f16"),
        lambda b: to_blocks(_nibbles(b[:, 48:], 32) | _bits(b[:, 16:48], 32), b[:, 4:16], "uint5"),
        lambda b: _half(b, 0, 2),
    ),
    "Q6_K": BlockFormat(Scheme("int6", 256, "f16"), _q6_k, lambda b: _half(b, 208)),
    "IQ4_NL": BlockFormat(_INT8, lambda b: _iq4(_nibbles(b[:, 2:], 16))),
    "IQ4_XS": BlockFormat(
        Scheme("int8", 32, "f32"), lambda b: _iq4(_nibbles(b[:, 8:], 16)), _iq4_xs_scales
    ),
}
DENSE: dict[str, Part] = {
    "Q4_1": lambda b: _with_minimum(_nibbles(b[:, 4:], 16), b),
    "Q5_1": lambda b: _with_minimum(_nibbles(b[:, 8:], 16) | _bits(b[:, 4:8], 1), b),
}


def by_pieces(blocks: torch.Tensor, convert: Part) -> torch.Tensor:
    """Return what `convert` makes of blocks u8[n, bytes], a piece at a time."""
    step = max(1, PIECE // blocks.shape[-1])
    first = convert(blocks[:step])
    if len(blocks) <= step:
        return first
    out = torch.empty(len(blocks), first.shape[-1], dtype=first.dtype)
    out[:step] = first
    for i in range(step, len(blocks), step):
        out[i : i + step] = convert(blocks[i : i + step])
    return out
