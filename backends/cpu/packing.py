"""Quantisation at build by C kernels (kernels/packing.c): the op `quantize` for int4, scales
and shifts of nonuniform formats (`fit_groups`), and error compensation (GPTQ)."""

from __future__ import annotations

import sys
from functools import cache
from typing import Any

import torch

from g4ir.errors import LowerError, MissingError, TrustError
from g4ir.ops.codecs import FORMATS, integer_range
from g4ir.ops.grids import GROUP, fit_groups, level_table
from g4ir.ops.quant import quantize
from g4ir.quant.compensation import Grid, Kernels, add_products, quantize_columns
from g4ir.ui.processor import architecture

from . import pyops
from .pyops import DTYPES

#: ids of the dtypes of x that the C kernel of `added_products` takes
PANEL_DTYPES = (DTYPES[torch.bfloat16], DTYPES[torch.float32])


def quantized(
    w: torch.Tensor, *, form: str, group: int, scale: str, moments: torch.Tensor | None = None
) -> tuple[Any, ...]:
    """Return the codes and scales of a weight, bit-identical to `quantize.reference`, which is the
    fallback for all but int4 with bf16 scales, and for weights and machines that the C kernel does
    not support (no values above 4096, infinities or NaN)."""
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
    attrs: dict[str, Any] = {"form": form, "group": group, "scale": scale, "moments": moments}
    return quantize.reference(w, **attrs, fit=fitted_groups)


def fitted_groups(
    x: torch.Tensor, levels: tuple[int, ...], shift_by: int, moments: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the scales and shifts of groups [.., GROUP] as `fit_groups` does, by the C kernel;
    `fit_groups` itself is the fallback for values and machines that the kernel does not support
    (only fp32 on a CPU; no values above 4096, infinities or NaN)."""
    if x.is_cpu and x.dtype == torch.float32 and _has_kernel(DTYPES[x.dtype], GROUP):
        x, weights = x.contiguous(), None if moments is None else moments.contiguous()
        scales, shifts = (x.new_empty(x.shape[:-1]) for _ in range(2))
        operands = x, weights, level_table(levels), scales, shifts
        addresses = [t if t is None else t.data_ptr() for t in operands]
        row = 1 if weights is None else weights.numel() // GROUP
        sizes = scales.numel(), row, levels[0], shift_by, torch.get_num_threads()
        if not pyops.kernel("fit_groups")(*addresses, *sizes):
            return scales, shifts
    return fit_groups(x, levels, shift_by, moments)


def quantized_columns(x: torch.Tensor, by: torch.Tensor, grid: Grid, start: torch.Tensor) -> None:
    """Quantise the columns of x in place, with error compensation, as `quantize_columns` does; by
    the C kernel if there is one."""
    if not _has_kernel(DTYPES[x.dtype], GROUP):
        quantize_columns(x, by, grid, start)
        return
    table, by = FORMATS[grid.form].table, by.contiguous()
    levels = level_table(table) if table else None
    operands = x, by, grid.step, grid.shift, start, levels
    addresses = [t if t is None else t.data_ptr() for t in operands]
    limits = integer_range(grid.form)
    pyops.kernel("round_columns")(*addresses, *x.shape, *limits, torch.get_num_threads())


def added_products(total: torch.Tensor, x: torch.Tensor) -> None:
    """Add x^T x of inputs x [T, n] to the upper triangle of `total` f32[n, n] as `add_products`
    does; by the C kernel if it supports x, with sums that do not depend on the number of threads.
    MemoryError if the kernel, which packs a copy of the inputs, runs out of memory."""
    dtype = DTYPES.get(x.dtype)
    if dtype not in PANEL_DTYPES or not _has_kernel(dtype, GROUP) or x.stride(1) != 1:
        add_products(total, x)
        return
    sizes, threads = (*x.shape, x.stride(0)), torch.get_num_threads()
    if pyops.kernel("add_products")(x.data_ptr(), total.data_ptr(), dtype, *sizes, threads):
        raise MemoryError(f"out of memory for x^T x of x {list(x.shape)}")


#: C implementations of quantisation at build on the CPU, and of its calibration sums
KERNELS = Kernels(quantized, quantized_columns, added_products)


@cache
def _has_kernel(dtype: int | None, size: int) -> bool:
    """Whether packing.c takes this dtype (an id) and group size; False except on Linux on x86-64,
    where torch sums in the order that packing.c reproduces."""
    if dtype is None or sys.platform != "linux" or architecture() != "x86_64":
        return False
    try:
        return bool(pyops.kernel("takes_packing")(dtype, size))
    except (LowerError, MissingError, TrustError, OSError):
        return False
