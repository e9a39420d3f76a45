"""What this machine can do now: bytes and FLOPs per second, measured in the process that uses
them."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch

from ..cost import Roof
from .stats import median
from .system import free_memory

#: the buffer: larger than any cache
BUFFER_BYTES = 1 << 30
TRIES = 5
#: columns of the buffer as a matrix
COLUMNS = 4096
#: a product may take this long
MATMUL_S = 0.3
SIDES = {"cpu": (512, 1024, 2048), "cuda": (4096, 8192)}


@dataclass(frozen=True)
class Rates:
    """Bytes per second of a plain read (the faster of a sum and a matrix-vector product) and of a
    copy (both directions counted), FLOPs per second of a square matrix product: each the best of
    TRIES."""

    read: float
    copy: float
    matmul: float

    @property
    def bandwidth(self) -> float:
        return max(self.read, self.copy)

    def roof(self) -> Roof:
        return Roof(self.bandwidth, self.matmul, "measured")

    def to_dict(self) -> dict[str, float]:
        return asdict(self)


def middle(rates: list[Rates]) -> Rates:
    """The median of each rate."""
    return Rates(*(median([getattr(r, k) for r in rates]) for k in ("read", "copy", "matmul")))


class Meter:
    """Holds its operands, so that a measurement allocates nothing."""

    def __init__(self, device: str, dtype: torch.dtype) -> None:
        self.device = device
        room = torch.cuda.mem_get_info()[0] if device == "cuda" else free_memory()
        rows = min(BUFFER_BYTES, room // 8) // 4 // (2 * COLUMNS) * 2
        self.buffer = torch.ones(rows, COLUMNS, device=device)
        self.vector, self.result = (torch.ones(n, device=device) for n in (COLUMNS, rows))
        self.matrix = self._largest(dtype)

    def _largest(self, dtype: torch.dtype) -> torch.Tensor:
        """The largest matrix whose product is quick enough."""
        for side in SIDES[self.device]:
            m = torch.ones(side, side, dtype=dtype, device=self.device)
            self._seconds(lambda m=m: m @ m)  # type: ignore[misc]
            if 4 * self._seconds(lambda m=m: m @ m) > MATMUL_S:  # type: ignore[misc]
                break
        return m

    def measure(self) -> Rates:
        """About half a second on a CPU."""
        m, source, target = self.matrix, *self.buffer.chunk(2)
        flops = 2 * m.shape[0] ** 3
        read = min(
            self._best(self.buffer.sum),
            self._best(lambda: torch.mv(self.buffer, self.vector, out=self.result)),
        )
        return Rates(
            self.buffer.nbytes / read,
            2 * source.nbytes / self._best(lambda: target.copy_(source)),
            flops / self._best(lambda: m @ m),
        )

    def _best(self, f: Callable[[], Any]) -> float:
        return min(self._seconds(f) for _ in range(TRIES))

    def _seconds(self, f: Callable[[], Any]) -> float:
        synchronize(self.device)
        start = time.perf_counter()
        f()
        synchronize(self.device)
        return time.perf_counter() - start


def synchronize(device: str) -> None:
    """Wait until the device has done what it was given."""
    if device == "cuda":
        torch.cuda.synchronize()
