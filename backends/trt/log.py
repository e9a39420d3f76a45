"""Objects that TensorRT calls back: for messages, progress, and pieces of a plan."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any

from g4ir.errors import LowerError
from g4ir.ui.progress import Progress


def logger(trt: Any, file: Path | None = None) -> Any:
    """Return an ILogger that keeps errors and writes every message to `file` as it comes. TensorRT
    keeps the first logger of a process: one is for all networks of a build."""

    class Log(trt.ILogger):
        def __init__(self) -> None:
            trt.ILogger.__init__(self)
            self.errors: list[str] = []
            self.file = file.open("a", buffering=1, errors="replace") if file else None

        def log(self, severity: Any, msg: str) -> None:
            levels = trt.ILogger.Severity
            if severity in (levels.INTERNAL_ERROR, levels.ERROR):
                self.errors.append(" ".join(msg.split()))
            if self.file:
                with suppress(OSError):  # TensorRT takes no exception
                    self.file.write(f"[{severity.name}] {msg}\n")

        def close(self) -> None:
            if self.file:
                with suppress(OSError):
                    self.file.close()
                self.file = None

        def said(self) -> str:
            """Return the last errors, as the end of a message."""
            return joined(self.errors[-3:]) or "TensorRT gave no reason"

    return Log()


def joined(errors: Sequence[str]) -> str:
    """Return each error once, on one line."""
    return " | ".join(dict.fromkeys(errors))[:2000]


@contextmanager
def all_taken(log: Any, what: str) -> Iterator[None]:
    """A context that raises LowerError if TensorRT logs an error: calls that set an attribute only
    log a refusal, and the network is built without it."""
    start = len(log.errors)
    yield
    if refused := log.errors[start:]:
        raise LowerError(f"TensorRT refused a part of {what}: {joined(refused)}")


def progress_monitor(trt: Any, progress: Progress) -> Any:
    """Return an IProgressMonitor that tells the phases that have begun and not ended, at most once
    a second, and ends the build if `stopped`."""

    class Monitor(trt.IProgressMonitor):
        def __init__(self) -> None:
            trt.IProgressMonitor.__init__(self)
            self.stopped, self.told = False, 0.0
            #: name -> steps done, of all
            self.phases: dict[str, tuple[int, int]] = {}

        def phase_start(self, phase_name: str, parent_phase: str, num_steps: int) -> None:
            self.phases[phase_name] = 0, num_steps

        def phase_finish(self, phase_name: str) -> None:
            self.phases.pop(phase_name, None)

        def step_complete(self, phase_name: str, step: int) -> bool:
            if phase_name in self.phases:
                self.phases[phase_name] = step, self.phases[phase_name][1]
            if time.monotonic() - self.told >= 1:
                self.told = time.monotonic()
                progress("; ".join(f"{n} {done}/{of}" for n, (done, of) in self.phases.items()))
            return not self.stopped

    return Monitor()


def stream_writer(trt: Any, file: IO[bytes]) -> Any:
    """Return an IStreamWriter into a file; `error` has what stopped it, as it may not raise."""

    class Writer(trt.IStreamWriter):
        def __init__(self) -> None:
            trt.IStreamWriter.__init__(self)
            self.error: OSError | None = None

        def write(self, data: bytes) -> int:
            try:
                return file.write(data)
            except OSError as e:
                self.error = e
                return 0

    return Writer()
