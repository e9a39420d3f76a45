"""Networks of the dialect, computed by onnxruntime on a CPU: ONNX's operators take the place of
NVIDIA's."""

from __future__ import annotations

from collections.abc import Mapping

import onnx
import onnxruntime
import torch
from onnx import helper

from g4ir.backends.base import Tensors
from g4ir.backends.onnx_graph.export import MODEL
from g4ir.backends.onnx_graph.runtime import PRODUCTS_OF_CODES, SEVERITY, OnnxRuntime
from g4ir.ir.graph import Program
from g4ir.plan.engine_limits import Limits
from g4ir.weights.pack import ParamSource

from .dialect import Dialect, emitted
from .interface import ENGINE, networks
from .parse import Addresses


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


def new_session(model: onnx.ModelProto) -> onnxruntime.InferenceSession:
    """Return a session on one thread, in which sums are those of fp32."""
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads, options.log_severity_level = 1, SEVERITY
    for key, value in PRODUCTS_OF_CODES.items():
        options.add_session_config_entry(key, value)
    return onnxruntime.InferenceSession(
        model.SerializeToString(), options, providers=["CPUExecutionProvider"]
    )


class DialectRuntime(OnnxRuntime):
    """The runtime of ONNX engines over networks of the dialect, without files."""

    def __init__(
        self, program: Program, limits: Limits, params: ParamSource, settings: Mapping[str, str]
    ) -> None:
        self.graphs, self.limits, self.source, self.mapped = program.graphs, limits, params, False
        self.sessions = {
            name: _opened(emitted(g, limits, Addresses(params), settings)[0], name)
            for name, g in networks(program).items()
        }
        text = networks(program)[ENGINE]
        self.state, self.outputs = {v.name: v for v in text.state}, text.outputs
        self.in_place = frozenset[str]()
        self._counted: dict[int, torch.Tensor] = {}

    def _run(self, file: str, mapped: bool, feeds: Tensors, made: Tensors, where: str) -> None:
        session = self.sessions[ENGINE if file == MODEL else file.removesuffix(".onnx")]
        given = {i.name: feeds[i.name].contiguous().numpy() for i in session.get_inputs()}
        for name, found in zip(made, session.run([*made], given), strict=True):
            made[name].copy_(torch.from_numpy(found))


def _opened(e: Dialect, name: str) -> onnxruntime.InferenceSession:
    model = with_weights(e, name)
    nodes = [m for n in model.graph.node for m in as_onnx(n)]
    del model.graph.node[:]
    model.graph.node.extend(nodes)
    return new_session(model)
