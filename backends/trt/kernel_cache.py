"""TensorRT-RTX's runtime cache: kernels that it compiles just in time for the current GPU when it
loads an engine, kept in the user's cache folder. Losing them costs only time."""

from __future__ import annotations

import hashlib
from contextlib import suppress
from typing import Any

from g4ir.errors import TrustError
from g4ir.ui.files import write_file
from g4ir.ui.paths import cache_root, check_private, private
from g4ir.ui.progress import Progress

from .host import Api


class KernelCache:
    """Creates the execution contexts of an engine directory, which share compiled kernels. `key`
    identifies the engine, the GPU and the library."""

    def __init__(self, api: Api, key: str, progress: Progress) -> None:
        name = f"{hashlib.sha256(key.encode()).hexdigest()[:24]}.kernels"
        self.api, self.file, self.progress = api, cache_root() / "tensorrt" / name, progress
        self._cache: Any = None
        self._stored = b""

    def context(self, engine: Any, label: str, recorded: bool) -> Any:
        """Return an execution context with caller-provided memory; None if the library fails.
        Captured steps have few shapes, and get kernels specialised when a shape first occurs. All
        others use shape-generic kernels: kernels specialised in the background would make results
        depend on timing."""
        trt = self.api.trt
        self.progress(f"finishing kernels for this GPU: {label}")
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
            self._cache = self._open(config)
        config.set_runtime_cache(self._cache)
        return engine.create_execution_context(config)

    def keep(self) -> None:
        """Write the compiled kernels if there are more than were read; best effort."""
        kernels = bytes(self._cache.serialize() or b"") if self._cache else b""
        if kernels not in (self._stored, b""):
            with suppress(TrustError, OSError):
                write_file(private(self.file.parent) / self.file.name, [kernels])
                self._stored = kernels

    def _open(self, config: Any) -> Any:
        """Return the runtime cache with the kernels of earlier loads: native code, so only if other
        users cannot write it."""
        cache = config.create_runtime_cache()
        with suppress(TrustError, OSError):
            check_private(self.file.parent)
            kernels = self.file.read_bytes()
            if cache.deserialize(kernels):
                self._stored = kernels
            else:
                cache.reset()
        return cache
