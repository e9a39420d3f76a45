"""Writes a checkpoint as it is published."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from g4ir.errors import WeightsError
from g4ir.model.names import HEAD, ORDER
from g4ir.model.tensors import Tensors, dead_tensors, media_tensors, text_tensors
from g4ir.ops.types import torch
from g4ir.spec.record import Spec
from g4ir.ui.files import new_folder, write_file

from . import tensorfile
from .checkpoint import CONFIG, INDEX, SINGLE, WeightSource
from .match import tower_names
from .random import random_tensor


def write_checkpoint(
    directory: Path,
    spec: Spec,
    source: WeightSource,
    *,
    shards: int = 1,
    prefix: str | None = None,
    dead: bool = False,
    config: bool = True,
    media: Iterable[str] = (),
) -> Path:
    """Write a Hugging Face checkpoint directory, complete or not at all; it must not exist.

    `prefix` defaults to what transformers uses for that config. `dead` adds the unused K/V of
    KV-shared layers, as the hub's files have them; `media` the towers of these kinds."""
    if directory.exists():
        raise WeightsError(f"{directory}: exists already; fix: choose another directory")
    values = spec.to_hf() if config else {}
    alone = spec.drafter or (config and "text_config" not in values)
    prefix = prefix or ("model." if alone else "model.language_model.")
    directory.parent.mkdir(parents=True, exist_ok=True)
    work = new_folder(directory.parent, f".{directory.name}.")
    try:
        _write_weights(work, spec, source, shards, prefix, dead, media_tensors(spec, media))
        if config:
            _write_json(work / CONFIG, values)
        work.rename(directory)
    except BaseException:
        shutil.rmtree(work, ignore_errors=True)
        raise
    return directory


def _write_weights(
    work: Path,
    spec: Spec,
    source: WeightSource,
    shards: int,
    prefix: str,
    dead: bool,
    towers: Tensors,
) -> None:
    code = tensorfile.CODES[str(source.dtype).removeprefix("torch.")]
    extra = dead_tensors(spec) if dead else {}
    text = text_tensors(spec) | extra
    bare = {(name if name == HEAD else prefix + name): name for name in text}
    bare |= {tower_names(spec, name)[0]: name for name in towers}
    shapes = text | towers

    def tensor(name: str) -> torch.Tensor:
        key = bare[name]
        if key in extra:
            return random_tensor(0, key, shapes[key], source.dtype)
        made = source.tensor(key)
        return made if key == ORDER else made.to(source.dtype)

    names = list(bare)
    files = [f"model-{i + 1:05}-of-{shards:05}.safetensors" for i in range(shards)]
    files = [SINGLE] if shards == 1 else files
    where = {name: files[i * len(files) // len(names)] for i, name in enumerate(names)}
    for file in files:
        own = {n: bare[n] for n in names if where[n] == file}
        table = {n: ("I64" if k == ORDER else code, tuple(shapes[k])) for n, k in own.items()}
        tensorfile.write_tensors(work / file, table, tensor, {"format": "pt"})
    if shards > 1:
        total = sum((work / file).stat().st_size for file in files)
        _write_json(work / INDEX, {"metadata": {"total_size": total}, "weight_map": where})


def _write_json(path: Path, value: Any) -> None:
    write_file(path, [json.dumps(value, indent=2).encode() + b"\n"])
