"""The TensorRT backend on the CPU: fake.py stands for TensorRT, a name for the GPU."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest

import g4ir
from g4ir.backends import find_backend
from g4ir.backends.trt.backend import BACKEND, TrtBackend
from g4ir.backends.trt.host import Api, Host, capsule, probe
from g4ir.engine.engine import Engine
from tests.trt import fake

H100 = "NVIDIA H100 80GB HBM3"
MAX_SEQ, CHUNK, ROWS = 96, 16, 3


class OnTheCpu:
    """A step runs when it is called; memory of the CPU lies anywhere."""

    alignment = 1

    def recording(self) -> bool:
        return fake.IExecutionContext.capturing

    @contextmanager
    def handle(self) -> Iterator[int]:
        yield 0


@cache
def emulated_api() -> Api:
    return probe(fake.tensorrt())


def emulated(folder: Path, gpu: str = H100, api: Callable[[], Api] | None = None) -> TrtBackend:
    """A backend that builds and runs on the CPU; timing caches lie in `folder`."""

    def communicator_of(group: Any) -> Any:
        return capsule(fake.communicator(group._all))

    host = Host(
        tensorrt=api or emulated_api,
        check_gpu=lambda: None,
        gpu=lambda: gpu,
        capability=lambda: (9, 0),
        memory=lambda device: 80 << 30,
        communicator=communicator_of,
        timings=lambda: folder / "timings",
        stream=OnTheCpu,
        record=None,
    )
    return replace(BACKEND, devices=("cpu",), host=host)


def use(monkeypatch: pytest.MonkeyPatch, backend: TrtBackend) -> None:
    """What `--backend trt` means from here on."""

    def find(name: str) -> Any:
        return backend if name == "trt" else find_backend(name)

    for user in ("build", "load"):
        monkeypatch.setattr(f"g4ir.builder.{user}.find_backend", find)


def build(out: Path, spec: Any, backend: str = "trt", **options: Any) -> Engine:
    """An engine with random weights, in fp32 unless told otherwise."""
    limits = {"max_batch": ROWS, "max_seq": MAX_SEQ, "prefill_chunk": CHUNK}
    given = {"dtype": "float32", **limits, **options}
    return g4ir.build(spec, out, backend=backend, device="cpu", random_weights=0, **given)
