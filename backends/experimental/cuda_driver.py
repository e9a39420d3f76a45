"""Kernels loaded and started by CUDA's driver, through ctypes: nothing is compiled.

The structures are those of cuda.h (CUlaunchConfig, CUlaunchAttribute), which have been the same
since CUDA 12.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from typing import Any

import torch

from g4ir.errors import EngineError

LIBRARY = "libcuda.so.1"
#: CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION: a kernel may begin before the one in front
#: of it has ended
EARLY = 6
#: CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES, and how much a kernel has without it
SHARED, USUAL_SHARED = 8, 48 * 1024
#: triton's kernels end with two addresses, of memory that ours have no use for
UNUSED = (ctypes.c_uint64(0), ctypes.c_uint64(0))


class Attribute(ctypes.Structure):
    """CUlaunchAttribute, whose value is a union of 64 bytes."""

    _fields_ = (("id", ctypes.c_int), ("pad", ctypes.c_int), ("value", ctypes.c_int * 16))


class Config(ctypes.Structure):
    """CUlaunchConfig."""

    _fields_ = (
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("shared", ctypes.c_uint),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.POINTER(Attribute)),
        ("count", ctypes.c_uint),
    )


def current_stream() -> int:
    """Return the stream that torch works on: while a step is recorded, that of the recording."""
    return int(torch.cuda.current_stream().cuda_stream)


class CudaDriver:
    """The functions of the driver's library that kernels need. `stream`: where they are started."""

    def __init__(self, library: Any = None, stream: Callable[[], int] = current_stream) -> None:
        try:
            self.library = ctypes.CDLL(LIBRARY) if library is None else library
        except OSError as e:
            raise EngineError(f"{LIBRARY} cannot be loaded: {e}") from e
        self.stream = stream

    def _call(self, name: str, *words: Any) -> None:
        if status := getattr(self.library, name)(*words):
            text = ctypes.c_char_p()
            self.library.cuGetErrorString(status, ctypes.byref(text))
            why = (text.value or b"unknown").decode(errors="replace")
            raise EngineError(f"the CUDA driver: {name} returned {status}, {why}")

    def load(self, cubin: bytes, name: str, shared: int) -> Any:
        """Return the kernel of an assembled file."""
        module, function = ctypes.c_void_p(), ctypes.c_void_p()
        self._call("cuModuleLoadData", ctypes.byref(module), cubin)
        self._call("cuModuleGetFunction", ctypes.byref(function), module, name.encode())
        if shared > USUAL_SHARED:
            self._call("cuFuncSetAttribute", function, SHARED, shared)
        return function

    def start(
        self,
        function: Any,
        grid: Sequence[int],
        threads: int,
        shared: int,
        values: Sequence[Any],
        early: bool,
    ) -> None:
        """Start a kernel on the stream; the driver copies the values of its operands."""
        attribute = Attribute(id=EARLY)
        attribute.value[0] = 1
        config = Config(
            grid=(ctypes.c_uint * 3)(*grid),
            block=(ctypes.c_uint * 3)(threads, 1, 1),
            shared=shared,
            stream=self.stream(),
            attributes=ctypes.pointer(attribute) if early else None,
            count=int(early),
        )
        given = (*values, *UNUSED)
        addresses = (ctypes.c_void_p * len(given))(*(ctypes.addressof(v) for v in given))
        self._call("cuLaunchKernelEx", ctypes.byref(config), function, addresses, None)
