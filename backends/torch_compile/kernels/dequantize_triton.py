"""A weight made of its codes: bound by writing it.

Error budget: one product, rounded once; int4 with scales in fp32 is off by their rounding.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch.library import triton_op

from g4ir.ops.codecs import dequantized
from g4ir.ops.types import torch_dtype

from .codes_triton import bits_of_16, columns, form_of, row_scaled, rows_of, scales_of, weight_tile
from .launch import blocks, start, takes

Tensor = torch.Tensor


@triton.jit
def _dequantize(
    codes,
    scales,
    out,
    N,
    K: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    FORM: tl.constexpr,
    GROUP: tl.constexpr,
):
    """out [N, K] = codes * scales. Grid: blocks of columns, of rows."""
    row = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    at, live = tl.program_id(0) * BLOCK_K, row < N
    w, s = rows_of(codes, row, K, FORM), scales_of(scales, row, K, GROUP)
    t = weight_tile(w, s, live, at, bits_of_16(codes), K, BLOCK_K, BLOCK_N, FORM, GROUP)
    t = row_scaled(t, s, live, FORM, GROUP)
    k = at + tl.arange(0, BLOCK_K)
    mask = live[:, None] & (k < K)[None, :]
    tl.store(out + row.to(tl.int64)[:, None] * K + k[None, :], t.to(out.dtype.element_ty), mask)


@triton_op("g4ir::dequantize", mutates_args={})
def dequantize(
    codes: Tensor, scales: Tensor, to: str, block_n: int, block_k: int, warps: int
) -> Tensor:
    """Compute the op `dequantize`."""
    dtype = torch_dtype(to)
    if not takes(codes):
        made: Tensor = dequantized(codes, scales, dtype)
        return made
    k = columns(codes)
    out = codes.new_empty((*codes.shape[:-1], k), dtype=dtype)
    n = out.numel() // k
    start(
        _dequantize,
        (blocks(k, block_k), blocks(n, block_n)),
        (codes, scales, out, n),
        K=k,
        BLOCK_N=block_n,
        BLOCK_K=block_k,
        **form_of(codes, scales),
        num_warps=warps,
    )
    return out
