"""The machine, the versions and the memory in use, as kept beside the numbers."""

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

#: load beyond the cores that says nothing
SPARE = 0.25
PACKAGES = ("transformers", "triton")


def environment(device: str = "cpu") -> dict[str, Any]:
    """Return CPU or GPU model, clocks where they can be read, threads, versions, commit, date."""
    gpu = device == "cuda"
    models, clocks = (_lines("/proc/cpuinfo", key) for key in ("model name", "cpu MHz"))
    versions = {}
    for package in PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[package] = importlib.metadata.version(package)
    return {
        **({"gpu": torch.cuda.get_device_name(), "cuda": torch.version.cuda} if gpu else {}),
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


def _lines(file: str, key: str, separator: str = ":") -> list[str]:
    """Return what a file of the system says of a key; nothing where there is none."""
    with contextlib.suppress(OSError):
        lines = Path(file).read_text().splitlines()
        return [line.partition(separator)[2].strip() for line in lines if line.startswith(key)]
    return []


def commit() -> str:
    """Return the commit of the checkout that runs; `unknown` where this is none."""
    root = Path(__file__).resolve().parents[2]
    if not (root / ".git").exists():
        return "unknown"
    command = ["git", "--no-optional-locks", "describe", "--always", "--dirty", "--match=-"]
    with contextlib.suppress(OSError):
        done = subprocess.run(command, capture_output=True, text=True, cwd=root)
        return done.stdout.strip() or "uncommitted"
    return "unknown"


def load_average() -> float | None:
    """Return the load of the last minute; None where the system has none."""
    with contextlib.suppress(OSError, AttributeError):
        return os.getloadavg()[0]
    return None


def busy_text(load: float | None) -> str | None:
    """Say that the machine was busy at the start, so that times are too long; None where it was
    not."""
    cores = os.cpu_count() or 1
    if load is None or load <= cores + SPARE:
        return None
    return (
        f"the machine is busy (load average {load:.1f} on {cores} cores at the start): times are "
        f"too long; run again when it is quiet"
    )


def reset_peak(device: str) -> None:
    """Start a new peak, where the system lets us."""
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()


def peak_memory(device: str) -> dict[str, int]:
    """Return bytes since `reset_peak`, or since the process began where the system cannot say: the
    process's resident memory and the CUDA allocator's."""
    cuda = {"cuda_bytes": torch.cuda.max_memory_allocated()} if device == "cuda" else {}
    return {"rss_bytes": peak_resident_bytes(), **cuda}
