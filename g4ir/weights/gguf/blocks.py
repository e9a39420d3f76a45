"""Dequantises the blocks of GGUF files (ops/layouts.py), and repacks them as codes and scales where
that is lossless.

A block is a row of bytes. Every product is exact in float32. Types with tables of vectors or
ternary values are dequantised by the package `gguf`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from g4ir.errors import MissingError
from g4ir.ops.codecs import FORMATS, dequantize_codes, pack_codes
from g4ir.ops.layouts import LAYOUTS
from g4ir.ops.types import torch, torch_dtype
from g4ir.quant.recipe import Scheme

from .container import TABLES

#: u8[n, bytes of a block] -> a field of each of the n blocks, [n, ..]
Part = Callable[["torch.Tensor"], "torch.Tensor"]

#: bytes converted at a time: few enough for a core's cache
PIECE = 1 << 18


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


def _coded(kind: str, code_format: str, group: int, scales: Part | None = None) -> BlockFormat:
    """Return a block format with the codes of `code_format` in another bit order."""

    def codes(blocks: torch.Tensor) -> torch.Tensor:
        packed: torch.Tensor = LAYOUTS[kind].convert(blocks, FORMATS[code_format].layout)
        return packed.view(torch_dtype(FORMATS[code_format].codes))

    return BlockFormat(Scheme(code_format, group, "f16"), codes, scales or partial(_scales, kind))


def _scales(kind: str, blocks: torch.Tensor) -> torch.Tensor:
    """Return the float16 scales (and minima) of blocks: f16[n, 1 or 2]."""
    scales: torch.Tensor = LAYOUTS[kind].split(blocks)["scales"].contiguous().view(torch.float16)
    return scales


def _integers(kind: str, blocks: torch.Tensor) -> torch.Tensor:
    """Return the signed integers of blocks that have 6 bits each: i8[n, values]."""
    layout = LAYOUTS[f"{kind} integers"]
    integers = layout.read(LAYOUTS[kind].split(blocks)["integers"]).to(torch.int8) - layout.zero
    return integers


def _q3_k(blocks: torch.Tensor) -> torch.Tensor:
    """Return int3k codes, whose integers have 8 bits."""
    layout, integers = LAYOUTS["Q3_K"], _integers("Q3_K", blocks).view(torch.uint8)
    values = layout.read(blocks).to(torch.int8) - layout.zero
    return pack_codes(values, "int3k", integers)


def _iq4_xs_scales(blocks: torch.Tensor) -> torch.Tensor:
    return _scales("IQ4_XS", blocks).float() * _integers("IQ4_XS", blocks)


def _minimum_scales(kind: str, blocks: torch.Tensor) -> torch.Tensor:
    """Return scales and minima of blocks that add their minimum: w = code * scale + minimum."""
    return _scales(kind, blocks) * torch.tensor([1, -1], dtype=torch.float16)


CODED = {
    "Q8_0": _coded("Q8_0", "int8", 32),
    "Q4_0": _coded("Q4_0", "int4", 32),
    "Q5_0": _coded("Q5_0", "int5", 32),
    "Q4_K": _coded("Q4_K", "uint4", 256),
    "Q5_K": _coded("Q5_K", "uint5", 256),
    "Q6_K": _coded("Q6_K", "int6", 256),
    "Q2_K": _coded("Q2_K", "uint2", 256),
    "Q3_K": BlockFormat(Scheme("int3k", 256, "f16"), _q3_k, partial(_scales, "Q3_K")),
    "Q4_1": _coded("Q4_1", "min4", 32, partial(_minimum_scales, "Q4_1")),
    "Q5_1": _coded("Q5_1", "min5", 32, partial(_minimum_scales, "Q5_1")),
    "IQ4_NL": _coded("IQ4_NL", "iq4", 32),
    "IQ4_XS": BlockFormat(
        Scheme("iq4", 32, "f32"), _coded("IQ4_XS", "iq4", 32).codes, _iq4_xs_scales
    ),
}


def _by_package(kind: str, blocks: torch.Tensor) -> torch.Tensor:
    """Dequantise blocks by ggml's own package; MissingError without it."""
    try:
        from gguf import GGMLQuantizationType, quants
    except ImportError:
        fix = "pip install 'g4ir[gguf]'"
        raise MissingError(f"GGUF files with {kind} need the package gguf: {fix}") from None
    return torch.from_numpy(quants.dequantize(blocks.numpy(), GGMLQuantizationType[kind]))


#: type -> function that dequantises its blocks
DEQUANTIZE: dict[str, Part] = {
    **{kind: coded.dequantize for kind, coded in CODED.items()},
    **{kind: partial(_by_package, kind) for kind in TABLES["by_package"]},
}


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
