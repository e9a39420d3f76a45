"""Backends: each compiles a program (its optimised graphs) into an engine directory, and runs it
from there."""

from __future__ import annotations

import importlib

from g4ir.errors import InputError

from .base import Backend

#: name on the command line -> module that holds BACKEND
BACKENDS = {
    "reference": "g4ir.backends.reference",
    "torch": "g4ir.backends.inductor",
    "onnx": "g4ir.backends.onnx_graph",
    "trt": "g4ir.backends.trt",
}


def find_backend(name: str) -> Backend:
    """Return the backend of this name; an unknown name raises InputError, which lists the known
    ones."""
    if name not in BACKENDS:
        raise InputError(f"unknown backend {name!r}; one of {', '.join(BACKENDS)}")
    return importlib.import_module(BACKENDS[name]).BACKEND
