"""Names of values: `L3.attn.q` belongs to layer 3 of the text model, `vision.L3.attn.q` to layer 3
of the image tower, `draft.L3.attn.q` to layer 3 of the draft model."""

from __future__ import annotations

import re

_OF_LAYER = re.compile(r"(?:([a-z]+)\.)?L(\d+)\.(.+)")


def split_name(name: str) -> tuple[str, int | None, str]:
    """Return (part, layer, suffix): `vision.L3.attn.q` -> ("vision", 3, "attn.q"), with part ""
    for the text model; ("", None, name) for a value outside the layers, even a tower's."""
    match = _OF_LAYER.fullmatch(name)
    return (match[1] or "", int(match[2]), match[3]) if match else ("", None, name)


def layer_of(name: str) -> int | None:
    """Return the index of the layer that a value belongs to, in its part of the model; None outside
    the layers."""
    return split_name(name)[1]
