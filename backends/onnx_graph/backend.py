"""`--backend onnx`: exports an ONNX model, which onnxruntime runs here on the CPU, and other
runtimes elsewhere."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from g4ir.backends.base import Backend, Task
from g4ir.backends.primitives.graph import text_graph
from g4ir.backends.primitives.network import stored_bytes
from g4ir.backends.primitives.weights import by_columns
from g4ir.errors import MissingError
from g4ir.ir.graph import Program
from g4ir.model.draft import DRAFT
from g4ir.plan.engine_limits import Limits
from g4ir.quant.rewrite import simplify_formats
from g4ir.ui.progress import Progress

if TYPE_CHECKING:
    from g4ir.backends.base import Prepared

NEEDS = ("onnx", "onnxruntime")


@dataclass(frozen=True)
class Exported:
    """The manifest's record of an export: ONNX opset, and number of nodes of model.onnx."""

    opset: int
    nodes: int


class OnnxBackend(Backend):
    """Exports graphs to ONNX through the tensor primitives; runs them on onnxruntime."""

    name = "onnx"
    devices = ("cpu",)
    #: onnxruntime has almost no bf16 operators on CPUs
    dtypes = ("f32",)
    kv_dtypes = ()
    kv_reason = "onnxruntime's Concat, Gather, Slice and TensorScatter lack this dtype on the CPU"
    rounds_activations = False
    verifies_in_chunks = True
    packs_weights = True
    record = Exported

    def packages(self, device: str) -> tuple[str, ...]:
        return NEEDS

    def needs(self, device: str) -> tuple[Callable[[], object], ...]:
        return (partial(require, *NEEDS),)

    def stored(self, program: Program, device: str) -> Program:
        """Return graphs whose quantised weights are int8, int4 or fp8, and column-major, since
        onnxruntime fuses only such weights with matmuls; others are converted to int8 or
        dequantised. Embedding tables stay row-major."""
        return program.map(simplify_formats).map(by_columns)

    def compile(self, task: Task, settings: Mapping[str, str]) -> dict[str, Any]:
        from .export import export

        task.progress("writing the ONNX models")
        return export(task.program, task.limits, task.folder)

    def cache_bytes(self, program: Program, limits: Limits) -> int:
        return stored_bytes(text_graph(program), limits)

    def dry_run(self, prepared: Prepared, progress: Progress) -> dict[str, Any]:
        require("onnx")
        from .export import EMBED, MODEL, NullStorage, models, node_counts, summary

        program = prepared.packing.program
        exported = dict(models(program, prepared.config.limits, NullStorage()))
        report: dict[str, Any] = {"onnx": summary(exported.pop(MODEL))}
        del exported[EMBED]
        counts = {
            file.removesuffix(".onnx"): f"{sum(node_counts(model).values())} nodes"
            for file, model in exported.items()
        }
        drafter = {DRAFT: counts.pop(DRAFT)} if DRAFT in counts else {}
        return {**report, **({"towers": counts} if counts else {}), **drafter}

    def load(self, task: Task, manifest: Any, cuda_graph: bool = True) -> Any:
        require("onnxruntime")
        from .runtime import OnnxRuntime

        return OnnxRuntime(task.program, task.limits, task.folder, task.params, task.progress)


def require(*modules: str, backend: str = "onnx") -> None:
    """Raise MissingError, naming the backend, if one of the packages is not installed."""
    absent = [name for name in modules if importlib.util.find_spec(name) is None]
    if absent:
        fix = "`pip install 'g4ir[onnx]'`"
        raise MissingError(f"--backend {backend} needs the library {' and '.join(absent)}: {fix}")


BACKEND = OnnxBackend()
