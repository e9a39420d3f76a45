"""What is this machine, and what are the constants that the step model predicts with?

The gap between dependent kernels of a CUDA graph, also of kernels that begin early; the cost of a
launch; rates of reading, copying and multiplying. They are written as constants for
`g4ir show --timeline --constants FILE`, and the steps of the variants are predicted with them.
"""

from __future__ import annotations

import ctypes
import json
import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import triton
import triton.language as tl

from bench.common import seconds
from bench.gpu.engines import CARD, DRY, ROWS, Scale, g4ir_said, named
from g4ir.backends.cuda.graph import recorded
from g4ir.backends.cuda.kernels.launch import begin, ready
from g4ir.backends.cuda.kernels.resources import assemble
from g4ir.backends.experimental.cuda_driver import CudaDriver
from g4ir.backends.experimental.step_model import measured_text, read_constants
from g4ir.backends.inductor.device import find_device
from g4ir.bench.measure import percentile
from g4ir.bench.roof import Meter, passes_seconds, synchronize
from g4ir.bench.system import environment
from g4ir.errors import check_all
from g4ir.ui.files import write_file
from g4ir.ui.memory import free_memory

__all__ = ["CARD", "DRY"]
#: kernels of the graph whose gap is measured
CHAIN = 500


@triton.jit
def _count(x, AHEAD: tl.constexpr):
    """Add 1 to a number, as a kernel of a step does if it begins early."""
    begin(AHEAD)
    ready(AHEAD)
    tl.store(x, tl.load(x) + 1)


@pytest.mark.limit(60)
def test_preflight(measure: Any, scale: Scale, out: Path) -> None:
    measure("machine", partial(machine, out, scale))
    measure("gap", partial(gap, scale, early=False))
    measure("early gap", partial(gap, scale, early=True))
    measure("rates", lambda: asdict(Meter(scale.device, torch.bfloat16).measure()))
    gpu = gpu_of(scale)
    write_constants(measure.found, gpu, constants_file(out, gpu))


def gpu_of(scale: Scale) -> str:
    return scale.gpu or find_device(scale.device).target(1).gpu


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


def gap(scale: Scale, early: bool) -> dict[str, Any]:
    """Measure microseconds of dependent kernels of a graph with nearly no work each, and of the
    host to start one; each must see what the one before made."""
    counted = torch.zeros(1, dtype=torch.int32, device=scale.device)
    on_card = scale.device == "cuda"
    start = starter(counted, early) if on_card else partial(counted.add_, 1)

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
        "us_p50": percentile(times, 50),
        "us_best": times[0],
        "host_us": host,
        "ok": int(counted) == runs * CHAIN,
    }


def starter(x: torch.Tensor, early: bool) -> Callable[[], None]:
    """Return a function that starts a kernel by the driver, as an engine's step does."""
    kernel = assemble((_count, (1,), (x,), {"AHEAD": early, "num_warps": 1}))
    driver = CudaDriver()
    function = driver.load(kernel.cubin, kernel.name, kernel.shared)
    given = [ctypes.c_uint64(x.data_ptr())]
    return partial(driver.start, function, (1, 1, 1), 32, kernel.shared, given, early)


def constants_file(out: Path, gpu: str) -> Path:
    return out / f"step_model-{gpu}.yaml"


def write_constants(found: Mapping[str, Any], gpu: str, path: Path) -> None:
    """Write the constants of this GPU; nothing if one was not measured, or the step model does not
    know the GPU."""
    plain, early = (_pair(found.get(name, {})) for name in ("gap", "early gap"))
    rates = found.get("rates", {})
    if plain and early and "read" in rates and gpu in read_constants().gpus:
        text = measured_text(gpu, max(rates["read"], rates["copy"]) / 1e6, plain, early)
        write_file(path, [text.encode()])


def _pair(found: Mapping[str, Any]) -> tuple[float, float] | None:
    return (found["us_best"], found["us_p50"]) if found.get("ok") else None


@pytest.mark.limit(60)
@pytest.mark.parametrize("rows", ROWS)
def test_predictions(measure: Any, scale: Scale, out: Path, variant: str, rows: int) -> None:
    """Predict the steps that test_decode.py measures, by this card's constants if there are any."""
    gpu = gpu_of(scale)
    path = constants_file(out, gpu)
    options = ["--constants", str(path)] if path.exists() else []
    for c in scale.contexts[:2]:
        words = [*named(variant), "--batch", str(rows), "--context", str(c)]
        command = ["show", *words, "--timeline", "--gpu", gpu, *options, "--json"]
        measure(f"c{c}", partial(predicted, command))


def predicted(command: Sequence[str]) -> dict[str, Any]:
    said = json.loads(g4ir_said(command))
    fast, slow = said["time_us"]
    count = len(said["launches"])
    return {"us": {"fast": fast, "slow": slow}, "roof_us": said["roof_us"], "launches": count}
