"""The target that programs are compiled for."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Target:
    """The device; on CUDA also the GPU's name (cuda/target.py) and `rows`, the maximum batch size.

    `gpu` is empty on the CPU, where no Triton kernels are used.
    """

    device: str
    gpu: str = ""
    rows: int = 1

    def __str__(self) -> str:
        return f"{self.device} {self.gpu} rows {self.rows}" if self.gpu else self.device
