"""Reads `quantization_config` of a config.json and finds quantised weights, one module a format."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from g4ir.spec.reader import Where, tree_of
from g4ir.weights.tensorfile import broken, parse_json, quoted, read_limited

from . import compressed_tensors, huggingface, mlx
from .base import KEY, Files, QuantisedTensors

LIMIT = 4 << 20
#: quant_method -> its reader: the config's tree and the files -> what is in codes
METHODS: Mapping[str, Callable[[Any, Files], QuantisedTensors]] = {
    "compressed-tensors": compressed_tensors.read,
    "fp8": huggingface.read_fp8,
    "gemma": huggingface.read_mobile,
}


def is_coded(config: Path) -> bool:
    """Whether a config.json says that weights are in codes."""
    values = _values(config)
    return any(values.get(key) is not None for key in (KEY, mlx.KEY))


def _values(config: Path) -> dict[str, Any]:
    return parse_json(config, read_limited(config, LIMIT))


def read_coded(config: Path, files: Files) -> QuantisedTensors:
    """Return a checkpoint's tensors with its quantised weights. SpecError for a key that is not
    understood, WeightsError for a method that is not read and for tensors that do not fit."""
    whole = _values(config)
    values, of_mlx = whole.get(KEY), whole.get(mlx.KEY)
    if of_mlx is not None or mlx.is_mlx(values):
        stated: Any = values if of_mlx is None else of_mlx
        if not mlx.is_mlx(stated):
            raise broken(config, f"{mlx.KEY}: {quoted(stated)} is not read", mlx.OTHER)
        return mlx.read(config, stated, files)
    if values is None:
        return QuantisedTensors(files.names, {}, {})
    method = str(values.get("quant_method")) if isinstance(values, dict) else None
    if method is None or method not in METHODS:
        what = f"{KEY}: quant_method {quoted(method)} is not read, only {', '.join(METHODS)}"
        fix = "fix: take a compressed-tensors or GGUF file of the model, or its bf16 weights with"
        raise broken(config, what, f"{fix} --quant")
    return METHODS[method](tree_of(values, Where(str(config), 0), exact=True), files)
