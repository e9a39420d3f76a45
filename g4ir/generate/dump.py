"""Writes values inside a model (hidden states, attention outputs, ...) to a file."""

from __future__ import annotations

import json
from pathlib import Path

import torch

from g4ir.engine.values import Inspection
from g4ir.ops.types import Type, torch_dtype
from g4ir.ui.files import check_disk_space, new_version
from g4ir.weights.tensorfile import FileTensor, bytes_of, code_of, file_layout


def write_values(path: Path, plan: Inspection) -> dict[str, Type]:
    """Compute the values of a plan and write them to a safetensors file, a chunk at a time, with
    the token ids as metadata `tokens`; return their types by name. A file appears only if it is
    complete. InputError if the disk has no room."""
    tensors = {
        name: FileTensor(code_of(torch_dtype(t.dtype)), tuple(map(int, t.shape)), ())
        for name, t in plan.types.items()
    }
    names, header, size = file_layout(tensors, {"tokens": json.dumps([*plan.ids])})
    check_disk_space(path, size)
    offsets, at = dict[str, int](), len(header)
    for name in names:
        offsets[name], at = at, at + tensors[name].nbytes
    with new_version(path) as file, torch.no_grad():
        file.write(header)
        file.truncate(size)

        def store(name: str, start: int, t: torch.Tensor) -> None:
            file.seek(offsets[name] + start * (tensors[name].nbytes // tensors[name].shape[1]))
            file.write(bytes_of(t))

        plan.run(store)
    return dict(plan.types)
