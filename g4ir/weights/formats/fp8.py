"""fp8 as transformers writes it: e4m3 codes, a scale for each block or one for all of a weight.
`weight_scale_inv` is multiplied, in spite of its name. Activations are not rounded."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Annotated, Any

from g4ir.spec.reader import Length, Node, OneOf, Range, build

from .base import (
    FIX,
    KEY,
    STACKED,
    Files,
    Found,
    Modules,
    NameList,
    QuantisedTensors,
    ScaleBlocks,
    coded_weight,
    e4m3,
    require,
    wrong,
)
from .patterns import excluded

WEIGHT, SCALE, STACKED_SCALE, ACTIVATION = (
    ".weight",
    ".weight_scale_inv",
    "_scale_inv",
    ".activation_scale",
)
SUFFIXES = (SCALE, STACKED_SCALE, ACTIVATION, WEIGHT)

log = logging.getLogger(__name__)
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


def read(tree: Node, files: Files) -> QuantisedTensors:
    """Return what is in codes; SpecError or WeightsError for what is not understood."""
    config: Fp8Config = build(Fp8Config, tree, KEY)
    modules = Modules(files, SUFFIXES)
    for module, parts in modules.parts.items():
        _take(modules, module, parts, config, str(tree.where))
    log.warning("%s: activations are not rounded, as weights are", tree.where)
    return modules.done()


def _take(
    modules: Modules, module: str, parts: dict[str, Found], config: Fp8Config, where: str
) -> None:
    if found := parts.pop(ACTIVATION, None):
        modules.ignored[found[1].name] = "a scale of activations, which are not rounded"
    if STACKED.fullmatch(module) and module in modules.plain:
        parts[WEIGHT] = modules.plain.pop(module)
    scales = parts.get(SCALE) or parts.get(STACKED_SCALE)
    weight = parts.get(WEIGHT)
    if scales is None:
        if weight and weight[1].dtype == "F8_E4M3":
            raise wrong(weight, "its module has no weight_scale_inv")
        modules.plain |= {f[1].name: f for f in parts.values()}
        return
    if weight is None:
        raise wrong(scales, "its module has no weight")
    names = config.modules_to_not_convert or config.ignored_layers or ()
    if excluded(module, names, where):
        raise wrong(weight, "is in codes, but modules_to_not_convert names its module", FIX)
    require(weight, ["F8_E4M3"])
    grid = ScaleBlocks(*(config.weight_block_size or (0, 0)))
    shape = weight[1].shape
    modules.add(
        module,
        weight,
        coded_weight(modules.files, "fp8", shape, weight, scales, grid, e4m3(weight)),
    )
