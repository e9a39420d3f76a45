"""Formats that transformers itself and MLX write; activations and caches are not rounded.

fp8: e4m3 codes, a scale for each block or one for all of a weight. `weight_scale_inv` is
multiplied, in spite of its name.

MLX: w = scale * q + bias, with one of each for a group of a row; `quantization` of config.json has
`bits` and `group_size`, and others under a module's name, false if it is not quantised. Codes lie
in words of 32 bits, low bits first. No scheme of ours has both in 16 bits: weights become values.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any

from g4ir.ops.layouts import in_order
from g4ir.ops.types import torch
from g4ir.spec.reader import Length, Node, OneOf, Range, build
from g4ir.weights.tensorfile import FLOATS, broken, quoted

from .base import (
    FIX,
    KEY,
    PIECE,
    Files,
    Found,
    NameList,
    QuantisedTensors,
    ScaleBlocks,
    StoredWeight,
    Taken,
    coded_weight,
    e4m3,
    excluded,
    plain_name,
    read_modules,
    require,
    wrong,
)

log = logging.getLogger(__name__)
WEIGHT = ".weight"
INVERSE, STACKED_SCALE = ".weight_scale_inv", "_scale_inv"
UNUSED = {".activation_scale": "a scale of activations, which are not rounded"}
_Side = Annotated[int, Range(1, 1 << 16)]


@dataclass(frozen=True)
class Fp8Config:
    """The whole of `quantization_config`."""

    quant_method: str
    activation_scheme: Annotated[str, OneOf(("dynamic", "static"))] = "dynamic"
    weight_block_size: Annotated[tuple[_Side, ...], Length(2, 2)] | None = (128, 128)
    modules_to_not_convert: NameList | None = None
    modules_to_convert: NameList | None = None
    ignored_layers: NameList | None = None
    scale_fmt: Annotated[str, OneOf(("float", "ue8m0"))] = "float"
    fmt: Annotated[str, OneOf(("e4m3",))] = "e4m3"
    dequantize: Any = None


def read_fp8(tree: Node, files: Files) -> QuantisedTensors:
    config: Fp8Config = build(Fp8Config, tree, KEY)
    take = partial(_take_fp8, files, config, str(tree.where))
    found = read_modules(files, (INVERSE, STACKED_SCALE, WEIGHT), take, UNUSED)
    log.warning("%s: activations are not rounded, as weights are", tree.where)
    return found


def _take_fp8(
    files: Files, config: Fp8Config, where: str, module: str, parts: Mapping[str, Found]
) -> Taken | None:
    scales = parts.get(INVERSE) or parts.get(STACKED_SCALE)
    weight = parts.get(WEIGHT) or files.names.get(module)  # stacked experts have no suffix
    if scales is None:
        if weight and weight[1].dtype == "F8_E4M3":
            raise wrong(weight, "its module has no weight_scale_inv")
        return None
    if weight is None:
        raise wrong(scales, "its module has no weight")
    names = config.modules_to_not_convert or config.ignored_layers or ()
    if excluded(module, names, where):
        raise wrong(weight, "is quantised, but modules_to_not_convert names its module", FIX)
    require(weight, ["F8_E4M3"])
    grid = ScaleBlocks(*(config.weight_block_size or (0, 0)))
    return weight, coded_weight(files, "fp8", weight[1].shape, weight, scales, grid, e4m3(weight))


MLX_KEY, NEEDED = "quantization", {"group_size", "bits"}
MLX_PARTS = (".weight", ".scales", ".biases")
MLX_BITS = (2, 4, 8)
MLX_OTHER = "fix: take the bf16 weights of the model with --quant, or a compressed-tensors or "
MLX_OTHER += "GGUF file of it"


def is_mlx(values: Any) -> bool:
    """Whether this says how MLX quantised weights; mlx-lm writes it under the usual key too."""
    return isinstance(values, dict) and values.keys() >= NEEDED and "quant_method" not in values


def read_mlx(config: Path, values: Mapping[str, Any], files: Files) -> QuantisedTensors:
    mode = values.get("mode", "affine")
    if mode != "affine":
        raise broken(config, f"{MLX_KEY}: MLX's mode {quoted(mode)} is not read", MLX_OTHER)
    own = {plain_name(f"{k}.weight"): v for k, v in values.items() if isinstance(v, dict)}

    def take(module: str, parts: Mapping[str, Found]) -> Taken | None:
        if parts.keys() != {*MLX_PARTS}:
            return None
        stated = own.get(f"{module}.weight", values)
        found = [parts[part] for part in MLX_PARTS]
        return found[0], _mlx_weight(config, files, stated, found)

    found = read_modules(files, MLX_PARTS, take, {})
    if found.weights:
        log.warning(
            "%s: %d weights of MLX become numbers of the engine's dtype, as no format here has "
            "their scales and biases; --quant quantises them again",
            *(config.parent, len(found.weights)),
        )
    return found


def _mlx_weight(
    config: Path, files: Files, stated: Mapping[str, Any], parts: list[Found]
) -> StoredWeight:
    codes, scales, biases = parts
    bits, group = stated.get("bits"), stated.get("group_size")
    if bits not in MLX_BITS or type(group) is not int or not 0 < group <= 1 << 16:
        what = f"{quoted(bits)} bits in groups of {quoted(group)} ({config.name}: {MLX_KEY})"
        raise wrong(codes, f"{what}, and {', '.join(map(str, MLX_BITS))} bits are read", MLX_OTHER)
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
        made = torch.cat([piece(*p) for p in zip(*pieces)])
        if not bool(made.isfinite().all()):
            raise wrong(scales, "a scale or bias is NaN or infinite")
        return made

    return StoredWeight((rows, groups * group), {"": values}, partial(files.release, parts))
