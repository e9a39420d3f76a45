"""Reads a checkpoint's quantised weights, as `quantization_config` of its config.json describes
them (or a key or file of other tools)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from g4ir.spec.reader import Where, tree_of
from g4ir.weights.tensorfile import broken, quoted, read_json

from . import compressed_tensors
from .base import KEY, Files, QuantisedTensors
from .fp4 import MODELOPT, MODELOPT_KEY, read_modelopt
from .gptq import read_awq, read_gptq
from .huggingface import MLX_KEY, MLX_OTHER, is_mlx, read_fp8, read_mlx, read_mobile

#: quant_method -> reader (config tree, files) -> quantised tensors
METHODS: Mapping[str, Callable[[Any, Files], QuantisedTensors]] = {
    "compressed-tensors": compressed_tensors.read,
    "fp8": read_fp8,
    "gemma": read_mobile,
    "gptq": read_gptq,
    "awq": read_awq,
    "modelopt": read_modelopt,
    "modelopt_fp4": read_modelopt,
}


def is_coded(config: Path) -> bool:
    """Whether a config.json, or ModelOpt's file beside it, declares quantised weights."""
    values = read_json(config)
    stated = any(values.get(key) is not None for key in (KEY, MLX_KEY))
    return stated or (config.parent / MODELOPT).is_file()


def read_coded(config: Path, files: Files) -> QuantisedTensors:
    """Return a checkpoint's tensors with its quantised weights, which `config` (config.json), or
    ModelOpt's file beside it, describes. WeightsError for an unsupported format, SpecError for a
    wrong value of a key."""
    tree = read_json(config)
    key, values, of_mlx = KEY, tree.get(KEY), tree.get(MLX_KEY)
    if of_mlx is not None or is_mlx(values):
        stated: Any = values if of_mlx is None else of_mlx
        if not is_mlx(stated):
            raise broken(config, f"{MLX_KEY}: {quoted(stated)} is not supported", MLX_OTHER)
        return read_mlx(config, stated, files)
    if values is None:
        if not (config.parent / MODELOPT).is_file():
            return QuantisedTensors(files.names, {}, {})
        config = config.parent / MODELOPT  # older checkpoints have it only there
        key, values = MODELOPT_KEY, read_json(config).get(MODELOPT_KEY)
        values = {"quant_method": "modelopt", **values} if isinstance(values, dict) else None
    method = str(values.get("quant_method")) if isinstance(values, dict) else None
    if method is None or method not in METHODS:
        msg = f"{key}: quant_method {quoted(method)} is not supported, only {', '.join(METHODS)}"
        fix = "fix: use a compressed-tensors or GGUF file of the model, or build from its bf16"
        raise broken(config, msg, f"{fix} checkpoint with --quant")
    return METHODS[method](tree_of(values, Where(str(config), 0), exact=True), files)
