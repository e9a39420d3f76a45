"""Writes quantised weights as compressed-tensors, which the module beside it reads."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

from g4ir.model.names import CODES, SCALES
from g4ir.ops.codecs import unpacked
from g4ir.ops.types import TORCH_NAMES, torch
from g4ir.quant.recipe import Scheme
from g4ir.weights.tensorfile import CODES as DTYPES
from g4ir.weights.tensorfile import FileTensor

from .base import MODULES, STACKED
from .compressed_tensors import PACKED, SCALE, SHAPE, TABLES, WEIGHT, WORDS

#: form -> format, type of the numbers, their bits
WRITTEN = {
    "int4": (PACKED, "int", 4),
    **dict.fromkeys(("int8", "int5"), (PACKED, "int", 8)),
    "fp8": ("float-quantized", "float", 8),
}
#: CODES or SCALES -> those of a weight
Parts = Callable[[str], "torch.Tensor"]
_NUMBER = re.compile(r"\.\d+(?=\.)")
#: of an expert, the last in the name of its module
_EXPERT = re.compile(r"\.\d+(?=\.[^.]+$)")


def has_name(name: str, shape: tuple[int, ...], scheme: Scheme) -> bool:
    """Whether the format says the same of a weight: a matrix of a product, and no table, whose rows
    are whole words of codes of 4 or 8 bits."""
    whole = scheme.form in WRITTEN and shape[-1] * WRITTEN[scheme.form][2] % 32 == 0
    return whole and not name.removesuffix(WEIGHT).endswith(TABLES)


def whole_experts(names: Sequence[str]) -> list[str]:
    """Return the names without experts of which only some matrices are among them: readers take
    codes of all matrices of an expert or of none."""
    stacked = Counter(name.rpartition(".")[0] for name in names if STACKED.fullmatch(name))
    return [name for name in names if stacked.get(name.rpartition(".")[0], 2) == 2]


def stored(
    name: str, shape: tuple[int, ...], scheme: Scheme, dtype: str, parts: Parts
) -> dict[str, FileTensor]:
    """Return the tensors of a quantised weight [.., N, K] by their names in a file; `dtype`: of
    scales that follow the engine's."""
    form, _, bits = WRITTEN[scheme.form]
    scale = TORCH_NAMES[scheme.scale or dtype]
    out: dict[str, FileTensor] = {}
    for module, cut, (n, k) in _modules(name, shape):
        groups = k // scheme.group if scheme.group else 1
        codes, scales = partial(_codes, parts, cut), partial(_scales, parts, cut, scale)
        if form == PACKED:
            out[module + WORDS] = FileTensor("I32", (n, k * bits // 32), codes)
            out[module + SHAPE] = FileTensor("I64", (2,), partial(torch.tensor, (n, k)))
        else:
            out[module + WEIGHT] = FileTensor("F8_E4M3", (n, k), codes)
        out[module + SCALE] = FileTensor(DTYPES[scale], (n, groups), scales)
    return out


def config(schemes: Mapping[str, Scheme], names: Iterable[str]) -> dict[str, Any]:
    """Return the quantization_config of weights by their names in a file, of those of `names`.
    Modules of all layers are named by one pattern where they are quantised alike, experts of a
    layer always."""
    alike: dict[str, dict[str, Scheme | None]] = {}
    for name in names:
        for module, *_ in _modules(name, (1, 2, 1)):
            target = _pattern(_EXPERT, module) if STACKED.fullmatch(name) else module
            of_all = _pattern(_NUMBER, module)
            alike.setdefault(of_all, {})[target] = schemes.get(name)
    targets: dict[Scheme, list[str]] = {}
    for of_all, found in alike.items():
        if len({*found.values()}) == 1 and len(found) > 1:
            found = {of_all: next(iter(found.values()))}
        for target, scheme in found.items():
            if scheme:
                targets.setdefault(scheme, []).append(target)
    groups = {f"group_{i}": _group(s, names) for i, (s, names) in enumerate(targets.items())}
    formats = {group["format"] for group in groups.values()}
    return {
        "quant_method": "compressed-tensors",
        "format": formats.pop() if len(formats) == 1 else "mixed-precision",
        "quantization_status": "compressed",
        "ignore": [],
        "config_groups": groups,
    }


def _pattern(numbers: re.Pattern[str], module: str) -> str:
    """Return the target of modules whose names differ in these numbers."""
    names = map(re.escape, numbers.split(module))
    return "re:" + r"\.\d+".join(names) + "$"


def _group(scheme: Scheme, targets: list[str]) -> dict[str, Any]:
    form, kind, bits = WRITTEN[scheme.form]
    numbers: dict[str, Any] = {"num_bits": bits, "type": kind, "symmetric": True}
    if scheme.group:
        numbers |= {"strategy": "group", "group_size": scheme.group}
    else:
        numbers |= {"strategy": "channel"}
    return {"targets": targets, "weights": numbers, "input_activations": None, "format": form}


Cut = Callable[["torch.Tensor"], "torch.Tensor"]


def _modules(name: str, shape: tuple[int, ...]) -> Iterator[tuple[str, Cut, tuple[int, int]]]:
    """Yield module, its part of codes or scales, and its shape; each expert is a module."""
    if not STACKED.fullmatch(name):
        yield name.removesuffix(WEIGHT), lambda t: t, (shape[0], shape[1])
        return
    prefix, _, last = name.rpartition(".")
    modules = MODULES[:2] if last.startswith("gate_up") else MODULES[2:]
    count, n, k = shape
    each = n // len(modules)
    for e in range(count):
        for i, module in enumerate(modules):
            yield f"{prefix}.{e}.{module}", partial(_rows, e, i * each, each), (each, k)


def _rows(e: int, first: int, count: int, t: torch.Tensor) -> torch.Tensor:
    return t[e, first : first + count]


def _codes(parts: Parts, cut: Cut) -> torch.Tensor:
    codes = cut(parts(CODES)).contiguous()
    if codes.dtype == torch.uint16:
        codes = unpacked(codes)
    if codes.dtype == torch.int8:  # a word holds code + 128
        codes = codes.view(torch.uint8) ^ 128
    return codes.view(torch.int32) if codes.dtype == torch.uint8 else codes


def _scales(parts: Parts, cut: Cut, dtype: str) -> torch.Tensor:
    return cut(parts(SCALES)).to(getattr(torch, dtype))
