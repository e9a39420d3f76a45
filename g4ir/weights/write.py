"""Writes Hugging Face checkpoints."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from g4ir.errors import WeightsError
from g4ir.model.names import DENSE, HEAD, ORDER, PLE_TABLE, TOKEN_TABLE
from g4ir.model.tensors import Shape, media_tensors, text_tensors
from g4ir.ops.finite import cast
from g4ir.ops.types import dtype_name, torch
from g4ir.spec.record import Spec
from g4ir.spec.sentence_transformers import MODULES
from g4ir.ui.files import check_disk_space, check_folder, new_folder, write_file
from g4ir.ui.progress import Progress, no_progress

from . import tensorfile
from .checkpoint import CONFIG, INDEX, SINGLE, Checkpoint
from .match import tower_names
from .tensorfile import FileTensor, TensorPieces, code_of, in_shards

#: elements per piece
PIECE = 1 << 24


def write_checkpoint(
    directory: Path,
    spec: Spec,
    source: Checkpoint,
    *,
    media: Iterable[str] = (),
    dtype: torch.dtype | None = None,
    side_files: Mapping[str, bytes] | None = None,
    progress: Progress = no_progress,
) -> Path:
    """Write a Hugging Face checkpoint directory, into an absent or empty directory, atomically.

    `media`: kinds whose towers are written too; tensors for which the source has defaults are left
    out. Tensors have `dtype`, by default the source's (a draft model's token order: int64), and are
    computed shortly before they are written. `side_files`: contents by name.
    WeightsError if the directory is not empty; InputError if the disk has no room."""
    check_empty(directory)
    values = spec.to_hf()
    base = "" if spec.embedding else "model."  # an encoder's class has no `model` inside
    alone = spec.drafter or "text_config" not in values
    prefix = base if alone else f"{base}language_model."
    tensors = _tensors(_names(spec, source, prefix, media), source, dtype or source.dtype)
    dense = {n: tensors.pop(n) for n in [*tensors] if n.startswith(DENSE)}
    check_disk_space(directory, sum(t.nbytes for t in (*tensors.values(), *dense.values())))
    directory.parent.mkdir(parents=True, exist_ok=True)
    work = new_folder(directory.parent, f".{directory.name}.")
    try:
        _write_weights(work, in_shards(tensors), progress)
        if spec.embedding:
            _write_modules(work, spec, [*dense.values()])
        for name, raw in (side_files or {}).items():
            write_file(work / name, [raw])
        _write_json(work / CONFIG, values)
        work.rename(directory)
    except BaseException:
        shutil.rmtree(work, ignore_errors=True)
        raise
    return directory


def check_empty(path: Path) -> None:
    """Raise WeightsError unless the path is absent or an empty directory that a rename can replace;
    InputError if its parent is no directory and cannot become one."""
    check_folder(path.parent)
    if path.exists() and path.samefile(Path.cwd()):
        raise WeightsError(f"{path}: the current directory cannot be replaced; fix: name a new one")
    if path.is_symlink() or (path.exists() and not (path.is_dir() and not any(path.iterdir()))):
        raise WeightsError(f"{path}: exists already; fix: choose another directory")


def _names(
    spec: Spec, source: Checkpoint, prefix: str, media: Iterable[str]
) -> dict[str, tuple[str, Shape]]:
    """Return name in a checkpoint -> (name without prefix, shape)."""
    text, towers = text_tensors(spec), media_tensors(spec, media)
    names = {
        (name if name == HEAD or name.startswith(DENSE) else prefix + name): (name, text[name])
        for name in text
    }
    bare = 1 if spec.embedding else 0  # index of a tower's prefixes; 1: without `model.`
    names |= {tower_names(spec, name)[bare]: (name, towers[name]) for name in towers}
    return {name: target for name, target in names.items() if target[0] not in source.defaults}


def _tensors(
    names: Mapping[str, tuple[str, Shape]], source: Checkpoint, dtype: torch.dtype
) -> dict[str, FileTensor]:
    """Return the tensors of a checkpoint by their names in its files."""
    out: dict[str, FileTensor] = {}
    for name, (bare, shape) in names.items():
        code = "I64" if bare == ORDER else code_of(dtype)
        make = partial(_cast_pieces, source, bare, shape, dtype)
        out[name] = FileTensor(code, shape, [make], partial(source.release, bare))
    return out


def _cast_pieces(source: Checkpoint, name: str, shape: Shape, dtype: torch.dtype) -> TensorPieces:
    kind = dtype_name(dtype)
    return (x if name == ORDER else cast(x, kind, name) for x in in_pieces(source, name, shape))


def in_pieces(source: Checkpoint, name: str, shape: Shape) -> Iterator[torch.Tensor]:
    """Yield a tensor; embedding tables in pieces of rows, since they may be half of a model."""
    if name not in (TOKEN_TABLE, PLE_TABLE):
        yield source.tensor(name)
        return
    for ids in torch.arange(shape[0]).split(max(1, PIECE // shape[1])):
        yield source.rows(name, ids)


def _write_weights(work: Path, files: list[dict[str, FileTensor]], progress: Progress) -> None:
    where: dict[str, str] = {}
    for i, tensors in enumerate(files):
        file = SINGLE if len(files) == 1 else f"model-{i + 1:05}-of-{len(files):05}.safetensors"
        progress(f"writing {file}")
        tensorfile.write_tensors(work / file, tensors, {"format": "pt"})
        where |= dict.fromkeys(tensors, file)
    if len(files) > 1:
        total = sum(t.nbytes for tensors in files for t in tensors.values())
        _write_json(work / INDEX, {"metadata": {"total_size": total}, "weight_map": where})


def _write_modules(work: Path, spec: Spec, dense: list[FileTensor]) -> None:
    """Write the modules that sentence-transformers runs after the transformer: mean pooling, dense
    layers, L2 normalisation."""
    size, kind = spec.text.hidden_size, "sentence_transformers.models."
    if spec.embedding and spec.embedding.projection:
        size = spec.embedding.projection
    pooling = {"word_embedding_dimension": size, "pooling_mode_mean_tokens": True}
    configs: list[tuple[str, dict[str, Any]]] = [("Pooling", pooling)]
    for t in dense:
        out, into = t.shape
        activation = "torch.nn.modules.linear.Identity"
        config = {"in_features": into, "out_features": out, "bias": False}
        configs.append(("Dense", config | {"activation_function": activation}))
    configs.append(("Normalize", {}))
    modules = [{"idx": 0, "name": "0", "path": "", "type": f"{kind}Transformer"}]
    for i, (name, config) in enumerate(configs, 1):
        folder = f"{i}_{name}"
        modules.append({"idx": i, "name": str(i), "path": folder, "type": kind + name})
        (work / folder).mkdir()
        if config:
            _write_json(work / folder / CONFIG, config)
        if name == "Dense":
            tensors = {"linear.weight": dense[i - 2]}
            tensorfile.write_tensors(work / folder / SINGLE, tensors, {"format": "pt"})
    _write_json(work / MODULES, modules)


def _write_json(path: Path, value: Any) -> None:
    write_file(path, [json.dumps(value, indent=2).encode() + b"\n"])
