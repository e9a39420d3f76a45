"""g4ir: a compiler-style graph builder and engine for the Gemma 4 model family.

    spec   = g4ir.load_spec("tiny-moe")
    engine = g4ir.build(spec, out="engine", random_weights=0)
    tokens = engine.generate([2, 5, 7], max_new_tokens=16)

Importing the package is cheap: torch is loaded with the first name that needs it.
"""

from __future__ import annotations

import importlib
import sys
from types import ModuleType
from typing import Any

__version__ = "0.1.0"

#: public name -> module that defines it
_EXPORTS = {
    "Spec": "spec", "load_spec": "spec", "spec_names": "spec", "diff_specs": "spec",
    "build_graph": "model", "build_program": "model",
    "parse_graph": "text", "print_graph": "text",
    "verify": "ir", "Graph": "ir", "Program": "ir",
    "run_passes": "pipeline", "interpret": "interpret", "empty_state": "interpret",
    "build": "engine", "load_engine": "engine", "Engine": "engine", "Session": "session",
    "G4Error": "errors",
}  # fmt: skip

__all__ = ["__version__", *_EXPORTS]


def __getattr__(name: str) -> Any:
    if name not in _EXPORTS:
        raise AttributeError(f"module 'g4ir' has no attribute {name!r}")
    return getattr(importlib.import_module(f"g4ir.{_EXPORTS[name]}"), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *_EXPORTS])


class _Package(ModuleType):
    """Keeps `g4ir.interpret` the function: importing the module of that name would hide it."""

    def __setattr__(self, name: str, value: object) -> None:
        if name not in _EXPORTS or not isinstance(value, ModuleType):
            super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Package
