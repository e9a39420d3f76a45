"""What the CPU adds to programs of torch's compiler: the C kernels, step programs, tiles."""

from __future__ import annotations

import platform
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from g4ir.backends.base import Task
from g4ir.backends.host_cpu import cpu_flags
from g4ir.backends.inductor.device import Device
from g4ir.backends.inductor.target import Target
from g4ir.backends.inductor.toolchain import cpp_compiler
from g4ir.ir.graph import Graph, Program
from g4ir.plan.engine_limits import Limits

from .library import KERNELS_FILE, compile_kernels, compile_part, is_part, kernel_parts, part_file
from .tiles import in_tiles

#: the files of this room that a program's code follows from
SOURCES = ("attention.py", "isa.py", "lowerings.py", "pyops.py", "wrappers.py")


class Cpu(Device):
    """The CPU. What needs torch is imported late: processes that compile the C kernels do not."""

    name = "cpu"
    records = True
    packages = ("torch",)
    preload = "torch._inductor.compile_fx"

    def needs(self) -> tuple[Callable[[], object], ...]:
        return (cpp_compiler,)

    def machine(self) -> str:
        import torch

        capability = torch.backends.cpu.get_cpu_capability()
        return f"{platform.machine()} {capability} {','.join(cpu_flags())}"

    def target(self, rows: int) -> Target:
        return Target(self.name)

    def stored(self, program: Program) -> Program:
        """Return graphs whose products take weights in tiles."""
        return in_tiles(program)

    def recorded_phases(self, program: Program, limits: Limits) -> tuple[str, ...]:
        from .step_program import step_phases

        return step_phases(program, limits)

    def parts(self, program: Program) -> Sequence[str]:
        graphs = program.graphs.values()
        dtypes = {v.type.dtype for g in graphs for v in g.params}
        return kernel_parts(dtypes, any(n.op == "fake_quantize" for g in graphs for n in g.nodes))

    def early_parts(self) -> Sequence[str]:
        from .wrappers import SHARED_PARTS

        return (*kernel_parts(()), *SHARED_PARTS)

    def link(self, folder: Path, parts: Sequence[str]) -> None:
        compile_kernels(folder / KERNELS_FILE, parts)

    def lowered(self, g: Graph, target: Target) -> Any:
        from .lowerings import lowered

        return lowered(g)

    def sources(self, target: Target) -> Sequence[Path]:
        return [Path(__file__).with_name(name) for name in SOURCES]

    def options(self, text: str) -> dict[str, Any]:
        from .wrappers import program_options

        return program_options(text)

    def packaging(
        self, folder: Path, options: dict[str, Any], made_of: str
    ) -> AbstractContextManager[dict[str, Any]]:
        from .wrappers import interface_apart

        return interface_apart(folder, options, made_of)

    def part_file(self, text: str) -> str | None:
        return part_file(text) if is_part(text) else None

    def compile_part(self, text: str, target: Target, path: Path) -> bool:
        if is_part(text):
            compile_part(text, path)
            return True
        from .wrappers import SHARED_PARTS, compile_shared

        shared = text in SHARED_PARTS
        if shared:
            compile_shared(text, target)
        return shared

    def runtime(
        self,
        task: Task,
        steps: Mapping[str, Sequence[Any]],
        files: Mapping[str, Sequence[str | None]],
        cuda_graph: bool,
    ) -> Any:
        from .runtime import CpuRuntime

        return CpuRuntime(task, steps, files)


DEVICE = Cpu()
