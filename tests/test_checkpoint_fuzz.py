"""Mutated checkpoints either open or fail with one clear error: no traceback, no hang.

How many examples are drawn, and how long one may take, is set by the hypothesis profile.
"""

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
from g4ir.model.tensors import text_tensors
from g4ir.spec.record import Spec, load_spec
from g4ir.weights.checkpoint import INDEX, SINGLE, Checkpoint
from g4ir.weights.random import RandomCheckpoint
from g4ir.weights.write import write_checkpoint
from tests.configs import two_layers
from tests.oracle import find_oracle
from tests.packing import Tensors
from tests.test_quantised_checkpoints import CASES

SPEC = two_layers(8, 16)


@pytest.fixture(scope="module")
def single(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return made(tmp_path_factory.mktemp("single") / "ckpt", shards=1)


@pytest.fixture(scope="module")
def sharded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return made(tmp_path_factory.mktemp("sharded") / "ckpt", shards=2)


def made(path: Path, shards: int) -> Path:
    write_checkpoint(path, SPEC, RandomCheckpoint(SPEC, 0), shards=shards, config=False)
    (path / "config.json").write_text("{}")
    for file in list(path.iterdir()):
        (path.parent / file.name).write_bytes(file.read_bytes())  # the originals
    return path


def original(path: Path, name: str) -> bytes:
    return (path.parent / name).read_bytes()


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


# ---- bytes ----------------------------------------------------------------------------------


def flip(data: bytes, at: int, value: int) -> bytes:
    return data[:at] + bytes([data[at] ^ value]) + data[at + 1 :] if at < len(data) else data


def cut(data: bytes, at: int, value: int) -> bytes:
    return data[:at]


def splice(data: bytes, at: int, value: int) -> bytes:
    return data[:at] + data[at // 2 : at // 2 + value] + data[at:]


def remove(data: bytes, at: int, value: int) -> bytes:
    return data[:at] + data[at + value :]


def length(data: bytes, at: int, value: int) -> bytes:
    return (at * value).to_bytes(8, "little") + data[8:]


PLACES = st.one_of(st.integers(0, 7), st.integers(8, 3000), st.integers(0, 20_000))
EDITS = st.lists(
    st.tuples(st.sampled_from([flip, cut, splice, remove, length]), PLACES, st.integers(1, 255)),
    min_size=1,
    max_size=4,
)


@pytest.mark.parametrize("name", [SINGLE, INDEX])
@given(edits=EDITS)
def test_changed_bytes(single: Path, sharded: Path, name: str, edits: list[Any]) -> None:
    folder, most = (single, 1 << 20) if name == SINGLE else (sharded, 4000)
    data = original(folder, name)
    for edit, at, value in edits:
        data = edit(data, at % most, value)
    (folder / name).write_bytes(data)
    survives(folder)


# ---- JSON -----------------------------------------------------------------------------------

TEXT = st.one_of(st.text(max_size=12), st.sampled_from(["F32", "U8", "F4", "../x", "/", "\ud800"]))
NUMBERS = st.one_of(st.integers(-2, 600), st.integers(0, 1 << 70), st.floats())
JSON = st.recursive(
    st.one_of(st.none(), st.booleans(), NUMBERS, TEXT),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(TEXT, inner, max_size=3)),
    max_leaves=6,
)


def header_of(data: bytes) -> tuple[dict[str, Any], bytes]:
    size = int.from_bytes(data[:8], "little")
    return json.loads(data[8 : 8 + size]), data[8 + size :]


def with_header(text: bytes, data: bytes) -> bytes:
    return len(text).to_bytes(8, "little") + text + data


@st.composite
def changed_headers(draw: st.DrawFn, header: dict[str, Any]) -> dict[str, Any]:
    """A header with a few entries or fields replaced, renamed, swapped or removed."""
    out: dict[str, Any] = dict(header)
    names = st.sampled_from(sorted(header))
    for _ in range(draw(st.integers(1, 3))):
        name, other = draw(names), draw(names)
        entry = out.get(name)
        match draw(st.sampled_from(["field", "entry", "rename", "swap", "remove", "metadata"])):
            case "field":
                key = draw(st.sampled_from(["dtype", "shape", "data_offsets", "more"]))
                value = draw(st.one_of(JSON, st.lists(NUMBERS, max_size=3)))
                out[name] = {**(entry if isinstance(entry, dict) else {}), key: value}
            case "entry":
                out[name] = draw(JSON)
            case "rename":
                out[draw(TEXT)] = out.pop(name, {})
            case "swap":
                out[name], out[other] = out.get(other, {}), out.get(name, {})
            case "remove":
                out.pop(name, None)
            case "metadata":
                out["__metadata__"] = draw(JSON)
    return out


@given(data=st.data())
def test_changed_header(single: Path, data: st.DataObject) -> None:
    header, body = header_of(original(single, SINGLE))
    text = json.dumps(data.draw(changed_headers(header))).encode()
    (single / SINGLE).write_bytes(with_header(text, body))
    survives(single)


@given(value=JSON)
def test_any_json_as_header(single: Path, value: Any) -> None:
    (single / SINGLE).write_bytes(with_header(json.dumps(value).encode(), b""))
    survives(single)


SHARD = "model-00001-of-00002"
NAMES = [SHARD, f"../{SHARD}", f"./{SHARD}", "/dev/zero", "x" * 5000, "\0", "\ud800"]
FILES = st.one_of(
    TEXT,
    st.sampled_from(["config.json", "../config.json", INDEX, SINGLE, "/dev/zero", ".", ""]),
    st.sampled_from([f"{name}.safetensors" for name in NAMES]),
    JSON,
)


@given(
    changes=st.dictionaries(st.one_of(st.integers(0, 40), TEXT), FILES, min_size=1, max_size=3),
    dropped=st.integers(0, 80),
)
def test_changed_index(sharded: Path, changes: dict[Any, Any], dropped: int) -> None:
    index = json.loads(original(sharded, INDEX))
    names = list(index["weight_map"])
    for key, file in changes.items():
        name = names[key % len(names)] if isinstance(key, int) else key
        index["weight_map"][name] = file
    if dropped < len(names):
        index["weight_map"].pop(names[dropped])
    (sharded / INDEX).write_text(json.dumps(index))
    survives(sharded)


@given(value=st.one_of(JSON, st.fixed_dictionaries({"weight_map": JSON})))
def test_any_json_as_index(sharded: Path, value: Any) -> None:
    (sharded / INDEX).write_text(json.dumps(value))
    survives(sharded)


# ---- quantised weights ----------------------------------------------------------------------

WORDS = ("group", "channel", "block", "tensor", "int", "float", "pack-quantized", "re:.*", "Linear")
VALUES = st.one_of(JSON, st.integers(-3, 300), st.sampled_from((1 << 40, *WORDS)))
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


def quantised_survives(folder: Path, config: Any, tensors: Tensors, spec: Spec) -> None:
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
def test_quantisation_configs(
    tmp_path_factory: pytest.TempPathFactory, case: str, data: st.DataObject
) -> None:
    config, tensors, spec = base(case)
    quant = config["quantization_config"]
    for _ in range(data.draw(st.integers(1, 3))):
        quant = replaced(quant, data.draw(st.sampled_from(places(quant))), data.draw(VALUES))
        if not isinstance(quant, dict):
            break
    quantised_survives(
        tmp_path_factory.mktemp("c"), config | {"quantization_config": quant}, tensors, spec
    )


@given(CASE, st.data())
def test_quantised_tensors(
    tmp_path_factory: pytest.TempPathFactory, case: str, data: st.DataObject
) -> None:
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
    quantised_survives(tmp_path_factory.mktemp("c"), config, tensors, spec)
