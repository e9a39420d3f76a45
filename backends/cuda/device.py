"""NVIDIA GPUs: Triton kernels and CUDA graphs in addition to Inductor programs."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from g4ir.backends.base import Task
from g4ir.backends.inductor.device import Compiler
from g4ir.backends.inductor.programs import Steps, phases
from g4ir.backends.inductor.target import Target
from g4ir.ir.graph import Graph, Program
from g4ir.ops.types import torch
from g4ir.plan.engine_limits import Limits
from g4ir.quant.rewrite import simplify_formats

from .kernels.base import byte_params, codes_of
from .schedule import dense_bytes, same_kernels, schedule
from .target import HOPPER, find_target, has_large_blocks
from .toolkit import toolchain

#: files of this folder that compiled programs depend on
SOURCES = ("kernels/*.py", "lowerings.py", "schedule.py")


class Cuda(Compiler):
    """NVIDIA GPUs. Torch is imported late, so that `g4ir kernels` works without torch."""

    name = "cuda"
    packages = ("torch", "triton")

    def needs(self) -> tuple[Callable[[], object], ...]:
        return toolchain(", or build with --device cpu")

    def machine(self) -> str:
        return f"cuda sm_{''.join(map(str, torch.cuda.get_device_capability()))}"

    def target(self, rows: int) -> Target:
        return find_target(rows)

    def stored(self, program: Program) -> Program:
        """Return the program with weights that no kernel reads converted to int8 or dequantised at
        build, unless they are int8, int4 or fp8 already."""
        return program.map(lambda g: simplify_formats(g, lambda n: bool(codes_of(n))))

    def byte_params(self, g: Graph) -> frozenset[str]:
        return byte_params(g)

    def scratch_bytes(self, program: Program) -> Callable[[Limits], int]:
        """Return a function from limits to scratch bytes: the max bytes of weights that a step
        dequantises for one node, with the kernels that max_batch selects on a Hopper GPU."""

        @cache
        def of_rows(rows: int) -> int:
            target = Target("cuda", HOPPER, rows)
            graphs = (program.graphs[p] for p in phases(program))
            return max(dense_bytes(schedule(g, target)) for g in graphs)

        return lambda limits: of_rows(same_kernels(limits.max_batch))

    def notes(self, target: Target) -> Iterator[str]:
        if not has_large_blocks(target.gpu):
            yield (
                "attention uses torch's kernels: g4ir's are for GPUs with 227 KiB of shared memory "
                "per block (Hopper and data center Blackwell)"
            )

    def lowered(self, g: Graph, target: Target) -> Any:
        from .lowerings import lowered

        return lowered(schedule(g, target))

    def sources(self) -> Sequence[Path]:
        folder = Path(__file__).resolve().parent
        return [path for name in SOURCES for path in sorted(folder.glob(name))]

    def options(self) -> dict[str, Any]:
        return {"combo_kernels": True}  # independent ops share a launch

    def versions(self) -> Sequence[str]:
        return [importlib.metadata.version("triton")]

    def runtime(self, task: Task, steps: Steps, cuda_graph: bool) -> Any:
        from .runtime import CudaRuntime

        return CudaRuntime(task, steps, cuda_graph)


DEVICE = COMPILER = Cuda()
