"""Samples and budgets of the Triton kernels, by the name of their first launch; a file for each of
`backends/cuda/kernels`."""

from __future__ import annotations

import importlib
import pkgutil

from .base import Budget

BUDGETS: dict[str, Budget] = {}
for _file in pkgutil.iter_modules(__path__):
    if _file.name != "base":
        BUDGETS |= importlib.import_module(f"{__name__}.{_file.name}").BUDGETS
