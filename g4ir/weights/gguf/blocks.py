"""Dequantises the blocks of GGUF files (ops/layouts.py), and converts them to codes and scales.

A block is a row of bytes. Most types are repacked without loss; the product of a code and its scale
is exact in float32. Types with tables of vectors or ternary values are dequantised by the package
`gguf`, and quantised again.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from g4ir.errors import MissingError
from g4ir.ops.codecs import FORMATS, dequantize_codes, pack_codes, quantize_values
from g4ir.ops.layouts import LAYOUTS
from g4ir.ops.types import torch, torch_dtype
from g4ir.quant.recipe import Scheme

#: function from blocks u8[n, bytes] to a field of each, [n, ..]
Part = Callable[["torch.Tensor"], "torch.Tensor"]

#: bytes converted at a time: few enough for a core's cache
PIECE = 1 << 18


@dataclass(frozen=True)
class BlockFormat:
    """A GGUF type as codes and scales of a format (ops/codecs.py), which the two functions compute
    from blocks u8[n, bytes]: codes [n, elements], scales [n, groups] (with minima [n, 2 groups];
    equal in a row's blocks if the scheme has one scale per row).
    `dense`: dequantises blocks, if codes and scales only approximate them; None: they are exact.
    `together`: number of GGUF blocks in a block of codes."""

    scheme: Scheme
    codes: Part
    scales: Part
    dense: Part | None = None
    together: int = 1

    def dequantize(self, blocks: torch.Tensor) -> torch.Tensor:
        if self.dense:
            return self.dense(blocks)
        return dequantize_codes(self.codes(blocks), self.scales(blocks), torch.float32)


def _coded(kind: str, code_format: str, group: int, scales: Part | None = None) -> BlockFormat:
    """Return a block format for a GGUF type with the values of `code_format` in another bit order;
    `scales`: by default those that the blocks have."""

    def codes(blocks: torch.Tensor) -> torch.Tensor:
        packed: torch.Tensor = LAYOUTS[kind].convert(blocks, FORMATS[code_format].layout)
        return packed.view(torch_dtype(FORMATS[code_format].codes))

    return BlockFormat(Scheme(code_format, group, "f16"), codes, scales or partial(_scales, kind))


def _scales(kind: str, blocks: torch.Tensor) -> torch.Tensor:
    """Return the float16 scales (and minima) of blocks: f16[n, 1 or 2]."""
    return LAYOUTS[kind].split(blocks)["scales"].contiguous().view(torch.float16)


def _integers(kind: str, blocks: torch.Tensor) -> torch.Tensor:
    """Return the signed 6-bit sub-block scales, which multiply a block's scale: i8[n, count]."""
    layout = LAYOUTS[f"{kind} integers"]
    integers = layout.read(LAYOUTS[kind].split(blocks)["integers"]).to(torch.int8) - layout.zero
    return integers


def _q3_k(blocks: torch.Tensor) -> torch.Tensor:
    """Return int3k codes of Q3_K blocks, with the sub-block scales in 8 bits instead of 6."""
    layout, integers = LAYOUTS["Q3_K"], _integers("Q3_K", blocks).view(torch.uint8)
    values = layout.read(blocks).to(torch.int8) - layout.zero
    return pack_codes(values, "int3k", integers)


def _iq4_xs_scales(blocks: torch.Tensor) -> torch.Tensor:
    return _scales("IQ4_XS", blocks).float() * _integers("IQ4_XS", blocks)


def _minimum_scales(kind: str, blocks: torch.Tensor) -> torch.Tensor:
    """Return scales and negated minima of blocks that add their minimum (w = code * scale +
    minimum): formats here subtract it."""
    return _scales(kind, blocks) * torch.tensor([1, -1], dtype=torch.float16)


def _nvfp4(blocks: torch.Tensor) -> torch.Tensor:
    """Return fp4 codes with the blocks' sub-block scales, e4m3, without their sign bit; 0x7f (NaN)
    becomes 0, as in ggml."""
    clean = blocks.clone()
    scales = LAYOUTS["NVFP4"].split(clean)["integers"]
    scales &= 0x7F
    scales[scales == 0x7F] = 0
    codes: torch.Tensor = LAYOUTS["NVFP4"].convert(clean, FORMATS["fp4"].layout)
    return codes.view(torch_dtype(FORMATS["fp4"].codes))


def _nvfp4_scales(blocks: torch.Tensor) -> torch.Tensor:
    """Return 0.5, the scale of codes that are twice e2m1; NaN, which readers refuse, if one of a
    block's scales has the sign bit."""
    signed = LAYOUTS["NVFP4"].split(blocks)["integers"].amax(-1, keepdim=True) > 0x7F
    return torch.where(signed, torch.nan, 0.5)


def _mxfp4(blocks: torch.Tensor, codes: bool) -> torch.Tensor:
    """Return fp4 codes, or without `codes` their scales, of pairs of blocks, each of which has a
    power of two. Powers may be up to 17 apart, the range of e4m3 below the larger one: the scale is
    NaN, which readers refuse, if they are further apart and the smaller block is not zero."""
    pairs = blocks.unflatten(-1, (2, -1))
    layout = LAYOUTS["MXFP4"]
    powers = layout.split(pairs)["scales"].squeeze(-1).int()
    max_power = powers.amax(-1, keepdim=True)
    if not codes:
        nonzero = (layout.read(pairs) & 7).bool().any(-1)
        lost = (nonzero & (max_power - powers > 17)).any(-1, keepdim=True)
        return torch.ldexp(torch.ones(max_power.shape), max_power - 136).where(~lost, torch.nan)
    shared = torch.ldexp(torch.ones(powers.shape), powers - max_power + 8).to(torch.float8_e4m3fn)
    shared = shared.view(torch.uint8).repeat_interleave(2, -1)
    return pack_codes(layout.read(pairs).flatten(-2), "fp4", shared)


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
    "MXFP4": BlockFormat(
        Scheme("fp4", 64, "f32"),
        partial(_mxfp4, codes=True),
        partial(_mxfp4, codes=False),
        together=2,
    ),
    "NVFP4": BlockFormat(Scheme("fp4", 0, "f32"), _nvfp4, _nvfp4_scales),
    "IQ4_XS": BlockFormat(
        Scheme("iq4", 32, "f32"), _coded("IQ4_XS", "iq4", 32).codes, _iq4_xs_scales
    ),
}


#: types that no format here represents exactly -> format and group with the smallest error (on
#: random blocks) among those with at most one more bit per weight
_REQUANTISED = {
    "IQ1_S": ("int2", 32),
    "IQ1_M": ("uint2", 256),
    "IQ2_XXS": ("uint2", 256),
    "IQ2_XS": ("uint2", 256),
    "IQ2_S": ("int3k", 256),
    "IQ3_XXS": ("int4", 256),
    "IQ3_S": ("int4", 64),
    "TQ1_0": ("int2", 256),
    "TQ2_0": ("int2", 256),
}


def _dense(kind: str, blocks: torch.Tensor) -> torch.Tensor:
    """Dequantise blocks with the package `gguf`; MissingError if it is not installed."""
    try:
        from gguf import GGMLQuantizationType, quants
    except ImportError:
        fix = "pip install 'g4ir[gguf]'"
        raise MissingError(f"GGUF files with {kind} need the package gguf: {fix}") from None
    return torch.from_numpy(quants.dequantize(blocks.numpy(), GGMLQuantizationType[kind]))


def _requantised(kind: str, form: str, group: int) -> BlockFormat:
    """Return a block format that quantises dequantised blocks again."""

    def part(blocks: torch.Tensor, index: int) -> torch.Tensor:
        parts = quantize_values(_dense(kind, blocks), form, group, "f16")
        return parts[index].view(len(blocks), -1)

    codes, scales = (partial(part, index=i) for i in range(2))
    return BlockFormat(Scheme(form, group, "f16"), codes, scales, partial(_dense, kind))


REQUANTISED = {kind: _requantised(kind, *how) for kind, how in _REQUANTISED.items()}
CODED |= REQUANTISED


def relative_error(kind: str, blocks: torch.Tensor) -> float:
    """Return the rms error of requantising some blocks of a GGUF type, relative to the rms of their
    values."""
    coded = CODED[kind]
    meant = coded.dequantize(blocks)
    held = dequantize_codes(coded.codes(blocks), coded.scales(blocks), torch.float32)
    return float((held - meant).norm() / meant.norm().clamp(min=1e-30))


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
