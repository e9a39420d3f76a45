"""Mutated checkpoints either open or fail with one clear error: no traceback, no hang.

How many examples are drawn, and how long one may take, is set by the hypothesis profile.
"""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory, mkdtemp
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from g4ir import G4Error, Spec, load_spec
from g4ir.model.tensors import text_tensors
from g4ir.weights.checkpoint import INDEX, SINGLE, Checkpoint
from g4ir.weights.random import random_weights
from tests.configs import two_layers
from tests.engines import published_checkpoint
from tests.mutations import junk, mutate
from tests.oracle import find_oracle
from tests.test_quantised_checkpoints import CASES, Tensors

SPEC = two_layers(8, 16)


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, bytes]]:
    """The file that is changed: its folder and what it holds."""
    out = {}
    for name, shards in ((SINGLE, 1), (INDEX, 2)):
        folder = tmp_path_factory.mktemp("checkpoint") / "ckpt"
        published_checkpoint(folder, SPEC, random_weights(SPEC, 0), shards)
        out[name] = folder, (folder / name).read_bytes()
    return out


def survives(path: Path) -> None:
    """Open and read everything; only a G4Error with a fix, in printable ASCII, may come out."""
    try:
        opened = Checkpoint.open(path, SPEC)
        for name, shape in text_tensors(SPEC).items():
            assert opened.tensor(name).shape == shape
        opened.close()
    except G4Error as error:
        message = str(error)
        assert "fix:" in message and message.isascii() and len(message) < 3000
        assert message.replace("\n", "").isprintable()


PLACES = st.one_of(st.integers(0, 7), st.integers(8, 3000), st.integers(0, 20_000))
#: where bytes are replaced, how many, and by which
EDIT = st.tuples(PLACES, st.sampled_from((0, 1, 8, 100, 1 << 20)), st.binary(max_size=8))


@pytest.mark.parametrize("name", [SINGLE, INDEX])
@given(edits=st.lists(EDIT, min_size=1, max_size=4))
def test_changed_bytes(checkpoints: Any, name: str, edits: list[Any]) -> None:
    (folder, data), most = checkpoints[name], 1 << 20 if name == SINGLE else 4000
    for at, count, new in edits:
        data = data[: at % most] + new + data[at % most + count :]
    (folder / name).write_bytes(data)
    survives(folder)


SHARD = "model-00001-of-00002.safetensors"
WORDS = (
    *("F32", "U8", "F4", "../x", "/", "\ud800", "config.json", INDEX, SINGLE, SHARD, f"../{SHARD}"),
    *("/dev/zero.safetensors", f"{'x' * 5000}.safetensors", "\0.safetensors", ".", "data_offsets"),
    *("group", "channel", "block", "tensor", "int", "float", "pack-quantized", "re:.*", "Linear"),
)
TEXT = st.one_of(st.text(max_size=12), st.sampled_from(WORDS))
JSON = junk(*WORDS)


@given(data=st.data())
def test_changed_headers(checkpoints: Any, data: st.DataObject) -> None:
    folder, raw = checkpoints[SINGLE]
    size = int.from_bytes(raw[:8], "little")
    text = json.dumps(mutate(data, json.loads(raw[8 : 8 + size]), JSON, TEXT)).encode()
    (folder / SINGLE).write_bytes(len(text).to_bytes(8, "little") + text + raw[8 + size :])
    survives(folder)


@given(data=st.data())
def test_changed_indexes(checkpoints: Any, data: st.DataObject) -> None:
    folder, raw = checkpoints[INDEX]
    (folder / INDEX).write_text(json.dumps(mutate(data, json.loads(raw), JSON, TEXT)))
    survives(folder)


DTYPES = (torch.int32, torch.uint8, torch.int8, torch.bfloat16, torch.float32, torch.int64)


@cache
def base(case: str) -> tuple[dict[str, Any], Tensors, Spec]:
    folder = CASES[case].write(find_oracle(load_spec("tiny-ple")), Path(mkdtemp()) / "c")
    config = json.loads((folder / "config.json").read_text())
    return config, load_file(folder / "model.safetensors"), Spec.from_hf(folder)


def quantised_survives(config: Any, tensors: Tensors, spec: Spec) -> None:
    with TemporaryDirectory() as made:
        folder = Path(made)
        (folder / "config.json").write_text(json.dumps(config))
        save_file({k: v.contiguous() for k, v in tensors.items()}, folder / "model.safetensors")
        try:
            opened = Checkpoint.open(folder, spec)
            for name, scheme in opened.forms.items():
                codes, scales = (opened.tensor(name + part) for part in (".codes", ".scales"))
                assert codes.shape[:-1] == scales.shape[:-1] and scales.isfinite().all(), scheme
                assert opened.tensor(name).shape[:-1] == codes.shape[:-1]
                ids = torch.tensor([1, 0])
                assert torch.equal(opened.rows(name, ids), opened.tensor(name)[ids])
        except G4Error as error:
            message = str(error)
            assert message.replace("\n", "").isprintable() and len(message) < 3000


CASE = st.sampled_from(sorted(CASES))


@given(CASE, st.data())
def test_quantisation_configs(case: str, data: st.DataObject) -> None:
    config, tensors, spec = base(case)
    made = {"quantization_config": mutate(data, config["quantization_config"], JSON, TEXT)}
    quantised_survives(config | made, tensors, spec)


@given(CASE, st.data())
def test_quantised_tensors(case: str, data: st.DataObject) -> None:
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
    quantised_survives(config, tensors, spec)
