"""The part of a backend that plans depend on: supported features, and the memory layout of an
engine.

Plans, memory checks of builds and loaders of engines take the bytes of weights from the program
that `stored` returns, and those of caches and scratch from the backend's methods.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from g4ir.errors import InputError
from g4ir.ir.graph import Program
from g4ir.ops.kv_quant import NARROW

from .engine_limits import Limits
from .formats import DEVICES, DTYPES, cache_bytes


def no_scratch(program: Program) -> Callable[[Limits], int]:
    return lambda limits: 0


@dataclass(frozen=True)
class Setting:
    """A setting of a backend: `g4ir build --set NAME=VALUE`."""

    choices: tuple[str, ...]
    default: str
    help: str


class PlannedBackend:
    """The part of a backend (backends/base.py) that a plan depends on. By default weights and
    caches are stored as the graphs declare them."""

    name: str
    #: devices that its engines run on, the default first
    devices: tuple[str, ...]
    #: IR names of the supported dtypes; an engine has the spec's by default, or the first if that
    #: is not supported
    dtypes: tuple[str, ...]
    settings: Mapping[str, Setting] = {}
    #: supported dtypes of quantised KV caches (ops/kv_quant.py)
    kv_dtypes: tuple[str, ...] = tuple(NARROW)
    #: why it supports no others, for the error
    kv_reason: str = ""
    #: whether it supports activation quantisation (ops/codecs.py: fake_quantize)
    rounds_activations: bool = True
    #: whether a verification step runs as a prefill chunk, so that its tokens must fit in one
    verifies_in_chunks: bool = False
    #: whether it supports several ranks (tensor parallelism)
    shares: bool = False

    def stored(self, program: Program, device: str) -> Program:
        """Return optimised graphs with weights in the layout of the backend's matmuls on a device:
        for example quantised weights column-major, or dequantised at build."""
        return program

    def cache_bytes(self, program: Program, limits: Limits) -> int:
        """Return the bytes of the caches of a session of max_batch sequences."""
        return cache_bytes(program, limits.max_batch, limits.max_seq)

    def scratch_bytes(
        self, program: Program, device: str, settings: Mapping[str, str]
    ) -> Callable[[Limits], int]:
        """Return, as a function of the limits, the bytes that a step needs beyond the workspace of
        its graphs."""
        return no_scratch(program)


class Definition(PlannedBackend):
    """The reference backend (the interpreter) as plans need it; imports no torch."""

    name = "reference"
    devices = DEVICES
    dtypes = DTYPES
    shares = True


DEFINITION = Definition()


def checked_settings(backend: PlannedBackend, given: Mapping[str, str]) -> dict[str, str]:
    """Return name -> value of every setting of the backend, `given` or its default; InputError on
    an unknown name or value."""
    known = backend.settings
    for name, value in given.items():
        if name not in known:
            names = ", ".join(known) or "none"
            raise InputError(f"--set {name}: backend {backend.name} has the settings: {names}")
        if value not in known[name].choices:
            choices = ", ".join(known[name].choices)
            raise InputError(
                f"--set {name}={value}: expected one of {choices} ({known[name].help})"
            )
    return {name: given.get(name, s.default) for name, s in known.items()}
