"""What is this machine: the gap between dependent kernels of a CUDA graph; the cost of a launch;
rates of reading, copying and multiplying."""

from __future__ import annotations

import os
import shutil
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import triton
import triton.language as tl

from bench.common import seconds
from bench.gpu.engines import CARD, DRY, Scale
from g4ir.backends.cuda.graph import recorded
from g4ir.backends.inductor.device import find_device
from g4ir.bench.roof import Meter, passes_seconds, synchronize
from g4ir.bench.system import environment
from g4ir.errors import check_all
from g4ir.ui.memory import free_memory

__all__ = ["CARD", "DRY"]
#: number of dependent kernels in the CUDA graph whose gaps are measured
CHAIN = 500


@triton.jit
def _count(x):
    """Add 1 to a number."""
    tl.store(x, tl.load(x) + 1)


@pytest.mark.limit(60)
def test_preflight(measure: Any, scale: Scale, out: Path) -> None:
    measure("machine", partial(machine, out, scale))
    measure("gap", partial(gap, scale))
    measure("rates", lambda: asdict(Meter(scale.device, torch.bfloat16).measure()))


def machine(out: Path, scale: Scale) -> dict[str, Any]:
    """Describe the machine. MissingError if programs cannot be compiled on it."""
    check_all(*find_device(scale.device).needs())
    free = torch.cuda.mem_get_info()[0] if scale.device == "cuda" else free_memory()
    return {
        **environment(scale.device),
        "processors": os.cpu_count(),
        "free_gb": free >> 30,
        "disk_gb": shutil.disk_usage(out).free >> 30,
    }


def gap(scale: Scale) -> dict[str, Any]:
    """Measure the microseconds per kernel of a CUDA graph of dependent, nearly empty kernels, and
    of the host to launch one. `ok`: each saw the result of the one before."""
    counted = torch.zeros(1, dtype=torch.int32, device=scale.device)
    on_card = scale.device == "cuda"
    start = partial(_count[(1,)], counted, num_warps=1) if on_card else partial(counted.add_, 1)

    def chain() -> None:
        for _ in range(CHAIN):
            start()

    passes = partial(passes_seconds, recorded(chain), 10) if on_card else partial(seconds, chain)
    times = sorted(passes() / CHAIN * 1e6 for _ in range(10))
    host = seconds(chain) / CHAIN * 1e6
    synchronize(scale.device)
    runs = round(int(counted) / CHAIN)
    return {
        "kernels": CHAIN,
        "us_p50": np.percentile(times, 50),
        "us_best": times[0],
        "host_us": host,
        "ok": int(counted) == runs * CHAIN,
    }
