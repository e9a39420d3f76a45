"""The op `quantize` for 4-bit weights on the CPU by a C kernel (cpu/packing.c), the same bits."""

from __future__ import annotations

import ctypes
import platform
import sys
from contextlib import closing
from functools import cache
from typing import Any

import torch

from g4ir.errors import LowerError, MissingError, TrustError
from g4ir.ops.quant import quantize
from g4ir.ui.paths import unpacking

from .compile import PACKING, compile_kernels
from .pyops import DTYPES


def quantized(w: torch.Tensor, *, form: str, group: int, scale: str) -> tuple[Any, ...]:
    """Return `quantize.reference` of a weight, which also computes what the kernel does not take:
    other formats, weights beyond 4096, infinities and NaN, machines without a C compiler."""
    size = group or w.shape[-1]
    if form == "int4" and scale == "bf16" and w.dtype in DTYPES and w.device.type == "cpu":
        library, dtype = _library(), DTYPES[w.dtype]
        if library and library.g4ir_takes_packing(dtype, size):
            codes = torch.empty(*w.shape[:-1], w.shape[-1] // 2, dtype=torch.uint8)
            scales = torch.empty(*w.shape[:-1], w.shape[-1] // size, dtype=torch.bfloat16)
            given = w.contiguous()
            places = given.data_ptr(), dtype, codes.data_ptr(), scales.data_ptr()
            if not library.g4ir_pack(*places, scales.numel(), size, torch.get_num_threads()):
                return codes, scales
    return quantize.reference(w, form=form, group=group, scale=scale)


@cache
def _library() -> Any:
    """Return the kernel; None without a C compiler, or where torch sums in another order."""
    if sys.platform != "linux" or platform.machine() != "x86_64":
        return None
    try:
        with unpacking() as folder, closing(folder):
            path = folder.path / "packing.so"
            compile_kernels(path, PACKING)
            library = ctypes.CDLL(str(path))
    except (LowerError, MissingError, TrustError, OSError):
        return None
    pointer, size = ctypes.c_void_p, ctypes.c_int64
    library.g4ir_takes_packing.argtypes = [ctypes.c_int, size]
    library.g4ir_pack.argtypes = [pointer, ctypes.c_int, pointer, pointer, size, size, ctypes.c_int]
    return library
