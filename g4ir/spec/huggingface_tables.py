"""Tables of Hugging Face config.json, from huggingface.yaml: model types, keys and defaults."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from g4ir.ui.files import read_table

from .parts import FULL, SLIDING, Audio, UnifiedAudio, UnifiedVision, Vision

_TABLES = read_table(Path(__file__).with_name("huggingface.yaml"))
_PARTS = {
    part: _TABLES["parts"][part.__name__] for part in (Vision, Audio, UnifiedVision, UnifiedAudio)
}

# config model_type -> (model_type of the spec, whether the file is a composite with towers)
MODEL_TYPES = {name: (kind, towers) for name, (kind, _, towers) in _TABLES["model_types"].items()}
ARCHITECTURES = {(kind, towers): name for kind, name, towers in _TABLES["model_types"].values()}
KINDS = {"sliding_attention": SLIDING, "full_attention": FULL}
HF_KINDS = {kind: name for name, kind in KINDS.items()}
HOUSEKEEPING = frozenset(_TABLES["housekeeping"].split())
NEUTRAL: list[str] = _TABLES["neutral"].split()
NOTHING: tuple[Any, ...] = (None, False, 0, 0.0, {}, [], "")
TEXT_DEFAULTS: dict[str, Any] = _TABLES["text_defaults"]
BY_MODEL: dict[str, dict[str, Any]] = _TABLES["by_model"]
ROPE_DEFAULTS: dict[str, dict[str, Any]] = _TABLES["rope_defaults"]
PART_TYPES: dict[type, str] = {part: table["model_type"] for part, table in _PARTS.items()}
PART_DEFAULTS: dict[type, dict[str, Any]] = {
    part: {name: value for name, value in table.items() if name != "model_type"}
    for part, table in _PARTS.items()
}
# field of Tokens -> its key in a composite config, older spellings after it, and the default
MEDIA: dict[str, tuple[tuple[str, ...], int]] = {
    name: (tuple(keys), default) for name, (default, *keys) in _TABLES["media"].items()
}
AUDIO_MEDIA = ("audio", "boa", "eoa")
CENTROIDS: dict[str, tuple[str, int]] = _TABLES["centroids"]
HF_NAMES: dict[str, str] = _TABLES["names"]
BASE_GEOMETRY: dict[str, int] = _TABLES["base_geometry"]
