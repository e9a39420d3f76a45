"""Rows of a table in host memory, read by the GPU itself.

Host memory that is registered with CUDA has the same address on the device (unified addressing), so
a kernel reads it over the bus like its own. It does so within a recorded step, which the host could
not do: that learns a token only a step later. A program copies one part of a row, so that many
reads of one row are on their way at once.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from .launch import begin, blocks, ready, start_untraced

Tensor = torch.Tensor

#: elements of a row that a program copies: 16 bytes a thread of one warp, twice
BLOCK = 512


@triton.jit
def host_rows(address, ids, out, D, BLOCK: tl.constexpr, AHEAD: tl.constexpr = False):
    """out[r] = table[ids[r]], rows of D elements of out's type; the table lies at an address."""
    begin(AHEAD)
    ready(AHEAD)
    row = tl.program_id(0).to(tl.int64)
    i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    keep = i < D
    table = address.to(tl.pointer_type(out.dtype.element_ty))
    at = tl.load(ids + row) * D
    # Each row is read once.
    x = tl.load(table + at + i, mask=keep, eviction_policy="evict_first")
    tl.store(out + row * D + i, x, mask=keep)


def gather_host_rows(address: int, ids: Tensor, columns: int, dtype: torch.dtype) -> Tensor:
    """Return rows `ids` (int64, any shape, in range) of a table at an address that the device of
    `ids` may read: [*ids.shape, columns]."""
    out = torch.empty((*ids.shape, columns), dtype=dtype, device=ids.device)
    grid = (ids.numel(), blocks(columns, BLOCK))
    start_untraced(
        host_rows, grid, (address, ids.contiguous(), out, columns), BLOCK=BLOCK, num_warps=1
    )
    return out
