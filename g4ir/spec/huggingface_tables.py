"""Tables of Hugging Face config.json, from huggingface.yaml and model_types.yaml: model types, keys
and defaults."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from g4ir.ui.files import read_table

from .parts import (
    ASSISTANT,
    CHAT_FORMS,
    FAMILIES,
    FULL,
    LATER_TEXT,
    SLIDING,
    Audio,
    Text,
    UnifiedAudio,
    UnifiedVision,
    Vision,
)

_TABLES = read_table(Path(__file__).with_name("huggingface.yaml"))
_PARTS = {
    part: _TABLES["parts"][part.__name__] for part in (Vision, Audio, UnifiedVision, UnifiedAudio)
}


@dataclass(frozen=True)
class Family:
    """Rules for the configs of a model_type: a row of model_types.yaml, which documents them."""

    keys: dict[str, Any]
    ropes: dict[str, Any]
    older: dict[str, Any] = field(default_factory=dict)
    without: dict[str, str] = field(default_factory=dict)
    ignored: str = ""
    chat: str = CHAT_FORMS[0]
    text: dict[str, bool] = field(default_factory=dict)
    prefixes: dict[str, list[str]] = field(default_factory=dict)
    embedding: dict[str, Any] = field(default_factory=dict)
    when: str = ""

    @property
    def plain(self) -> list[str]:
        """Config keys that are fields of `Text` under the same name, but for num_hidden_layers."""
        names = {*self.keys} - {"num_hidden_layers"}
        return [f.name for f in fields(Text) if f.name in names]

    @property
    def fixed(self) -> dict[str, Any]:
        """Field of LATER_TEXT for which the family's configs have no key -> its value."""
        without_key = {*LATER_TEXT} - {*self.keys}
        return {name: self.text.get(name, getattr(Text, name)) for name in without_key}


def family(model_type: str) -> Family:
    """Return the family of a model_type; a draft model has its target's."""
    row = FAMILIES[model_type.removesuffix(ASSISTANT)]
    return Family(**{f.name: row[f.name] for f in fields(Family) if f.name in row})


_FILES = [(kind, *file) for kind, row in FAMILIES.items() for file in row["files"].items()]
# config model_type -> (model_type of the spec, whether it is a composite config, with text_config)
MODEL_TYPES = {
    name: (kind, parts) for kind, name, (_, parts) in _FILES if "when" not in FAMILIES[kind]
}
# config model_type -> key that, if true, means another model_type of the spec; and that type
VARIANTS = {
    name: (row["when"], kind) for kind, name, _ in _FILES if "when" in (row := FAMILIES[kind])
}
ARCHITECTURES = {(kind, parts): name for kind, _, (name, parts) in _FILES}
KINDS = {"sliding_attention": SLIDING, "full_attention": FULL}
HF_KINDS = {kind: name for name, kind in KINDS.items()}
HOUSEKEEPING = frozenset(_TABLES["housekeeping"].split())
NEUTRAL: list[str] = _TABLES["neutral"].split()
# values with which an unsupported key has no effect
NOTHING: tuple[Any, ...] = (None, False, 0, 0.0, {}, [], "")
PART_TYPES: dict[type, str] = {part: table["model_type"] for part, table in _PARTS.items()}
PART_DEFAULTS: dict[type, dict[str, Any]] = {
    part: {name: value for name, value in table.items() if name != "model_type"}
    for part, table in _PARTS.items()
}
# field of Tokens -> (its key in a composite config, then other names of that key), default
MEDIA: dict[str, tuple[tuple[str, ...], int]] = {
    name: (tuple(keys), default) for name, (default, *keys) in _TABLES["media"].items()
}
AUDIO_MEDIA = ("audio", "boa", "eoa")
CENTROIDS: dict[str, tuple[str, int]] = _TABLES["centroids"]
HF_NAMES: dict[str, str] = _TABLES["names"]
# keys of the attention geometry of both layer kinds
BASE_GEOMETRY = ("head_dim", "num_key_value_heads")
