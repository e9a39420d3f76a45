"""The target that programs are compiled for."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from pathlib import Path

#: compute capability that the kernels need
LEAST = (9, 0)
#: elements of a weight from which on the CPU's C kernels gain
FROM = 1 << 16
#: goes for a GPU that is not at hand
HOPPER = "h100"


@dataclass(frozen=True)
class Target:
    """The device; on CUDA the GPU and the maximum batch size.

    `gpu` is empty where kernels are not used: on the CPU, and on GPUs before Hopper.
    """

    device: str
    gpu: str = ""
    rows: int = 1

    def __str__(self) -> str:
        return f"{self.device} {self.gpu} rows {self.rows}" if self.gpu else self.device


def gpu_name(product: str, capability: tuple[int, int]) -> str:
    """Name a GPU: `NVIDIA H200` -> h200; another Hopper card goes by h100,
    others by their capability, such as sm_100; empty for a GPU that is too old."""
    if capability < LEAST:
        return ""
    for name in ("h200", HOPPER):
        if name in product.lower():
            return name
    return HOPPER if capability == (9, 0) else f"sm_{capability[0]}{capability[1]}"


def find_target(device: str, rows: int) -> Target:
    """Return the target of a build on this machine."""
    if device != "cuda":
        return Target(device)
    import torch

    name = gpu_name(torch.cuda.get_device_name(), torch.cuda.get_device_capability())
    return Target(device, name, rows)


def has_gemm() -> bool:
    """Whether the C kernels compute products of many rows and attention of prompts (cpu/gemm.h):
    the CPU multiplies bf16 and has no matrix unit, with which a library is faster."""
    return "avx512_bf16" in cpu_flags() and "amx_bf16" not in cpu_flags()


@cache
def cpu_flags() -> tuple[str, ...]:
    """Return the vector extensions of this CPU, sorted; compiled code may use any of them."""
    info = Path("/proc/cpuinfo")
    text = info.read_text() if info.exists() else ""
    line = next((x for x in text.splitlines() if x.startswith(("flags", "Features"))), "")
    wanted = ("avx", "amx", "fma", "bmi", "sve", "asimd", "bf16", "fp16")
    return tuple(sorted(f for f in line.partition(":")[2].split() if f.startswith(wanted)))
