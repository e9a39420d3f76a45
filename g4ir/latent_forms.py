"""Which form of the K=V cache is fastest where, by measurement."""

from __future__ import annotations

from .spec import Spec


def choose_form(spec: Spec, device: str, dtype: str, max_seq: int) -> str:
    """The form for `--latent-kv auto`."""
    return "off"
