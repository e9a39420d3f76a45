"""The config.json that the hub has for a released variant."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

from tests.cases import read_table

CONFIGS = read_table("hub_configs.yaml")
RELEASED = ("e2b", "e4b", "12b", "26b-a4b", "31b")
#: variant -> its layers of full attention
FULL_LAYERS = {name: range(*CONFIGS[name]["full_layers"]) for name in RELEASED}


def hub_config(name: str) -> dict[str, Any]:
    """A copy, free to be changed."""
    config: dict[str, Any] = deepcopy(CONFIGS[name])
    del config["full_layers"]
    text, full = config["text_config"], FULL_LAYERS[name]
    kinds = ("sliding_attention", "full_attention")
    text["layer_types"] = [kinds[i in full] for i in range(text["num_hidden_layers"])]
    return config
