"""`--backend torch`: compile the segments of prefill and decode, keep their files."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from g4ir.ir import Program, bind
from g4ir.packing import ParamSource

from ..base import Limits, Progress
from . import compile as compiler
from .segment import Segment, Step, schedule

PHASES = ("prefill", "decode")
KERNELS = "kernels.so"


def phase_steps(program: Program, limits: Limits) -> dict[str, list[Step]]:
    """The schedule of each phase; an engine for one row has its batch dim fixed."""
    fixed = {"B": 1} if limits.max_batch == 1 else {}
    return {p: schedule(bind(program.graphs[p], **fixed)) for p in PHASES}


class TorchBackend:
    """Ahead-of-time compiled for the CPU or for CUDA."""

    name = "torch"
    devices = ("cpu", "cuda")

    def check(self, device: str) -> None:
        compiler.check_toolchain(device)

    def machine(self, device: str) -> str:
        return compiler.machine(device)

    def compile(
        self, program: Program, limits: Limits, device: str, out: Path, progress: Progress
    ) -> dict[str, Any]:
        steps = phase_steps(program, limits)
        texts = [s.text for many in steps.values() for s in many if isinstance(s, Segment)]
        jobs = max(1, min(os.cpu_count() or 1, 8))
        files = compiler.compile_all(texts, device, out / "programs", jobs, progress)
        if device == "cpu":
            compiler.compile_kernels(out / "programs" / KERNELS)
        return {
            phase: [files[s.text] if isinstance(s, Segment) else None for s in many]
            for phase, many in steps.items()
        }

    def load(
        self, program: Program, limits: Limits, device: str, folder: Path, kept: dict[str, Any],
        params: ParamSource, progress: Progress,
    ) -> Any:  # fmt: skip
        from .runtime import TorchRuntime

        return TorchRuntime(program, limits, device, folder / "programs", kept, params, progress)


BACKEND = TorchBackend()
