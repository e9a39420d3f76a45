"""NVFP4 and MXFP4 weights, and NVIDIA ModelOpt's checkpoints.

Codes are e2m1, two in a byte u8 [N, K/2], the even one in the low bits; a scale serves 16 (NVFP4,
e4m3) or 32 values (MXFP4, a power of two as its biased exponent). NVFP4 has one more scale f32 for
all of a weight: `weight_global_scale` of compressed-tensors divides, `weight_scale_2` of ModelOpt
multiplies. Twice an e2m1 code is an integer, so rows whose length is a multiple of 64 become the
format `fp4`, in which e4m3 scales of 16 values multiply a scale in f32 (NVFP4, of the row) or bf16
(MXFP4, of 64 values); other rows become int8 in groups.

ModelOpt describes its files in `quantization_config` or in hf_quant_config.json next to
config.json. The tensors say how a module is quantised: e4m3 codes have `weight_scale`, one number,
one for each row or one for each block of 128 x 128.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from functools import partial
from typing import Annotated, Any, ClassVar

from g4ir.ops.codecs import FORMATS
from g4ir.ops.layouts import PAIRS
from g4ir.ops.types import torch
from g4ir.quant.recipe import Scheme
from g4ir.spec.reader import Node, OneOf, build
from g4ir.weights.tensorfile import broken, quoted

from .base import (
    KEY,
    UNREAD,
    Files,
    ModuleWeight,
    NameList,
    Part,
    QuantisedTensors,
    ScaleBlocks,
    StoredWeight,
    TensorRef,
    TensorRefs,
    checked_scales,
    coded_weight,
    e4m3,
    invalid,
    quantised_weight,
    read_modules,
    require,
)

log = logging.getLogger(__name__)
OTHERWISE = "fix: build from the model's bf16 checkpoint with --quant, such as --quant int8"
#: values that share a scale
NVFP4_GROUP, MXFP4_GROUP = 16, 32
#: values of a block of `fp4`
BLOCK = FORMATS["fp4"].block_values
#: largest exponent of e4m3; powers of two down to REACH below it are e4m3 too
E4M3_TOP, REACH = 8, 17


def nvfp4_weight(
    files: Files, codes: TensorRef, scales: TensorRef, tensor: TensorRef, divides: bool
) -> StoredWeight:
    """Return an NVFP4 weight from codes u8 [N, K/2] and e4m3 scales [N, K/16]: in blocks of `fp4`,
    or as int8 if K is no multiple of 64. `tensor`: its per-tensor scale, which `divides` or
    multiplies."""
    require(tensor, ["F32"])
    if tensor[1].shape not in ((), (1,)):
        raise invalid(tensor, f"expected one number, found shape {list(tensor[1].shape)}")

    def factor() -> torch.Tensor:
        stored = checked_scales(tensor, files.rows(tensor)).flatten()
        return (1 / stored if divides else stored) / 2

    require(scales, ["F8_E4M3"])
    checked = partial(_checked_groups, files, codes, scales, NVFP4_GROUP)
    group = _group_in(codes, scales, NVFP4_GROUP)
    if group:  # rows that are no whole blocks
        parts = _as_int8(files, codes), lambda ids: checked(ids) * factor()
        return _weight(files, (codes, scales), Scheme("int8", group, "f32"), *parts)

    def packed(ids: torch.Tensor | None) -> torch.Tensor:
        checked(ids)
        return _in_blocks(files.rows(codes, ids), files.rows(scales, ids))

    def by_row(ids: torch.Tensor | None) -> torch.Tensor:
        return factor().expand(codes[1].shape[0] if ids is None else len(ids), 1).contiguous()

    return _weight(files, (codes, scales), Scheme("fp4", 0, "f32"), packed, by_row)


def mxfp4_weight(files: Files, codes: TensorRef, scales: TensorRef) -> StoredWeight:
    """Return an MXFP4 weight from codes u8 [N, K/2] and exponents u8 [N, K/32]: in blocks of `fp4`,
    or as int8 if K is no multiple of 64."""
    require(scales, ["U8", "F8_E8M0"])

    def exponents(ids: torch.Tensor | None) -> torch.Tensor:
        """Return the exponents i16 [.., G] of groups; -127, the least, for groups of zeros."""
        biased = files.rows(scales, ids).view(torch.uint8).to(torch.int16)
        if bool((biased == 255).any()):
            raise invalid(scales, "a scale is NaN, expected a power of two")
        return biased.where(_nonzero(files.rows(codes, ids), MXFP4_GROUP), 0) - 127

    group = _group_in(codes, scales, MXFP4_GROUP)
    if group:
        parts = _as_int8(files, codes), lambda ids: torch.exp2(exponents(ids).float() - 1)
        return _weight(files, (codes, scales), Scheme("int8", group, "f32"), *parts)

    def tops(ids: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        pairs = exponents(ids).unflatten(-1, (-1, 2))
        return pairs, pairs.amax(-1).clamp(min=E4M3_TOP - 118) - E4M3_TOP

    def packed(ids: torch.Tensor | None) -> torch.Tensor:
        pairs, top = tops(ids)
        below = pairs - top[..., None]
        if bool(((below < E4M3_TOP - REACH) & (pairs > -127)).any()):
            msg = f"scales of neighbouring groups differ by a factor of more than 2^{REACH}"
            raise invalid(scales, msg, OTHERWISE)
        factors = torch.exp2(below.clamp(min=E4M3_TOP - REACH).float()).repeat_interleave(2, -1)
        return _in_blocks(files.rows(codes, ids), factors.flatten(-2).to(torch.float8_e4m3fn))

    def by_block(ids: torch.Tensor | None) -> torch.Tensor:
        return torch.exp2(tops(ids)[1].float() - 1).to(torch.bfloat16)

    return _weight(files, (codes, scales), Scheme("fp4", BLOCK, "bf16"), packed, by_block)


def _weight(
    files: Files, refs: tuple[TensorRef, TensorRef], scheme: Scheme, codes: Part, scales: Part
) -> StoredWeight:
    n, width = refs[0][1].shape
    release = partial(files.release, refs)
    return quantised_weight(scheme, (n, 2 * width), codes, scales, release, files.dtype)


def _group_in(codes: TensorRef, scales: TensorRef, group: int) -> int:
    """Check shapes; return 0 if rows consist of whole blocks of `fp4`, otherwise the group size of
    int8."""
    require(codes, ["U8"])
    if len(codes[1].shape) != 2 or codes[1].shape[1] * 2 % group:
        msg = f"expected [N, K/2] with K a multiple of {group}, found {list(codes[1].shape)}"
        raise invalid(codes, msg)
    n, k = codes[1].shape[0], codes[1].shape[1] * 2
    require(scales, [scales[1].dtype], (n, k // group))
    return group if k % BLOCK else 0


def _nonzero(codes: torch.Tensor, group: int) -> torch.Tensor:
    """Return, for each group of code bytes, whether it has a code other than 0 and -0."""
    return ((codes & 0x77) != 0).unflatten(-1, (-1, group // 2)).any(-1)


def _checked_groups(
    files: Files, codes: TensorRef, scales: TensorRef, group: int, ids: torch.Tensor | None
) -> torch.Tensor:
    """Return e4m3 scales in f32, with 1 for 0 in groups of zeros; WeightsError for NaN, negative
    scales, and 0 in other groups."""
    stored = files.rows(scales, ids).float()
    checked_scales(scales, stored.where((stored != 0) | _nonzero(files.rows(codes, ids), group), 1))
    return stored.where(stored != 0, 1)


def _as_int8(files: Files, codes: TensorRef) -> Part:
    table = torch.tensor(FORMATS["fp4"].table, dtype=torch.int8)
    return lambda ids: table[PAIRS.read(files.rows(codes, ids)).int()]


def _in_blocks(codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Return bytes of codes and e4m3 scales as blocks of `fp4`."""
    blocks = codes.unflatten(-1, (-1, BLOCK // 2)), scales.view(torch.uint8).unflatten(-1, (-1, 4))
    return torch.cat(blocks, -1).flatten(-2).view(torch.float4_e2m1fn_x2)


# --- ModelOpt ------------------------------------------------------------------------------------

#: ModelOpt's file, which describes checkpoints without `quantization_config`, and the key in it
MODELOPT, MODELOPT_KEY = "hf_quant_config.json", "quantization"
FIX = f"fix: correct {KEY} of config.json (or {MODELOPT}), or download the checkpoint again"
WEIGHT, SCALE, SECOND = ".weight", ".weight_scale", ".weight_scale_2"
UNUSED = (".input_scale", ".output_scale", ".k_scale", ".v_scale", "_bmm_quantizer.amax")
ALGORITHMS = ("NVFP4", "W4A16_NVFP4", "FP8", "FP8_PB_WO", "MIXED_PRECISION")


@dataclass(frozen=True)
class ModelOptConfig:
    """`quantization` of hf_quant_config.json, or `quantization_config` of config.json."""

    unread: ClassVar = UNREAD["modelopt"]
    quant_algo: Annotated[str, OneOf(ALGORITHMS)]
    quant_method: str = "modelopt"
    exclude_modules: NameList | None = None
    ignore: NameList | None = None
    kv_cache_quant_algo: Any = None
    kv_cache_scheme: Any = None
    has_zero_point: Any = None
    pre_quant_scale: Any = None


def read_modelopt(tree: Node, files: Files) -> QuantisedTensors:
    key = MODELOPT_KEY if str(tree.where).endswith(MODELOPT) else KEY
    config: ModelOptConfig = build(ModelOptConfig, tree, key)
    if config.has_zero_point or config.pre_quant_scale:
        name = "has_zero_point" if config.has_zero_point else "pre_quant_scale"
        msg = f"{key}: {name} {quoted(getattr(config, name))} is not supported"
        raise broken(str(tree.where), msg, OTHERWISE)
    skipped = (*(config.exclude_modules or ()), *(config.ignore or ()))
    take = partial(_take, files, lambda module: any(fnmatchcase(module, p) for p in skipped))
    why = "a scale of activations or caches, which are not rounded"
    tensors = read_modules(files, (SECOND, SCALE, WEIGHT), take, dict.fromkeys(UNUSED, why))
    if tensors.ignored or config.kv_cache_quant_algo or config.kv_cache_scheme:
        log.warning("%s: only weights are quantised, not activations and caches", tree.where)
    return tensors


def _take(
    files: Files, skipped: Callable[[str], bool], module: str, parts: TensorRefs
) -> ModuleWeight | None:
    weight, scales, second = (parts.get(suffix) for suffix in (WEIGHT, SCALE, SECOND))
    if weight is None or scales is None:
        coded = weight is not None and weight[1].dtype in ("U8", "F8_E4M3")
        if coded or weight is None:
            missing = "weight_scale" if coded else "weight"
            raise invalid(next(iter(parts.values())), f"its module has no {missing}")
        return None
    if skipped(module):
        msg = "is quantised, but exclude_modules or ignore matches its module"
        raise invalid(weight, msg, FIX)
    if weight[1].dtype == "U8":
        if second is None:
            raise invalid(weight, "its module has no weight_scale_2")
        return weight, nvfp4_weight(files, weight, scales, second, divides=False)
    if second is not None:
        raise invalid(second, f"does not belong to {weight[1].dtype} codes", FIX)
    require(weight, ["F8_E4M3"])
    return weight, _fp8(files, weight, scales)


def _fp8(files: Files, weight: TensorRef, scales: TensorRef) -> StoredWeight:
    """Return an e4m3 weight with one scale, a scale for each row, or for each block of 128 x
    128."""
    shape, stored = weight[1].shape, scales[1].shape
    one, row, block = ScaleBlocks(0, 0), ScaleBlocks(1, 0), ScaleBlocks(128, 128)
    sizes = [size for size in stored if size > 1]
    grids = (one, row, block) if len(shape) == 2 else ()
    grid = next((g for g in grids if [s for s in g.shape(shape) if s > 1] == sizes), None)
    if grid is None:
        raise invalid(scales, f"{list(stored)} scales do not fit a weight {list(shape)}", FIX)
    header, entry = scales
    scales = header, replace(entry, shape=() if grid == one else grid.shape(shape))
    return coded_weight(files, "fp8", shape, weight, scales, grid, e4m3(weight))
