"""Networks of the dialect, computed by onnxruntime on a CPU: ONNX's operators take the place of
NVIDIA's."""

from __future__ import annotations

import onnx
import onnxruntime
import torch
from onnx import helper

from g4ir.backends.onnx_graph.runtime import PRODUCTS_OF_CODES, SEVERITY
from g4ir.backends.trt.dialect import Dialect


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
        q, keys, values, mask = n.input
        rows, one, shape, whole = (f"{n.name}/{x}" for x in ("rows", "one", "shape", "mask"))
        return [  # onnxruntime takes no mask that is the same for all queries
            helper.make_node("Shape", [q], [rows], start=2, end=3),
            helper.make_node("Constant", [], [one], value_ints=[1]),
            helper.make_node("Concat", [one, one, rows, one], [shape], axis=0),
            helper.make_node("Expand", [mask, shape], [whole]),
            helper.make_node("Attention", [q, keys, values, whole], n.output, scale=1.0),
        ]
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
