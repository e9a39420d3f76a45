"""GPTQ and AWQ: w = (q - z) * s, with a scale s and a zero point z for each group of a row.

Both store transposes of w [N, K]: `qweight` has the axes K, N; `qzeros` and `scales` have G, N with
G = K / group. GPTQ packs `qweight` i32 [K*b/32, N] along K and `qzeros` i32 [G, N*b/32] along N,
low bits first, also across words; checkpoint_format `gptq` stores zero points minus 1, `gptq_v2` as
they are. `g_idx` i32 [K] is the group of each column, out of order if columns were quantised by
activation order (desc_act). AWQ (version gemm) packs both along N, `qweight` i32 [K, N/8], in the
order of `AWQ_ORDER`. Layouts as AutoGPTQ's `qlinear` and AutoAWQ's `WQLinear_GEMM` write them.

Codes q - z take one bit more than q, except in symmetric files. Weights that need more than 8 bits,
or have groups of less than MIN_GROUP values or columns out of order, are dequantised to the
engine's dtype.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any, ClassVar

from g4ir.ops.codecs import integer_format, pack_integers
from g4ir.ops.types import torch
from g4ir.quant.recipe import Scheme
from g4ir.spec.reader import Node, OneOf, Range, build
from g4ir.weights.tensorfile import broken, quoted

from .base import (
    FILE_SCALES,
    FIX,
    KEY,
    MIN_GROUP,
    UNREAD,
    Files,
    ModuleWeight,
    NameList,
    QuantisedTensors,
    StoredWeight,
    TensorRef,
    TensorRefs,
    checked_scales,
    excluded,
    invalid,
    packed_integers,
    quantised_weight,
    read_modules,
    require,
    subtract_zeros,
)

log = logging.getLogger(__name__)
QWEIGHT, QZEROS, SCALES, INDEX, WEIGHT = ".qweight", ".qzeros", ".scales", ".g_idx", ".weight"
#: column of the n-th nibble of a word, and its inverse
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
_AWQ_NIBBLES = [AWQ_ORDER.index(column) for column in range(8)]
OTHERWISE = "fix: use another file of the model, or build from its bf16 checkpoint with --quant"

_Group = Annotated[int, Range(-1, 1 << 16)]


@dataclass(frozen=True)
class GptqConfig:
    """`quantization_config` of GPTQ."""

    unread: ClassVar = UNREAD["gptq"]
    quant_method: str
    bits: Annotated[int, Range(2, 8)]
    group_size: _Group = 128
    desc_act: bool = False
    sym: bool = True
    checkpoint_format: Annotated[str, OneOf(("gptq", "gptq_v2"))] = "gptq"
    dynamic: Any = None
    is_marlin_format: Any = None
    modules_to_not_convert: NameList | None = None


@dataclass(frozen=True)
class AwqConfig:
    """`quantization_config` of AWQ."""

    unread: ClassVar = UNREAD["awq"]
    quant_method: str
    bits: Annotated[int, Range(2, 8)] = 4
    group_size: _Group = 128
    zero_point: bool = True
    version: str = "gemm"
    modules_to_not_convert: NameList | None = None


@dataclass(frozen=True)
class _Packing:
    """How a file's modules are packed. `by_row`: `qweight` -> integers minus 2^(bits-1), i8 [N, K];
    `zeros`: `qzeros` -> zero points minus 2^(bits-1), integers [N, G]. `symmetric`: all zero points
    are 2^(bits-1). `ordered`: groups are consecutive columns (no desc_act). `packed_rows`: words
    have codes along K (GPTQ), not along N (AWQ)."""

    bits: int
    group: int
    symmetric: bool
    ordered: bool
    by_row: Callable[[torch.Tensor], torch.Tensor]
    zeros: Callable[[torch.Tensor], torch.Tensor]
    excluded: NameList
    packed_rows: bool

    def columns(self, words: int) -> int:
        """Return K of a weight [N, K] whose `qweight` has this first dim."""
        return words * 32 // self.bits if self.packed_rows else words

    def shapes(self, n: int, k: int, groups: int) -> tuple[tuple[int, int], tuple[int, int]]:
        """Return the shapes of `qweight` and `qzeros`."""
        words = n * self.bits // 32
        return (k * self.bits // 32, n) if self.packed_rows else (k, words), (groups, words)


def read_gptq(tree: Node, files: Files) -> QuantisedTensors:
    config: GptqConfig = build(GptqConfig, tree, KEY)
    where, bits = str(tree.where), config.bits
    if bits not in (2, 3, 4, 8):
        msg = f"{KEY}: {bits} bits of GPTQ are not supported, only 2, 3, 4, 8"
        raise broken(where, msg, OTHERWISE)
    if config.dynamic or config.is_marlin_format:
        key = "dynamic" if config.dynamic else "is_marlin_format"
        msg = f"{KEY}: {key} {quoted(getattr(config, key))} is not supported"
        raise broken(where, msg, OTHERWISE)
    stored_less = config.checkpoint_format == "gptq"
    packing = _Packing(
        *(bits, config.group_size, config.sym, not config.desc_act),
        by_row=lambda q: packed_integers(q.t(), bits, q.shape[0] * 32 // bits, "int8"),
        zeros=lambda z: _dense(z, bits).t().to(torch.int16) + stored_less,
        excluded=config.modules_to_not_convert or (),
        packed_rows=True,
    )
    return _read(files, packing, where)


def read_awq(tree: Node, files: Files) -> QuantisedTensors:
    config: AwqConfig = build(AwqConfig, tree, KEY)
    where = str(tree.where)
    for key, value, only in (("bits", config.bits, 4), ("version", config.version.lower(), "gemm")):
        if value != only:
            msg = f"{KEY}: {key} {quoted(value)} of AWQ is not supported, only {only}"
            raise broken(where, msg, OTHERWISE)

    def columns(words: torch.Tensor) -> torch.Tensor:
        return _dense(words, 4).unflatten(-1, (-1, 8))[..., _AWQ_NIBBLES].flatten(-2).t()

    packing = _Packing(
        *(4, config.group_size, not config.zero_point, True, columns, columns),
        excluded=config.modules_to_not_convert or (),
        packed_rows=False,
    )
    return _read(files, packing, where)


def _dense(words: torch.Tensor, bits: int) -> torch.Tensor:
    return packed_integers(words, bits, words.shape[-1] * 32 // bits, "int8")


def _read(files: Files, packing: _Packing, where: str) -> QuantisedTensors:
    dense: list[str] = []
    take = partial(_take, files, packing, where, dense)
    tensors = read_modules(files, (QWEIGHT, QZEROS, SCALES, INDEX, WEIGHT), take, {})
    if dense:
        log.warning(
            "%s: %d weights with columns out of order (desc_act), more than 8 bits or groups of "
            f"less than {MIN_GROUP} are dequantised to the engine's dtype, such as %s; --quant "
            "quantises them again",
            *(files.directory, len(dense), dense[0]),
        )
    return tensors


def _take(
    files: Files,
    packing: _Packing,
    where: str,
    dense: list[str],
    module: str,
    parts: TensorRefs,
) -> ModuleWeight | None:
    if not parts.keys() & {QWEIGHT, QZEROS, SCALES, INDEX}:
        return None
    first = next(iter(parts.values()))
    needed = {QWEIGHT, SCALES} | ({QZEROS} if not packing.symmetric else set())
    if missing := sorted(needed - parts.keys()):
        raise invalid(first, f"its module has no {missing[0][1:]}")
    qweight = parts[QWEIGHT]
    if WEIGHT in parts:
        raise invalid(parts[WEIGHT], "its module has qweight too: one weight in two formats", FIX)
    if excluded(module, packing.excluded, where):
        raise invalid(qweight, "is quantised, but modules_to_not_convert matches its module", FIX)
    weight = _weight(files, packing, parts)
    if weight.scheme is None:
        dense.append(module)
    return qweight, weight


def _weight(files: Files, packing: _Packing, parts: TensorRefs) -> StoredWeight:
    qweight, scales = parts[QWEIGHT], parts[SCALES]
    (n, k), group = _shape(packing, qweight, scales, parts.get(QZEROS))
    index = _index(files, packing, parts.get(INDEX), k, group)
    bits = packing.bits + (not packing.symmetric)
    release = partial(files.release, parts.values())

    def integers() -> torch.Tensor:
        return packing.by_row(files.rows(qweight))

    def zeros() -> torch.Tensor | None:
        if QZEROS not in parts:
            return None
        z = packing.zeros(files.rows(parts[QZEROS]))
        if packing.symmetric and bool(z.any()):
            msg = "has zero points other than 2^(bits - 1), but the config says symmetric"
            raise invalid(parts[QZEROS], msg, FIX)
        return None if packing.symmetric else z

    def factors(ids: torch.Tensor | None) -> torch.Tensor:
        s = checked_scales(scales, files.rows(scales)).t().contiguous()
        return s if ids is None else s[ids]

    def values(ids: torch.Tensor | None) -> torch.Tensor:
        q, z, s = integers().to(torch.int16), zeros(), factors(None).float()
        at = torch.arange(k) // group if index is None else index
        w = (q if z is None else q - z[:, at]).float() * s[:, at]
        return w if ids is None else w[ids]

    if index is not None or bits > 8 or group < min(MIN_GROUP, k):
        return StoredWeight((n, k), {"": values}, release)
    name = integer_format(bits, k, group)

    def codes(ids: torch.Tensor | None) -> torch.Tensor:
        z, q = zeros(), integers()
        packed = pack_integers(q if z is None else subtract_zeros(q, z).to(torch.int8), name)
        return packed if ids is None else packed[ids]

    scheme = Scheme(name, 0 if group == k else group, FILE_SCALES[scales[1].dtype])
    return quantised_weight(scheme, (n, k), codes, factors, release, files.dtype)


def _shape(
    packing: _Packing, qweight: TensorRef, scales: TensorRef, zeros: TensorRef | None
) -> tuple[tuple[int, int], int]:
    """Return the shape of a weight and its group size; WeightsError if its tensors do not fit."""
    require(scales, ("F16", "BF16", "F32"))
    for tensor in (scales, qweight):
        if len(tensor[1].shape) != 2:
            raise invalid(tensor, f"expected a matrix, found {list(tensor[1].shape)}")
    (groups, n), (words, _) = scales[1].shape, qweight[1].shape
    k = packing.columns(words)
    group = k if packing.group <= 0 else packing.group
    if not groups or k % group or k // group != groups:
        msg = f"{groups} scales per row do not fit groups of {group} in {k} columns"
        raise invalid(scales, msg, FIX)
    for ref, shape in zip((qweight, zeros), packing.shapes(n, k, groups), strict=True):
        if ref:
            require(ref, ["I32"], shape)
    return (n, k), group


def _index(
    files: Files, packing: _Packing, ref: TensorRef | None, k: int, group: int
) -> torch.Tensor | None:
    """Return the group of each column i64 [K] if columns are out of order, otherwise None."""
    if ref is None:
        return None
    require(ref, ["I32", "I64"], (k,))
    index = files.rows(ref).long()
    if bool((index == torch.arange(k) // group).all()):
        return None
    if packing.ordered:
        msg = "columns are out of order, but desc_act of the config is not true"
        raise invalid(ref, msg, FIX)
    if bool(((index < 0) | (index >= k // group)).any()):
        raise invalid(ref, f"a column's group is not one of the {k // group}")
    return index
