"""The list of what an exported model may hold: operators that onnxruntime runs and TensorRT's
parser takes, with the parser's limits.

onnxruntime takes more than the parser does (a softcap in Attention, circular TensorScatter, other
reductions in ScatterND), so that a model that runs here could still be refused there. The limits
are those of the parser's operator table as of TensorRT 11.2 (opsets 9 to 24). Networks of quantised
weights go beyond it: they gather bytes, and have blocks of 32.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import onnx
from onnx import helper

from g4ir.errors import LowerError

#: of the parser's TopK, which takes less
TOP_K = 3840
FLOAT = frozenset({onnx.TensorProto.FLOAT, onnx.TensorProto.FLOAT16, onnx.TensorProto.BFLOAT16})
WHOLE = frozenset({onnx.TensorProto.INT32, onnx.TensorProto.INT64})
BOOL = frozenset({onnx.TensorProto.BOOL})
BYTES = frozenset({onnx.TensorProto.INT8, onnx.TensorProto.UINT8})
ANY = FLOAT | WHOLE | BOOL


@dataclass(frozen=True)
class Context:
    """The facts that rules look up by tensor name."""

    constants: Mapping[str, onnx.TensorProto]
    types: Mapping[str, onnx.TypeProto.Tensor]

    def rank(self, name: str) -> int | None:
        found = self.types.get(name)
        return None if found is None else len(found.shape.dim)


#: (node, its attributes, context) -> what is wrong, or None
Rule = Callable[[onnx.NodeProto, Mapping[str, Any], Context], str | None]


def _fixed(*inputs: int) -> Rule:
    """Return the rule that these inputs are initialisers."""

    def rule(n: onnx.NodeProto, attrs: Mapping[str, Any], context: Context) -> str | None:
        loose = [n.input[i] for i in inputs if n.input[i] not in context.constants]
        return f"{loose[0]} is computed, not an initialiser" if loose else None

    return rule


def _top_k(n: onnx.NodeProto, attrs: Mapping[str, Any], context: Context) -> str | None:
    if wrong := _fixed(1)(n, attrs, context):
        return wrong
    k = int(onnx.numpy_helper.to_array(context.constants[n.input[1]]).item())
    if not attrs.get("sorted", 1):
        return "sorted is 0"
    return f"K is {k}, the limit {TOP_K - 1}" if k >= TOP_K else None


def _tensor_scatter(n: onnx.NodeProto, attrs: Mapping[str, Any], context: Context) -> str | None:
    mode, axis = attrs.get("mode", b"linear").decode(), attrs.get("axis", -2)
    if mode != "linear" or axis != -2:
        return f"mode is {mode}, axis {axis}: linear along axis -2"
    rank = context.rank(n.input[0])
    return None if rank == 4 else f"a cache of rank {rank}: 4"


@dataclass(frozen=True)
class Allowed:
    """Dtypes of an operator's first result, and further limits."""

    dtypes: frozenset[int] = ANY
    rule: Rule | None = None


_NUMBER = Allowed(FLOAT | WHOLE)
_REAL = Allowed(FLOAT)
_LOGIC = Allowed(BOOL)

OPERATORS: Mapping[str, Allowed] = {
    **dict.fromkeys(("Add", "Sub", "Mul", "Div", "Max", "Min", "Neg"), _NUMBER),
    **dict.fromkeys(("Exp", "Log", "Tanh", "Sqrt", "Erf", "Pow", "MatMul", "Softmax"), _REAL),
    **dict.fromkeys(("Equal", "Greater", "Less", "And", "Or", "Not"), _LOGIC),
    **dict.fromkeys(("Cast", "Concat", "GatherND", "Identity", "Transpose", "Where"), Allowed()),
    "Gather": Allowed(ANY | BYTES),
    "DequantizeLinear": Allowed(FLOAT, _fixed(0)),
    **dict.fromkeys(("ReduceSum", "ReduceMean", "ReduceMax"), Allowed(FLOAT, _fixed(1))),
    **dict.fromkeys(("Reshape", "Squeeze", "Unsqueeze"), Allowed(ANY, _fixed(1))),
    "Slice": Allowed(ANY, _fixed(1, 3)),
    "Shape": Allowed(WHOLE),
    "TopK": Allowed(FLOAT, _top_k),
    "TensorScatter": Allowed(FLOAT, _tensor_scatter),
    "If": Allowed(),
}


def walk(nodes: Sequence[onnx.NodeProto]) -> Iterator[onnx.NodeProto]:
    """Yield the nodes, and those of their branches."""
    for n in nodes:
        yield n
        for a in n.attribute:
            if a.type == onnx.AttributeProto.GRAPH:
                yield from walk(a.g.node)


def check_model(model: onnx.ModelProto) -> None:
    """Check a model: LowerError names the first node off the list, its operator and the limit."""
    graph = model.graph
    known = [*graph.input, *graph.output, *graph.value_info]
    context = Context(
        {t.name: t for t in graph.initializer}, {v.name: v.type.tensor_type for v in known}
    )
    for n in walk(graph.node):
        if wrong := _wrong(n, context):
            raise LowerError(
                f"node {n.name}: operator {n.op_type}: {wrong}; lower it to operators of "
                f"backends/onnx_graph/allow_list.py"
            )


def _wrong(n: onnx.NodeProto, context: Context) -> str | None:
    allowed = None if n.domain else OPERATORS.get(n.op_type)
    if allowed is None:
        return "not among those that onnxruntime and TensorRT's parser both take"
    found = context.types.get(n.output[0])
    if found and found.elem_type not in allowed.dtypes:
        return f"its result is {onnx.TensorProto.DataType.Name(found.elem_type)}"
    attrs = {a.name: helper.get_attribute_value(a) for a in n.attribute}
    return allowed.rule(n, attrs, context) if allowed.rule else None
