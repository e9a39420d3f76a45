"""Read the modules of a sentence-transformers folder: the layers after an encoder's transformer.

`modules.json` lists the transformer and them in order, each with its folder: mean pooling, dense
layers, L2 normalisation.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from g4ir.errors import SpecError

from .reader import json_object, quote, read_bytes

MODULES, CONFIG = "modules.json", "config.json"
#: file with the prompts of tasks
PROMPTS = "config_sentence_transformers.json"
LIMIT = 1 << 20
#: modules in order, of which dense layers may be any number, also none
ORDER = ("Transformer", "Pooling", "Dense", "Normalize")


@dataclass(frozen=True)
class DenseLayer:
    """A dense layer without bias: its folder and output width."""

    folder: str
    width: int


def read_modules(folder: Path) -> tuple[DenseLayer, ...] | None:
    """Return the dense layers of an encoder's folder; None without modules.json. SpecError for
    modules other than the transformer, mean pooling, dense layers without bias and activation, L2
    normalisation."""
    path = folder / MODULES
    if not path.is_file():
        return None
    modules = _json(path, list)
    kinds = [str(m.get("type")).rpartition(".")[2] for m in modules if isinstance(m, dict)]
    expected = ["Transformer", "Pooling", *["Dense"] * kinds.count("Dense"), "Normalize"]
    if len(kinds) < len(modules) or kinds != expected:
        order, found = ", ".join(ORDER), ", ".join(kinds)[:200] or "none"
        raise SpecError(f"{path}: expected modules {order} (any number of Dense), found {found}")
    if first := modules[0].get("path"):
        why = "expected an empty path: the transformer is in the checkpoint's folder"
        raise SpecError(f"{path}: path {quote(str(first))} of the first module: {why}")
    _check_pooling(folder / _inside(path, modules[1]) / CONFIG)
    return tuple(_dense(folder, _inside(path, m)) for m in modules[2:-1])


def _inside(path: Path, module: dict[str, Any]) -> str:
    name = module.get("path")
    if not isinstance(name, str) or name in ("", ".", "..") or {*name} & {"/", "\\"}:
        raise SpecError(f"{path}: path {quote(str(name))}: expected the name of a folder beside it")
    return name


def _check_pooling(path: Path) -> None:
    config = _json(path)
    prefix = "pooling_mode_"
    modes = [k.removeprefix(prefix) for k, v in config.items() if k.startswith(prefix) and v]
    modes += [str(config["pooling_mode"])] if config.get("pooling_mode") else []
    if {m.removesuffix("_tokens") for m in modes} != {"mean"}:
        raise SpecError(f"{path}: pooling {', '.join(modes) or 'unknown'}: only mean is supported")
    if config.get("include_prompt", True) is not True:
        raise SpecError(f"{path}: include_prompt false is not supported: the mean is of all tokens")


def _dense(folder: Path, name: str) -> DenseLayer:
    path = folder / name / CONFIG
    config = _json(path)
    width = config.get("out_features")
    activation = str(config.get("activation_function", "Identity"))
    if type(width) is not int or width < 1:
        raise SpecError(f"{path}: out_features {quote(str(width))}: expected a positive integer")
    if config.get("bias", True) or not activation.endswith("Identity"):
        why = "a dense layer with bias or activation is not supported"
        raise SpecError(f"{path}: bias {config.get('bias', True)}, {activation[:80]}: {why}")
    return DenseLayer(name, width)


def _json(path: Path, kind: type = dict) -> Any:
    raw = read_bytes(path, LIMIT, "download the encoder's whole folder, with its modules")
    try:
        return json_object(raw, kind)
    except ValueError as err:
        raise SpecError(f"{path}: {err}; download the file again") from None
