"""The machine as the TensorRT backend sees it: alone, and by what several ranks exchange."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from g4ir.errors import EngineError
from g4ir.parallel.group import Group
from g4ir.plan.fit import device_memory
from g4ir.ui.paths import cache_root

from . import probe

if TYPE_CHECKING:
    from ..torch_compile.cuda_graph import Record


#: the type that a capsule's address has; a capsule points to the name as long as it lives
HANDLE = b"ncclComm_t"


def capsule(address: int) -> Any:
    """Return an address in the form that TensorRT's binding takes one in."""
    make = ctypes.pythonapi.PyCapsule_New
    make.restype = ctypes.py_object
    make.argtypes = [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]
    return make(address, HANDLE, None)


def communicator_of(group: Group) -> Any:
    """Return the NCCL communicator of all ranks, for execution contexts; all ask at a time."""
    return capsule(group.communicator())


def recorded_by_all(record: Record, agree: Callable[[bool], list[Any]]) -> Record:
    """Return what records a step where every rank can. One that ran it launch by launch would make
    no context where the others make theirs, and wait for it. `agree` gathers what ranks say."""

    def recorded(work: Callable[[], None]) -> Callable[[], None]:
        said = EngineError("another rank could not record the step")
        made = None
        try:
            made = record(work)
        except EngineError as e:
            said = e
        if not all(agree(made is not None)) or made is None:
            raise said
        return made

    return recorded


def cache_dir() -> Path:
    """Return the folder where timing caches are kept between builds."""
    return cache_root() / "tensorrt"


def recorder_of(device: str) -> Record | None:
    from ..torch_compile.cuda_graph import recorded

    return recorded if device == "cuda" else None


@dataclass(frozen=True)
class Host:
    """A machine's abilities; other values stand for another machine."""

    tensorrt: Callable[[], probe.Api] = probe.require_tensorrt
    check_gpu: Callable[[], None] = probe.require_gpu
    gpu: Callable[[], str] = probe.gpu
    architecture: Callable[[], str] = probe.architecture
    memory: Callable[[str], int] = device_memory
    free: Callable[[str], int] = probe.free_memory
    #: ranks -> what the contexts of this one are given, by which they exchange
    communicator: Callable[[Group], Any] = communicator_of
    timings: Callable[[], Path] = cache_dir
    #: whether a build has a process of its own
    apart: bool = True
    #: device -> what makes of a step one that is replayed; None: steps run launch by launch
    record: Callable[[str], Record | None] = recorder_of

    def machine(self, device: str) -> str:
        """Return the GPU and the TensorRT that plans are made for."""
        return f"{device} {self.architecture()} tensorrt-{self.tensorrt().short}"
