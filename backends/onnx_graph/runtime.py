"""Running the exported network on onnxruntime, over caches that torch owns."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import onnxruntime
import torch

from g4ir.errors import EngineError
from g4ir.ir.graph import Program
from g4ir.model.draft import DRAFT
from g4ir.ops.types import Type, torch_dtype
from g4ir.plan.engine_limits import Limits
from g4ir.ui.progress import Progress
from g4ir.weights.pack import ParamSource

from ..base import Tensors, Watch
from ..primitives.graph import network_graph
from ..primitives.network import (
    BLOCK_IDS,
    NO_BLOCK,
    ROWS,
    SLOTS,
    TURNED,
    asked_rows,
    is_ring,
    stored_type,
)
from ..primitives.runtime import NetworkCaches, NetworkRuntime
from .emitter import element_type
from .export import DRAFT_FILE, MODEL, tower_file

#: the model's own word for the caches that it updates in place
IN_PLACE = "g4ir.in_place"
#: sums in fp32: by default onnxruntime rounds what codes are multiplied with to 8 bits. And, where
#: a row has one scale, as few copies of it as its kernels take
PRODUCTS_OF_CODES = {
    "session.qdq_matmulnbits_accuracy_level": "1",
    "session.qdq_matmulnbits_block_size": "-1",
}
#: of onnxruntime's log: errors only, since each of them is raised as well
SEVERITY = 4


class OnnxCaches(NetworkCaches):
    """Caches that cannot be written in place have a second buffer, and the two change places after
    every step."""

    spare: dict[str, torch.Tensor]

    def swap(self) -> None:
        self.held, self.spare = self.spare, self.held

    def nbytes(self) -> int:
        every = {t.data_ptr(): t for t in (*self.held.values(), *self.spare.values())}
        return sum(t.nbytes for t in every.values())

    def zero(self) -> None:
        super().zero()
        for t in self.spare.values():
            t.zero_()


class OnnxRuntime(NetworkRuntime):
    """A loaded engine of the onnx backend."""

    def __init__(
        self,
        program: Program,
        limits: Limits,
        folder: Path,
        params: ParamSource,
        progress: Progress,
    ) -> None:
        graph = network_graph(program)
        self.graphs, self.folder = program.graphs, folder
        self.limits, self.source, self.path = limits, params, folder / MODEL
        self.state = {v.name: v for v in graph.state}
        self.outputs = graph.outputs
        progress(MODEL)
        coded = any(True for _ in graph.find("dequantize_columns"))
        self.mapped = self.outputs[0].type.dtype == "f32" and not coded
        self.session = open_session(self.path, self.mapped)
        self.names = {i.name for i in self.session.get_inputs()}
        facts = self.session.get_modelmeta().custom_metadata_map
        if IN_PLACE not in facts:
            raise EngineError(f"{self.path} is not of this engine; build it again")
        self.in_place = frozenset(facts[IN_PLACE].split(","))
        self._counted: dict[int, torch.Tensor] = {}
        #: of towers and the drafter, opened when they are first used
        self._others: dict[Path, onnxruntime.InferenceSession] = {}

    def new_state(self, batch: int) -> OnnxCaches:
        types = {n: stored_type(v.type, self.limits) for n, v in self.state.items()}
        rings = [n for n, v in self.state.items() if is_ring(v.type)]
        state = OnnxCaches(types, rings, batch, self.limits)
        state.spare = {
            n: t if n in self.in_place else torch.zeros_like(t) for n, t in state.held.items()
        }
        return state

    def run(
        self,
        phase: str,
        feeds: dict[str, torch.Tensor],
        state: OnnxCaches,
        context: int,
        logits: bool,
        watch: Watch | None = None,
    ) -> Tensors | None:
        """Run one chunk; `watch` sees the results: nothing else of the one network shows."""
        if phase == DRAFT:
            return self._draft(feeds, state, context)
        batch, size = feeds["positions"].shape
        rows = asked_rows(phase, feeds)
        given = {
            BLOCK_IDS: torch.full((batch, size), NO_BLOCK),
            ROWS: rows,
            **feeds,
            SLOTS: self._count(state.slots(context)),
            TURNED: state.turned,
        }
        state.turn(feeds["positions"])
        inputs = {k: t.contiguous() for k, t in given.items() if k in self.names}
        outputs = {f"{name}.next": t for name, t in state.spare.items()}
        asked = {"B": batch, "S": size, "R": rows.shape[1]}
        made: dict[str, torch.Tensor] = {}
        if logits or watch:
            made = {v.name: _empty(v.type.bind(asked)) for v in self.outputs}
        where = f"in a {phase} chunk of {batch} x {size} tokens"
        _run(self.session, {**inputs, **state.held}, {**outputs, **made}, self.path, where)
        state.swap()
        if watch:
            for name, t in made.items():
                watch(name, t)
        return made if logits else None

    def _draft(
        self, feeds: dict[str, torch.Tensor], state: OnnxCaches, context: int
    ) -> dict[str, torch.Tensor]:
        path, graph = self.folder / DRAFT_FILE, self.graphs[DRAFT]
        drafter = self._other(path, self.mapped)
        names = {i.name for i in drafter.get_inputs()}
        slots = self._count(state.slots(context))
        given = {**feeds, **state.held, SLOTS: slots, TURNED: state.turned}
        inputs = {k: t.contiguous() for k, t in given.items() if k in names}
        batch = len(feeds["written"])
        made = {v.name: _empty(v.type.bind({"B": batch})) for v in graph.outputs}
        _run(drafter, inputs, made, path, f"in a draft of {batch} rows")
        return made

    def encode(self, tower: str, feeds: Tensors) -> torch.Tensor:
        path, (soft,) = self.folder / tower_file(tower), self.graphs[tower].outputs
        session, out = self._other(path, soft.type.dtype == "f32"), _empty(soft.type)
        inputs = {k: t.contiguous() for k, t in feeds.items()}
        _run(session, inputs, {soft.name: out}, path, f"on {', '.join(feeds)}")
        return out

    def _other(self, path: Path, mapped: bool) -> onnxruntime.InferenceSession:
        if path not in self._others:
            self._others[path] = open_session(path, mapped)
        return self._others[path]

    def _count(self, n: int) -> torch.Tensor:
        if n not in self._counted:
            self._counted[n] = torch.arange(n)
        return self._counted[n]

    def close(self) -> None:
        del self.session
        self._others.clear()
        self.source.close()


def open_session(
    path: Path, mapped: bool = False, written: Path | None = None
) -> onnxruntime.InferenceSession:
    """Return a model on the CPU with torch's number of threads; EngineError where it is refused.
    What onnxruntime made of it is `written`, if asked for.

    `mapped`: weights are read where they lie in their files, instead of copied into the layouts
    that onnxruntime likes best. Loading then takes no time and no memory but the page cache's (4 GB
    of weights: 0.2 s against 15 s on two cores, 0.3 GB of memory against a peak of 5.5 GB); a step
    takes up to twice as long. Not for f16, whose products need weights widened to f32, nor for
    quantised weights, whose products would make them dense in every step.
    """
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = torch.get_num_threads()
    options.log_severity_level = SEVERITY
    if written:
        options.optimized_model_filepath = str(written)
    without = ["ConstantFolding"] if mapped else []
    options.add_session_config_entry("session.disable_prepacking", str(int(mapped)))
    for key, value in PRODUCTS_OF_CODES.items():
        options.add_session_config_entry(key, value)
    try:
        return onnxruntime.InferenceSession(
            str(path), options, providers=["CPUExecutionProvider"], disabled_optimizers=without
        )
    except Exception as err:
        raise EngineError(
            f"{path}: onnxruntime {onnxruntime.__version__} does not take it: {_first_line(err)}; "
            f"build it again, or update onnxruntime"
        ) from err


def _empty(t: Type) -> torch.Tensor:
    return torch.empty([int(d) for d in t.shape], dtype=torch_dtype(t.dtype))


def _run(session: Any, inputs: Tensors, outputs: Tensors, path: Path, where: str) -> None:
    try:
        binding = session.io_binding()
        _bind(binding.bind_input, inputs)
        _bind(binding.bind_output, outputs)
        session.run_with_iobinding(binding)
    except Exception as err:
        raise EngineError(
            f"{path}: onnxruntime {onnxruntime.__version__} failed {where}: {_first_line(err)}"
        ) from err


def _bind(bind: Any, tensors: Tensors) -> None:
    """Bind tensors by address: onnxruntime reads and writes torch's memory."""
    for name, t in tensors.items():
        bind(name, "cpu", 0, _element(t), list(t.shape), t.data_ptr())


_ELEMENTS = {torch_dtype(d): element_type(d) for d in ("f32", "f16", "i64", "i32", "bool")}


def _element(t: torch.Tensor) -> Any:
    return _ELEMENTS[t.dtype]


def _first_line(err: Exception) -> str:
    return (str(err).strip().splitlines() or [type(err).__name__])[0][:300]
