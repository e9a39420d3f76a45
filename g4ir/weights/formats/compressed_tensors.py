"""compressed-tensors: `config_groups` say which modules are quantised and how; scales multiply.

Layouts as in the library of that name: `weight_packed` i32 [N, K*b/32] of `pack-quantized` holds
codes + 2^(b-1), low bits first, also across words; the bytes of 2- and 4-bit rows are those of
ops/codecs.py. With zero points z the codes become q - z, which take one more bit. The int8 and e4m3
codes of other formats are not packed. NVFP4 and MXFP4 are in fp4.py. Activations are not rounded.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any, ClassVar

from g4ir.errors import WeightsError
from g4ir.model.names import CODES, SCALES
from g4ir.ops.codecs import integer_format, pack_integers
from g4ir.ops.types import torch
from g4ir.spec.reader import Length, Node, OneOf, Range, build
from g4ir.weights.tensorfile import broken, quoted

from .base import (
    FIX,
    KEY,
    UNREAD,
    Files,
    ModuleWeight,
    QuantisedTensors,
    ScaleBlocks,
    Selects,
    StoredWeight,
    TensorRef,
    TensorRefs,
    as_it_is,
    coded_weight,
    e4m3,
    invalid,
    packed_integers,
    quantised_weight,
    read_modules,
    require,
    selector,
    subtract_zeros,
)
from .fp4 import MXFP4_GROUP, NVFP4_GROUP, mxfp4_weight, nvfp4_weight

PACKED, NVFP4, MXFP4 = "pack-quantized", "nvfp4-pack-quantized", "mxfp4-pack-quantized"
#: (format, type of codes) -> supported bits
READ = {
    (PACKED, "int"): range(1, 9),
    (NVFP4, "float"): (4,),
    (MXFP4, "float"): (4,),
    ("int-quantized", "int"): (8,),
    ("naive-quantized", "int"): (8,),
    ("float-quantized", "float"): (8,),
    ("naive-quantized", "float"): (8,),
}
OTHERWISE = "fix: use a pack-quantized or float-quantized file, or build from the bf16 checkpoint"
OTHERWISE += " with --quant"
WEIGHT, WORDS, SCALE, SHAPE = ".weight", ".weight_packed", ".weight_scale", ".weight_shape"
ZERO, INDEX, GLOBAL = ".weight_zero_point", ".weight_g_idx", ".weight_global_scale"
#: strategies of the other formats; None: by the group size
STRATEGIES = (None, "tensor", "channel", "group", "block")
#: format -> its only strategy and group size
FIXED = {NVFP4: ("tensor_group", NVFP4_GROUP), MXFP4: ("group", MXFP4_GROUP)}
ACTIVATIONS = (
    *(
        ".input_scale",
        ".input_global_scale",
        ".input_zero_point",
        ".output_scale",
        ".output_zero_point",
    ),
    *(".q_scale", ".k_scale", ".v_scale"),
)
SUFFIXES = (WORDS, WEIGHT, SCALE, SHAPE, ZERO, INDEX, GLOBAL)
#: format -> suffixes of its codes, and of what it needs beside scales; others: `.weight`
CODE_SUFFIXES = {PACKED: (WORDS, SHAPE), NVFP4: (WORDS, GLOBAL), MXFP4: (WORDS,)}
#: modules of class Embedding, not Linear, by suffix of their names
TABLES = ("embed_tokens", "embed_tokens_per_layer")
NOT_ROUNDED = "a scale of activations or caches, which are not rounded"

log = logging.getLogger(__name__)
_Word = Annotated[str, Length(1, 500)]


@dataclass(frozen=True)
class QuantArgs:
    """How weights or activations are quantised."""

    unread: ClassVar = UNREAD["compressed_tensors_args"]
    num_bits: Annotated[int, Range(1, 16)] = 8
    type: Annotated[str, OneOf(("int", "float"))] = "int"
    symmetric: bool = True
    strategy: str | None = None
    group_size: Annotated[int, Range(-1, 1 << 16)] | None = None
    block_structure: (
        Annotated[tuple[Annotated[int, Range(1, 1 << 16)], ...], Length(2, 2)] | None
    ) = None
    actorder: Any = None

    @property
    def grid(self) -> ScaleBlocks | None:
        """Blocks of a weight that share a scale; None for an unsupported strategy, and for one
        whose group size or block structure is missing."""
        group, default_strategy = self.group_size or 0, {None: "tensor", -1: "channel"}
        grids = {
            "tensor": ScaleBlocks(0, 0),
            "channel": ScaleBlocks(1, 0),
            "group": ScaleBlocks(1, group) if group > 0 else None,
            "tensor_group": ScaleBlocks(1, group) if group > 0 else None,
            "block": ScaleBlocks(*self.block_structure) if self.block_structure else None,
        }
        return grids.get(self.strategy or default_strategy.get(self.group_size, "group"))


@dataclass(frozen=True)
class ModuleGroup:
    """Modules with the same quantisation: `targets` are names, `re:` patterns, or classes."""

    targets: Annotated[tuple[_Word, ...], Length(1, 10_000)]
    weights: QuantArgs | None = None
    input_activations: QuantArgs | None = None
    output_activations: QuantArgs | None = None
    format: str | None = None


@dataclass(frozen=True)
class CompressedTensorsConfig:
    """`quantization_config` of compressed-tensors."""

    unread: ClassVar = UNREAD["compressed_tensors"]
    quant_method: str
    config_groups: dict[_Word, ModuleGroup]
    format: str = "dense"
    quantization_status: str | None = None
    ignore: Annotated[tuple[_Word, ...], Length(0, 100_000)] | None = None
    kv_cache_scheme: Any = None
    sparsity_config: Any = None
    moe_sparsity_config: Any = None
    transform_config: Any = None


#: predicate of a target's modules, their quantisation, and the format of their tensors
_Group = tuple[Selects, QuantArgs, str]


def read(tree: Node, files: Files) -> QuantisedTensors:
    config: CompressedTensorsConfig = build(CompressedTensorsConfig, tree, KEY)
    where = str(tree.where)
    _check(config, where)
    groups = _by_priority(config, where)
    take = partial(_take, files, selector(config.ignore or (), where), groups)
    tensors = read_modules(files, SUFFIXES, take, dict.fromkeys(ACTIVATIONS, NOT_ROUNDED))
    module_groups = config.config_groups.values()
    if tensors.ignored or any(g.input_activations or g.output_activations for g in module_groups):
        log.warning("%s: only weights are quantised, not activations", where)
    if config.kv_cache_scheme is not None:
        log.warning("%s: kv_cache_scheme is ignored", where)
    return tensors


def _by_priority(config: CompressedTensorsConfig, where: str) -> list[_Group]:
    """Return a predicate for each target, with its group's settings, in the library's order: names
    before patterns, each sorted (`match_targets` of compressed_tensors/utils/match.py)."""
    targets = {
        target: (group.weights, group.format or config.format)
        for group in config.config_groups.values()
        if group.weights
        for target in group.targets
    }
    selector(tuple(targets), where)  # raises for too many patterns
    ordered = sorted(targets, key=lambda t: ("re:" in t, t))
    return [(selector((t,), where), *targets[t]) for t in ordered]


def _check(config: CompressedTensorsConfig, where: str) -> None:
    sparsity = config.sparsity_config or {}
    dense = isinstance(sparsity, dict) and sparsity.get("format", "dense") == "dense"
    unsupported = {
        "sparsity_config": not dense,
        "moe_sparsity_config": bool(config.moe_sparsity_config),
        "transform_config": bool(config.transform_config),
        "quantization_status": config.quantization_status not in (None, "compressed", "frozen"),
    }
    for key, bad in unsupported.items():
        if bad:
            raise _unread(where, key, getattr(config, key))
    for name, group in config.config_groups.items():
        _check_group(f"{where}: {KEY}.config_groups.{name}", config, group)


def _check_group(where: str, config: CompressedTensorsConfig, group: ModuleGroup) -> None:
    layout, args = group.format or config.format, group.weights
    if args is None:
        raise _unread(where, "weights", None)
    bits = READ.get((layout, args.type))
    only, size = FIXED.get(layout, (args.strategy, args.group_size))
    strategies = (only,) if layout in FIXED else STRATEGIES
    size_key = "block_structure" if args.strategy == "block" else "group_size"
    symmetric = args.symmetric or (layout == PACKED and args.num_bits < 8)
    for key, value, is_read in (
        ("format", layout, any(layout == of for of, _ in READ)),
        (f"format {layout} with type", args.type, bits is not None),
        ("num_bits", args.num_bits, args.num_bits in (bits or ())),
        ("strategy", args.strategy, args.strategy in strategies),
        (size_key, getattr(args, size_key), args.grid is not None),
        ("group_size", args.group_size, args.group_size == size),
        ("actorder", args.actorder, args.actorder not in ("group", "dynamic", True)),
        ("symmetric", False, symmetric),
    ):
        if not is_read:
            raise _unread(where, key, value)


def _unread(where: str, key: str, value: Any) -> WeightsError:
    return broken(where, f"{key} {quoted(value)} is not supported", OTHERWISE)


def _take(
    files: Files, ignore: Selects, groups: list[_Group], module: str, parts: TensorRefs
) -> ModuleWeight | None:
    kind = "Embedding" if module.endswith(TABLES) else "Linear"
    plain = parts.get(WEIGHT)
    if SCALE not in parts and plain and len(plain[1].shape) != 2:
        kind = ""
    by_name, by_class = ([g for g in groups if g[0](*key)] for key in ((module, ""), ("", kind)))
    chosen = next(iter((*by_name, *by_class)), None)
    ignored = ignore(module, kind)
    ref = next(parts[s] for s in SUFFIXES if s in parts)
    if SCALE not in parts and WORDS not in parts:
        if kind and chosen and not ignored and files.of_text(module):
            msg = "is not quantised, but config_groups match its module and `ignore` does not"
            raise invalid(ref, msg, FIX)
        return None
    if ignored:
        raise invalid(ref, "is quantised, but `ignore` matches its module", FIX)
    if chosen is None:
        raise invalid(ref, "is quantised, but no target of config_groups matches its module", FIX)
    return ref, _weight(files, parts, *chosen[1:])


def _weight(files: Files, parts: TensorRefs, args: QuantArgs, layout: str) -> StoredWeight:
    code_suffixes = CODE_SUFFIXES.get(layout, (WEIGHT,))
    expected = (*code_suffixes, SCALE, *([] if args.symmetric else [ZERO]))
    if ref := parts.get(INDEX):
        msg = "columns in another order (actorder with g_idx) are not supported"
        raise invalid(ref, msg, OTHERWISE)
    if other := next((ref for suffix, ref in parts.items() if suffix not in expected), None):
        msg = f"does not belong to format {layout} with symmetric {args.symmetric}"
        raise invalid(other, msg, FIX)
    if missing := next((suffix for suffix in expected if suffix not in parts), None):
        first = next(parts[s] for s in SUFFIXES if s in parts)
        raise invalid(first, f"its module has no {missing[1:]}")
    codes, grid = parts[code_suffixes[0]], args.grid
    assert grid
    if layout == NVFP4:
        return nvfp4_weight(files, codes, parts[SCALE], parts[GLOBAL], divides=True)
    if layout == MXFP4:
        return mxfp4_weight(files, codes, parts[SCALE])
    if layout == PACKED:
        return _packed(files, parts, args, grid)
    dtype, name = {"int": ("I8", "int8"), "float": ("F8_E4M3", "fp8")}[args.type]
    require(codes, [dtype])
    check = e4m3(codes) if name == "fp8" else as_it_is
    _divides(codes, codes[1].shape, args)
    return coded_weight(files, name, codes[1].shape, codes, parts[SCALE], grid, check)


def _packed(files: Files, parts: TensorRefs, args: QuantArgs, grid: ScaleBlocks) -> StoredWeight:
    """Return a weight of 1 to 8 bits, stored in 32-bit words, in the format of the fewest bits
    that has its codes."""
    codes, bits = parts[WORDS], args.num_bits
    require(codes, ["I32"])
    require(parts[SHAPE], ["I64", "I32"], (len(codes[1].shape),))
    shape = tuple(map(int, files.rows(parts[SHAPE])))
    words = (*shape[:-1], -(-shape[-1] * bits // 32)) if shape else ()
    if words != codes[1].shape or min(shape, default=0) < 1:
        packed = f"weight_packed {list(codes[1].shape)} of {bits} bits"
        raise invalid(parts[SHAPE], f"says {list(shape)}, which does not fit {packed}")
    _divides(codes, shape, args)
    width, asymmetric = shape[-1], not args.symmetric
    name = integer_format(bits + asymmetric, width, grid.group(shape))
    convert = partial(packed_integers, bits=bits, width=width, fmt="int8" if asymmetric else name)
    weight = coded_weight(files, name, shape, codes, parts[SCALE], grid, convert)
    return _with_zeros(files, weight, parts[ZERO], grid, bits) if asymmetric else weight


def _divides(codes: TensorRef, shape: tuple[int, ...], args: QuantArgs) -> None:
    group = args.group_size or 0
    if group > 0 and shape[-1] % group:
        raise invalid(codes, f"groups of {group} do not divide rows of {shape[-1]}", FIX)


def _with_zeros(
    files: Files, w: StoredWeight, zeros: TensorRef, grid: ScaleBlocks, bits: int
) -> StoredWeight:
    """Apply zero points, packed along the output axis as i32 [N*b/32, G]: codes q - z."""
    n, groups = grid.shape(w.shape)[-2:]
    if len(w.shape) != 2:
        raise invalid(zeros, "zero points of stacked experts are not supported", OTHERWISE)
    require(zeros, ["I32"], (-(-n * bits // 32), groups))
    scheme = w.scheme
    assert scheme

    def codes(ids: torch.Tensor | None) -> torch.Tensor:
        z = packed_integers(files.rows(zeros).t(), bits, n, "int8").t()
        return pack_integers(
            subtract_zeros(w.parts[CODES](ids), grid.spread(z, w.shape, ids)), scheme.form
        )

    return quantised_weight(scheme, w.shape, codes, w.parts[SCALES], w.release, files.dtype)
