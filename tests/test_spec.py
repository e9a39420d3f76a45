"""Specs: the shipped files, the strict loader, extends, and Hugging Face configs both ways.

No input makes the spec loaders raise anything but SpecError, hang, or accept an illegal spec.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Iterator
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from g4ir.errors import SpecError
from g4ir.model.tensors import dead_tensors, numel, text_tensors, tower_tensors
from g4ir.plan.count import counts
from g4ir.spec.huggingface_tables import family
from g4ir.spec.parts import TOWERS
from g4ir.spec.reader import MAX_ERRORS, Length, Where, did_you_mean, plain_value, tree_of
from g4ir.spec.record import Spec, diff_specs, load_spec, spec_names, spec_path
from g4ir.spec.rules import canonical
from tests.cases import read_table
from tests.configs import random_spec
from tests.hub_configs import RELEASED, hub_config
from tests.mutations import junk, mutate
from tests.refused.cases import put

CASES = read_table("spec_cases.yaml")


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(10**9), 10**9) | st.floats(-1e9, 1e9) | st.text(),
    lambda x: st.lists(x, max_size=3) | st.dictionaries(st.text(max_size=5), x, max_size=3),
    max_leaves=8,
)


@given(JSON)
def test_a_tree_keeps_the_values(value: Any) -> None:
    assert plain_value(tree_of(value, Where("f", 1))) == value


def test_bounds_of_names_and_lengths() -> None:
    assert did_you_mean("a", ["abcdefgh"]) == "" != did_you_mean("ab", ["abcdefgh"])
    assert "at least 1 items" in (Length(1).broken(()) or "")
    assert "1 to 2 items" in (Length(1, 2).broken((1, 2, 3)) or "")
    for size, said in ((200, "hub: must look like"), (201, "hub: expected text of")):
        with pytest.raises(SpecError, match=said):
            load_text(f"schema: 1\nextends: tiny-dense\nhub: {size * 'a'}\n".encode())


# --- shipped files --------------------------------------------------------------------------------


@pytest.mark.parametrize("name", spec_names())
def test_shipped_spec_is_legal_and_round_trips(name: str, tmp_path: Path) -> None:
    spec = load_spec(name)
    assert spec.name == name
    file = tmp_path / "copy.yaml"
    file.write_text(spec.to_yaml())
    again = load_spec(file)
    assert again == spec
    assert again.digest() == spec.digest()
    assert json.loads(json.dumps(spec.to_dict())) == spec.to_dict()
    assert load_spec(spec_path(name)) == spec  # a path works like the name


# --- conversion by field type ---------------------------------------------------------------------


def write(tmp_path: Path, text: str, name: str = "mine.yaml") -> Path:
    file = tmp_path / name
    file.write_text(text)
    return file


def variant(tmp_path: Path, body: str) -> Spec:
    """tiny-moe with a changed text section."""
    indented = "".join(f"  {line}\n" for line in body.splitlines())
    return load_spec(write(tmp_path, f"schema: 1\nextends: tiny-moe\ntext:\n{indented}"))


@pytest.mark.parametrize(("key", "written", "value"), CASES["read"])
def test_values_by_field_type(key: str, written: str, value: Any, tmp_path: Path) -> None:
    """Though YAML takes 1e-6 for a string; patterns compare by what they mean."""
    got = getattr(variant(tmp_path, f"{key}: {written}").text, key)
    value = tuple(value) if isinstance(value, list) else value
    assert got == value and type(got) is type(value)


def test_moe_on_all_layers_is_moe(tmp_path: Path) -> None:
    every = variant(tmp_path, "moe: {layers: [0, 1, 2, 3, 4, 5]}")
    assert every == replace(load_spec("tiny-moe"), name="mine")
    some = variant(tmp_path, "moe: {layers: [1, 5]}")
    assert [layer.has_moe for layer in some.layers()] == [False, True, False, False, False, True]


# --- extends --------------------------------------------------------------------------------------


def test_extends_overrides_deeply(tmp_path: Path) -> None:
    file = write(
        tmp_path, "schema: 1\nextends: 26b-a4b\nvision: null\ntext: {moe: {num_experts: 64}}\n"
    )
    base, spec = load_spec("26b-a4b"), load_spec(file)
    assert [(key, b) for key, _, b in diff_specs(base, spec)][:3] == [
        ("name", "mine"),
        ("text.moe.num_experts", 64),
        ("hub", None),  # the weights of another model
    ]
    assert spec.vision is None


# --- refusals -------------------------------------------------------------------------------------


# --- Hugging Face ---------------------------------------------------------------------------------


def as_config(spec: Spec) -> Spec:
    """What a config says of a spec."""
    return replace(spec, hub=None, chat=family(spec.model_type).chat)


def saved_by_transformers(config: dict[str, Any], folder: Path) -> dict[str, Any]:
    """The config.json that transformers writes after it has read this one."""
    from transformers import AutoConfig

    fields = {k: v for k, v in config.items() if k != "model_type"}
    AutoConfig.for_model(config["model_type"], **fields).save_pretrained(folder)
    return json.loads((folder / "config.json").read_text())


@pytest.mark.parametrize("name", spec_names())
def test_configs(name: str, tmp_path: Path) -> None:
    """A spec's own config and that of the hub say the spec, as they are and as transformers writes
    what it has read of them."""
    spec, folder = load_spec(name), tmp_path / "0"
    for i, config in enumerate([spec.to_hf(), *([hub_config(name)] if name in RELEASED else [])]):
        if config["model_type"] not in CONFIG_MAPPING:  # of a later transformers
            folder.mkdir()
            (folder / "config.json").write_text(json.dumps(config))
            assert diff_specs(Spec.from_hf(config, name=name), as_config(spec)) == []
            continue
        saved = saved_by_transformers(config, tmp_path / str(i))
        text = saved.get("text_config", saved)
        by_layer = "per_layer_config" not in family(spec.model_type).without
        assert ("per_layer_config" in text) == by_layer and "global_head_dim" not in text
        for source in (config, saved):
            assert diff_specs(Spec.from_hf(source, name=name), as_config(spec)) == []
    for path in (folder, folder / "config.json", str(folder)):
        assert diff_specs(Spec.from_hf(path, name=name), as_config(spec)) == []
    assert Spec.from_hf(folder / "config.json").name == Spec.from_hf(folder).name


def test_defaults_of_missing_keys_are_those_of_transformers(tmp_path: Path) -> None:
    for kind in (
        *("gemma4_text", "gemma4", "gemma4_unified_text", "gemma4_unified"),
        *("gemma3_text", "gemma3"),
    ):
        bare: dict[str, Any] = {"model_type": kind}
        if kind in TOWERS:
            bare |= {"vision_config": {}, "audio_config": {}}
        saved = saved_by_transformers(deepcopy(bare), tmp_path / kind)
        assert diff_specs(Spec.from_hf(bare, "x"), Spec.from_hf(saved, "x")) == []


def tiny_config(**changes: Any) -> dict[str, Any]:
    return load_spec("tiny-moe").to_hf() | changes


#: rope of full layers, changed


@pytest.mark.parametrize(("name", "changes", "said"), CASES["spellings"])
def test_spellings(name: str, changes: dict[str, Any], said: dict[str, Any]) -> None:
    config = hub_config(name) if name in RELEASED else tiny_config()
    if name.startswith("gemma3"):
        config = load_spec("tiny-gemma3").to_hf()
    if name.endswith("images"):
        del config["architectures"]
        config = {"model_type": "gemma3", "text_config": config, "vision_config": {}}
    for path, value in changes.items():
        put(config, path, value)
    found = dict(flat(Spec.from_hf(config).to_dict()))
    assert {key: found[key] for key in said} == said


def flat(values: dict[str, Any], path: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in values.items():
        if isinstance(value, dict):
            yield from flat(value, f"{path}{key}.")
        else:
            yield f"{path}{key}", value


def test_composite_without_towers_drops_media_ids_outside_the_vocabulary() -> None:
    config = {"model_type": "gemma4", "text_config": load_spec("tiny-moe").to_hf()}
    config["text_config"].pop("architectures")
    spec = Spec.from_hf(config)
    assert spec.tokens.image is None and spec.vision is None
    config["vision_config"] = {}
    with pytest.raises(SpecError, match=r"tokens\.image: 258880 is outside the vocabulary"):
        Spec.from_hf(config)


@pytest.mark.parametrize(("path", "value"), CASES["housekeeping"])
def test_housekeeping_is_ignored(path: str, value: Any) -> None:
    put(config := hub_config("e2b"), path, value)
    spec = Spec.from_hf(config, name="e2b")
    assert diff_specs(spec, as_config(load_spec("e2b"))) == []


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
