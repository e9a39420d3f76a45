"""The vector extensions of this machine's processor."""

from __future__ import annotations

from functools import cache
from pathlib import Path


@cache
def cpu_flags() -> tuple[str, ...]:
    """Return the vector extensions of this CPU, sorted; compiled code may use any of them."""
    info = Path("/proc/cpuinfo")
    text = info.read_text() if info.exists() else ""
    line = next((x for x in text.splitlines() if x.startswith(("flags", "Features"))), "")
    wanted = ("avx", "amx", "fma", "bmi", "sve", "asimd", "bf16", "fp16")
    return tuple(sorted(f for f in line.partition(":")[2].split() if f.startswith(wanted)))
