"""Interface of a device of `--backend torch`: its runtime, and what it adds to programs of torch's
compiler. Implementations are in backends/cpu and backends/cuda."""

from __future__ import annotations

import importlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from g4ir.backends.base import Task
from g4ir.ir.graph import Graph, Program
from g4ir.plan.backend import no_scratch
from g4ir.plan.engine_limits import Limits

from .programs import Steps
from .target import Target

#: name -> the module with its DEVICE and COMPILER
DEVICES = {"cpu": "g4ir.backends.cpu.device", "cuda": "g4ir.backends.cuda.device"}


class Device(ABC):
    """A device, with or without compiled programs."""

    name: str
    #: Python packages whose versions its engines depend on
    packages: tuple[str, ...]
    #: whether graphs are compiled
    compiles = False

    @abstractmethod
    def needs(self) -> tuple[Callable[[], object], ...]:
        """Return checks of the environment for a build; each raises MissingError."""

    @abstractmethod
    def machine(self) -> str:
        """Return the instruction set of compiled code, as text that is stored, compared and
        printed."""

    @abstractmethod
    def stored(self, program: Program) -> Program:
        """Return the program with weights in the layouts of the device's kernels."""

    def scratch_bytes(self, program: Program) -> Callable[[Limits], int]:
        """Return a function from limits to the scratch bytes of a step, beyond the workspace of its
        graphs."""
        return no_scratch(program)

    @abstractmethod
    def runtime(self, task: Task, steps: Steps, cuda_graph: bool) -> Any:
        """Return the runtime of an engine; `cuda_graph`: whether steps may be CUDA graphs."""


class Compiler(Device):
    """A device with programs of torch's compiler."""

    compiles = True

    @abstractmethod
    def target(self, rows: int) -> Target:
        """Return the target of a build on this machine for batches of up to `rows` sequences."""

    @abstractmethod
    def lowered(self, g: Graph, target: Target) -> Any:
        """Return a graph with the lowerings of its nodes (lowered.py)."""

    @abstractmethod
    def sources(self) -> Sequence[Path]:
        """Return source files that compiled programs depend on."""

    def byte_params(self, g: Graph) -> frozenset[str]:
        """Return the params of a graph that its programs take as bytes [.., row bytes]."""
        return frozenset()

    def notes(self, target: Target) -> Iterator[str]:
        """Yield messages for the user of a build about its target."""
        yield from ()

    def versions(self) -> Sequence[str]:
        """Return versions of packages, except torch, that compiled programs depend on."""
        return ()

    def options(self) -> dict[str, Any]:
        """Return options of torch's compiler, in addition to compile.INDUCTOR."""
        return {}


def find_device(name: str) -> Device:
    """Return the Device of this name, a key of DEVICES."""
    return importlib.import_module(DEVICES[name]).DEVICE


def find_compiler(name: str) -> Compiler:
    """Return the Compiler of this name, for engines with compiled programs."""
    return importlib.import_module(DEVICES[name]).COMPILER
