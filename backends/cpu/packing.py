"""The op `quantize` for 4-bit weights, and the compensation of errors, by C kernels
(kernels/packing.c)."""

from __future__ import annotations

import sys
from functools import cache
from typing import Any

import torch

from g4ir.errors import LowerError, MissingError, TrustError
from g4ir.ops.codecs import FORMATS, integer_range
from g4ir.ops.grids import GROUP, level_table
from g4ir.ops.quant import quantize
from g4ir.quant.compensation import Grid, Kernels, quantize_columns
from g4ir.ui.processor import architecture

from . import pyops
from .pyops import DTYPES


def quantized(
    w: torch.Tensor, *, form: str, group: int, scale: str, moments: torch.Tensor | None = None
) -> tuple[Any, ...]:
    """Quantise a weight like `quantize.reference`, which also is the fallback: for other formats,
    weights beyond 4096, infinities, NaN, and machines without the kernel."""
    size, dtype, threads = group or w.shape[-1], DTYPES.get(w.dtype), torch.get_num_threads()
    if form == "int4" and scale == "bf16" and w.is_cpu and _has_kernel(dtype, size):
        codes = torch.empty(*w.shape[:-1], w.shape[-1] // 2, dtype=torch.uint8)
        scales = torch.empty(*w.shape[:-1], w.shape[-1] // size, dtype=torch.bfloat16)
        weights, row = None, scales.shape[-1]
        if moments is not None:
            weights = moments.expand(*w.shape[:-2], 1, -1).float().contiguous()
        operands = w.contiguous(), weights, codes, scales
        addresses = [t if t is None else t.data_ptr() for t in operands]
        sizes = scales.numel(), size, row, row * w.shape[-2:-1].numel()
        if not pyops.kernel("pack")(*addresses, *sizes, dtype, threads):
            return codes, scales
    return quantize.reference(w, form=form, group=group, scale=scale, moments=moments)


def quantized_columns(
    x: torch.Tensor, by: torch.Tensor, grid: Grid, rounded: torch.Tensor, start: torch.Tensor | None
) -> None:
    """Compute `quantize_columns`; without the kernel it is the fallback."""
    if not _has_kernel(DTYPES[x.dtype], GROUP):
        quantize_columns(x, by, grid, rounded, start)
        return
    table, by = FORMATS[grid.form].table, by.contiguous()
    levels = level_table(table) if table else None
    operands = x, by, grid.step, grid.shift, rounded, start, levels
    addresses = [t if t is None else t.data_ptr() for t in operands]
    limits = integer_range(grid.form)
    pyops.kernel("round_columns")(*addresses, *x.shape, *limits, torch.get_num_threads())


#: kernels of a build
KERNELS = Kernels(quantized, quantized_columns)


@cache
def _has_kernel(dtype: int | None, size: int) -> bool:
    """Whether the kernel packs groups of this size; not on systems where torch sums in another
    order."""
    if dtype is None or sys.platform != "linux" or architecture() != "x86_64":
        return False
    try:
        return bool(pyops.kernel("takes_packing")(dtype, size))
    except (LowerError, MissingError, TrustError, OSError):
        return False
