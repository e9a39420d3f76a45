"""What a kind of device adds to the programs of torch's compiler. Each has a room with one record
of it; nothing here asks which device it is."""

from __future__ import annotations

import importlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from g4ir.backends.base import Task
from g4ir.ir.graph import Graph, Program
from g4ir.plan.backend import no_scratch
from g4ir.plan.engine_limits import Limits

from .target import Target

#: name -> the module with its DEVICE
DEVICES = {"cpu": "g4ir.backends.cpu.device", "cuda": "g4ir.backends.cuda.device"}


class Device(ABC):
    """A kind of device. What is not said here again adds nothing."""

    name: str
    #: packages whose versions its engines depend on
    packages: tuple[str, ...]
    #: whether it computes graphs without programs of the compiler, as step programs where it can
    records = False
    #: module that takes long to import, which compiling processes share
    preload: str

    @abstractmethod
    def needs(self) -> tuple[Callable[[], object], ...]:
        """Return checks of the environment for a build; each raises MissingError."""

    @abstractmethod
    def check_compiler(self) -> None:
        """Raise MissingError where programs cannot be compiled."""

    @abstractmethod
    def machine(self) -> str:
        """Return the instruction set that compiled code needs, as text to compare and to show."""

    @abstractmethod
    def target(self, rows: int) -> Target:
        """Return the target of a build on this machine, for batches of so many rows."""

    @abstractmethod
    def stored(self, program: Program) -> Program:
        """Return graphs whose weights lie as its products take them."""

    def scratch_bytes(self, program: Program) -> Callable[[Limits], int]:
        """Return, by limits, the bytes that a step needs beyond the workspace of its graphs."""
        return no_scratch(program)

    # --- what is compiled

    def recorded_phases(self, program: Program, limits: Limits) -> tuple[str, ...]:
        """Return the graphs that run as step programs."""
        return ()

    def notes(self, program: Program, target: Target) -> Iterator[str]:
        """Yield what a build should say of its target."""
        yield from ()

    # --- how

    @abstractmethod
    def lowered(self, g: Graph, target: Target) -> Any:
        """Return a graph with the lowerings of its nodes (lowered.py)."""

    @abstractmethod
    def sources(self, target: Target) -> Sequence[Path]:
        """Return files of the room that a program's code follows from."""

    def versions(self, target: Target) -> Sequence[str]:
        """Return versions of packages, beside torch's, that a program's code follows from."""
        return ()

    def options(self, text: str) -> dict[str, Any]:
        """Return options of torch's compiler for a program."""
        return {}

    # --- running

    @abstractmethod
    def runtime(
        self,
        task: Task,
        steps: Mapping[str, Sequence[Any]],
        files: Mapping[str, Sequence[str | None]],
        cuda_graph: bool,
    ) -> Any:
        """Return a loaded engine."""


def find_device(name: str) -> Device:
    """Return the record of a device."""
    device: Device = importlib.import_module(DEVICES[name]).DEVICE
    return device
