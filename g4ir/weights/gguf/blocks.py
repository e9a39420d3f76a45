"""Dequantises the blocks of GGUF files (ops/layouts.py), and repacks them as codes and scales where
that is lossless.

A block is a row of bytes. Types whose minima are float16 too (Q4_1, Q5_1) are dequantised. Every
product is exact in float32.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from g4ir.ops.codecs import FORMATS, dequantize_codes
from g4ir.ops.layouts import LAYOUTS
from g4ir.ops.types import torch, torch_dtype
from g4ir.quant.recipe import Scheme

#: u8[n, bytes of a block] -> a field of each of the n blocks, [n, ..]
Part = Callable[["torch.Tensor"], "torch.Tensor"]

#: bytes converted at a time: few enough for a core's cache
PIECE = 1 << 18
_IQ4 = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)


@dataclass(frozen=True)
class BlockFormat:
    """A type that is codes times scales: codes as in ops/codecs.py, scales [n, groups]."""

    scheme: Scheme
    codes: Part
    scales: Part

    def dequantize(self, blocks: torch.Tensor) -> torch.Tensor:
        values: torch.Tensor = dequantize_codes(
            self.codes(blocks), self.scales(blocks), torch.float32
        )
        return values


def _coded(kind: str, code_format: str, group: int) -> BlockFormat:
    """Return a block format with the codes of `code_format` in another bit order."""

    def codes(blocks: torch.Tensor) -> torch.Tensor:
        packed: torch.Tensor = LAYOUTS[kind].convert(blocks, FORMATS[code_format].layout)
        return packed.view(torch_dtype(FORMATS[code_format].codes))

    return BlockFormat(Scheme(code_format, group, "f16"), codes, partial(_scales, kind))


def _scales(kind: str, blocks: torch.Tensor) -> torch.Tensor:
    """Return the float16 scales (and minima) of blocks: f16[n, 1 or 2]."""
    scales: torch.Tensor = LAYOUTS[kind].split(blocks)["scales"].contiguous().view(torch.float16)
    return scales


def _iq4(kind: str, blocks: torch.Tensor) -> torch.Tensor:
    return torch.tensor(_IQ4, dtype=torch.int8)[LAYOUTS[kind].read(blocks).int()]


def _iq4_xs_scales(blocks: torch.Tensor) -> torch.Tensor:
    layout, parts = LAYOUTS["IQ4_XS integers"], LAYOUTS["IQ4_XS"].split(blocks)
    integers = layout.read(parts["integers"]).to(torch.int8) - layout.zero
    return _scales("IQ4_XS", blocks).float() * integers


def _with_minimum(kind: str, blocks: torch.Tensor) -> torch.Tensor:
    scale, minimum = _scales(kind, blocks).float().split(1, -1)
    return LAYOUTS[kind].read(blocks) * scale + minimum


CODED = {
    "Q8_0": _coded("Q8_0", "int8", 32),
    "Q4_0": _coded("Q4_0", "int4", 32),
    "Q5_0": _coded("Q5_0", "int5", 32),
    "Q4_K": _coded("Q4_K", "uint4", 256),
    "Q5_K": _coded("Q5_K", "uint5", 256),
    "Q6_K": _coded("Q6_K", "int6", 256),
    "IQ4_NL": BlockFormat(
        Scheme("int8", 32, "f16"), partial(_iq4, "IQ4_NL"), partial(_scales, "IQ4_NL")
    ),
    "IQ4_XS": BlockFormat(Scheme("int8", 32, "f32"), partial(_iq4, "IQ4_XS"), _iq4_xs_scales),
}
DENSE: dict[str, Part] = {kind: partial(_with_minimum, kind) for kind in ("Q4_1", "Q5_1")}


def by_pieces(blocks: torch.Tensor, convert: Part) -> torch.Tensor:
    """Apply `convert` to blocks u8[n, bytes], PIECE bytes at a time."""
    step = max(1, PIECE // blocks.shape[-1])
    first = convert(blocks[:step])
    if len(blocks) <= step:
        return first
    out = torch.empty(len(blocks), first.shape[-1], dtype=first.dtype)
    out[:step] = first
    for i in range(step, len(blocks), step):
        out[i : i + step] = convert(blocks[i : i + step])
    return out
