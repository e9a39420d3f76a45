"""Resolves choices of a user against a spec without loading torch."""

from __future__ import annotations

from g4ir.errors import InputError
from g4ir.ops.types import dtype_name
from g4ir.passes.latent_kv import FORMS
from g4ir.spec.record import Spec
from g4ir.weights.pack import DEFAULT_PLACEMENT, PLACEMENTS

from .formats import DTYPES
from .latent import choose_form

DEVICES = ("cpu", "cuda")


def find_dtype(name: str) -> str:
    """`float32`, `f32` -> f32; InputError for what no engine computes in."""
    try:
        short = dtype_name(name)
    except ValueError:
        short = name
    if short not in DTYPES:
        raise InputError(f"dtype {name!r}: expected float32, bfloat16 or float16")
    return short


def find_latent(given: str, spec: Spec, device: str, dtype: str, max_seq: int) -> str:
    """Return the form of the K=V caches as asked, or for `auto` as measured."""
    if device not in DEVICES:
        raise InputError(f"device {device!r}: expected {' or '.join(DEVICES)}")
    if given not in ("auto", *FORMS):
        raise InputError(f"latent-kv {given!r}: expected one of auto, {', '.join(FORMS)}")
    return choose_form(spec, device, dtype, max_seq) if given == "auto" else given


def find_placement(given: str | None, spec: Spec, device: str) -> str | None:
    """Return where the table of per-layer embeddings lies; None where there is none. Nothing given:
    on CUDA the device, if it has room for it."""
    if given is not None and given not in PLACEMENTS:
        raise InputError(f"ple-placement {given!r}: expected one of {', '.join(PLACEMENTS)}")
    if spec.text.ple is None:
        if given is not None:
            raise InputError(f"ple-placement {given}: this spec has no per-layer embeddings")
        return None
    return given or ("device" if device == "cuda" else DEFAULT_PLACEMENT)
