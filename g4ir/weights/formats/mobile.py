"""The mobile form (`quant_method` gemma): 2, 4 or 8 bits for each module, a scale for each row.

Codes lie along K, low bits first, as code + 2^(b-1) in bytes; 8 bits as they are. The scales are
rounded to the engine's dtype before they are multiplied. Inputs and outputs of modules may have a
grid of their own (`input_activation_scale`), which is not followed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

from g4ir.errors import WeightsError
from g4ir.spec.reader import Length, Node, Range, build

from .base import Coded, Files, Found, Grid, Modules, coded_weight, require, wrong
from .patterns import compiled, excluded

if TYPE_CHECKING:
    import torch

KEY = "quantization_config"
WEIGHT, SCALE = ".weight", ".weight_scale"
TABLE, TABLE_SCALE = ".embedding_quantized", ".embedding_scale"
RANGES = (".input_activation_scale", ".output_activation_scale")
CACHES = (".k_cache_scale", ".v_cache_scale")
SUFFIXES = (SCALE, TABLE, TABLE_SCALE, *RANGES, *CACHES, WEIGHT)
FIX = "fix: correct quantization_config of config.json, or download the checkpoint again"
ROUNDED = "activations are rounded to a grid of their own, which engines do not do"
OTHERWISE = "fix: take the weights in bf16, trained for 4 bits, with --quant int4"

_Bits = Annotated[int, Range(2, 8)]
_Names = Annotated[tuple[Annotated[str, Length(1, 500)], ...], Length(0, 2000)]


@dataclass(frozen=True)
class Own:
    """Settings of some modules."""

    num_bits: _Bits | None = None


@dataclass(frozen=True)
class Config:
    """The whole of `quantization_config`."""

    quant_method: str
    num_bits: _Bits = 4
    quantize_embeddings: bool = False
    module_quant_configs: dict[Annotated[str, Length(1, 500)], Own] | None = None
    modules_to_not_convert: _Names | None = None

    def bits(self, module: str, where: str) -> int:
        """Return the bits of a module; the first pattern that is found in its name counts."""
        for pattern, own in (self.module_quant_configs or {}).items():
            if compiled(pattern, where).search(module):
                return own.num_bits or self.num_bits
        return self.num_bits


def read(tree: Node, files: Files) -> Coded:
    """Return what is in codes; SpecError or WeightsError for what is not understood."""
    config: Config = build(Config, tree, KEY)
    modules = Modules(files, SUFFIXES)
    for module, parts in modules.parts.items():
        _take(modules, module, parts, config, str(tree.where))
    return modules.done()


def _take(
    modules: Modules, module: str, parts: dict[str, Found], config: Config, where: str
) -> None:
    """Sort the tensors of one module into weights in codes, plain ones and ignored ones."""
    for suffix in CACHES:
        if found := parts.pop(suffix, None):
            modules.ignored[found[1].name] = "a scale of caches, which are not rounded"
    ranges = [found for suffix in RANGES if (found := parts.pop(suffix, None))]
    table = TABLE in parts or TABLE_SCALE in parts
    codes, scales = (parts.get(s) for s in ((TABLE, TABLE_SCALE) if table else (WEIGHT, SCALE)))
    if scales is None and not table:
        if ranges:
            raise wrong(ranges[0], "is of a module without weight_scale")
        modules.plain |= {f[1].name: f for f in parts.values()}
        return
    if scales is None or codes is None or len(parts) > 2:
        raise wrong(modules.named(parts), "expected codes and their scales, and no others")
    if excluded(module, config.modules_to_not_convert or (), where):
        raise wrong(codes, "is in codes, but modules_to_not_convert names its module", FIX)
    if table and not config.quantize_embeddings:
        raise wrong(codes, "is in codes, but quantize_embeddings is false", FIX)
    for found in ranges:
        modules.ignored[found[1].name] = "0: activations are not rounded"
        if _is_set(modules.files, found):
            modules.faults[codes[1]] = str(wrong(found, ROUNDED, OTHERWISE))
    bits = config.bits(module, where)
    if bits not in FORMS:
        raise WeightsError(
            f"{where}: {KEY}: num_bits {bits} of {module}: expected 2, 4 or 8; {FIX}"
        )
    form = FORMS[bits]
    require(codes, [form.dtype])
    shape = (*codes[1].shape[:-1], codes[1].shape[-1] * form.packed) if codes[1].shape else ()
    columns = _columns(scales, shape) if table else 0
    weight = coded_weight(
        modules.files, form.name, shape, codes, scales, Grid(1, columns), form.convert, None
    )
    modules.add(module, codes, weight)


def _columns(scales: Found, shape: tuple[int, ...]) -> int:
    """Return the columns of a table that share a scale."""
    groups = scales[1].shape[-1] if len(scales[1].shape) == 2 else 0
    if not groups or not shape or shape[-1] % groups:
        raise wrong(scales, f"its scales do not divide rows of {shape[-1] if shape else 0}")
    return shape[-1] // groups


def _is_set(files: Files, found: Found) -> bool:
    """Whether a scale of activations is not 0, which stands for none."""
    require(found, ["F32", "BF16", "F16"])
    if found[1].shape not in ((), (1,)):
        raise wrong(found, f"expected one number, found {list(found[1].shape)}")
    return float(files.tensor(found).flatten()[0]) != 0


def _as_it_is(t: torch.Tensor) -> torch.Tensor:
    return t


def _from_2_bits(t: torch.Tensor) -> torch.Tensor:
    """Return bytes of four 2-bit codes as bytes of two 4-bit codes: code + 2 becomes code + 8."""
    import torch

    a, b, c, d = ((t >> at & 3) + 6 for at in (0, 2, 4, 6))
    return torch.stack((a | b << 4, c | d << 4), -1).flatten(-2)


@dataclass(frozen=True)
class Form:
    """How codes lie in a file: dtype, codes in an element; the canonical form and the way to it."""

    dtype: str
    packed: int
    name: str
    convert: Callable[[torch.Tensor], torch.Tensor]


FORMS: Mapping[int, Form] = {
    2: Form("U8", 4, "int4", _from_2_bits),
    4: Form("U8", 2, "int4", _as_it_is),
    8: Form("I8", 1, "int8", _as_it_is),
}
