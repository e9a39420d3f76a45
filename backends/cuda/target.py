"""The GPU target of a build on this machine."""

from __future__ import annotations

from g4ir.backends.inductor.target import Target
from g4ir.ops.types import torch

#: name of Hopper GPUs, the H200 aside; target of memory estimates
HOPPER = "h100"


def gpu_name(product: str, capability: tuple[int, int]) -> str:
    """Name a GPU: h200 if the product's name contains that (H200, GH200); other Hopper cards: h100;
    other GPUs: their capability, for example sm_100."""
    for name in ("h200", HOPPER):
        if name in product.lower():
            return name
    return HOPPER if capability == (9, 0) else f"sm_{capability[0]}{capability[1]}"


def has_large_blocks(gpu: str) -> bool:
    """Whether a thread block may use 227 KiB of shared memory, as on Hopper and data center
    Blackwell; on other GPUs it has 99 KiB or more."""
    return gpu.startswith(("h", "sm_10"))


def find_target(rows: int) -> Target:
    """Return the target of a build for this machine's GPU."""
    name = gpu_name(torch.cuda.get_device_name(), torch.cuda.get_device_capability())
    return Target("cuda", name, rows)
