"""The ops: one file per family. Every op of every file of this folder is in the table."""

from __future__ import annotations

import importlib
import pkgutil

from .base import Op, Sample

_FAMILIES = [
    importlib.import_module(f"{__name__}.{m.name}") for m in pkgutil.iter_modules(__path__)
]
OPS: dict[str, Op] = {
    o.name: o for family in _FAMILIES for o in vars(family).values() if isinstance(o, Op)
}

__all__ = ["OPS", "Op", "Sample"]
