"""Memory of the machine, of a GPU, and of this process."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from pathlib import Path

from .threads import control_groups


def device_memory(device: str) -> int:
    """Return the bytes of memory of `cuda` (the current device) or of this machine's `cpu`: the
    installed memory, or the limit of the process's control groups, if that is less."""
    if device == "cuda":
        import torch

        return int(torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory)
    import psutil

    return min([psutil.virtual_memory().total, *(limit for limit, _ in memory_limits())])


def memory_limits(root: Path = Path("/")) -> Iterator[tuple[int, int]]:
    """Yield (memory limit, memory in use), in bytes, of each of the process's control groups that
    has a limit."""
    for group in control_groups(root):
        with contextlib.suppress(OSError, ValueError):  # "max": no limit
            limit, used = (int((group / f"memory.{n}").read_text()) for n in ("max", "current"))
            yield limit, used


def free_memory() -> int:
    """Return the bytes of available memory, within the container's limit."""
    import psutil

    free = (max(limit - used, 0) for limit, used in memory_limits())
    return min([psutil.virtual_memory().available, *free])


def free_on(device: str) -> int:
    """Return the free bytes of a device's memory."""
    if device != "cuda":
        return free_memory()
    import torch

    return int(torch.cuda.mem_get_info()[0])


def peak_resident_bytes() -> int:
    """Return the peak resident memory of the process, since its start or since the last reset of
    the peak (proc(5), clear_refs)."""
    with contextlib.suppress(OSError):  # else ru_maxrss, which includes the parent's before exec
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    if sys.platform == "win32":
        import psutil

        return int(psutil.Process().memory_info().peak_wset)
    import resource

    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
