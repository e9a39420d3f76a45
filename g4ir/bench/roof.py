"""The roofline: bytes and FLOPs per second of this machine, measured in the process that uses them.

On a GPU (H200) a pass over the buffer takes a quarter of a millisecond, of which launch and
synchronisation would be a tenth: many passes are timed between two CUDA events. A GPU's clock
depends on its power draw, which is lower for constant operands: so they are random there, and the
median counts, not the best.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from statistics import median
from typing import Any

import torch

from g4ir.ui.memory import free_on

#: bytes of the buffer that is read and copied: more than any cache; less only if less than 8 times
#: as much memory is free
BUFFER_BYTES = 1 << 30
#: on a CPU: measurements, of which the best counts
TRIES = 5
#: on a GPU: bytes moved between two events, maximum passes between them, and number of measurements
TIMED_BYTES = 8 << 30
MAX_PASSES = 20
REPEATS = 10
#: columns of the buffer as a matrix
COLUMNS = 4096
#: rows and columns of the matrices of a product
SIDES = {"cpu": 2048, "cuda": 8192}
#: rows and columns of the matrices by whose product the faster dtype is chosen: small, since torch
#: computes only 0.4 GFLOP/s in bf16 on a CPU with AVX2
TRIED_SIDE = 256


@dataclass(frozen=True)
class Rates:
    """Bytes per second of a plain read (the faster of a sum and a matrix-vector product) and of a
    copy (both directions counted), FLOPs per second of a square matrix product: each the best of
    TRIES on a CPU, the median of REPEATS on a GPU. The product is in the engine's dtype; on a CPU
    in float32 if that is faster, as without bf16 instructions."""

    read: float
    copy: float
    matmul: float

    @property
    def bandwidth(self) -> float:
        return max(self.read, self.copy)


def median_rates(rates: Sequence[Rates]) -> Rates:
    """Return the median of each rate."""
    return Rates(*(median([getattr(r, f.name) for r in rates]) for f in fields(Rates)))


class Meter:
    """Measures `Rates` on operands that are allocated once."""

    def __init__(self, device: str, dtype: torch.dtype) -> None:
        self.device, self.rates = device, list[Rates]()
        rows = min(BUFFER_BYTES, free_on(device) // 8) // 4 // (2 * COLUMNS) * 2
        self.buffer = self._filled(rows, COLUMNS)
        self.vector, self.result = (self._filled(n) for n in (COLUMNS, rows))
        dtypes = {dtype, torch.float32} if device == "cpu" else {dtype}
        square = self._filled(SIDES[device], SIDES[device])
        tried = square[:TRIED_SIDE, :TRIED_SIDE].contiguous()
        self.matrix = square.to(max(dtypes, key=lambda d: self._flop_rate(tried.to(d))))

    def _filled(self, *shape: int) -> torch.Tensor:
        make = torch.randn if self.device == "cuda" else torch.ones
        return make(*shape, device=self.device)

    def measure(self) -> Rates:
        """Measure the rates; append them to `rates` and return them."""
        source, target = self.buffer.chunk(2)
        passes = min(MAX_PASSES, -(-TIMED_BYTES // self.buffer.nbytes))
        read = min(
            self._typical(self.buffer.sum, passes),
            self._typical(lambda: torch.mv(self.buffer, self.vector, out=self.result), passes),
        )
        copy = self._typical(lambda: target.copy_(source), passes)
        bandwidths = self.buffer.nbytes / read, 2 * source.nbytes / copy
        self.rates.append(Rates(*bandwidths, self._flop_rate(self.matrix)))
        return self.rates[-1]

    def _flop_rate(self, m: torch.Tensor) -> float:
        return 2 * m.shape[0] ** 3 / self._typical(lambda: m @ m, MAX_PASSES)

    def _typical(self, f: Callable[[], Any], passes: int) -> float:
        """Measure the seconds of one pass: the best on a CPU, the median on a GPU."""
        if self.device == "cuda":
            return median([passes_seconds(f, passes) for _ in range(REPEATS)])
        return min(self._seconds(f) for _ in range(TRIES))

    def _seconds(self, f: Callable[[], Any]) -> float:
        synchronize(self.device)
        start = time.perf_counter()
        f()
        synchronize(self.device)
        return time.perf_counter() - start


def passes_seconds(f: Callable[[], Any], passes: int) -> float:
    """Measure the mean seconds of a pass on a GPU, between two CUDA events."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(passes):
        f()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end)) / 1e3 / passes


def synchronize(device: str) -> None:
    """Wait for the device's pending work."""
    if device == "cuda":
        torch.cuda.synchronize()
