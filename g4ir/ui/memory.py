"""Free memory of the machine and of a GPU."""

from __future__ import annotations

import contextlib
from pathlib import Path


def free_memory() -> int:
    """Return the bytes that the system can give, within the container's limit; 4 GiB if it does
    not say."""
    found = [4 << 30]
    with contextlib.suppress(OSError):
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                found = [int(line.split()[1]) * 1024]
    group = Path("/sys/fs/cgroup")
    with contextlib.suppress(OSError, ValueError):  # "max": no limit
        limit, used = (int((group / f"memory.{n}").read_text()) for n in ("max", "current"))
        found.append(max(limit - used, 0))
    return min(found)


def free_on(device: str) -> int:
    """Return the free bytes of the memory that a device computes in."""
    if device != "cuda":
        return free_memory()
    import torch

    return int(torch.cuda.mem_get_info()[0])
