"""Calls of a decode step: compiled regions, interpreter nodes, CUDA kernels."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from g4ir.backends.torch_compile.programs import phase_steps
from g4ir.backends.torch_compile.segment import Segment
from g4ir.engine.engine import Engine


def calls_per_step(engine: Engine) -> dict[str, int]:
    """Count compiled regions and the eager ops between them; nodes if the backend is not torch."""
    if engine.facts.backend != "torch":
        return {"nodes": len(engine.program.graphs["decode"].nodes)}
    steps = phase_steps(engine.program, engine.limits)["decode"]
    regions = sum(isinstance(s, Segment) for s in steps)
    return {"programs": regions, "glue": len(steps) - regions}


def kernels_per_step(step: Callable[[], Any]) -> dict[str, float]:
    """Count the CUDA kernels of a step, and their milliseconds."""
    from torch.profiler import ProfilerActivity, profile

    step()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        step()
        torch.cuda.synchronize()
    kernels = [
        e
        for e in profiler.events()
        if e.device_type == torch.autograd.DeviceType.CUDA and not e.name.startswith("Mem")
    ]
    return {"kernels": len(kernels), "device_ms": sum(e.device_time for e in kernels) / 1e3}
