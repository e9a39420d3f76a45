"""Kernels that TensorRT-RTX finishes for the current GPU when it loads an engine, and the file that
keeps them for the next time (its runtime cache).

The file lies beside the engine directory, whose own files are those of the build. It holds native
code, so it is read only if it is this user's alone, and only for the engine, GPU and library for
which it was written. Losing it costs time alone: a file that cannot be used is removed, which is
logged once.
"""

from __future__ import annotations

import hashlib
import os
import stat
from contextlib import suppress
from pathlib import Path
from typing import Any

from g4ir.ui.files import write_file
from g4ir.ui.paths import GROUP_WORLD_WRITE
from g4ir.ui.progress import Progress

from .host import Api

#: appended to the name of the engine directory
SUFFIX = ".kernels"
#: bytes of the digest at the start of the file
DIGEST = hashlib.sha256().digest_size
#: maximum bytes of a file that is read
LARGEST = 1 << 30


class KernelCache:
    """Makes the execution contexts of an engine directory, which share their finished kernels."""

    def __init__(self, api: Api, file: Path, key: str, progress: Progress) -> None:
        """`key` names the engine, the GPU and the library."""
        self.api, self.file, self.progress = api, file, progress
        self._key = key.encode()
        self._cache: Any = None
        self._stored = b""

    def context(self, engine: Any, label: str, recorded: bool) -> Any:
        """Return an execution context with memory of the caller's; None if the library makes none.
        Steps that are recorded as a CUDA graph have few shapes, whose kernels are finished when a
        shape first occurs. All others use kernels for any shape: those for one shape, finished
        behind a step's back, would let a text depend on when it is asked for."""
        trt = self.api.trt
        self.progress(f"finishing kernels for this GPU: {label}")
        config = engine.create_runtime_config()
        managed = trt.ExecutionContextAllocationStrategy.USER_MANAGED
        config.set_execution_context_allocation_strategy(managed)
        strategy = trt.DynamicShapesKernelSpecializationStrategy
        config.dynamic_shapes_kernel_specialization_strategy = (
            strategy.EAGER if recorded else strategy.NONE
        )
        # Steps are recorded here (cuda/graph.py), not by the library as well.
        config.cuda_graph_strategy = trt.CudaGraphStrategy.DISABLED
        if self._cache is None:
            self._cache = self._opened(config)
        config.set_runtime_cache(self._cache)
        return engine.create_execution_context(config)

    def keep(self) -> None:
        """Write the finished kernels if there are more than were read; by best effort."""
        if self._cache is None:
            return
        kernels = bytes(self._cache.serialize() or b"")
        if kernels in (self._stored, b""):
            return
        try:
            write_file(self.file, [self._digest(kernels), kernels], mode=0o600)
            self._stored = kernels
        except OSError as e:
            self.progress(f"{self.file} cannot be written ({e.strerror}): kernels are not kept")

    def _opened(self, config: Any) -> Any:
        cache = config.create_runtime_cache()
        try:
            kernels = self._read()
        except FileNotFoundError:
            return cache
        except (OSError, ValueError) as e:
            self._drop(getattr(e, "strerror", None) or str(e))
            return cache
        if cache.deserialize(kernels):
            self._stored = kernels
        else:
            self._drop(f"{self.api.library.name} does not take it on this machine")
            cache.reset()
        return cache

    def _read(self) -> bytes:
        """Return the kernels in the file; ValueError says what is wrong with it."""
        flags = os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0)
        with open(os.open(self.file, flags), "rb") as file:
            status = os.fstat(file.fileno())
            if not stat.S_ISREG(status.st_mode):
                raise ValueError("it is no ordinary file")
            if status.st_uid != os.geteuid():
                raise ValueError("it belongs to another user")
            if status.st_mode & GROUP_WORLD_WRITE:
                raise ValueError("other users may write to it")
            if status.st_size > LARGEST:
                raise ValueError(f"it is larger than {LARGEST} bytes")
            raw = file.read()
        digest, kernels = raw[:DIGEST], raw[DIGEST:]
        if digest != self._digest(kernels):
            raise ValueError("it is damaged, or of another engine, GPU or library")
        return kernels

    def _digest(self, kernels: bytes) -> bytes:
        return hashlib.sha256(self._key + b"\0" + kernels).digest()

    def _drop(self, why: str) -> None:
        self.progress(f"{self.file} is not used, since {why}: kernels are finished again")
        with suppress(OSError):
            self.file.unlink()
