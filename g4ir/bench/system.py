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
from g4ir.ui.posix import resource

#: what nvidia-smi is asked -> key of the report
GPU_FIELDS = {
    "driver_version": "driver",
    "clocks.sm": "clock_mhz",
    "clocks.max.sm": "max_clock_mhz",
    "clocks.mem": "memory_clock_mhz",
    "power.limit": "power_limit_w",
    "temperature.gpu": "temperature_c",
    "memory.total": "memory_mib",
    "clocks_throttle_reasons.active": "throttle_reasons",
}
#: cores of other processes that take nothing from this one's threads
SPARE = 0.25
PACKAGES = ("transformers", "triton")


def environment(device: str = "cpu") -> dict[str, Any]:
    """Return CPU or GPU model, clocks where they can be read, threads, versions, commit, date."""
    models, clocks = (_lines("/proc/cpuinfo", key) for key in ("model name", "cpu MHz"))
    versions = {}
    for package in PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[package] = importlib.metadata.version(package)
    return {
        **(_gpu() if device == "cuda" else {}),
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


def _gpu() -> dict[str, Any]:
    found: dict[str, Any] = {"gpu": torch.cuda.get_device_name(), "cuda": torch.version.cuda}
    command = [
        "nvidia-smi",
        f"--query-gpu={','.join(GPU_FIELDS)}",
        "--format=csv,noheader,nounits",
        f"--id={torch.cuda.current_device()}",
    ]
    with contextlib.suppress(OSError, subprocess.TimeoutExpired):
        done = subprocess.run(command, capture_output=True, text=True, timeout=20)
        values = [x.strip() for x in done.stdout.strip().split(",")]
        if done.returncode == 0 and len(values) == len(GPU_FIELDS):
            found |= dict(zip(GPU_FIELDS.values(), values, strict=True))
    return found


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


class OtherLoad:
    """Measures, from its creation on, how many cores other processes keep busy."""

    def __init__(self) -> None:
        self._start = time.perf_counter(), *_processor_seconds()

    def cores(self) -> float | None:
        """Return the mean number of cores; None where the system does not count them."""
        start, total, own = self._start
        if total is None or (now := _processor_seconds())[0] is None:
            return None
        elapsed = max(time.perf_counter() - start, 1e-9)
        return max(0.0, (now[0] - total - (now[1] - own)) / elapsed)


def _processor_seconds() -> tuple[float | None, float]:
    """Return the seconds that all cores were busy (other guests of the host included), and those
    of this process."""
    fields = _lines("/proc/stat", "cpu ", " ")
    # user, nice, system, idle, iowait, irq, softirq, steal; guests are part of user
    ticks = [int(x) for x in fields[0].split()[:8]] if fields else []
    busy = (sum(ticks) - sum(ticks[3:5])) / os.sysconf("SC_CLK_TCK") if ticks else None
    return busy, time.process_time()


def load_average() -> float | None:
    """Return the load of the last minute; None where the system has none."""
    with contextlib.suppress(OSError):
        return os.getloadavg()[0]
    return None


def busy_text(threads: int, others: float | None, load: float | None) -> str | None:
    """Say that the machine was busy, so that times are too long; None where it was not.

    threads: of this process. others: cores that other processes kept busy. load: the average before
    it began, which counts what it waited for too.
    """
    cores = os.cpu_count() or 1
    contended = others is not None and others > SPARE and threads + others > cores + SPARE
    if not contended and (load is None or load <= cores + SPARE):
        return None
    kept = f"other processes kept {others:.1f} of {cores} cores busy" if contended else ""
    queue = f"load average {load:.1f} on {cores} cores at the start" if load is not None else ""
    facts = ", ".join(filter(None, (kept, queue)))
    return f"the machine is busy ({facts}): times are too long; run again when it is quiet"


def reset_peak(device: str) -> None:
    """Start a new peak, where the system lets us."""
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()


def peak_memory(device: str) -> dict[str, int]:
    """Return bytes since `reset_peak`, or since the process began where the system cannot say: the
    process's resident memory and the CUDA allocator's."""
    peak = [int(text.split()[0]) for text in _lines("/proc/self/status", "VmHWM:")]
    kib = peak[0] if peak else resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    cuda = {"cuda_bytes": torch.cuda.max_memory_allocated()} if device == "cuda" else {}
    return {"rss_bytes": kib * 1024, **cuda}
