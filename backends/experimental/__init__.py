"""Experiments: off by default, each with the measurement that would bring it in (README.md).

The core loads an experiment by its name alone, when a setting or an option asks for it; a test
holds the core to that. An experiment may import any backend.
"""

from __future__ import annotations

import importlib
from typing import Any

#: name -> what asks for it
EXPERIMENTS = {
    "kernel_graph": "build --backend torch --set decode_step=early",
    "step_model": "show --timeline",
    "trt_step": "build --backend trt --dry-run",
}


def experiment(name: str) -> Any:
    """Import an experiment and return its module."""
    assert name in EXPERIMENTS
    return importlib.import_module(f"{__name__}.{name}")
