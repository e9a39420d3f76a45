"""CPU threads: their number, and OpenMP's spin time.

GNU OpenMP's threads (library matmuls) spin 300,000 rounds (milliseconds) before they sleep. On a
busy machine that occupies the core of the thread that they wait for. 3,000 rounds cost nothing on
an idle machine and keep a busy one usable. Decode kernels have a separate thread pool
(backends/cpu/kernels/team.c).
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import MutableMapping
from pathlib import Path

from .processor import hold_libraries

#: rounds that OpenMP's threads spin before they sleep
SPIN = "3000"
#: variables by which a user sets the wait policy, and the number of threads
WAIT_VARIABLES = ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")
COUNT_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")


def configure_openmp(environ: MutableMapping[str, str] = os.environ) -> None:
    """Set OpenMP's wait policy, and its number of threads if a CPU quota grants fewer cores than
    are visible; hold libraries to the instruction set of `G4IR_ISA`. The user's own variables win.
    No effect after torch is loaded: OpenMP reads its variables then."""
    if "torch" in sys.modules:
        return
    hold_libraries(environ)
    if not any(name in environ for name in WAIT_VARIABLES):
        environ["GOMP_SPINCOUNT"] = SPIN
    if not any(name in environ for name in COUNT_VARIABLES) and usable_cores() < visible_cores():
        environ["OMP_NUM_THREADS"] = str(usable_cores())


def visible_cores() -> int:
    """Return how many cores this process may be scheduled on."""
    try:
        return len(os.sched_getaffinity(0))
    except AttributeError:  # not Linux
        return os.cpu_count() or 1


def usable_cores(root: Path = Path("/")) -> int:
    """Return how many cores this process can keep busy: its affinity, limited by the CPU quotas of
    its control groups (rounded down, at least one)."""
    quotas = [1e6]
    for group in control_groups(root):
        with contextlib.suppress(OSError, ValueError):  # "max": no quota
            quota, period = map(float, (group / "cpu.max").read_text().split())
            quotas.append(quota / period)
    return max(1, min(visible_cores(), int(min(quotas))))


def control_groups(root: Path = Path("/")) -> list[Path]:
    """Return the control group of this process and those above it (version 2)."""
    mount = root / "sys/fs/cgroup"
    with contextlib.suppress(OSError):
        for line in (root / "proc/self/cgroup").read_text().splitlines():
            if line.startswith("0::"):
                group = mount / line.removeprefix("0::/")
                return [group, *(p for p in group.parents if p.is_relative_to(mount))]
    return []
