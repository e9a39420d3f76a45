"""The kernels of the decode step and of prefill; `base.py` says what a kernel is.

Every file of this folder that has a `_triton` beside it is in the table.
"""

from __future__ import annotations

import importlib
import pkgutil

from .base import Kernel

_FILES = [module.name for module in pkgutil.iter_modules(__path__)]
#: a node becomes the first whose rule takes it
KERNELS: tuple[Kernel, ...] = tuple(
    kernel
    for name in _FILES
    if f"{name}_triton" in _FILES
    for kernel in importlib.import_module(f"{__name__}.{name}").KERNELS
)
