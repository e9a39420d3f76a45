"""No input makes the spec loaders raise anything but SpecError, hang, or accept an illegal spec.

The number of examples comes from the loaded hypothesis profile (`--full` raises it).
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from g4ir.errors import SpecError
from g4ir.model.tensors import dead_tensors, numel, text_tensors, tower_tensors
from g4ir.plan.count import counts
from g4ir.spec.reader import MAX_ERRORS
from g4ir.spec.record import Spec, diff_specs, load_spec, spec_names, spec_path
from g4ir.spec.rules import canonical
from tests.configs import random_spec
from tests.mutations import junk, mutate

BASES = {name: load_spec(name) for name in spec_names()}
SMALL_BASES = ("tiny-dense", "tiny-moe", "tiny-ple", "12b")

VALUES = junk("", "full", "sliding", "vision", "all", "1e-6", "bf16", "on", "e2b", "null")
KEYS = st.text(max_size=12)


def mutate_bytes(data: st.DataObject, text: bytes) -> bytes:
    """A slice replaced by other bytes, up to three times."""
    for _ in range(data.draw(st.integers(1, 3))):
        start = data.draw(st.integers(0, len(text)))
        end = start + data.draw(st.sampled_from([0, 0, 1, 1, 2, 5, 40]))
        piece = data.draw(st.binary(max_size=6) | st.sampled_from(PIECES))
        text = text[:start] + piece + text[end:]
    return text


PIECES = (
    *(b"\n", b"  ", b": ", b"- ", b"&a ", b"*a", b"<<: ", b"!!int ", b"{", b"}", b"[", b"]"),
    *(b'"', b"'", b"|\n", b"---\n", b"...\n", b"%TAG ! x\n", b"? ", b"#", b"\t", b",", b"~"),
    *(b"9" * 30, b"\\x", b'"\\UFFFFFFFF"', b"\xff", b"\xe2\x80\xa8", b".inf", b"-", b"1e9"),
)


def attempt(read: Callable[[], Spec]) -> Spec | None:
    """The spec, or None after a SpecError of printable lines."""
    try:
        spec = read()
    except SpecError as err:
        lines = str(err).split("\n")
        assert len(lines) <= MAX_ERRORS + 1
        for line in lines:
            line.encode()
            assert line and len(line) < 2000, line
        return None
    consistent(spec)
    return spec


def consistent(spec: Spec) -> None:
    """What holds for every spec that a loader accepts."""
    layers = spec.layers()
    assert len(layers) == spec.text.num_hidden_layers
    for layer in layers:
        if layer.donor is not None:
            donor = layers[layer.donor]
            assert donor.donor is None and donor.kind == layer.kind
    live = text_tensors(spec)
    assert not live.keys() & dead_tensors(spec).keys()
    assert all(dim > 0 for shape in live.values() for dim in shape)
    count = counts(spec)
    assert count.active > 0 and count.text == numel(live)
    assert count.loaded == count.text + numel(tower_tensors(spec))
    assert load_text(spec.to_yaml().encode()) == spec


#: written anew for each example: making a directory takes as long as loading a spec
FOLDER = tempfile.TemporaryDirectory()
FILE = Path(FOLDER.name) / "mine.yaml"


def load_text(text: bytes) -> Spec:
    FILE.write_bytes(text)
    return load_spec(FILE)


@given(st.data(), st.sampled_from(SMALL_BASES))
def test_mutated_spec_data(data: st.DataObject, name: str) -> None:
    whole = json.loads(json.dumps({"schema": 1, **BASES[name].to_dict()}))
    tree = mutate(data, whole, VALUES, KEYS)
    attempt(lambda: load_text(yaml.safe_dump(tree, allow_unicode=True).encode("utf-8", "replace")))


@given(st.data(), st.sampled_from(spec_names()))
def test_mutated_spec_bytes(data: st.DataObject, name: str) -> None:
    text = mutate_bytes(data, spec_path(name).read_bytes())
    attempt(lambda: load_text(text))


@given(st.binary(max_size=200) | st.text(max_size=200).map(lambda t: t.encode("utf-8", "replace")))
def test_any_bytes(text: bytes) -> None:
    attempt(lambda: load_text(text))
    attempt(lambda: from_json(text))


def from_json(text: bytes) -> Spec:
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_bytes(text)
        return Spec.from_hf(folder)


@given(st.data(), st.sampled_from(SMALL_BASES))
def test_mutated_config(data: st.DataObject, name: str) -> None:
    tree = mutate(data, BASES[name].to_hf(), VALUES, KEYS)
    spec = attempt(lambda: Spec.from_hf(tree))
    if spec is not None:  # what was read can be written and read again
        again = Spec.from_hf(json.loads(json.dumps(spec.to_hf())), name=spec.name)
        assert diff_specs(spec, again) == []


# Each example is written and loaded, as YAML and as a config.
@settings(max_examples=settings.default.max_examples // 4)
@given(st.integers(0, 1999), st.sampled_from((None, 1, 2, 40, 100)), st.booleans())
def test_every_legal_combination_loads(seed: int, layers: int | None, media: bool) -> None:
    """Any mix of pattern, window, heads, K=V, sharing, wide MLP, per-layer embeddings, experts."""
    spec = random_spec(seed)
    text = spec.text
    if layers:
        moe = text.moe and replace(text.moe, layers=None)
        text = replace(text, num_hidden_layers=layers, num_kv_shared_layers=0, moe=moe)
    if media and spec.model_type == "gemma4":
        text = replace(text, use_bidirectional_attention="vision")
    spec = canonical(replace(spec, text=text))
    consistent(spec)
    uniform = replace(
        spec.text,
        attn_logit_softcapping=None,
        sliding=replace(spec.text.sliding, k_eq_v=False),
        moe=spec.text.moe and replace(spec.text.moe, layers=None),
    )
    said = replace(spec, text=uniform)  # what a Hugging Face config can say
    assert diff_specs(Spec.from_hf(said.to_hf(), name=spec.name), said) == []
