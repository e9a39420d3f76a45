"""Memory of large results on the CPU, kept for the next result of the same size.

The system's allocator hands blocks this large back to the kernel as soon as they are free, and
every page of the next one is a fault: about a tenth of the product that fills it.
"""

from __future__ import annotations

import weakref
from collections import defaultdict
from typing import Any

import torch

#: results from this many bytes on are kept
FROM = 8 << 20
#: bytes kept that nothing uses
KEPT = 128 << 20

_free: defaultdict[int, list[Any]] = defaultdict(list)


def empty_f32(*shape: int) -> torch.Tensor:
    """Make f32[shape], uninitialised. Its memory comes back when the last tensor on it is gone."""
    size = torch.Size(shape).numel()
    if 4 * size < FROM:
        return torch.empty(shape)
    try:  # not by looking first: another thread may take the last one in between
        memory = _free[size].pop()
    except IndexError:
        memory = torch.empty(size).numpy()
    lent = memory.view()  # the tensor's storage holds this array, and nothing else does
    weakref.finalize(lent, _give_back, memory).atexit = False
    return torch.from_numpy(lent).view(shape)


def kept_bytes() -> int:
    """Count the bytes kept that nothing uses."""
    # A copy: threads change it meanwhile.
    return sum(4 * size * len(many) for size, many in _free.copy().items())


def _give_back(memory: Any) -> None:
    if kept_bytes() + memory.nbytes > KEPT:
        _free.clear()  # sizes change: what other sizes left is of no use
    _free[memory.size].append(memory)
