"""Reads weights that MLX quantised: w = scale * q + bias, with one of each for a group of a row.

`quantization` of config.json holds `bits` and `group_size`, and under a module's name others, or
false for one that is not quantised. Codes lie in words of 32 bits, the lowest bits first. No scheme
of ours has a scale and a minimum of 16 bits each, so weights become numbers.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from g4ir.errors import WeightsError
from g4ir.ops.types import torch
from g4ir.weights.tensorfile import FLOATS, quoted

from .base import (
    PIECE,
    Files,
    Found,
    QuantisedTensors,
    StoredWeight,
    Taken,
    plain_name,
    read_modules,
    require,
    wrong,
)

log = logging.getLogger(__name__)

KEY, NEEDED = "quantization", {"group_size", "bits"}
PARTS = (".weight", ".scales", ".biases")
READ = (2, 4, 8)
OTHER = (
    "fix: take the bf16 weights of the model with --quant, or a compressed-tensors or GGUF file of "
    "it"
)


def is_mlx(values: Any) -> bool:
    """Whether this says how MLX quantised weights; mlx-lm writes it under the usual key too."""
    return isinstance(values, dict) and values.keys() >= NEEDED and "quant_method" not in values


def read(config: Path, values: Mapping[str, Any], files: Files) -> QuantisedTensors:
    mode = values.get("mode", "affine")
    if mode != "affine":
        raise WeightsError(f"{config}: {KEY}: MLX's mode {quoted(mode)} is not read; {OTHER}")
    own = {plain_name(f"{k}.weight"): v for k, v in values.items() if isinstance(v, dict)}

    def take(module: str, parts: Mapping[str, Found]) -> Taken | None:
        if parts.keys() != {*PARTS}:
            return None
        stated = own.get(f"{module}.weight", values)
        return parts[PARTS[0]], _weight(config, files, stated, *(parts[p] for p in PARTS))

    found = read_modules(files, PARTS, take, {})
    if found.weights:
        log.warning(
            "%s: %d weights of MLX become numbers of the engine's dtype, as no format here has "
            "their scales and biases; --quant quantises them again",
            *(config.parent, len(found.weights)),
        )
    return found


def _weight(
    config: Path,
    files: Files,
    stated: Mapping[str, Any],
    codes: Found,
    scales: Found,
    biases: Found,
) -> StoredWeight:
    bits, group = stated.get("bits"), stated.get("group_size")
    if bits not in READ or type(group) is not int or not 0 < group <= 1 << 16:
        what = f"{quoted(bits)} bits in groups of {quoted(group)} ({config.name}: {KEY})"
        raise wrong(codes, f"{what}, and {', '.join(map(str, READ))} bits are read", OTHER)
    rows, groups = scales[1].shape if len(scales[1].shape) == 2 else (0, 0)
    require(codes, ("U32",), (rows, groups * group * bits // 32))
    require(scales, FLOATS, (rows, groups))
    require(biases, FLOATS, (rows, groups))
    header, entry = codes
    raw = header, replace(entry, dtype="U8", shape=(rows, entry.shape[1] * 4))
    shifts = torch.arange(0, 8, bits, dtype=torch.uint8)

    def piece(raw: torch.Tensor, scale: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        q = (raw[..., None] >> shifts) & (1 << bits) - 1
        grouped = q.view(len(raw), groups, -1).float()
        return (grouped * scale.float()[..., None] + bias.float()[..., None]).flatten(1)

    def values(ids: torch.Tensor | None) -> torch.Tensor:
        each = max(1, PIECE // (groups * group))
        parts = [files.rows(part, ids).split(each) for part in (raw, scales, biases)]
        made = torch.cat([piece(*p) for p in zip(*parts)])
        if not bool(made.isfinite().all()):
            raise wrong(scales, "a scale or bias is NaN or infinite")
        return made

    release = partial(files.release, (codes, scales, biases))
    return StoredWeight((rows, groups * group), {"": values}, release)
