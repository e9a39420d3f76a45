"""Rows of a quantised weight, dequantised: those that token ids gather from a table, or all, for
matmuls of many rows by a library.

Error: one fp32 rounding of the weight; in bf16 a rounding may fall the other way.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch.library import triton_op

from g4ir.ops.codecs import FORMATS, dequantize_codes
from g4ir.ops.types import torch_dtype

from .codes_triton import columns, exponent_of, format_constants, row_scaled, rows_of, scales_of
from .codes_triton import weight_tile as tile_of
from .launch import blocks, rounded, start, takes

Tensor = torch.Tensor


@triton.jit
def _rows(
    codes,
    scales,
    ids,
    y,
    rows,
    factor,
    K: tl.constexpr,
    GATHERED: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_K: tl.constexpr,
    FORMAT: tl.constexpr,
    GROUP: tl.constexpr,
):
    """Compute BLOCK_R rows x BLOCK_K columns of y [rows, K]: if GATHERED rows `ids` of the weight,
    rounded, times `factor`, else all rows, without the factor. Grid: columns, rows."""
    r = tl.program_id(1).to(tl.int64) * BLOCK_R + tl.arange(0, BLOCK_R)
    at = tl.program_id(0) * BLOCK_K
    live = r < rows
    row = tl.load(ids + r, mask=live, other=0) if GATHERED else r
    scales = scales_of(scales, row, K, FORMAT, GROUP)
    w = rows_of(codes, row, K, FORMAT)
    exponent = exponent_of(codes, FORMAT)
    t = tile_of(w, scales, live, at, exponent, K, BLOCK_K, BLOCK_R, FORMAT, GROUP)
    t = row_scaled(t, scales, live, FORMAT, GROUP)
    if GATHERED:
        t = rounded(t, y) * factor
    k = at + tl.arange(0, BLOCK_K)
    at_y = y + r[:, None] * K + k[None, :]
    tl.store(at_y, t.to(y.dtype.element_ty), mask=live[:, None] & (k < K)[None, :])


@triton_op("g4ir::dequantized_rows", mutates_args={})
def dequantized_rows(
    codes: Tensor,
    scales: Tensor,
    ids: Tensor | None,
    form: str,
    factor: float,
    dtype: torch.dtype,
    block_r: int,
    block_k: int,
    warps: int,
) -> Tensor:
    """Return rows `ids` of a weight [N, K] as [*ids.shape, K], rounded to `dtype` and then
    multiplied by `factor`; without ids a weight [.., N, K] in full, without the factor. codes:
    bytes in the format `form`."""
    if not takes(codes):
        typed = codes.view(torch_dtype(FORMATS[form].codes))
        if ids is None:
            return dequantize_codes(typed, scales, dtype)
        gathered = dequantize_codes(codes[ids].view(typed.dtype), scales[ids], dtype)
        return gathered * torch.tensor(factor).to(dtype)
    k, shape = columns(codes, form), codes.shape[:-1] if ids is None else ids.shape
    y = codes.new_empty((*shape, k), dtype=dtype)
    rows = y.numel() // k
    start(
        _rows,
        (blocks(k, block_k), blocks(rows, block_r)),
        (codes, scales, codes if ids is None else ids, y, rows, factor),
        K=k,
        GATHERED=ids is not None,
        BLOCK_R=block_r,
        BLOCK_K=block_k,
        **format_constants(codes, scales, form),
        num_warps=warps,
    )
    return y


def gathered_rows(
    codes: Tensor, scales: Tensor, form: str, ids: Tensor, factor: float, dtype: torch.dtype
) -> Tensor:
    """Return rows `ids` of a table times `factor`, both rounded to `dtype`."""
    rounded_factor = float(torch.tensor(factor, dtype=dtype, device="cpu"))
    return dequantized_rows(codes, scales, ids, form, rounded_factor, dtype, 1, 1024, 4)


def dense(w: Tensor, scales: Tensor | None, form: str, dtype: torch.dtype) -> Tensor:
    """Return a quantised weight dequantised to `dtype`; one without scales unchanged."""
    if scales is None:
        return w
    return dequantized_rows(w, scales, None, form, 1.0, dtype, 4, 512, 4)
