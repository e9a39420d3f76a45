"""Tables in host memory that the GPU itself reads, row by row.

Host memory that is registered with CUDA has the same address on the device, so a kernel reads it
over the bus like its own, within a recorded step, which the host could not do: it learns a token
only a step later. A program copies one part of a row, so that many reads are on their way at once.
"""

from __future__ import annotations

import logging
import mmap
import weakref
from contextlib import suppress
from typing import Any

import torch
import triton
import triton.language as tl

from g4ir.ir.graph import Value
from g4ir.ops.types import torch_dtype
from g4ir.ui.units import size_text
from g4ir.weights.pack import ParamSource, StoredParams, open_table

from .kernels.launch import blocks, start_untraced

#: flags of cudaHostRegister: for every context, at a device address, and never written
PORTABLE, MAPPED, READ_ONLY = 1, 2, 8
#: rows of a table are copied in pieces of about so many bytes
PIECE_BYTES = 64 << 20

#: elements of a row that a program copies: 16 bytes a thread of one warp, twice
ROW_BLOCK = 512

log = logging.getLogger(__name__)


@triton.jit
def host_rows(  # type: ignore[no-untyped-def]
    address, ids, out, D, BLOCK: tl.constexpr
):
    """out[r] = table[ids[r]], rows of D elements of out's type; the table lies at an address."""
    row = tl.program_id(0).to(tl.int64)
    i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    keep = i < D
    table = address.to(tl.pointer_type(out.dtype.element_ty))
    at = tl.load(ids + row) * D
    # Each row is read once.
    x = tl.load(table + at + i, mask=keep, eviction_policy="evict_first")
    tl.store(out + row * D + i, x, mask=keep)


def gather_host_rows(
    address: int, ids: torch.Tensor, columns: int, dtype: torch.dtype
) -> torch.Tensor:
    """Return rows `ids` (int64, in range) of a table at an address: [*ids.shape, columns]."""
    out = torch.empty((*ids.shape, columns), dtype=dtype, device=ids.device)
    grid = (ids.numel(), blocks(columns, ROW_BLOCK))
    start_untraced(
        host_rows, grid, (address, ids.contiguous(), out, columns), BLOCK=ROW_BLOCK, num_warps=1
    )
    return out


class HostTable:
    """A table in registered host memory; indexed by ids on the device, its rows are made there.
    The memory stays registered as long as the table lives."""

    def __init__(self, table: torch.Tensor, device: torch.device) -> None:
        self.table, self.dtype = table, table.dtype
        #: where rows are made
        self.device = device

    def __getitem__(self, ids: torch.Tensor) -> torch.Tensor:
        ids = ids.to(self.device)
        return gather_host_rows(self.table.data_ptr(), ids, self.table.shape[1], self.dtype)


def open_host_table(source: ParamSource, v: Value, placement: str, device: str) -> Any:
    """Return a table param for the embed graph of an engine on CUDA, of which nothing lies on the
    device.

    `mmap`: the mapped file itself, where it can be registered, else as `host`: a copy of it. Where
    no memory can be registered the host gathers rows, and says so.
    """
    cuda, at = torch.cuda.cudart(), torch.device(device)
    file = registered_file(source, v, cuda) if placement == "mmap" else None
    table = copied(source, v) if file is None else file
    found, why = None, "it cannot be registered with CUDA"
    if file is not None or register(table, PORTABLE | MAPPED, cuda):
        found, why = tried(HostTable(table, at))
    if found is not None:
        return found
    log.warning(
        "%s: %s of host memory are not read by the GPU itself, so that each token waits for the "
        "host to gather its rows: %s",
        v.name,
        size_text(table.nbytes),
        why,
    )
    return open_table(source, v, placement, device) if placement == "mmap" else table


def tried(table: HostTable) -> tuple[HostTable | None, str]:
    """Return the table, or None and the reason where its first row cannot be read: triton makes the
    kernel now, with a C compiler and the driver's library."""
    try:
        row = table[torch.zeros(1, dtype=torch.int64)]
        same = torch.equal(row.cpu().view(torch.uint8), table.table[:1].view(torch.uint8))
    except torch.AcceleratorError:
        raise  # nothing works on this device any more
    except Exception as e:  # of triton, of what it starts, or of the driver
        return None, f"{type(e).__name__}: {(str(e).splitlines() or [''])[0][:200]}"
    return (table, "") if same else (None, "what it reads is not the table")


def registered_file(source: ParamSource, v: Value, cuda: Any) -> torch.Tensor | None:
    """Return the param as a registered mapping of its file, or None where there is none."""
    if not isinstance(source, StoredParams):
        return None
    table = source.tensor(v.name)
    return table if register(table, PORTABLE | MAPPED | READ_ONLY, cuda) else None


def copied(source: ParamSource, v: Value) -> torch.Tensor:
    """Copy the param into memory of its own. Torch's pinned memory comes in powers of two."""
    rows, columns = (int(d) for d in v.type.shape)
    table = torch.empty(rows, columns, dtype=torch_dtype(v.type.dtype))
    step = max(1, PIECE_BYTES // (columns * table.element_size()))
    for at in range(0, rows, step):
        piece = table[at : at + step]
        piece.copy_(source.rows(v.name, torch.arange(at, at + len(piece))))
    source.release(v.name)
    return table


def _forget_error() -> None:
    """Start a kernel: after the next one torch would raise the error of a failed CUDA call."""
    if torch.cuda.is_available():
        with suppress(RuntimeError):
            torch.ones(1, device="cuda").add_(1)


def register(table: torch.Tensor, flags: int, cuda: Any) -> bool:
    """Whether the table's pages are now the device's to read; they are until the table is gone."""
    begin = table.data_ptr() // mmap.PAGESIZE * mmap.PAGESIZE
    size = table.data_ptr() + table.nbytes - begin
    if int(cuda.cudaHostRegister(begin, size, flags)):
        _forget_error()
        return False
    # Of the storage: views of the table may outlive it.
    weakref.finalize(table.untyped_storage(), cuda.cudaHostUnregister, begin).atexit = False
    return True
