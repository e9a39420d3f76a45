"""Networks of the dialect, computed by onnxruntime on a CPU: NVIDIA's operators are replaced by
ONNX's, and ranks exchange what their collectives are of."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import onnx
import onnxruntime
import pytest
import torch
from onnx import helper

from g4ir.backends.base import Prepared
from g4ir.backends.onnx_graph.runtime import OnnxRuntime, Tensors
from g4ir.backends.primitives.graph import network_graph, tower_graphs
from g4ir.backends.primitives.network import Network
from g4ir.backends.trt import dry_run
from g4ir.backends.trt.dialect import Dialect
from g4ir.backends.trt.lowerings import AUTO, known_forms, lowerings
from g4ir.backends.trt.parse import Addresses
from g4ir.backends.trt.recorder.ranks import Exchange, exchange_of
from g4ir.ir.graph import Graph, Program
from g4ir.model.draft import DRAFT
from g4ir.plan.engine_limits import Limits

COLLECTIVE = "DistCollective"


def dialect_of(
    g: Graph, limits: Limits, params: Any, settings: Mapping[str, str]
) -> onnx.ModelProto:
    """The model of a graph, with its weights in it."""
    e = Dialect(Addresses(params))
    attention = settings["attention"]
    how = lowerings(known_forms([g]) if attention == AUTO else attention)
    Network(e, g, limits, how, settings["experts"]).emit()
    model = e.model(g.name, "", {})
    for t in model.graph.initializer:
        if t.data_location == onnx.TensorProto.EXTERNAL:
            (location,) = (x.value for x in t.external_data if x.key == "location")
            stored = e.storage.tensors[location].contiguous().view(-1).view(torch.uint8)
            t.ClearField("external_data")
            t.data_location, t.raw_data = onnx.TensorProto.DEFAULT, stored.numpy().tobytes()
    return model


def as_onnx(n: onnx.NodeProto) -> list[onnx.NodeProto]:
    """The nodes of ONNX that compute what one of NVIDIA's does."""
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
        held = [t for t in g.initializer if t.name in read]
        inputs = read - written - {t.name for t in held}
        values = ([kinds[n] for n in sorted(names)] for names in (inputs, written & later))
        piece = helper.make_model(
            helper.make_graph(part, f"{g.name}{number}", *values, held),
            opset_imports=model.opset_import,
            ir_version=model.ir_version,
        )
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads, options.log_severity_level = 1, 3
        options.add_session_config_entry("session.qdq_matmulnbits_accuracy_level", "1")
        yield Segment(onnxruntime.InferenceSession(piece.SerializeToString(), options), last)


def computed(parts: Sequence[Segment], feeds: Tensors, exchange: Exchange | None) -> Tensors:
    """Every tensor that is fed or handed from one segment to another or to the caller."""
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
        self, program: Program, limits: Limits, params: Any, settings: Mapping[str, str]
    ) -> None:
        graphs = {"model": network_graph(program), **tower_graphs(program)}
        graphs |= {DRAFT: program.graphs[DRAFT]} if DRAFT in program.graphs else {}
        models = {name: dialect_of(g, limits, params, settings) for name, g in graphs.items()}
        self.models = models
        self.parts = {name: [*segments(m)] for name, m in models.items()}
        self.graphs, self.limits, self.source, self.mapped = program.graphs, limits, params, False
        self.state = {v.name: v for v in graphs["model"].state}
        self.outputs, self.in_place = graphs["model"].outputs, frozenset[str]()
        self.exchange: Exchange | None = None
        self._counted: dict[int, torch.Tensor] = {}

    def link(self, communicator: Any) -> None:
        self.exchange = exchange_of(communicator())

    def _run(self, file: str, mapped: bool, feeds: Tensors, made: Tensors, where: str) -> None:
        found = computed(self.parts[file.removesuffix(".onnx")], feeds, self.exchange)
        for name, t in made.items():
            t.copy_(found[name])


def errors_of(p: Prepared, patch: pytest.MonkeyPatch) -> dict[str, float]:
    """Errors of the networks in small, in fp32, beside the interpreter's."""

    def opened(api: Any, *of: Any) -> DialectRuntime:
        return DialectRuntime(*of)

    patch.setattr(dry_run, "emulated", opened)
    with dry_run.one_thread():
        return dry_run.check_small(dry_run.emulator(), p, "f32")
