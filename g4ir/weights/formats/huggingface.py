"""Formats of transformers and MLX; activations and caches are not quantised.

fp8: e4m3 codes, a scale for each block or one for all of a weight. `weight_scale_inv` is a
multiplier, in spite of its name.

The mobile format (`quant_method` gemma): 2, 4 or 8 bits for each module; a scale for each row, in
tables for each row or each group of a row. Codes are stored along K, low bits first, as code +
2^(b-1) in bytes; 8-bit codes unchanged. Scales are rounded to the engine's dtype before they are
multiplied.

MLX: w = scale * q + bias, with one scale and one bias for a group of a row; `quantization` of
config.json has `bits` and `group_size`, and other settings under a module's name, false if it is
not quantised. Codes are packed into 32-bit words, low bits first. These weights are dequantised to
the engine's dtype.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any, ClassVar

from g4ir.ops.codecs import integer_format
from g4ir.ops.layouts import in_order
from g4ir.ops.types import torch
from g4ir.spec.reader import Length, Node, OneOf, Range, build
from g4ir.weights.tensorfile import FLOATS, broken, quoted

from .base import (
    FIX,
    KEY,
    PIECE,
    UNREAD,
    Files,
    ModuleWeight,
    NameList,
    QuantisedTensors,
    ScaleBlocks,
    StoredWeight,
    TensorRef,
    TensorRefs,
    as_it_is,
    coded_weight,
    compiled,
    e4m3,
    excluded,
    invalid,
    packed_integers,
    plain_name,
    read_modules,
    require,
)

log = logging.getLogger(__name__)
WEIGHT = ".weight"
INVERSE, STACKED_SCALE = ".weight_scale_inv", "_scale_inv"
UNUSED = {".activation_scale": "a scale of activations, which are not rounded"}
_Side = Annotated[int, Range(1, 1 << 16)]


@dataclass(frozen=True)
class Fp8Config:
    """`quantization_config` of fp8 checkpoints."""

    unread: ClassVar = UNREAD["fp8"]
    quant_method: str
    activation_scheme: Annotated[str, OneOf(("dynamic", "static"))] = "dynamic"
    weight_block_size: Annotated[tuple[_Side, ...], Length(2, 2)] | None = (128, 128)
    modules_to_not_convert: NameList | None = None
    ignored_layers: NameList | None = None
    scale_fmt: Annotated[str, OneOf(("float", "ue8m0"))] = "float"
    fmt: Annotated[str, OneOf(("e4m3",))] = "e4m3"


def read_fp8(tree: Node, files: Files) -> QuantisedTensors:
    config: Fp8Config = build(Fp8Config, tree, KEY)
    take = partial(_take_fp8, files, config, str(tree.where))
    tensors = read_modules(files, (INVERSE, STACKED_SCALE, WEIGHT), take, UNUSED)
    log.warning("%s: only weights are quantised, not activations", tree.where)
    return tensors


def _take_fp8(
    files: Files, config: Fp8Config, where: str, module: str, parts: TensorRefs
) -> ModuleWeight | None:
    scales = parts.get(INVERSE) or parts.get(STACKED_SCALE)
    weight = parts.get(WEIGHT) or files.names.get(module)  # stacked experts have no suffix
    if scales is None:
        if weight and weight[1].dtype == "F8_E4M3":
            raise invalid(weight, "its module has no weight_scale_inv")
        return None
    if weight is None:
        raise invalid(scales, "its module has no weight")
    key = "modules_to_not_convert" if config.modules_to_not_convert else "ignored_layers"
    if excluded(module, getattr(config, key) or (), where):
        raise invalid(weight, f"is quantised, but {key} matches its module", FIX)
    require(weight, ["F8_E4M3"])
    grid = ScaleBlocks(*(config.weight_block_size or (0, 0)))
    return weight, coded_weight(files, "fp8", weight[1].shape, weight, scales, grid, e4m3(weight))


SCALE = ".weight_scale"
TABLE, TABLE_SCALE = ".embedding_quantized", ".embedding_scale"
RANGES = (".input_activation_scale", ".output_activation_scale")
CACHES = dict.fromkeys(
    (".k_cache_scale", ".v_cache_scale"), "a scale of caches, which are not rounded"
)
MOBILE = (SCALE, TABLE, TABLE_SCALE, *RANGES, WEIGHT)
ROUNDED = "its module quantises activations, which is not supported"
OTHERWISE = "fix: build from the bf16 checkpoint trained for 4 bits (QAT), with --quant int4"

_Bits = Annotated[int, Range(2, 8)]


@dataclass(frozen=True)
class ModuleConfig:
    """Settings of the modules whose names match a pattern; None: the default bits."""

    num_bits: _Bits | None = None


@dataclass(frozen=True)
class MobileConfig:
    """`quantization_config` of the mobile format."""

    quant_method: str
    num_bits: _Bits = 4
    quantize_embeddings: bool = False
    module_quant_configs: dict[Annotated[str, Length(1, 500)], ModuleConfig] | None = None
    modules_to_not_convert: NameList | None = None

    def bits(self, module: str, where: str) -> int:
        """Return the bits of a module: of the first pattern that matches anywhere in its name, else
        the default."""
        for pattern, module_config in (self.module_quant_configs or {}).items():
            if compiled(pattern, where).search(module):
                return module_config.num_bits or self.num_bits
        return self.num_bits


def read_mobile(tree: Node, files: Files) -> QuantisedTensors:
    config: MobileConfig = build(MobileConfig, tree, KEY)
    ranges: dict[str, str] = {}
    take = partial(_take_mobile, files, config, str(tree.where), ranges)
    tensors = read_modules(files, MOBILE, take, CACHES)
    return replace(tensors, ignored={**tensors.ignored, **ranges})


def _take_mobile(
    files: Files,
    config: MobileConfig,
    where: str,
    ignored: dict[str, str],
    module: str,
    parts: dict[str, TensorRef],
) -> ModuleWeight | None:
    ranges = [ref for suffix in RANGES if (ref := parts.pop(suffix, None))]
    if not parts.keys() & {SCALE, TABLE, TABLE_SCALE}:
        if ranges:
            raise invalid(ranges[0], "is of a module without weight_scale")
        return None
    table = not parts.keys().isdisjoint((TABLE, TABLE_SCALE))
    codes, scales = (parts.get(s) for s in ((TABLE, TABLE_SCALE) if table else (WEIGHT, SCALE)))
    if scales is None or codes is None or len(parts) > 2:
        ref = next(parts[s] for s in MOBILE if s in parts)
        raise invalid(ref, "its module must have codes and their scales, and no other tensors")
    if excluded(module, config.modules_to_not_convert or (), where):
        raise invalid(codes, "is quantised, but modules_to_not_convert matches its module", FIX)
    if table and not config.quantize_embeddings:
        raise invalid(codes, "is quantised, but quantize_embeddings is false", FIX)
    rounded = [ref for ref in ranges if _is_set(files, ref)]
    for ref in ranges:
        ignored[ref[1].name] = ROUNDED if ref in rounded else "0: activations are not rounded"
    bits = config.bits(module, where)
    if bits not in MOBILE_DTYPES:
        raise broken(where, f"{KEY}: num_bits {bits} of {module}: expected 2, 4 or 8", FIX)
    require(codes, [MOBILE_DTYPES[bits]])
    shape = (*codes[1].shape[:-1], codes[1].shape[-1] * 8 // bits) if codes[1].shape else ()
    width = shape[-1] if shape else 1
    name = integer_format(bits, width)
    convert = partial(packed_integers, bits=bits, width=width, fmt=name) if bits < 8 else as_it_is
    grid = ScaleBlocks(1, _columns(scales, shape) if table else 0)
    weight = coded_weight(files, name, shape, codes, scales, grid, convert, None)
    fault = str(invalid(rounded[-1], ROUNDED, OTHERWISE)) if rounded else ""
    return codes, replace(weight, fault=fault)


def _columns(scales: TensorRef, shape: tuple[int, ...]) -> int:
    groups = scales[1].shape[-1] if len(scales[1].shape) == 2 else 0
    if not groups or not shape or shape[-1] % groups:
        raise invalid(scales, f"scales {list(scales[1].shape)} do not fit codes of {list(shape)}")
    return shape[-1] // groups


def _is_set(files: Files, ref: TensorRef) -> bool:
    """Whether an activation scale is set (not 0)."""
    require(ref, ["F32", "BF16", "F16"])
    if ref[1].shape not in ((), (1,)):
        raise invalid(ref, f"expected one number, found shape {list(ref[1].shape)}")
    return float(files.rows(ref).flatten()[0]) != 0


#: bits of mobile codes -> dtype of the file
MOBILE_DTYPES: Mapping[int, str] = {2: "U8", 4: "U8", 8: "I8"}


MLX_KEY, NEEDED = "quantization", {"group_size", "bits"}
MLX_PARTS = (".weight", ".scales", ".biases")
MLX_BITS = (2, 4, 8)
MLX_OTHER = "fix: build from the model's bf16 checkpoint with --quant, or use a compressed-tensors "
MLX_OTHER += "or GGUF file of it"


def is_mlx(values: Any) -> bool:
    """Whether a value is MLX's quantisation config; mlx-lm writes it under `quantization_config`
    too."""
    return isinstance(values, dict) and values.keys() >= NEEDED and "quant_method" not in values


def read_mlx(config: Path, values: Mapping[str, Any], files: Files) -> QuantisedTensors:
    mode = values.get("mode", "affine")
    if mode != "affine":
        raise broken(config, f"{MLX_KEY}: MLX's mode {quoted(mode)} is not supported", MLX_OTHER)
    by_module = {plain_name(f"{k}.weight"): v for k, v in values.items() if isinstance(v, dict)}

    def take(module: str, parts: TensorRefs) -> ModuleWeight | None:
        if parts.keys() != {*MLX_PARTS}:
            return None
        stated = by_module.get(f"{module}.weight", values)
        refs = [parts[part] for part in MLX_PARTS]
        return refs[0], _mlx_weight(config, files, stated, refs)

    tensors = read_modules(files, MLX_PARTS, take, {})
    if tensors.weights:
        log.warning(
            "%s: %d weights of MLX are dequantised to the engine's dtype, as no format here has "
            "their scales and biases; --quant quantises them again",
            *(config.parent, len(tensors.weights)),
        )
    return tensors


def _mlx_weight(
    config: Path, files: Files, stated: Mapping[str, Any], parts: list[TensorRef]
) -> StoredWeight:
    codes, scales, biases = parts
    bits, group = stated.get("bits"), stated.get("group_size")
    if bits not in MLX_BITS or type(group) is not int or not 0 < group <= 1 << 16:
        actual = f"{quoted(bits)} in groups of {quoted(group)} ({config.name}: {MLX_KEY})"
        expected = f"expected {' or '.join(map(str, MLX_BITS))} bits in groups of 1 to 65536"
        raise invalid(codes, f"{expected}, found {actual}", MLX_OTHER)
    rows, groups = scales[1].shape if len(scales[1].shape) == 2 else (0, 0)
    require(codes, ("U32",), (rows, groups * group * bits // 32))
    require(scales, FLOATS, (rows, groups))
    require(biases, FLOATS, (rows, groups))
    header, entry = codes
    raw = header, replace(entry, dtype="U8", shape=(rows, entry.shape[1] * 4))

    def piece(raw: torch.Tensor, scale: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        grouped = in_order(bits).read(raw).view(len(raw), groups, -1).float()
        return (grouped * scale.float()[..., None] + bias.float()[..., None]).flatten(1)

    def values(ids: torch.Tensor | None) -> torch.Tensor:
        each = max(1, PIECE // (groups * group))
        pieces = (files.rows(part, ids).split(each) for part in (raw, scales, biases))
        weight = torch.cat([piece(*p) for p in zip(*pieces)])
        if not bool(weight.isfinite().all()):
            raise invalid(scales, "a scale or bias is NaN or infinite")
        return weight

    return StoredWeight((rows, groups * group), {"": values}, partial(files.release, parts))
