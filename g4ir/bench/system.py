"""The machine, the versions and the memory in use, as reported with every measurement."""

from __future__ import annotations

import contextlib
import importlib.metadata
import os
import platform
import subprocess
import time
from pathlib import Path
from typing import Any

import torch

from g4ir import __version__
from g4ir.ui.memory import peak_resident_bytes

#: load average above the number of cores that is tolerated
SPARE = 0.25
PACKAGES = ("transformers", "triton")


def environment(device: str = "cpu") -> dict[str, Any]:
    """Return CPU or GPU model, clocks if they can be read, threads, versions, commit, date."""
    models, clocks = _cpu_info("model name"), _cpu_info("cpu MHz")
    gpu = {}
    if device == "cuda":
        gpu = {"gpu": torch.cuda.get_device_name(), "cuda": torch.version.cuda}
    versions = {}
    for package in PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[package] = importlib.metadata.version(package)
    return {
        **gpu,
        "cpu": models[0] if models else platform.processor(),
        "cpu_mhz": round(sum(map(float, clocks)) / len(clocks)) if clocks else None,
        "cores": torch.get_num_threads(),
        "isa": torch.backends.cpu.get_cpu_capability(),
        "torch": torch.__version__,
        **versions,
        "g4ir": __version__,
        "commit": commit(),
        "python": platform.python_version(),
        "platform": platform.platform(),
        "date": time.strftime("%Y-%m-%d"),
    }


def _cpu_info(key: str) -> list[str]:
    """Return the values of a key of /proc/cpuinfo, one a core; [] if there are none."""
    with contextlib.suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return [line.partition(":")[2].strip() for line in lines if line.startswith(key)]
    return []


def commit() -> str:
    """Return the commit of the checkout that runs; `unknown` outside of one."""
    root = Path(__file__).resolve().parents[2]
    command = ["git", "--no-optional-locks", "describe", "--always", "--dirty", "--match=-"]
    with contextlib.suppress(OSError):
        if (root / ".git").exists():
            result = subprocess.run(command, capture_output=True, text=True, cwd=root)
            return result.stdout.strip() or "uncommitted"
    return "unknown"


def load_average() -> float | None:
    """Return the load average of the last minute; None if the system has none."""
    with contextlib.suppress(OSError, AttributeError):
        return os.getloadavg()[0]
    return None


def busy_text(load: float | None) -> str | None:
    """Return a warning if the machine was busy at the start."""
    cores = os.cpu_count() or 1
    if load is None or load <= cores + SPARE:
        return None
    return (
        f"the machine is busy (load average {load:.1f} on {cores} cores at the start): times are "
        f"too long; run again when it is quiet"
    )


def reset_peak(device: str) -> None:
    """Reset the peak of memory, if the system permits it."""
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()


def peak_memory(device: str) -> dict[str, int]:
    """Return peak bytes since `reset_peak` (or since the process started if it could not be reset):
    the process's resident memory and the CUDA allocator's."""
    cuda = {"cuda_bytes": torch.cuda.max_memory_allocated()} if device == "cuda" else {}
    return {"rss_bytes": peak_resident_bytes(), **cuda}
