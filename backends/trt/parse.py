"""Parses a model of the dialect with NVIDIA's ONNX parser. Weights are passed by address, neither
copied nor in the protobuf."""

from __future__ import annotations

from typing import Any

import onnx
import torch

from g4ir.backends.onnx_graph.emitter import DataLocation
from g4ir.errors import LowerError
from g4ir.ir.graph import Value
from g4ir.ops.codecs import FORMAT_OF, FORMATS
from g4ir.ops.types import Type, dtype_name
from g4ir.weights.pack import ParamSource

from .dialect import Dialect
from .host import Api


class Addresses:
    """Weights and large constants by the `location` of the model's initialisers. The network
    references these tensors until it is built. The parser accepts two initialisers at one address
    only if their sizes are equal."""

    def __init__(self, params: ParamSource) -> None:
        self.params = params
        self.tensors: dict[str, torch.Tensor] = {}

    def weight(self, v: Value, field: str = "") -> DataLocation:
        """Return the location of a param, or of a field of the blocks of its codes; LowerError if
        its type differs from the graph's."""
        t = self.params.tensor(v.name).contiguous()
        stored = Type(dtype_name(t.dtype), tuple(t.shape))
        if stored != v.type:
            raise LowerError(f"param {v} is {stored}, the graph says {v.type}")
        if field:
            layout = FORMATS[FORMAT_OF[v.type.dtype]].layout
            blocks = t.view(torch.uint8).unflatten(-1, (-1, layout.nbytes))
            t = layout.split(blocks)[field].contiguous()
        return self._add(f"{v.name}{field}", t)

    def constant(self, data: bytes) -> DataLocation:
        tensor = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        return self._add(f"constant/{len(self.tensors)}", tensor)

    def of(self, t: onnx.TensorProto) -> torch.Tensor:
        """Return the tensor of an external initialiser."""
        (location,) = (x.value for x in t.external_data if x.key == "location")
        return self.tensors[location]

    def _add(self, location: str, tensor: torch.Tensor) -> DataLocation:
        self.tensors[location] = tensor
        return DataLocation(location, 0, tensor.nbytes)


def parse(api: Api, network: Any, emitter: Dialect, name: str, log: Any) -> Any:
    """Parse the emitted model into a network. Return the parser, which the network needs until it
    is built. LowerError if the parser refuses it (`_refusal`)."""
    model = emitter.model(name, "", {})
    parser = api.trt.OnnxParser(network, log)
    accepted = parser.load_model_proto(model.SerializeToString())
    for t in model.graph.initializer if accepted else ():
        if t.data_location == onnx.TensorProto.EXTERNAL:
            w = emitter.storage.of(t)
            accepted = accepted and parser.load_initializer(t.name, w.data_ptr(), w.nbytes)
    if not accepted or not parser.parse_model_proto():
        why = _refusal(parser, log)
        raise LowerError(f"TensorRT's parser refuses the network of {name}: {why}")
    return parser


def _refusal(parser: Any, log: Any) -> str:
    """Return the parser's first error and its node; without one, the log's errors."""
    if not parser.num_errors:
        return str(log.reason())
    error = parser.get_error(0)
    node = f"node {error.node_name()} ({error.node_operator()}): " if error.node_name() else ""
    return node + " ".join(error.desc().split())
