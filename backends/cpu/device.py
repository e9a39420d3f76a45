"""The CPU: C kernels, step programs, tiled weights."""

from __future__ import annotations

import platform
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from g4ir.backends.base import Task
from g4ir.backends.inductor.device import Compiler, Device
from g4ir.backends.inductor.programs import Steps
from g4ir.backends.inductor.target import Target
from g4ir.ir.graph import Graph, Program
from g4ir.ops.types import torch
from g4ir.ui.processor import cpu_flags

from .library import kernels
from .tiles import in_tiles


class Cpu(Device):
    """The CPU, which runs step programs. Imports of torch are deferred."""

    name = "cpu"
    packages = ("torch",)

    def needs(self) -> tuple[Callable[[], object], ...]:
        return (lambda: kernels().check(),)

    def machine(self) -> str:
        capability = torch.backends.cpu.get_cpu_capability()
        return f"{platform.machine()} {capability} {','.join(cpu_flags())}"

    def stored(self, program: Program) -> Program:
        """Return the program with tiled weights."""
        return in_tiles(program)

    def runtime(self, task: Task, steps: Steps, cuda_graph: bool) -> Any:
        from .runtime import CpuRuntime

        return CpuRuntime(task)


class CompiledCpu(Cpu, Compiler):
    """The CPU with programs of torch's compiler: `--set programs=inductor`, which tests on a CPU
    the code path of GPUs."""

    compiles = True

    def target(self, rows: int) -> Target:
        return Target(self.name)

    def lowered(self, g: Graph, target: Target) -> Any:
        from g4ir.backends.inductor.lower import COMMON
        from g4ir.backends.inductor.lowered import lowered_by_op

        return lowered_by_op(g, COMMON)

    def sources(self) -> Sequence[Path]:
        return []

    def runtime(self, task: Task, steps: Steps, cuda_graph: bool) -> Any:
        from g4ir.backends.inductor.runtime import ProgramRuntime

        return ProgramRuntime(task, steps)


DEVICE, COMPILER = Cpu(), CompiledCpu()
