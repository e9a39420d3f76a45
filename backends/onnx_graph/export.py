"""A program as ONNX files in an engine directory.

model.onnx      one network for prefill and decode (a decode step is a chunk of one token), or the
                graph of an encoder
draft.onnx      a step of the draft model, if there is one
embed.onnx      token ids -> the embeddings that model.onnx takes; g4ir itself gathers them from
                the tables
vision_N.onnx   an image, or a frame of a video, of at most N soft tokens -> its soft tokens
audio_N.onnx    an audio clip of at most N soft tokens -> its soft tokens
constants.bin   RoPE tables and other large constants
weights-*.safetensors   hold the initialisers: the models point into them, and nothing is stored
                twice. Models and these files must stay in one directory.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import IO, Any

import onnx

from g4ir.backends.primitives.emitter import SHARED, Operand
from g4ir.backends.primitives.graph import network_graph, tower_graphs
from g4ir.backends.primitives.lowerings import LOWERINGS
from g4ir.backends.primitives.network import Lowering, Network, full_slots
from g4ir.backends.primitives.weights import gather_dequantized
from g4ir.errors import EngineError, LowerError
from g4ir.ir.graph import Graph, Node, Program, Value
from g4ir.ir.names import layer_of
from g4ir.model.draft import DRAFT
from g4ir.model.encoder import ENCODE
from g4ir.plan.engine_limits import Limits
from g4ir.ui.files import read_table
from g4ir.weights import tensorfile

from .emitter import OPSET, DataLocation, OnnxEmitter

MODEL, EMBED, CONSTANTS = "model.onnx", "embed.onnx", "constants.bin"
DRAFT_FILE = "draft.onnx"
#: alignment of constants in bytes
ALIGNMENT = 64
OUTSIDE = "outside layers"

# --- external data ---------------------------------------------------------------------------


@dataclass
class Directory:
    """External data: weights in an engine directory's safetensors files, constants in
    constants.bin."""

    folder: Path
    constants: IO[bytes]
    weights: Mapping[str, tuple[str, tensorfile.Entry]] = field(init=False)

    def __post_init__(self) -> None:
        headers = map(tensorfile.read_header, sorted(self.folder.glob("*.safetensors")))
        self.weights = {k: (h.path.name, e) for h in headers for k, e in h.entries.items()}

    def weight(self, v: Value) -> DataLocation:
        if v.name not in self.weights:
            raise EngineError(f"{self.folder}: no safetensors file has {v}; build the engine again")
        file, entry = self.weights[v.name]
        if entry.nbytes != v.type.nbytes():
            size = f"{entry.nbytes} bytes of {entry.dtype}, expected {v.type}; build it again"
            raise EngineError(f"{self.folder / file}: {v} has {size}")
        return DataLocation(file, entry.start, entry.nbytes)

    def constant(self, data: bytes) -> DataLocation:
        self.constants.write(bytes(-self.constants.tell() % ALIGNMENT))
        location = DataLocation(CONSTANTS, self.constants.tell(), len(data))
        self.constants.write(data)
        return location


class NullStorage:
    """External data locations of a model that is only inspected, not written."""

    def weight(self, v: Value, field: str = "") -> DataLocation:
        return DataLocation("weights", 0, v.type.nbytes())

    def constant(self, data: bytes) -> DataLocation:
        return DataLocation(CONSTANTS, 0, len(data))


# --- models -----------------------------------------------------------------------------------


def models(program: Program, limits: Limits, storage: Any) -> Iterator[tuple[str, onnx.ModelProto]]:
    """Yield (file name, model), MODEL first. `storage`: Directory, or NullStorage without files."""
    kind = ENCODE if ENCODE in program.graphs else "network"
    yield MODEL, _model(kind, network_graph(program), limits, storage)
    yield EMBED, _model("embed", program.graphs["embed"], limits, storage)
    for name, g in tower_graphs(program).items():
        yield tower_file(name), _model("tower", g, limits, storage)
    if DRAFT in program.graphs:
        yield DRAFT_FILE, _model("draft", program.graphs[DRAFT], limits, storage)


def _model(kind: str, graph: Graph, limits: Limits, storage: Any) -> onnx.ModelProto:
    e = OnnxEmitter(storage)
    tables: dict[str, Lowering] = {
        "embedding": _embedding,
        "embedding_quantized": _embedding_quantized,
    }
    net = Network(e, graph, limits, {**LOWERINGS, **tables})
    net.emit()
    e.name_values({v.name: net.env[v.name] for n in graph.nodes for v in n.outputs})
    facts = {
        "g4ir.max_seq": str(limits.max_seq),
        "g4ir.prefill_chunk": str(limits.prefill_chunk),
        "g4ir.full_slots": str(full_slots(limits)),
        "g4ir.in_place": ",".join(_in_place(graph, e)),
    }
    name = graph.name if kind in ("tower", "draft") else kind
    return e.model(name, _docs()[kind], facts if kind in ("network", ENCODE) else {})


@cache
def _docs() -> dict[str, str]:
    return read_table(Path(__file__).with_name("models.yaml"))


def _embedding(net: Network, n: Node, table: Operand, ids: Operand) -> Operand:
    """Gather and scale rows of a table; the scale is rounded to the table's dtype first (rule
    2)."""
    return net.e.mul(net.e.gather(table, ids, 0), n.number("scale"))


def _embedding_quantized(
    net: Network, n: Node, codes: Operand, scales: Operand, ids: Operand
) -> Operand:
    """Gather, dequantise and scale rows of a quantised table."""
    rows = gather_dequantized(net, codes, scales, ids, ids.rank, n.word("to"))
    return net.e.mul(rows, n.number("scale"))


def _in_place(graph: Graph, e: OnnxEmitter) -> list[str]:
    """Return caches that can be updated in place: only the node that writes them reads them."""
    readers: dict[str, list[str]] = {}
    for n in e.nodes:
        for name in n.input:
            readers.setdefault(name, []).append(n.op_type)
    return [v.name for v in graph.state if readers.get(v.name) == ["TensorScatter"]]


# --- files ------------------------------------------------------------------------------------


def export(program: Program, limits: Limits, folder: Path) -> dict[str, Any]:
    """Write the models into a directory with the weights; return the manifest's record."""
    with open(folder / CONSTANTS, "wb") as file:
        exported = dict(models(program, limits, Directory(folder, file)))
    for name, model in exported.items():
        (folder / name).write_bytes(model.SerializeToString(deterministic=True))
        _check_file(folder / name)
    nodes = sum(node_counts(exported[MODEL]).values())
    return {"opset": OPSET, "nodes": nodes}


def tower_file(name: str) -> str:
    return f"{name}.onnx"


def _check_file(path: Path) -> None:
    try:
        onnx.checker.check_model(str(path), full_check=True)
    except (onnx.checker.ValidationError, onnx.shape_inference.InferenceError) as err:
        raise LowerError(f"{path.name} is no valid model: {str(err).strip()[:500]}") from err


# --- counts -----------------------------------------------------------------------------------


def node_counts(model: onnx.ModelProto) -> dict[str, int]:
    """Count nodes by layer (`L5`), and those outside of layers, among them nodes that layers share.
    An If counts as one node, its branches not at all.
    """
    return dict(Counter(_layer(n.name) for n in model.graph.node))


def _layer(name: str) -> str:
    layer = layer_of(name)
    return OUTSIDE if layer is None or SHARED + "/" in name else f"L{layer}"


def summary(model: onnx.ModelProto) -> str:
    """Return `1200 nodes: 40 outside layers, 97 in each of 25 layers, ...`"""
    counts = node_counts(model)
    outside = counts.pop(OUTSIDE, 0)
    kinds = Counter(counts.values())
    parts = [f"{size} in each of {many} layers" for size, many in sorted(kinds.items())]
    total = outside + sum(counts.values())
    return f"{total} nodes: {', '.join([f'{outside} outside layers', *parts])}"
