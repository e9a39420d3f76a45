"""Table of the Triton kernels for decode and prefill; `base.py` defines the record `Kernel`.

Every file of this folder with a `_triton` counterpart is in the table.
"""

from __future__ import annotations

import importlib
import pkgutil

from .base import Kernel

_FILES = [module.name for module in pkgutil.iter_modules(__path__)]
#: a node is lowered to the first kernel whose rule accepts it
KERNELS: tuple[Kernel, ...] = tuple(
    kernel
    for name in _FILES
    if f"{name}_triton" in _FILES
    for kernel in importlib.import_module(f"{__name__}.{name}").KERNELS
)
