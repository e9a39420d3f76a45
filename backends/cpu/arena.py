"""Memory arena for the values of step programs (step_program.py)."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from heapq import heappop, heappush
from itertools import count

import torch

Tensor = torch.Tensor

#: rows (batch x tokens) up to which decode and verification steps use the same blocks; verification
#: steps of more rows run in pieces (`CpuRuntime._run_program`)
ROWS = 8
#: alignment of a value's memory, in bytes
LINE = 64


class Arena:
    """Memory for the values of steps: reused after a value's last use, and by the next step.

    A block has the size of its value in a step of ROWS rows, or of the step's rows if these are
    more; with `max_sizes` (bytes, in the order of allocation) in the largest step. So steps of
    fewer rows use the same blocks. The oldest free block of a size is taken first, so that a value
    has the same address in all these steps. Memory that no step touches never becomes resident.
    """

    def __init__(self, device: str, max_sizes: Sequence[int] = ()) -> None:
        self.device, self.rows, self.max_sizes = device, ROWS, max_sizes
        #: bytes of this step's values, in the order of allocation
        self.sizes: list[int] = []
        #: size -> heap of free blocks (number, memory)
        self._free: defaultdict[int, list[tuple[int, Tensor]]] = defaultdict(list)
        #: storage -> its block, for blocks in use
        self._lent: dict[int, tuple[int, Tensor]] = {}
        #: storage -> number of its users
        self._users: Counter[int] = Counter()
        self._numbers = count()

    def begin(self, rows: int) -> None:
        """Free all blocks for a step of `rows` rows, which overwrites earlier steps' values."""
        self.rows = rows
        self.sizes.clear()
        for number, block in self._lent.values():
            heappush(self._free[block.numel()], (number, block))
        self._lent.clear()
        self._users.clear()

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Return an uninitialised tensor in a block that is in use until `use` or `begin` frees
        it."""
        size = torch.Size(shape).numel() * dtype.itemsize
        self.sizes.append(size)
        size = size * max(ROWS, self.rows) // self.rows
        if self.max_sizes:
            size = self.max_sizes[len(self.sizes) - 1]
        size = -(-max(size, 1) // LINE) * LINE
        if free := self._free[size]:
            number, block = heappop(free)
        else:
            number = next(self._numbers)
            block = torch.empty(size, dtype=torch.uint8, device=self.device)
        self._lent[storage_of(block)] = number, block
        return block.view(dtype)[: torch.Size(shape).numel()].view(shape)

    def use(self, t: Tensor, more: int) -> None:
        """Add `more` users (0 or negative, too) of a tensor's memory; a block left without users is
        freed."""
        key = storage_of(t)
        self._users[key] += more
        if not self._users[key] and key in self._lent:
            number, block = self._lent.pop(key)
            heappush(self._free[block.numel()], (number, block))


def storage_of(t: Tensor) -> int:
    """Return the identity of a tensor's storage."""
    return t.untyped_storage()._cdata
