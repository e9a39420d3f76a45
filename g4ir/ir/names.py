"""Names of values: `L3.attn.q` is of layer 3, `vision.L3.attn.q` of a tower's layer."""

from __future__ import annotations

import re

_OF_LAYER = re.compile(r"(?:([a-z]+)\.)?L(\d+)\.(.+)")


def split_name(name: str) -> tuple[str, int | None, str]:
    """(tower, layer, suffix): `vision.L3.attn.q` -> ("vision", 3, "attn.q"); outside the layers
    ("", None, name)."""
    match = _OF_LAYER.fullmatch(name)
    return (match[1] or "", int(match[2]), match[3]) if match else ("", None, name)


def layer_of(name: str) -> int | None:
    """Return the layer that a value belongs to, of the text model or of a tower."""
    return split_name(name)[1]
