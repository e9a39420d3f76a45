"""Specs: the shipped files, the strict loader, extends, and Hugging Face configs both ways."""

from __future__ import annotations

import json
from collections.abc import Iterator
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from g4ir.cli import main
from g4ir.errors import SpecError
from g4ir.spec.huggingface_tables import family
from g4ir.spec.parts import TOWERS
from g4ir.spec.record import (
    Spec,
    diff_specs,
    load_spec,
    spec_names,
    spec_path,
)
from tests.cases import TABLES, read_table
from tests.hub_configs import RELEASED, hub_config
from tests.refused.cases import put

CASES = read_table("spec_cases.yaml")


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


@pytest.mark.parametrize(("command", "warnings"), TABLES["spec"]["warnings"])
def test_forced_layers_warn(command: list[str], warnings: int, tmp_path: Path, capsys: Any) -> None:
    body = "schema: 1\nextends: tiny-moe\ntext: {num_hidden_layers: 7}\n"
    file = write(tmp_path, body)
    assert main([word.format(file) for word in command]) == 0
    assert capsys.readouterr().err.count("becomes a full one") == warnings


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
    out: dict[str, Any] = json.loads((folder / "config.json").read_text())
    return out


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
