"""The runtime of GPUs over an engine for the CPU: its steps are the CPU's programs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from g4ir.backends.base import GraphRun, Tensors
from g4ir.backends.cpu.runtime import CpuRuntime
from g4ir.backends.cuda.runtime import CudaRuntime
from g4ir.backends.inductor.runtime import ProgramRuntime
from g4ir.backends.kv_cache import Caches


class GpuOnCpu(CudaRuntime):
    """Nothing is recorded until a test says so."""

    def __init__(self, runtime: ProgramRuntime) -> None:
        self.__dict__.update(runtime.__dict__)
        self.record = None
        self.any_length = False


class GpuOnStepPrograms(GpuOnCpu, CpuRuntime):
    """Phases that are step programs stay those."""

    def run(self, step: GraphRun, state: Caches) -> Any:
        room = CudaRuntime if (step.phase, True) in self.plans else CpuRuntime
        return room.run(self, step, state)

    def _step(self, phase: str, state: Caches) -> Callable[[Tensors], Tensors]:
        if (phase, True) not in self.plans:
            return lambda feeds: self._run_program(GraphRun(phase, feeds, 0), state)
        return super()._step(phase, state)


def use_gpu_runtime(engine: Any, patch: Any) -> Any:
    """Give an engine for the CPU the runtime of GPUs, and return it."""
    if not isinstance(engine.runtime, GpuOnCpu):
        of = GpuOnStepPrograms if isinstance(engine.runtime, CpuRuntime) else GpuOnCpu
        patch.setattr(engine, "runtime", of(engine.runtime))
        patch.setattr(engine, "_idle", None)  # a session kept from before has no step of this kind
    return engine.runtime
