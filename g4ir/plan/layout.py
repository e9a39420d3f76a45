"""How a backend lays out an engine in the memory of its device, and what a plan has to know of it.

A backend (backends/base.py) fills in a `Layout`; plans, memory checks of builds and loaders of
engines take the bytes from the program that `stored` returns, and from nowhere else.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Protocol

from g4ir.ir.graph import Program
from g4ir.ops.kv_quant import NARROW
from g4ir.weights.pack import as_it_is

from .engine_limits import Limits
from .formats import DTYPES, cache_bytes


def plain_caches(program: Program, limits: Limits) -> int:
    """Return the bytes of the KV caches as the graphs declare them."""
    return cache_bytes(program, limits.max_batch, limits.max_seq)


def no_scratch(program: Program) -> Callable[[Limits], int]:
    return lambda limits: 0


@dataclass(frozen=True)
class Layout:
    """The memory layout of one backend on one device, with its settings."""

    backend: str = "reference"
    device: str = ""
    settings: tuple[tuple[str, str], ...] = ()
    #: returns optimised graphs whose weights are stored as the backend's products take them
    stored: Callable[[Program], Program] = field(default=as_it_is, compare=False)
    #: returns the bytes of the KV caches of a session of max_batch sequences
    caches: Callable[[Program, Limits], int] = field(default=plain_caches, compare=False)
    #: returns, as a function of the limits, the bytes of workspace beyond that of the graphs
    scratch: Callable[[Program], Callable[[Limits], int]] = field(default=no_scratch, compare=False)


class PlannedBackend(Protocol):
    """The part of a backend that a plan depends on."""

    @property
    def name(self) -> str: ...
    @property
    def devices(self) -> tuple[str, ...]: ...
    @property
    def dtypes(self) -> tuple[str, ...]: ...
    @property
    def kv_dtypes(self) -> tuple[str, ...]: ...
    @property
    def kv_reason(self) -> str: ...
    @property
    def rounds_activations(self) -> bool: ...
    @property
    def verifies_in_chunks(self) -> bool: ...
    @property
    def shares(self) -> bool: ...
    @property
    def place(self) -> str: ...

    def layout(self, device: str, settings: Mapping[str, str]) -> Layout: ...


@dataclass(frozen=True)
class Definition:
    """A backend that stores weights and caches as the graphs declare them."""

    name: str = "reference"
    devices: tuple[str, ...] = ("cpu", "cuda")
    dtypes: tuple[str, ...] = DTYPES
    kv_dtypes: tuple[str, ...] = tuple(NARROW)
    kv_reason: str = ""
    rounds_activations: bool = True
    verifies_in_chunks: bool = False
    shares: bool = True
    place: str = "where it was built"

    def layout(self, device: str, settings: Mapping[str, str]) -> Layout:
        return Layout(device=device)


DEFINITION = Definition()
