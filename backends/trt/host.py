"""The machine as the TensorRT backend sees it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from g4ir.parallel.group import Group
from g4ir.plan.fit import device_memory
from g4ir.ui.paths import cache_root

from . import probe
from .ranks import communicator_of

if TYPE_CHECKING:
    from ..torch_compile.cuda_graph import Record


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
