"""Names and shapes of tensors against the reference's own modules."""

from __future__ import annotations

import pytest

from g4ir.model.tensors import text_tensors, tower_tensors
from g4ir.spec.record import load_spec
from tests.configs import VARIANTS

UNIFIED_NAMES = {  # hub name -> name in the reference's module
    "model.embed_vision.embedding_projection": "model.embed_vision.multimodal_embedder"
    ".embedding_projection",
    "model.vision_embedder.": "model.embed_vision.",
}


@pytest.mark.parametrize("name", VARIANTS)
def test_names_and_shapes_are_those_of_transformers(name: str) -> None:
    import torch
    from transformers import AutoConfig, AutoModelForImageTextToText

    spec = load_spec(name)
    config = spec.to_hf()
    with torch.device("meta"):
        model = AutoModelForImageTextToText.from_config(
            AutoConfig.for_model(config.pop("model_type"), **config)
        )
    theirs = {k: tuple(v.shape) for k, v in model.state_dict().items() if k != "lm_head.weight"}
    text = {spec.prefixes.text[0] + k: v for k, v in text_tensors(spec).items()}
    towers = tower_tensors(spec)
    if name == "12b":
        for hub, module in UNIFIED_NAMES.items():
            towers = {k.replace(hub, module): v for k, v in towers.items()}
    assert text | towers == theirs
