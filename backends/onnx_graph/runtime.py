"""Runs the exported network on onnxruntime, with KV caches in torch memory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import onnxruntime
import torch

from g4ir.backends.base import GraphRun, Runtime, Tensors
from g4ir.backends.primitives.graph import network_graph
from g4ir.backends.primitives.network import (
    BLOCK_IDS,
    NO_BLOCK,
    ROWS,
    SLOTS,
    TURNED,
    is_ring,
    logit_rows,
    stored_type,
)
from g4ir.backends.primitives.runtime import NetworkCaches
from g4ir.errors import EngineError
from g4ir.ir.graph import Program
from g4ir.model.draft import DRAFT
from g4ir.model.encoder import ENCODE
from g4ir.ops.types import Type, torch_dtype
from g4ir.plan.engine_limits import Limits
from g4ir.ui.progress import Progress
from g4ir.weights.pack import ParamSource

from .export import DRAFT_FILE, MODEL, tower_file

#: metadata key of the model: caches that it updates in place
IN_PLACE = "g4ir.in_place"
#: session options: quantised matmuls in fp32, since onnxruntime by default quantises their
#: activations to int8; and, for weights with a scale per row, the largest block that its kernels
#: support (up to 256 values, instead of 32)
PRODUCTS_OF_CODES = {
    "session.qdq_matmulnbits_accuracy_level": "1",
    "session.qdq_matmulnbits_block_size": "-1",
}
#: onnxruntime's log level (fatal): errors are not logged, since they are raised as well
SEVERITY = 4


class OnnxCaches(NetworkCaches):
    """KV caches; those that cannot be updated in place are double-buffered and swapped after every
    step."""

    spare: dict[str, torch.Tensor]

    def swap(self) -> None:
        self.caches, self.spare = self.spare, self.caches

    def nbytes(self) -> int:
        every = {t.data_ptr(): t for t in (*self.caches.values(), *self.spare.values())}
        return sum(t.nbytes for t in every.values())

    def zero(self) -> None:
        super().zero()
        for t in self.spare.values():
            t.zero_()


class OnnxRuntime(Runtime):
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
        progress(f"reading {MODEL}")
        coded = any(True for _ in graph.find("dequantize_columns"))
        self.mapped = self.outputs[0].type.dtype == "f32" and not coded
        #: sessions by file; those of towers and the draft model are opened on first use
        self._sessions: dict[str, onnxruntime.InferenceSession] = {}
        facts = self._session(MODEL, self.mapped).get_modelmeta().custom_metadata_map
        if IN_PLACE not in facts:
            raise EngineError(f"{self.path} has no metadata of g4ir; build the engine again")
        self.in_place = frozenset(facts[IN_PLACE].split(","))
        self._counted: dict[int, torch.Tensor] = {}

    def _session(self, file: str, mapped: bool) -> onnxruntime.InferenceSession:
        if file not in self._sessions:
            self._sessions[file] = open_session(self.folder / file, mapped)
        return self._sessions[file]

    def _run(self, file: str, mapped: bool, feeds: Tensors, outputs: Tensors, where: str) -> None:
        """Run a model; feeds without a matching input are ignored."""
        session, path = self._session(file, mapped), self.folder / file
        names = [i.name for i in session.get_inputs() if i.name in feeds]
        try:
            binding = session.io_binding()
            _bind(binding.bind_input, {name: feeds[name].contiguous() for name in names})
            _bind(binding.bind_output, outputs)
            session.run_with_iobinding(binding)
        except Exception as err:
            raise EngineError(
                f"{path}: onnxruntime {onnxruntime.__version__} failed {where}: {_first_line(err)}"
            ) from err

    def new_state(self, batch: int) -> OnnxCaches:
        types = {n: stored_type(v.type, self.limits) for n, v in self.state.items()}
        rings = [n for n, v in self.state.items() if is_ring(v.type)]
        state = OnnxCaches(types, rings, batch, self.limits)
        state.spare = {
            n: t if n in self.in_place else torch.zeros_like(t) for n, t in state.caches.items()
        }
        return state

    def run(self, step: GraphRun, state: OnnxCaches) -> Tensors | None:
        """Run one chunk; `watch` gets the outputs only, since intermediate values of the network
        are not accessible."""
        phase, feeds, context = step.phase, step.feeds, step.context
        if phase == DRAFT:
            return self._draft(feeds, state, context)
        batch, size = feeds["positions"].shape
        if phase == ENCODE:
            batch, rows = len(feeds["ends"]), feeds["ends"][:, None]
        else:
            rows = logit_rows(phase, feeds)
        inputs = {
            BLOCK_IDS: torch.full((batch, size), NO_BLOCK),
            ROWS: rows,
            **feeds,
            SLOTS: self._count(state.slots(context)),
            TURNED: state.turned,
        }
        state.turn(feeds["positions"])
        caches_out = {f"{name}.next": t for name, t in state.spare.items()}
        dims = {"B": batch, "S": size, "R": rows.shape[1]}
        outputs: dict[str, torch.Tensor] = {}
        if step.logits or step.watch:
            outputs = {v.name: _empty(v.type.bind(dims)) for v in self.outputs}
        where = f"in a {phase} chunk of {batch} x {size} tokens"
        self._run(MODEL, self.mapped, {**inputs, **state.caches}, {**caches_out, **outputs}, where)
        state.swap()
        return step.take(outputs)

    def _draft(
        self, feeds: dict[str, torch.Tensor], state: OnnxCaches, context: int
    ) -> dict[str, torch.Tensor]:
        slots, batch = self._count(state.slots(context)), len(feeds["written"])
        inputs = {**feeds, **state.caches, SLOTS: slots, TURNED: state.turned}
        outputs = {v.name: _empty(v.type.bind({"B": batch})) for v in self.graphs[DRAFT].outputs}
        self._run(DRAFT_FILE, self.mapped, inputs, outputs, f"in a draft step of {batch} sequences")
        return outputs

    def encode(self, tower: str, feeds: Tensors) -> torch.Tensor:
        (soft,) = self.graphs[tower].outputs
        outputs, mapped = {soft.name: _empty(soft.type)}, soft.type.dtype == "f32"
        self._run(tower_file(tower), mapped, feeds, outputs, f"on {', '.join(feeds)}")
        return outputs[soft.name]

    def _count(self, n: int) -> torch.Tensor:
        if n not in self._counted:
            self._counted[n] = torch.arange(n)
        return self._counted[n]

    def close(self) -> None:
        self._sessions.clear()
        self.source.close()


def open_session(
    path: Path, mapped: bool = False, written: Path | None = None
) -> onnxruntime.InferenceSession:
    """Open a model on the CPU with torch's number of threads; EngineError if onnxruntime refuses
    it. `written`: path to write the optimised model to.

    `mapped`: weights stay memory-mapped instead of being prepacked. Loading then needs only page
    cache (4 GB of weights: 0.2 s against 15 s on two cores, 0.3 GB of memory against a peak of 5.5
    GB); a step takes up to twice as long. Not for quantised weights, which every step would
    dequantise in full.
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
            f"build the engine again, or update onnxruntime"
        ) from err


def _empty(t: Type) -> torch.Tensor:
    return torch.empty([int(d) for d in t.shape], dtype=torch_dtype(t.dtype))


def _bind(bind: Any, tensors: Tensors) -> None:
    """Bind tensors by address: onnxruntime reads and writes torch's memory."""
    for name, t in tensors.items():
        bind(name, "cpu", 0, t.numpy().dtype, list(t.shape), t.data_ptr())


def _first_line(err: Exception) -> str:
    return (str(err).strip().splitlines() or [type(err).__name__])[0][:300]
