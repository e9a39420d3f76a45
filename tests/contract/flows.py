"""The ways to run an engine: how each is built, and what it does not offer."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from g4ir.engine.engine import Engine
from tests.cases import read_table

#: turns on another way to choose tokens; returns the steps that are prepared for it, or None
Chooser = Callable[[Engine, pytest.MonkeyPatch], list[Any] | None]


def on_the_host(engine: Engine, patch: pytest.MonkeyPatch) -> None:
    """Logits are copied and the host chooses."""
    patch.setattr(engine.runtime, "token_loop", lambda *_: None)
    patch.setattr(engine, "_idle", None)


def in_a_program(engine: Engine, patch: pytest.MonkeyPatch) -> None:
    """A step program chooses: the way of an engine for the CPU."""
    patch.setattr(engine, "_idle", None)


def in_a_loop(engine: Engine, patch: pytest.MonkeyPatch) -> list[Any]:
    """The step chooses too: as on a GPU, but without a CUDA graph, on the CPU's programs."""
    from tests.gpu_on_cpu import use_gpu_runtime

    prepared: list[Callable[[], None]] = []
    runtime = use_gpu_runtime(engine, patch)

    def record(work: Callable[[], None]) -> Callable[[], None]:
        work()  # as recording a graph does
        prepared.append(work)
        return work

    patch.setattr(runtime, "record", record)
    patch.setattr(runtime, "any_length", True)
    return prepared


#: of the engines of every flow
MAX_SEQ, CHUNK = 128, 24


@contextmanager
def emulated_tensorrt(folder: Path) -> Iterator[None]:
    """A stand-in for TensorRT while engines are built and loaded."""
    from tests.trt.emulated import emulated, use
    from tests.trt.small import one_thread

    with pytest.MonkeyPatch.context() as patch, one_thread():
        use(patch, emulated(folder))
        yield


@dataclass(frozen=True)
class Flow:
    """One backend, as the contract needs it."""

    backend: str
    #: bfloat16 if it computes in that, and how far its logits may lie from the reference's
    #: in it, where each layer adds up to 2^-5 (tests/test_rounding.py) and there are eight
    half: tuple[str, float]
    #: why something is not offered -> how it is asked for, and what it `says`
    refuses: Mapping[str, dict[str, Any]]
    choosers: Mapping[str, Chooser] = field(default_factory=lambda: {"host": on_the_host})
    #: surrounds building and loading
    using: Callable[[Path], AbstractContextManager[None]] = lambda folder: nullcontext()
    #: no other process can load its engines
    emulated: bool = False
    #: compiling another engine takes too long for every run
    slow: bool = False
    #: of tests of one row
    specs: tuple[str, ...] = ("tiny-ple", "tiny-moe")
    #: whether the short run leaves out cases of which each value appears in others
    covering: bool = False


#: fields of a flow that are no data
OF_CODE: dict[str, dict[str, Any]] = {
    "torch": {"choosers": {"host": on_the_host, "loop": in_a_loop, "program": in_a_program}},
    "trt": {"using": emulated_tensorrt},
}
FLOWS = {
    name: Flow(name, **given, **OF_CODE.get(name, {}))
    for name, given in read_table("contract/flows.yaml").items()
}
