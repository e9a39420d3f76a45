"""Names and shapes of tensors against the reference's own modules, and sums of them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from g4ir.model.tensors import numel, text_tensors, tower_tensors
from g4ir.plan.count import counts
from g4ir.spec.record import Spec, load_spec
from tests.configs import VARIANTS


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("name", VARIANTS)
def test_parts_are_the_tables(name: str, tied: bool) -> None:
    spec = load_spec(name)
    spec = replace(spec, text=replace(spec.text, tie_word_embeddings=tied))
    count = counts(spec)
    assert count.text == numel(text_tensors(spec))
    assert count.loaded - count.text == numel(tower_tensors(spec))


# --- against the reference's own modules --------------------------------------------------------


def shrunk(name: str) -> Spec:
    """The variant with few layers, all else kept."""
    spec = load_spec(name)
    shared = 5 if spec.text.num_kv_shared_layers else 0
    text = replace(
        spec.text, num_hidden_layers=len(spec.text.pattern) * 2, num_kv_shared_layers=shared
    )
    towers: dict[str, Any] = {}
    for part in ("vision", "audio"):
        tower = getattr(spec, part)
        if tower is not None and "num_hidden_layers" in tower.__dataclass_fields__:
            towers[part] = replace(tower, num_hidden_layers=2)
    return replace(spec, text=text, **towers)


UNIFIED_NAMES = {  # hub name -> name in the reference's module
    "model.embed_vision.embedding_projection": "model.embed_vision.multimodal_embedder"
    ".embedding_projection",
    "model.vision_embedder.": "model.embed_vision.",
}


def reference_name(name: str) -> str:
    for hub, module in UNIFIED_NAMES.items():
        if name.startswith(hub):
            return module + name.removeprefix(hub)
    return name


@pytest.mark.parametrize("name", VARIANTS)
def test_names_and_shapes_are_those_of_transformers(name: str) -> None:
    import torch
    from transformers import AutoConfig, AutoModelForImageTextToText

    spec = shrunk(name)
    config = spec.to_hf()
    with torch.device("meta"):
        model = AutoModelForImageTextToText.from_config(
            AutoConfig.for_model(config.pop("model_type"), **config)
        )
    theirs = {k: tuple(v.shape) for k, v in model.state_dict().items() if k != "lm_head.weight"}
    text = {spec.prefixes.text[0] + k: v for k, v in text_tensors(spec).items()}
    towers = tower_tensors(spec)
    if name == "12b":
        towers = {reference_name(k): v for k, v in towers.items()}
    assert text | towers == theirs
