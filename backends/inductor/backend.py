"""`--backend torch`: Inductor programs on a GPU; on the CPU step programs and torch's ops, or with
`--set programs=inductor` Inductor programs too."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from g4ir.backends.base import Backend, Prepared, Task
from g4ir.errors import EngineError
from g4ir.ir.graph import Program
from g4ir.plan.backend import Setting
from g4ir.plan.engine_limits import Limits
from g4ir.plan.formats import DTYPES
from g4ir.ui.progress import Progress

from . import workers
from .compile import check_program
from .device import DEVICES, Device, find_compiler, find_device
from .programs import phase_steps
from .segment import Step

#: file name of a program
PROGRAM = re.compile(r"[0-9a-f]{24}\.pt2")
#: programs compiled in parallel
JOBS = max(1, min(os.cpu_count() or 1, 8))

#: manifest's record: graph -> program file of each step; None for eager ops
Programs = dict[str, tuple[str | None, ...]]


class TorchBackend(Backend):
    """Programs compiled ahead of time on CUDA; step programs and torch's ops on the CPU by
    default."""

    name = "torch"
    devices = tuple(DEVICES)
    dtypes = DTYPES
    shares = True
    record = Programs
    settings = {
        "programs": Setting(
            ("auto", "inductor"),
            "auto",
            "inductor: on the CPU too, programs of torch's compiler instead of g4ir's C kernels",
        )
    }

    def needs(self, device: str) -> tuple[Callable[[], object], ...]:
        return find_device(device).needs()

    def machine(self, device: str) -> str:
        return find_device(device).machine()

    def machine_of(self, device: str, compiled: Mapping[str, Any]) -> str:
        """Return the instruction set of compiled programs; an engine without programs, which has
        weights and graphs only, runs on any CPU."""
        return self.machine(device) if self.has_native_code(compiled) else "any"

    def takes_adapters(self, device: str, settings: Mapping[str, str]) -> bool:
        """Whether engines take LoRA adapters: only step programs do, not compiled programs."""
        return not _compiles(device, settings)

    def has_native_code(self, compiled: Mapping[str, Any]) -> bool:
        return any(map(any, compiled.values()))

    def stored(self, program: Program, device: str) -> Program:
        return find_device(device).stored(program)

    def packages(self, device: str) -> tuple[str, ...]:
        return find_device(device).packages

    def compile(self, task: Task, settings: Mapping[str, str]) -> dict[str, Any]:
        if not _compiles(task.device, settings):
            return {}
        steps = phase_steps(task.program, task.limits)
        files = self._compiled(task, texts_of(steps))
        return {phase: tuple(files.get(s.text) for s in many) for phase, many in steps.items()}

    def _compiled(self, task: Task, texts: Sequence[str]) -> dict[str, str]:
        """Compile programs; return text -> file name."""
        device = find_compiler(task.device)
        target = device.target(task.limits.max_batch)
        for note in device.notes(target):
            task.progress(note)
        folder = task.folder / "programs"
        return workers.compile_all(texts, target, folder, JOBS, task.progress)

    def scratch_bytes(
        self, program: Program, device: str, settings: Mapping[str, str]
    ) -> Callable[[Limits], int]:
        return find_device(device).scratch_bytes(program)

    def dry_run(self, prepared: Prepared, progress: Progress) -> dict[str, Any]:
        """Return the number of program calls, and of distinct programs; nothing if none are
        compiled."""
        config = prepared.config
        if not _compiles(config.device, config.settings):
            return {}
        texts = texts_of(phase_steps(prepared.packing.program, config.limits))
        return {"programs": {"calls": len(texts), "compiled": len(set(texts))}}

    def load(self, task: Task, files: Programs, cuda_graph: bool = True) -> Any:
        find = find_compiler if self.has_native_code(files) else find_device
        device: Device = find(task.device)
        steps = phase_steps(task.program, task.limits) if device.compiles else {}
        if device.compiles:
            _check_programs(task, steps, files)
        pairs = {name: [*zip(many, files[name], strict=True)] for name, many in steps.items()}
        return device.runtime(task, pairs, cuda_graph)


def _compiles(device: str, settings: Mapping[str, str]) -> bool:
    return settings["programs"] == "inductor" or find_device(device).compiles


def texts_of(steps: Mapping[str, Sequence[Step]]) -> list[str]:
    """Return the segment text of each program call, in order; equal segments repeat."""
    return [s.text for many in steps.values() for s in many if s.text]


def _check_programs(task: Task, steps: Mapping[str, Sequence[Step]], files: Programs) -> None:
    """Raise EngineError unless the folder has a program compiled from each segment."""
    folder = task.folder / "programs"
    texts = {name: [s.text for s in many] for name, many in steps.items()}
    if files.keys() != texts.keys():
        raise EngineError(
            f"{folder}: the manifest has programs of the graphs {', '.join(files) or 'none'}; "
            f"expected {', '.join(texts)}; build the engine again"
        )
    checked: set[tuple[str, str]] = set()
    for name, many in texts.items():
        expected = [bool(t) for t in many]
        if expected != [f is not None for f in files[name]]:
            problem = f"{folder}: the manifest's programs of {name} are not those of its segments"
            raise EngineError(f"{problem}; build the engine again")
        checked |= {(f, t) for f, t in zip(files[name], many) if f and t}
    for file, text in sorted(checked):
        if not PROGRAM.fullmatch(file) or not (folder / file).is_file():
            raise EngineError(f"{folder}: no program {file!r}; build the engine again")
        check_program(folder / file, text)


BACKEND = TorchBackend()
