"""Reads weights that MLX quantised: w = scale * q + bias, with one of each for a group of a row.

`quantization` of config.json holds `bits` and `group_size`, and under a module's name others, or
false for one that is not quantised. Codes lie in words of 32 bits, the lowest bits first. No scheme
of ours has a scale and a minimum of 16 bits each, so weights become numbers.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from g4ir.errors import WeightsError
from g4ir.weights.tensorfile import FLOATS, quoted

from .base import (
    CODED,
    PIECE,
    Files,
    Found,
    MadeWeight,
    QuantisedTensors,
    plain_name,
    require,
    wrong,
)

if TYPE_CHECKING:
    import torch

log = logging.getLogger(__name__)

KEY, NEEDED = "quantization", {"group_size", "bits"}
#: bits of a code that divide a byte
READ = (2, 4, 8)
OTHER = (
    "fix: take the bf16 weights of the model with --quant, or a compressed-tensors or GGUF file of "
    "it"
)


def is_mlx(values: Any) -> bool:
    """Whether this says how MLX quantised weights; mlx-lm writes it under the usual key too."""
    return isinstance(values, dict) and values.keys() >= NEEDED and "quant_method" not in values


def read(config: Path, values: Mapping[str, Any], files: Files) -> QuantisedTensors:
    """Return what is quantised; WeightsError names the module and what is not read of it."""
    mode = values.get("mode", "affine")
    if mode != "affine":
        raise WeightsError(f"{config}: {KEY}: MLX's mode {quoted(mode)} is not read; {OTHER}")
    own = {plain_name(f"{k}.weight"): v for k, v in values.items() if isinstance(v, dict | bool)}
    names, weights = dict(files.names), {}
    for name in files.names:
        weight, biases = name[: -len("scales")] + "weight", name[: -len("scales")] + "biases"
        if not name.endswith(".scales") or weight not in names or biases not in names:
            continue
        parts = [names.pop(part) for part in (weight, name, biases)]
        stated = own.get(weight, values)
        header, entry = parts[0]
        made = _weight(config, files, stated if isinstance(stated, dict) else values, parts)
        stand_in = replace(entry, dtype=CODED, shape=made.shape)
        names[weight], weights[stand_in] = (header, stand_in), made
    if weights:
        log.warning(
            "%s: %d weights of MLX become numbers of the engine's dtype, as no format here has "
            "their scales and biases; --quant quantises them again",
            *(config.parent, len(weights)),
        )
    return QuantisedTensors(names, weights, {})


def _weight(
    config: Path, files: Files, stated: Mapping[str, Any], parts: list[Found]
) -> MadeWeight:
    codes, scales, biases = parts
    bits, group = stated.get("bits"), stated.get("group_size")
    if bits not in READ or type(group) is not int or not 0 < group <= 1 << 16:
        what = f"{quoted(bits)} bits in groups of {quoted(group)} ({config.name}: {KEY})"
        raise wrong(codes, f"{what}, and {', '.join(map(str, READ))} bits are read", OTHER)
    rows, groups = scales[1].shape if len(scales[1].shape) == 2 else (0, 0)
    require(codes, ("U32",), (rows, groups * group * bits // 32))
    require(scales, FLOATS, (rows, groups))
    require(biases, FLOATS, (rows, groups))
    header, entry = codes
    raw = replace(entry, dtype="U8", shape=(rows, entry.shape[1] * 4))
    affine = Affine(files, (header, raw), scales, biases, bits)
    return MadeWeight((rows, groups * group), affine.numbers, lambda: files.release(parts))


@dataclass(frozen=True)
class Affine:
    """Codes u8[N, bytes], scales and biases [N, groups] of a weight."""

    files: Files
    codes: Found
    scales: Found
    biases: Found
    bits: int

    def numbers(self, rows: torch.Tensor | None) -> torch.Tensor:
        """Return the weight in float32, or rows of it, converted a piece at a time."""
        import torch

        parts = [self.files.rows(part, rows) for part in (self.codes, self.scales, self.biases)]
        each = max(1, PIECE // (parts[0].shape[1] * 8 // self.bits))
        made = torch.cat([self._piece(*p) for p in zip(*(t.split(each) for t in parts))])
        if not bool(made.isfinite().all()):
            raise wrong(self.scales, "a scale or bias is NaN or infinite")
        return made

    def _piece(self, raw: torch.Tensor, scales: torch.Tensor, biases: torch.Tensor) -> torch.Tensor:
        import torch

        shifts = torch.arange(0, 8, self.bits, dtype=torch.uint8)
        codes = (raw[..., None] >> shifts) & (1 << self.bits) - 1
        grouped = codes.view(len(raw), scales.shape[1], -1).float()
        return (grouped * scales.float()[..., None] + biases.float()[..., None]).flatten(1)
