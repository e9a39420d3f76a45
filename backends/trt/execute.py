"""Networks of the dialect, computed by onnxruntime on a CPU: ONNX's operators take the place of
NVIDIA's, and ranks exchange what their collectives are of."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

import onnx
import onnxruntime
import torch
from onnx import helper

from g4ir.backends.base import Tensors
from g4ir.backends.onnx_graph.export import MODEL
from g4ir.backends.onnx_graph.runtime import PRODUCTS_OF_CODES, SEVERITY, OnnxRuntime
from g4ir.ir.graph import Graph, Program
from g4ir.plan.engine_limits import Limits
from g4ir.weights.pack import ParamSource

from .dialect import COLLECTIVE, Dialect, emitted
from .interface import ENGINE, networks
from .parse import Addresses
from .ranks import Exchange


def whole_model(
    g: Graph, limits: Limits, params: ParamSource, settings: Mapping[str, str]
) -> onnx.ModelProto:
    """Return the model of a graph, with its weights in it."""
    return with_weights(emitted(g, limits, Addresses(params), settings)[0], g.name)


def with_weights(e: Dialect, name: str) -> onnx.ModelProto:
    """Return the model of what was emitted, with the weights that it points to in it."""
    model = e.model(name, "", {})
    for t in model.graph.initializer:
        if t.data_location == onnx.TensorProto.EXTERNAL:
            stored = e.storage.of(t).view(-1).view(torch.uint8)
            t.ClearField("external_data")
            t.data_location, t.raw_data = onnx.TensorProto.DEFAULT, stored.numpy().tobytes()
    return model


def as_onnx(n: onnx.NodeProto) -> list[onnx.NodeProto]:
    """Return nodes of ONNX that compute what one of NVIDIA's does."""
    if n.op_type == "TRT_Slice":
        x, start, size, stride = n.input
        stop = f"{n.name}/stop"
        add = helper.make_node("Add", [start, size], [stop])
        return [add, helper.make_node("Slice", [x, start, stop, "", stride], n.output)]
    if n.op_type == "TRT_Attention":
        return [helper.make_node("Attention", n.input, n.output, scale=1.0)]
    return [n]


@dataclass(frozen=True)
class Segment:
    """The part of a network up to a collective, and the collective, if one follows."""

    session: onnxruntime.InferenceSession
    collective: onnx.NodeProto | None


def segments(model: onnx.ModelProto) -> Iterator[Segment]:
    """Cut a network behind what each collective exchanges."""
    g, nodes = model.graph, [m for n in model.graph.node for m in as_onnx(n)]
    kinds = {v.name: v for v in (*g.input, *g.output, *g.value_info)}
    numbers = accumulate((n.op_type == COLLECTIVE for n in nodes), initial=0)
    parts: dict[int, list[onnx.NodeProto]] = {}
    for number, n in zip(numbers, nodes, strict=False):
        parts.setdefault(number, []).append(n)
    for number, part in sorted(parts.items()):
        last = part.pop() if part[-1].op_type == COLLECTIVE else None
        written = {name for n in part for name in n.output}
        read = {name for n in part for name in n.input if name}
        later = {i for k, p in parts.items() if k > number for n in p for i in n.input}
        later |= {v.name for v in g.output} | ({last.input[0]} if last else set())
        weights = [t for t in g.initializer if t.name in read]
        inputs = read - written - {t.name for t in weights}
        values = ([kinds[n] for n in sorted(names)] for names in (inputs, written & later))
        piece = helper.make_model(
            helper.make_graph(part, f"{g.name}{number}", *values, weights),
            opset_imports=model.opset_import,
            ir_version=model.ir_version,
        )
        yield Segment(_session(piece), last)


def _session(model: onnx.ModelProto) -> onnxruntime.InferenceSession:
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads, options.log_severity_level = 1, SEVERITY
    for key, value in PRODUCTS_OF_CODES.items():
        options.add_session_config_entry(key, value)
    return onnxruntime.InferenceSession(
        model.SerializeToString(), options, providers=["CPUExecutionProvider"]
    )


def computed(parts: Sequence[Segment], feeds: Tensors, exchange: Exchange | None) -> Tensors:
    """Return every tensor that is fed, or handed from a segment to another or to the caller."""
    values = {name: t.contiguous().numpy() for name, t in feeds.items()}
    for part in parts:
        names = [o.name for o in part.session.get_outputs()]
        given = {i.name: values[i.name] for i in part.session.get_inputs()}
        values |= zip(names, part.session.run(names, given), strict=True)
        if part.collective:
            assert exchange, "no ranks are linked"
            own = torch.from_numpy(values[part.collective.input[0]])
            rows = [t.float() for t in exchange(own)]
            how = {a.name: helper.get_attribute_value(a) for a in part.collective.attribute}
            summed = how["collective_operation"] == b"all_reduce"
            joined = torch.stack(rows).sum(0) if summed else torch.cat(rows)
            values[part.collective.output[0]] = joined.to(own.dtype).numpy()
    return {name: torch.from_numpy(v) for name, v in values.items()}


class DialectRuntime(OnnxRuntime):
    """The runtime of ONNX engines over networks of the dialect, without files."""

    def __init__(
        self, program: Program, limits: Limits, params: ParamSource, settings: Mapping[str, str]
    ) -> None:
        graphs = networks(program)
        self.models = {n: whole_model(g, limits, params, settings) for n, g in graphs.items()}
        self.parts = {name: [*segments(m)] for name, m in self.models.items()}
        self.graphs, self.limits, self.source, self.mapped = program.graphs, limits, params, False
        self.state = {v.name: v for v in graphs[ENGINE].state}
        self.outputs, self.in_place = graphs[ENGINE].outputs, frozenset[str]()
        #: of several ranks: what this one's collectives exchange by
        self.exchange: Exchange | None = None
        self._counted: dict[int, torch.Tensor] = {}

    def _run(self, file: str, mapped: bool, feeds: Tensors, made: Tensors, where: str) -> None:
        name = ENGINE if file == MODEL else file.removesuffix(".onnx")
        found = computed(self.parts[name], feeds, self.exchange)
        for name, t in made.items():
            t.copy_(found[name])
