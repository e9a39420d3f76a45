"""The container of GGUF files: values of every type, files that are refused, changed bytes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
from hypothesis import given
from hypothesis import strategies as st

from g4ir.errors import G4Error, WeightsError
from g4ir.weights.gguf.container import TYPES, read_container
from g4ir.weights.origin import find_origin
from tests.configs import two_layers
from tests.gguf_files import bare_file

CASES = yaml.safe_load(Path(__file__).with_name("gguf_containers.yaml").read_text())


def test_types() -> None:
    known = {int(t): (t.name, *GGML_QUANT_SIZES[t]) for t in GGMLQuantizationType}
    assert {k: (t.name, t.block, t.nbytes) for k, t in TYPES.items()} == known


def raw(words: str) -> bytes:
    """Bytes as gguf_containers.yaml writes them."""
    return b"".join(map(_word, words.split(" "))) if words else b""


def _word(word: str) -> bytes:
    kind, _, value = word.partition(":")
    match kind:
        case "u32":
            return int(value).to_bytes(4, "little")
        case "u64":
            return int(value).to_bytes(8, "little")
        case "s":
            return text(value)
        case "hex":
            return bytes.fromhex(value)
        case "zeros":
            return bytes(int(value))
    return word.strip("'").encode()


def text(s: str) -> bytes:
    return raw(f"u64:{len(s.encode())}") + s.encode()


def tensor(name: str, dims: list[int], kind: int = 0, offset: int = 0) -> bytes:
    shape = b"".join(raw(f"u64:{d}") for d in dims)
    return text(name) + raw(f"u32:{len(dims)}") + shape + raw(f"u32:{kind} u64:{offset}")


def whole(keys: Any = (), tensors: Any = (), version: int = 3, **_: Any) -> bytes:
    head = raw(f"'GGUF' u32:{version} u64:{len(tensors)} u64:{len(keys)}")
    head += b"".join(text(name) + raw(f"u32:{kind} {value}") for name, kind, value in keys)
    head += b"".join(tensor(*row) for row in tensors)
    return head + bytes(-len(head) % 32 + 256)


@pytest.mark.parametrize("name", CASES["broken"])
def test_refused_containers(tmp_path: Path, name: str) -> None:
    case = CASES["broken"][name]
    data = raw(case["bytes"]) if "bytes" in case else whole(**case)
    (tmp_path / "a.gguf").write_bytes(data)
    with pytest.raises(WeightsError) as error:
        read_container(tmp_path / "a.gguf")
    message = str(error.value)
    assert case["says"] in message and "a.gguf" in message and "fix:" in message, message
    assert message.isascii() and message.isprintable()


def test_values(tmp_path: Path) -> None:
    """Every type of a value, version 2, and data with gaps."""
    keys = [(name, kind, data) for name, (kind, data, _) in CASES["values"].items()]
    placed = (("b", [8], 0, 64), ("a", [2, 3], 1))
    (tmp_path / "a.gguf").write_bytes(whole(keys, placed, version=2))
    found = read_container(tmp_path / "a.gguf")
    for name, (kind, _, value) in CASES["values"].items():
        assert (found.items(name) if kind == 9 else found.values[name]) == value
    assert found.tensors["a"].shape == (3, 2)
    assert found.tensors["b"].entry.start - found.tensors["a"].entry.start == 64


@pytest.fixture(scope="module")
def fuzzed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file beside its original."""
    path = tmp_path_factory.mktemp("fuzz") / "a.gguf"
    bare_file(path, two_layers(32, 300), kind="Q8_0")
    path.with_suffix(".original").write_bytes(path.read_bytes())
    return path


def survives(path: Path) -> None:
    """Read all of it; only a G4Error, in printable ASCII, may come out."""
    try:
        origin = find_origin(path)
        source = origin.open(origin.spec(), (), "bf16")
        origin.side_files()
        for name in source.weights:
            source.tensor(name)
    except G4Error as error:
        message = str(error)
        assert message.isascii() and len(message) < 3000
        assert message.replace("\n", "").isprintable()


def header_size(data: bytes) -> int:
    return data.index(b"rope_freqs.weight")


@given(share=st.floats(0, 1))
def test_truncated(fuzzed: Path, share: float) -> None:
    data = fuzzed.with_suffix(".original").read_bytes()
    fuzzed.write_bytes(data[: int(share * (len(data) - 1))])
    with pytest.raises(WeightsError):
        read_container(fuzzed)


PLACES = st.one_of(st.integers(0, 31), st.integers(0, 1500), st.integers(0, 1 << 20))
EDITS = st.lists(
    st.tuples(st.sampled_from((1, 4, 8)), PLACES, st.integers(0, 2**64 - 1)), min_size=1, max_size=3
)


@given(edits=EDITS)
def test_changed_bytes(fuzzed: Path, edits: list[tuple[int, int, int]]) -> None:
    """Bytes, or numbers of 4 or 8, anywhere in the header: lengths, counts, types and offsets."""
    data = bytearray(fuzzed.with_suffix(".original").read_bytes())
    for size, at, value in edits:
        start = at % header_size(data)
        data[start : start + size] = (value % 256**size).to_bytes(size, "little")
    fuzzed.write_bytes(data)
    survives(fuzzed)
