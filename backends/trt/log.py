"""What TensorRT calls back: messages and progress."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any

from ..base import Progress


def logger(trt: Any) -> Any:
    """An ILogger that keeps errors, and the last of the warnings."""

    class Log(trt.ILogger):
        def __init__(self) -> None:
            trt.ILogger.__init__(self)
            self.errors: list[str] = []
            self.warnings: list[str] = []

        def log(self, severity: Any, msg: str) -> None:
            levels = trt.ILogger.Severity
            if severity in (levels.INTERNAL_ERROR, levels.ERROR):
                self.errors.append(msg)
            elif severity == levels.WARNING:
                self.warnings = [*self.warnings[-19:], msg]

    return Log()


@dataclass
class Phases:
    """The builder's phases that have begun and not ended: name -> (steps, done)."""

    progress: Progress
    running: dict[str, tuple[int, int]] = field(default_factory=dict)
    told: float = 0.0

    def step(self, name: str, done: int) -> None:
        steps, _ = self.running.get(name, (0, 0))
        self.running[name] = (steps, done)
        if time.monotonic() - self.told >= 1:
            self.told = time.monotonic()
            self.progress("; ".join(f"{n} {d}/{s}" for n, (s, d) in self.running.items()))


def progress_monitor(trt: Any, progress: Progress) -> Any:
    """An IProgressMonitor that tells the phases, and ends the build once `stopped` is set."""

    class Monitor(trt.IProgressMonitor):
        def __init__(self) -> None:
            trt.IProgressMonitor.__init__(self)
            self.stopped = False
            self.phases = Phases(progress)

        def phase_start(self, phase_name: str, parent_phase: str, num_steps: int) -> None:
            self.phases.running[phase_name] = (num_steps, 0)

        def phase_finish(self, phase_name: str) -> None:
            self.phases.running.pop(phase_name, None)

        def step_complete(self, phase_name: str, step: int) -> bool:
            self.phases.step(phase_name, step)
            return not self.stopped

    return Monitor()
