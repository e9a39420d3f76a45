"""`--backend torch`: compile the segments of prefill and decode, keep their files."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import Any

from g4ir.errors import EngineError
from g4ir.ir.graph import Program
from g4ir.ir.rewrite import split_prologue
from g4ir.plan.engine_limits import Limits
from g4ir.plan.formats import DTYPES
from g4ir.plan.layout import no_scratch
from g4ir.plan.memory import Needs
from g4ir.quant.rewrite import simplified
from g4ir.ui import compiler_cache
from g4ir.ui.progress import Progress

from ..base import Backend, Prepared, Task
from . import workers
from .compile import check_program, machine
from .cpu_library import compile_kernels, kernel_parts
from .cuda_toolkit import toolchain
from .programs import KERNELS_FILE, choice_texts, phase_steps, phases
from .schedule import any_length, dense_bytes, same_kernels, schedule
from .segment import Segment, Step
from .target import HOPPER, Target, find_target
from .tiles import in_tiles

#: what a program's file is called
PROGRAM = re.compile(r"[0-9a-f]{24}\.pt2")
#: programs that are compiled at a time
JOBS = max(1, min(os.cpu_count() or 1, 8))


#: graph or op that chooses -> the program of each step, by file; None for eager ops
Programs = dict[str, tuple[str | None, ...]]


class TorchBackend(Backend):
    """Ahead-of-time compiled for the CPU or for CUDA."""

    name = "torch"
    devices = ("cpu", "cuda")
    dtypes = DTYPES
    native = True
    shares = True
    record = Programs

    def needs(self, device: str, ranks: int) -> tuple[Callable[[], object], ...]:
        return toolchain(device, ", or build with --device cpu")

    def machine(self, device: str) -> str:
        return machine(device)

    def stored(self, program: Program, device: str) -> Program:
        """Return graphs for the CPU, whose products take weights in tiles, or for a GPU, whose
        kernels read neither int6 nor codes with minima."""
        return in_tiles(program) if device == "cpu" else program.map(simplified)

    def packages(self, device: str) -> tuple[str, ...]:
        return ("torch", "triton") if device == "cuda" else ("torch",)

    @contextmanager
    def about_to_compile(self, device: str) -> Iterator[None]:
        """Start the processes that compile, which import torch's compiler for some seconds; at the
        end delete precompiled headers, unless another build uses them."""
        try:
            with (
                compiler_cache.in_use(),
                workers.compilers_started(JOBS, device) if JOBS > 1 else nullcontext(),
            ):
                yield
        finally:
            compiler_cache.delete_headers()

    def compile(self, task: Task, settings: Mapping[str, str]) -> dict[str, Any]:
        with compiler_cache.in_use():
            return self._compile(task, settings)

    def _compile(self, task: Task, settings: Mapping[str, str]) -> dict[str, Any]:
        program, limits, device, progress = task.program, task.limits, task.device, task.progress
        steps = phase_steps(program, limits, device)
        texts = [s.text for many in steps.values() for s in many if isinstance(s, Segment)]
        chooses = choice_texts(program, limits) if device == "cuda" else {}
        texts += chooses.values()
        target = find_target(device, limits.max_batch)
        if device == "cuda" and not target.gpu:
            progress("this GPU is older than Hopper: the library's kernels only")
        parts = _kernel_parts(program) if device == "cpu" else []
        folder = task.folder / "programs"
        files = workers.compile_all([*texts, *parts], target, folder, JOBS, progress)
        if parts:
            compile_kernels(folder / KERNELS_FILE, parts)
        kept = {
            phase: tuple(files[s.text] if isinstance(s, Segment) else None for s in many)
            for phase, many in steps.items()
        }
        return kept | {op: (files[text],) for op, text in chooses.items()}

    def scratch_bytes(
        self, program: Program, device: str, settings: Mapping[str, str]
    ) -> Callable[[Limits], int]:
        """Count the weights that products of many rows on a GPU take dense, a node at a time; and
        what a recorded chunk of a prompt holds of its own."""
        return _Scratch(program).at if device == "cuda" else no_scratch(program)

    def dry_run(self, prepared: Prepared, progress: Progress) -> dict[str, Any]:
        """Count the programs that an engine calls in all, and those that are compiled."""
        phases = phase_steps(prepared.packing.program, prepared.limits, prepared.device)
        texts = [s.text for many in phases.values() for s in many if isinstance(s, Segment)]
        return {"programs": {"calls": len(texts), "compiled": len(set(texts))}}

    def load(self, task: Task, kept: Programs, cuda_graph: bool = True) -> Any:
        from .runtime import TorchRuntime

        folder = task.folder / "programs"
        steps = phase_steps(task.program, task.limits, task.device)
        _check_programs(task, steps, folder, kept)
        return TorchRuntime(task, steps, kept, cuda_graph)


def _kernel_parts(program: Program) -> list[str]:
    graphs = program.graphs.values()
    dtypes = {v.type.dtype for g in graphs for v in g.params}
    rounded = any(n.op == "fake_quantize" for g in graphs for n in g.nodes)
    return kernel_parts(dtypes, rounded)


@dataclass(frozen=True)
class _Scratch:
    """Bytes of dense weights and of recorded chunks on a GPU, by limits."""

    program: Program

    def at(self, limits: Limits) -> int:
        dense, recorded = self._of_rows(same_kernels(limits.max_batch))
        if not recorded:
            return max(dense.values())
        sizes = limits.max_batch, limits.max_seq, limits.prefill_chunk
        chunk = dense["prefill"] + self._prefill.without_attention(*sizes)
        return max(dense.values()) + chunk

    @cached_property
    def _prefill(self) -> Needs:
        return Needs((split_prologue(self.program.graphs["prefill"])[1],))

    @cached_property
    def _of_rows(self) -> Callable[[int], tuple[dict[str, int], bool]]:
        """Function of a batch size: phase -> bytes of weights that are dequantised for one node,
        and whether chunks of prompts are recorded, which hold such weights again."""
        graphs = self.program.graphs

        @cache
        def of_rows(rows: int) -> tuple[dict[str, int], bool]:
            target = Target("cuda", HOPPER, rows)
            made = {p: schedule(graphs[p], target) for p in phases(self.program)}
            return {p: dense_bytes(s) for p, s in made.items()}, any_length(made["prefill"])

        return of_rows


def _check_programs(
    task: Task, steps: Mapping[str, Sequence[Step]], folder: Path, kept: Programs
) -> None:
    """Raise EngineError unless every segment has a program that was made of it."""
    texts: dict[str, list[str | None]] = {
        name: [s.text if isinstance(s, Segment) else None for s in many]
        for name, many in steps.items()
    }
    if task.device == "cuda":
        choices = choice_texts(task.program, task.limits).items()
        texts |= {op: [text] for op, text in choices}
    if kept.keys() != texts.keys():
        raise EngineError(
            f"{folder}: programs of {', '.join(texts)} expected, those of "
            f"{', '.join(kept)} named; build the engine again"
        )
    checked: set[tuple[str, str]] = set()
    for name, many in texts.items():
        if [t is None for t in many] != [f is None for f in kept[name]]:
            raise EngineError(
                f"{folder}: the programs of {name} are not one for each segment; "
                f"build the engine again"
            )
        checked |= {(f, t) for f, t in zip(kept[name], many) if f and t}
    for file, text in sorted(checked):
        if not PROGRAM.fullmatch(file) or not (folder / file).is_file():
            raise EngineError(f"{folder}: no program {file!r}; build the engine again")
        check_program(folder / file, text)


BACKEND = TorchBackend()
