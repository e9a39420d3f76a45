"""The machine, the versions and the memory in use, as reported with every measurement."""

from __future__ import annotations

import contextlib
import platform
import subprocess
import time
from pathlib import Path
from typing import Any

import psutil
import torch

from g4ir import __version__
from g4ir.builder.library import version_of
from g4ir.ui.memory import peak_resident_bytes

PACKAGES = ("transformers", "triton")


def environment(device: str = "cpu") -> dict[str, Any]:
    """Return GPU (if `device` is cuda) and CPU, its clock if it can be read, torch's threads,
    versions, commit, date, the load average of the last minute, and whether the CPU is `busy`."""
    on_gpu, clock = device == "cuda", psutil.cpu_freq()
    return {
        **({"gpu": torch.cuda.get_device_name(), "cuda": torch.version.cuda} if on_gpu else {}),
        "cpu": _cpu_model(),
        "cpu_mhz": round(clock.current) if clock else None,
        "cores": torch.get_num_threads(),
        "isa": torch.backends.cpu.get_cpu_capability(),
        "torch": torch.__version__,
        **{name: version for name in PACKAGES if (version := version_of(name))},
        "g4ir": __version__,
        "commit": commit(),
        "python": platform.python_version(),
        "date": time.strftime("%Y-%m-%d"),
        "load_average": (load := psutil.getloadavg()[0]),
        "busy": load > (psutil.cpu_count() or 1) + 0.25,
    }


def _cpu_model() -> str:
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor()


def commit() -> str:
    """Return the short hash of the checkout that runs, with `-dirty` if files differ from it;
    `unknown` outside of a checkout or without git, `uncommitted` if git names no commit."""
    root = Path(__file__).resolve().parents[2]
    command = ["git", "--no-optional-locks", "describe", "--always", "--dirty", "--match=-"]
    with contextlib.suppress(OSError):
        if (root / ".git").exists():
            result = subprocess.run(command, capture_output=True, text=True, cwd=root)
            return result.stdout.strip() or "uncommitted"
    return "unknown"


def reset_peak(device: str) -> None:
    """Reset the peak of resident memory, if the system permits it, and on cuda the allocator's."""
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()


def peak_memory(device: str) -> dict[str, int]:
    """Return peak bytes since `reset_peak` (or since the process started if it could not be reset):
    the process's resident memory, and on cuda the CUDA allocator's."""
    cuda = {"cuda_bytes": torch.cuda.max_memory_allocated()} if device == "cuda" else {}
    return {"rss_bytes": peak_resident_bytes(), **cuda}
