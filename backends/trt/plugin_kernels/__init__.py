"""Triton kernels whose parameters are in the order of a TensorRT plugin: inputs, whole numbers,
outputs."""

from __future__ import annotations

import importlib


def has_triton() -> bool:
    """Whether kernels can be compiled here."""
    try:
        importlib.import_module("triton")
    except ImportError:
        return False
    return True
