"""The op `quantize` for 4-bit weights by a C kernel (kernels/packing.c): the same bits."""

from __future__ import annotations

import ctypes
import platform
import sys
from functools import cache
from pathlib import Path
from typing import Any

import torch

from g4ir.errors import LowerError, MissingError, TrustError
from g4ir.ops.quant import quantize
from g4ir.ui.paths import unpacking

from .library import PACKING, compile_kernels
from .pyops import DTYPES


def quantized(
    w: torch.Tensor,
    *,
    form: str,
    group: int,
    scale: str,
    moments: torch.Tensor | None = None,
) -> tuple[Any, ...]:
    """Return `quantize.reference` of a weight, which also computes what the kernel does not take:
    other formats, weights beyond 4096, infinities and NaN, machines without a C++ compiler."""
    size, dtype, threads = group or w.shape[-1], DTYPES.get(w.dtype), torch.get_num_threads()
    if form == "int4" and scale == "bf16" and dtype is not None and w.is_cpu:
        library = _library()
        if library and library.g4ir_takes_packing(dtype, size):
            codes = torch.empty(*w.shape[:-1], w.shape[-1] // 2, dtype=torch.uint8)
            scales = torch.empty(*w.shape[:-1], w.shape[-1] // size, dtype=torch.bfloat16)
            by, row = None, scales.shape[-1]
            if moments is not None:
                by = moments.expand(*w.shape[:-2], 1, -1).float().contiguous()
            operands = w.contiguous(), by, codes, scales
            places = [t if t is None else t.data_ptr() for t in operands]
            sizes = scales.numel(), size, row, row * w.shape[-2:-1].numel()
            if not library.g4ir_pack(*places, *sizes, dtype, threads):
                return codes, scales
    return quantize.reference(w, form=form, group=group, scale=scale, moments=moments)


@cache
def _library() -> Any:
    """Return the kernel; None without a C compiler, or where torch sums in another order."""
    if sys.platform != "linux" or platform.machine() != "x86_64":
        return None
    try:
        with unpacking() as folder, folder:
            path = Path(folder.name, "packing.so")
            compile_kernels(path, PACKING)
            library = ctypes.CDLL(str(path))
    except (LowerError, MissingError, TrustError, OSError):
        return None
    pointer, size = ctypes.c_void_p, ctypes.c_int64
    library.g4ir_takes_packing.argtypes = [ctypes.c_int, size]
    library.g4ir_pack.argtypes = [*[pointer] * 4, *[size] * 4, *[ctypes.c_int] * 2]
    return library
