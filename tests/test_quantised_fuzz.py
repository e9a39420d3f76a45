"""Mutated checkpoints in codes are read, or refused with one clear error: no traceback, no hang."""

from __future__ import annotations

import copy
import json
from functools import cache
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from g4ir.errors import G4Error
from g4ir.spec.record import Spec, load_spec
from g4ir.weights.checkpoint import Checkpoint
from tests.oracle import find_oracle
from tests.packing import Tensors
from tests.test_quantised_checkpoints import CASES

WORDS = ("group", "channel", "block", "tensor", "int", "float", "pack-quantized", "re:.*", "Linear")
LEAVES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-3, 300),
    st.sampled_from((1 << 40, -(1 << 70), 0.5, float("nan"), 1e300)),
    st.sampled_from(WORDS),
    st.text(max_size=8),
)
JSON = st.recursive(
    LEAVES,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3), st.dictionaries(st.text(max_size=6), inner, max_size=3)
    ),
    max_leaves=6,
)
DTYPES = (torch.int32, torch.uint8, torch.int8, torch.bfloat16, torch.float32, torch.int64)


@cache
def base(case: str) -> tuple[dict[str, Any], Tensors, Spec]:
    folder = CASES[case].write(find_oracle(load_spec("tiny-ple")), Path(mkdtemp()) / "c")
    config = json.loads((folder / "config.json").read_text())
    return config, load_file(folder / "model.safetensors"), Spec.from_hf(folder)


def places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """The paths of all values inside one."""
    if not isinstance(value, dict | list):
        return [path]
    keys = value.items() if isinstance(value, dict) else enumerate(value)
    return [path, *(p for k, v in keys for p in places(v, (*path, k)))]


def replaced(value: Any, path: tuple[Any, ...], new: Any) -> Any:
    """A copy with another value at a path."""
    if not path:
        return new
    value = copy.copy(value)
    value[path[0]] = replaced(value[path[0]], path[1:], new)
    return value


def survives(folder: Path, config: Any, tensors: Tensors, spec: Spec) -> None:
    """Open and read all that is in codes; only an error of ours, in printable text, may come."""
    (folder / "config.json").write_text(json.dumps(config))
    save_file({k: v.contiguous() for k, v in tensors.items()}, folder / "model.safetensors")
    try:
        opened = Checkpoint.open(folder, spec)
        for name, scheme in opened.forms.items():
            codes, scales = (opened.tensor(name + part) for part in (".codes", ".scales"))
            assert codes.shape[:-1] == scales.shape[:-1] and bool(scales.isfinite().all()), scheme
            assert opened.tensor(name).shape[:-1] == codes.shape[:-1]
            ids = torch.tensor([1, 0])
            assert torch.equal(opened.rows(name, ids), opened.tensor(name)[ids])
    except G4Error as error:
        message = str(error)
        assert message.replace("\n", "").isprintable() and len(message) < 3000


CASE = st.sampled_from(sorted(CASES))


@given(CASE, st.data())
def test_configs(tmp_path_factory: pytest.TempPathFactory, case: str, data: st.DataObject) -> None:
    config, tensors, spec = base(case)
    quant = config["quantization_config"]
    for _ in range(data.draw(st.integers(1, 3))):
        quant = replaced(quant, data.draw(st.sampled_from(places(quant))), data.draw(JSON))
        if not isinstance(quant, dict):
            break
    survives(tmp_path_factory.mktemp("c"), config | {"quantization_config": quant}, tensors, spec)


@given(CASE, st.data())
def test_tensors(tmp_path_factory: pytest.TempPathFactory, case: str, data: st.DataObject) -> None:
    config, tensors, spec = base(case)
    tensors = dict(tensors)
    parts = [n for n in tensors if "norm" not in n]
    for _ in range(data.draw(st.integers(1, 3))):
        name = data.draw(st.sampled_from(parts))
        kind = data.draw(st.sampled_from(("drop", "zeros", "ones", "rows", "renamed", "dtype")))
        t = tensors.pop(name, torch.zeros(1))
        if kind == "renamed":
            tensors[data.draw(st.sampled_from(parts))] = t
        elif kind == "dtype":
            tensors[name] = t.to(data.draw(st.sampled_from(DTYPES)))
        elif kind == "rows":
            tensors[name] = t[:1] if t.dim() else t
        elif kind != "drop":
            shape = data.draw(st.lists(st.sampled_from((0, 1, 2, 16, 64, 128)), max_size=3))
            fill = torch.zeros if kind == "zeros" else torch.ones
            tensors[name] = fill(shape, dtype=data.draw(st.sampled_from(DTYPES)))
    survives(tmp_path_factory.mktemp("c"), config, tensors, spec)
