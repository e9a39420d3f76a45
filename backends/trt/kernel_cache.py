"""TensorRT-RTX's runtime cache: kernels that it compiles just in time for the current GPU when it
loads an engine.

The cache file is next to the engine directory, which contains files of the build only. The cache is
native code, so it is read only if no other user can write to its file, and only for the engine, GPU
and library version that wrote it. Losing it costs only time: an unusable file is reported and
removed.
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
    """Creates the execution contexts of an engine directory, which share compiled kernels."""

    def __init__(self, api: Api, file: Path, key: str, progress: Progress) -> None:
        """`key` identifies the engine, the GPU and the library."""
        self.api, self.file, self.progress = api, file, progress
        self._key = key.encode()
        self._cache: Any = None
        self._stored = b""

    def context(self, engine: Any, label: str, recorded: bool) -> Any:
        """Return an execution context with caller-provided memory; None if the library fails.
        Captured steps have few shapes, and get kernels specialised when a shape first occurs. All
        others use shape-generic kernels: kernels specialised in the background would make results
        depend on timing."""
        trt = self.api.trt
        self.progress(f"preparing kernels for this GPU: {label}")
        config = engine.create_runtime_config()
        managed = trt.ExecutionContextAllocationStrategy.USER_MANAGED
        config.set_execution_context_allocation_strategy(managed)
        strategy = trt.DynamicShapesKernelSpecializationStrategy
        config.dynamic_shapes_kernel_specialization_strategy = (
            strategy.EAGER if recorded else strategy.NONE
        )
        # Steps are captured by cuda/graph.py, not by the library too.
        config.cuda_graph_strategy = trt.CudaGraphStrategy.DISABLED
        if self._cache is None:
            self._cache = self._opened(config)
        config.set_runtime_cache(self._cache)
        return engine.create_execution_context(config)

    def keep(self) -> None:
        """Write the compiled kernels if they differ from those read; best effort."""
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
        """Read the cache file; ValueError if it is unusable."""
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
        self.progress(f"{self.file} is not used, since {why}: kernels are compiled again")
        with suppress(OSError):
            self.file.unlink()
