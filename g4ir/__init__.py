"""g4ir: a compiler and inference engine for Gemma 4 and Gemma 3 models.

    spec   = g4ir.load_spec("tiny-moe")
    engine = g4ir.build(spec, out="engine", random_weights=0)
    tokens = engine.generate([2, 5, 7], max_new_tokens=16)

Importing the package is cheap: torch is loaded with the first name that needs it.
"""

from __future__ import annotations

import importlib
import importlib.util
from pathlib import Path
from typing import Any

from g4ir.ui.threads import configure_openmp

__version__ = "0.2.0"

#: public name -> module that defines it
_EXPORTS = {
    "Spec": "spec.record",
    "load_spec": "spec.record",
    "spec_names": "spec.record",
    "diff_specs": "spec.record",
    "build_graph": "model.text",
    "build_program": "model.text",
    "parse_graph": "ir.text",
    "print_graph": "ir.text",
    "verify": "ir.verify",
    "Graph": "ir.graph",
    "Program": "ir.graph",
    "run_passes": "passes",
    "interpret": "ir.interpret",
    "empty_state": "ir.interpret",
    "build": "builder.build",
    "load": "builder.library",
    "load_engine": "builder.load",
    "export": "builder.export",
    "module": "builder.module",
    "score": "check.score",
    "Engine": "engine.engine",
    "Session": "engine.session",
    "join": "parallel.group",
    "follow": "builder.rank_worker",
    "G4Error": "errors",
}

__all__ = ["__version__", *_EXPORTS]


def _check_one_tree() -> None:
    """Raise ImportError if g4ir.passes, g4ir.backends or g4ir.specs are not installed or come from
    another checkout. In a second clone, `python -m g4ir` finds g4ir/ in the current folder, but an
    editable install maps these three, which are folders beside g4ir/, to the first clone."""
    package = Path(__file__).resolve().parent
    for folder in ("passes", "backends", "specs"):
        spec = importlib.util.find_spec(f"g4ir.{folder}")
        if spec is None or spec.origin is None:
            where = "not installed"
        elif (tree := Path(spec.origin).resolve().parents[1]) in (package, package.parent):
            continue
        else:
            where = f"in {tree}"
        fix = "run `pip install -e .` in the checkout that you mean to use"
        raise ImportError(f"g4ir is in {package.parent}, but g4ir.{folder} is {where}; {fix}")


_check_one_tree()

# Before a name of _EXPORTS loads torch: OpenMP reads its variables then.
configure_openmp()


def __getattr__(name: str) -> Any:
    if name not in _EXPORTS:
        raise AttributeError(f"module 'g4ir' has no attribute {name!r}")
    return getattr(importlib.import_module(f"g4ir.{_EXPORTS[name]}"), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *_EXPORTS])
