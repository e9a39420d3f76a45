"""A program as ONNX files in an engine directory.

model.onnx      one network for prefill and decode (a decode step is a chunk of one token)
draft.onnx      a step of the drafter, where there is one
embed.onnx      token ids -> the rows that model.onnx takes; g4ir itself gathers them from the
                tables
vision_N.onnx   a picture, or a frame of a video, of at most N soft tokens -> its soft tokens
audio_N.onnx    a sound of at most N soft tokens -> its soft tokens
constants.bin   tables of angles, and others that are large
weights-*.safetensors   hold the initialisers: the models point into them, and nothing is stored
                twice. Models and these files stay in one directory.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

import onnx

from g4ir.errors import EngineError, LowerError
from g4ir.ir.graph import Graph, Node, Program, Value
from g4ir.ir.names import layer_of
from g4ir.model.draft import DRAFT
from g4ir.plan.engine_limits import Limits
from g4ir.weights import tensorfile

from ..primitives.emitter import SHARED, Operand
from ..primitives.graph import network_graph, tower_graphs
from ..primitives.lowerings import LOWERINGS
from ..primitives.network import Lowering, Network, full_slots
from ..primitives.weights import gathered
from .allow_list import check_model
from .emitter import OPSET, OnnxEmitter, Place

MODEL, EMBED, CONSTANTS = "model.onnx", "embed.onnx", "constants.bin"
DRAFT_FILE = "draft.onnx"
#: constants begin at multiples of it
ALIGNMENT = 64
OUTSIDE = "outside layers"

#: what model.onnx says of itself
_NETWORK_DOC = """Prefill and decode of a Gemma 4 text model: a decode step is a chunk of one token.

B rows, a chunk of S tokens each (1 to `prefill_chunk`), C slots of the full-length
caches that the chunk looks at: at least as many as rows hold tokens after it, at most M. T is the
model's dtype.

    in   embeds          T[B,S,H]        of embed.onnx
         ple_rows        T[B,S,L*P]      of embed.onnx, where the variant has per-layer embeddings
         positions       i64[B,S]        of each token in its row; also padding counts on
         lengths         i64[B]          valid tokens of the chunk by row, 0 to S; padding follows
         slots           i64[C]          0, 1, 2, ...; where a layer has a full-length cache
         rows            i64[B,R]        where drafted tokens are verified: the rows of the chunk
                                         that logits are asked for
         block_ids       i64[B,S]        where the variant sees pictures both ways: one number for
                                         all soft tokens of a picture, which are in one chunk, and
                                         -1 for every other token
         turned          i64[B]          where a layer has a ring of R slots: position p of a row
                                         lies in slot (p + turned) mod R; zeros at first
         NAME            T[B,n,M,d]      a full-length cache, M = max_seq + prefill_chunk
                         T[B,n,R,d]      a ring
    out  logits          T[B,1,vocab]    of each row's last valid token ([B,S,vocab] for all,
                                         [B,R,vocab] for `rows`)
         hidden          T[B,R,H]        where there is a drafter: what these logits are made of
         NAME.next       as NAME         the cache after the chunk

Where a picture or a sound stands, its soft tokens take the place of the rows of `embeds` that its
placeholders got.

Caches start as zeros. NAME and NAME.next may share memory for the caches that the property
`g4ir.in_place` lists, and may not for the others. The next chunk's positions start after the valid
tokens of this one. A chunk must not cross the end of a ring: end it there, or turn the row's rings
(numpy.roll of their slots) by as many slots as `turned` then changes by.
"""

_EMBED_DOC = """Token ids to the rows that model.onnx takes.

in   tokens    i64[B,S]
out  embeds    [B,S,H]
     ple_rows  [B,S,L*P], where the variant has per-layer embeddings

Placeholders of media get the rows of the padding token.
"""

_TOWER_DOC = """One picture (patches, positions) or one sound (features, mask), padded to a fixed
size, to its soft tokens. What belongs to padding comes last and is to be left out.

in   patches    f32[1,P,D]   pixels of 0 to 1
     positions  i64[1,P,2]   column and row of each patch, (-1, -1) for padding; where the variant
                             takes them
     features   f32[1,T,F]   frames
     mask       bool[1,T]    where there is sound; where the variant takes it
out  soft       [1,N,H]      rows for model.onnx's embeds
"""


_DRAFT_DOC = """A step of the drafter: guesses the token behind the newest one, over two of the
model's caches, which it does not change.

in   embeds     T[B,1,H]    of the newest token, or of the last drafted one
     hidden     T[B,1,H]    of model.onnx, of the row that the token came of; then draft.hidden
     positions  i64[B,1]    where the drafted tokens stand, the same in all steps of a round
     last       i64[B,1]    the position of the newest token in the caches
     written    i64[B]      how many tokens they hold
     slots, turned, NAME    as those of model.onnx
out  draft.token   i64[B]
     draft.hidden  T[B,1,H]
"""


# --- where data lie ---------------------------------------------------------------------------


@dataclass
class Directory:
    """Weights in the safetensors files of a directory, constants in a file of their own."""

    folder: Path
    constants: IO[bytes]
    weights: Mapping[str, tuple[str, tensorfile.Entry]] = field(init=False)

    def __post_init__(self) -> None:
        headers = map(tensorfile.read_header, sorted(self.folder.glob("*.safetensors")))
        self.weights = {k: (h.path.name, e) for h in headers for k, e in h.entries.items()}

    def weight(self, v: Value) -> Place:
        if v.name not in self.weights:
            raise EngineError(f"{self.folder}: no safetensors file holds {v}; build it again")
        file, entry = self.weights[v.name]
        if entry.nbytes != v.type.nbytes():
            raise EngineError(f"{self.folder / file}: {v} is {v.type}, stored as {entry.dtype}")
        return Place(file, entry.start, entry.nbytes)

    def constant(self, data: bytes) -> Place:
        self.constants.write(bytes(-self.constants.tell() % ALIGNMENT))
        place = Place(CONSTANTS, self.constants.tell(), len(data))
        self.constants.write(data)
        return place


class Nowhere:
    """For a model that is looked at and not kept."""

    def weight(self, v: Value) -> Place:
        return Place("weights", 0, v.type.nbytes())

    def constant(self, data: bytes) -> Place:
        return Place(CONSTANTS, 0, len(data))


# --- models -----------------------------------------------------------------------------------


def network_model(
    program: Program, limits: Limits, storage: Any, experts: str = "auto"
) -> onnx.ModelProto:
    """Return the network of prefill and decode; LowerError where it leaves the allow-list."""
    graph, e = network_graph(program), OnnxEmitter(storage)
    net = Network(e, graph, limits, LOWERINGS, experts)
    net.emit()
    e.name_values(_made(graph, net))
    facts = {
        "g4ir.max_seq": str(limits.max_seq),
        "g4ir.prefill_chunk": str(limits.prefill_chunk),
        "g4ir.full_slots": str(full_slots(limits)),
        "g4ir.in_place": ",".join(_in_place(graph, e)),
    }
    return _checked(e.model("network", _NETWORK_DOC, facts))


def tower_model(graph: Graph, limits: Limits, storage: Any) -> onnx.ModelProto:
    """Return a tower; LowerError where it leaves the allow-list."""
    e = OnnxEmitter(storage)
    net = Network(e, graph, limits, LOWERINGS)
    net.emit()
    e.name_values(_made(graph, net))
    return _checked(e.model(graph.name, _TOWER_DOC, {}))


def draft_model(graph: Graph, limits: Limits, storage: Any) -> onnx.ModelProto:
    """Return a step of the drafter; LowerError where it leaves the allow-list."""
    e = OnnxEmitter(storage)
    net = Network(e, graph, limits, LOWERINGS)
    net.emit()
    e.name_values(_made(graph, net))
    return _checked(e.model(graph.name, _DRAFT_DOC, {}))


def embed_model(program: Program, limits: Limits, storage: Any) -> onnx.ModelProto:
    """Return the model from token ids to rows of the tables."""
    graph, e = program.graphs["embed"], OnnxEmitter(storage)
    own: dict[str, Lowering] = {
        "embedding": _embedding,
        "embedding_quantized": _embedding_quantized,
    }
    net = Network(e, graph, limits, {**LOWERINGS, **own})
    net.env.update({v.name: e.input(v.name, v.type) for v in graph.inputs})
    for n in graph.nodes:
        net.node(n)
    for v in graph.outputs:
        e.output(v.name, net.env[v.name])
    e.name_values(_made(graph, net))
    return _checked(e.model("embed", _EMBED_DOC, {}))


def _embedding(net: Network, n: Node, table: Operand, ids: Operand) -> Operand:
    """Return scaled rows of a table; the scale is rounded to the table's dtype first (rule 2)."""
    return net.e.mul(net.e.gather(table, ids, 0), n.number("scale"))


def _embedding_quantized(
    net: Network, n: Node, codes: Operand, scales: Operand, ids: Operand
) -> Operand:
    """Return `_embedding` of what rows of codes mean."""
    rows = gathered(net, codes, scales, ids, ids.rank, n.word("to"))
    return net.e.mul(rows, n.number("scale"))


def _made(graph: Graph, net: Network) -> dict[str, Operand]:
    return {v.name: net.env[v.name] for n in graph.nodes for v in n.outputs}


def _checked(model: onnx.ModelProto) -> onnx.ModelProto:
    check_model(model)
    return model


def _in_place(graph: Graph, e: OnnxEmitter) -> list[str]:
    """Return caches that only the node that writes them reads: it takes its input's memory."""
    readers: dict[str, list[str]] = {}
    for n in e.nodes:
        for name in n.input:
            readers.setdefault(name, []).append(n.op_type)
    return [v.name for v in graph.state if readers.get(v.name) == ["TensorScatter"]]


# --- files ------------------------------------------------------------------------------------


def export(program: Program, limits: Limits, folder: Path, experts: str = "auto") -> dict[str, Any]:
    """Write the models into a directory that holds the weights; return what was written."""
    with open(folder / CONSTANTS, "wb") as file:
        storage = Directory(folder, file)
        models = {
            MODEL: network_model(program, limits, storage, experts),
            EMBED: embed_model(program, limits, storage),
            **{
                tower_file(name): tower_model(g, limits, storage)
                for name, g in tower_graphs(program).items()
            },
        }
        if DRAFT in program.graphs:
            models[DRAFT_FILE] = draft_model(program.graphs[DRAFT], limits, storage)
    for name, made in models.items():
        (folder / name).write_bytes(made.SerializeToString(deterministic=True))
        _check_file(folder / name)
    nodes = sum(node_counts(models[MODEL]).values())
    return {"opset": OPSET, "nodes": nodes, "experts": experts}


def tower_file(name: str) -> str:
    return f"{name}.onnx"


def _check_file(path: Path) -> None:
    """Run onnx's own checker, and compare its inference of shapes with ours."""
    try:
        onnx.checker.check_model(str(path), full_check=True)
    except (onnx.checker.ValidationError, onnx.shape_inference.InferenceError) as err:
        raise LowerError(f"{path.name} is no valid model: {str(err).strip()[:500]}") from err


# --- counts -----------------------------------------------------------------------------------


def node_counts(model: onnx.ModelProto) -> dict[str, int]:
    """Count nodes by layer (`L5`), and outside of them; what serves several layers counts outside.

    A branch counts as one node.
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


def describe(path: Path) -> dict[str, str]:
    """Return the facts that a model file states."""
    model = onnx.load(str(path), load_external_data=False)
    return {p.key: p.value for p in model.metadata_props}
