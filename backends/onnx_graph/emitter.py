"""Tensor primitives as ONNX nodes.

Nodes are named by the IR value that they compute, then the operator: `L5.attn.q.rope/Mul_2`. A
tensor that is an IR value has that value's name, unless it is taken. Weights are external
initialisers in the engine's safetensors files; the protobuf contains small constants only.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import onnx
import torch
from onnx import helper

from g4ir.backends.primitives.emitter import Emitter, Operand, reshape_spec
from g4ir.ir.graph import Value
from g4ir.ops.types import Dim, Type, dtype_name

OPSET = 24
#: IR dtype -> ONNX element type; bf16 is legal in ONNX, but onnxruntime lacks the operators
ELEMENTS: Mapping[str, int] = {
    "f32": onnx.TensorProto.FLOAT,
    "f16": onnx.TensorProto.FLOAT16,
    "bf16": onnx.TensorProto.BFLOAT16,
    "i64": onnx.TensorProto.INT64,
    "i32": onnx.TensorProto.INT32,
    "bool": onnx.TensorProto.BOOL,
    "i8": onnx.TensorProto.INT8,
    "u8": onnx.TensorProto.UINT8,
    "f8e4m3": onnx.TensorProto.FLOAT8E4M3FN,
}
#: bytes above which a constant is stored outside of the model file
INLINE_BYTES = 4096

#: primitive -> ONNX operator, if the names differ
_NAMES = {"eq": "Equal", "gt": "Greater", "lt": "Less", "floor_div": "Div"}


@dataclass(frozen=True)
class DataLocation:
    """Location of external data: file, offset and length."""

    location: str
    offset: int
    length: int


class OnnxEmitter(Emitter):
    """Emits ONNX nodes; handles are tensor names, `model` returns the model's content. `storage`
    locates external data of weights and constants."""

    def __init__(self, storage: Any) -> None:
        self.storage = storage
        self.inputs: list[onnx.ValueInfoProto] = []
        self.initializers: dict[str, onnx.TensorProto] = {}
        self.nodes: list[onnx.NodeProto] = []
        self.types: dict[str, Type] = {}
        self.results: dict[str, Type] = {}
        self.renamed: dict[str, str] = {}
        self._names: Counter[str] = Counter()
        self._cache: dict[Any, str] = {}
        self._depth = 0

    # --- sources ------------------------------------------------------------------------------

    def input(self, name: str, t: Type) -> Operand:
        self.inputs.append(_info(name, t))
        return Operand(t, name)

    def param(self, v: Value) -> Operand:
        location = self.storage.weight(v)
        self.initializers[v.name] = outside(v.name, ELEMENTS[v.type.dtype], v.type.shape, location)
        return Operand(v.type, v.name)

    def constant(self, tensor: Any) -> Operand:
        t = Type(dtype_name(tensor.dtype), tuple(tensor.shape))
        return Operand(t, self._constant(t, tensor))

    def _constant(self, t: Type, tensor: torch.Tensor) -> str:
        """Return the name of an initialiser; equal small constants share one, large ones are
        external data."""
        data = tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes()
        name = f"const/{t.dtype}_{len(self.initializers)}"
        if len(data) > INLINE_BYTES:
            location = self.storage.constant(data)
            self.initializers[name] = outside(name, ELEMENTS[t.dtype], t.shape, location)
            return name
        if (t, data) not in self._cache:
            self._cache[t, data] = name
            self.initializers[name] = helper.make_tensor(
                name, ELEMENTS[t.dtype], list(t.shape), data, raw=True
            )
        return self._cache[t, data]

    def _ints(self, *values: int) -> str:
        """Return a constant i64 [n]: axes, sizes and the like."""
        return self._constant(Type("i64", (len(values),)), torch.tensor(values))

    def output(self, name: str, x: Operand) -> None:
        """Name a tensor after an output. An initialiser, an input, or a tensor that already has an
        output name is passed through Identity."""
        self.results[name] = x.type
        fixed = x.handle in self.initializers or x.handle not in self.types
        if fixed or x.handle in self.renamed:
            self.renamed[self._node("Identity", [x.handle], x.type)] = name
        else:
            self.renamed[x.handle] = name

    # --- nodes --------------------------------------------------------------------------------

    def _make(
        self, op: str, inputs: Sequence[str], types: Sequence[Type], **attrs: Any
    ) -> list[str]:
        base = f"{self.scope}/{op}"
        self._names[base] += 1
        name = base if self._names[base] == 1 else f"{base}_{self._names[base]}"
        outputs = [name if i == 0 else f"{name}:{i}" for i in range(len(types))]
        self.nodes.append(helper.make_node(op, list(inputs), outputs, name=name, **attrs))
        if not self._depth:
            self.types.update(zip(outputs, types, strict=True))
        return outputs

    def _node(self, op: str, inputs: Sequence[str], t: Type, **attrs: Any) -> str:
        return self._make(op, inputs, [t], **attrs)[0]

    def _op(self, op: str, xs: Sequence[Operand | str], t: Type, **attrs: Any) -> Operand:
        names = [x if isinstance(x, str) else x.handle for x in xs]
        return Operand(t, self._node(op, names, t, **attrs))

    def _once(self, key: Any, make: Callable[[], str]) -> str:
        """Return the name of a cached tensor, created on first use. Not cached within a branch of
        an If, whose tensors are invisible outside."""
        if key in self._cache:
            return self._cache[key]
        with self.shared_scope():
            name = make()
        if not self._depth:
            self._cache[key] = name
        return name

    def _length(self, x: Operand, axis: int) -> str:
        dim = x.shape[axis]
        if isinstance(dim, int):
            return self._ints(dim)

        def make() -> str:
            return self._node("Shape", [x.handle], Type("i64", (1,)), start=axis, end=axis + 1)

        return self._once(("length", dim), make)

    def when_one(
        self, x: Operand, axis: int, then: Callable[[], Operand], otherwise: Callable[[], Operand]
    ) -> Operand:
        dim = x.shape[axis]
        if isinstance(dim, int):
            return then() if dim == 1 else otherwise()
        one = self._once(("one", dim), lambda: self._is_one(self._length(x, axis)))
        first, second = self._branch("then", then), self._branch("otherwise", otherwise)
        if first[1] != second[1]:
            raise ValueError(f"branches of different types: {first[1]} and {second[1]}")
        return self._op("If", [one], first[1], then_branch=first[0], else_branch=second[0])

    def _is_one(self, length: str) -> str:
        equal = self._node("Equal", [length, self._ints(1)], Type("bool", (1,)))
        return self._node("Squeeze", [equal, self._ints(0)], Type("bool", ()))

    def _branch(self, name: str, make: Callable[[], Operand]) -> tuple[onnx.GraphProto, Type]:
        """Emit a subgraph (branch of an If), which reads outer tensors by name."""
        outside, self.nodes = self.nodes, []
        self._depth += 1
        out = make()
        if not any(out.handle in n.output for n in self.nodes):
            out = self._op("Identity", [out], out.type)
        graph = helper.make_graph(self.nodes, name, [], [_info(out.handle, out.type)])
        self._depth -= 1
        self.nodes = outside
        return graph, out.type

    # --- pointwise ----------------------------------------------------------------------------

    def _unary(self, kind: str, x: Operand, t: Type) -> Operand:
        return self._op(kind.capitalize(), [x], t)

    def _binary(self, kind: str, a: Operand, b: Operand, t: Type) -> Operand:
        return self._op(_NAMES.get(kind, kind.capitalize()), [a, b], t)

    def _where(self, condition: Operand, a: Operand, b: Operand, t: Type) -> Operand:
        return self._op("Where", [condition, a, b], t)

    def _cast(self, x: Operand, t: Type) -> Operand:
        return self._op("Cast", [x], t, to=ELEMENTS[t.dtype])

    # --- matmuls and reductions ---------------------------------------------------------------

    def _linear(self, x: Operand, w: Operand, columns: bool, t: Type) -> Operand:
        return self._op("MatMul", [x, w if columns else self.transpose(w, 1, 0)], t)

    def _dequantize(self, codes: Operand, scales: Operand, axis: int, t: Type) -> Operand:
        """Emit a DequantizeLinear that onnxruntime fuses with the following matmul if the weight is
        column-major. Scales are cast, since the result has their dtype."""
        if codes.dtype == "u8":
            codes = self._view(codes, t, onnx.TensorProto.INT4)
        attrs = {"axis": axis, "block_size": int(t.shape[axis]) // int(scales.shape[axis])}
        if t.rank == 2 and scales.shape[axis] == 1:
            attrs = {"axis": 1 - axis}
            scales = self.reshape(scales, t.shape[1 - axis])
        return self._op("DequantizeLinear", [codes, self.cast(scales, t.dtype)], t, **attrs)

    def _bits(self, codes: Operand, t: Type) -> Operand:
        return self._view(codes, t, ELEMENTS[t.dtype])

    def _matmul(self, a: Operand, b: Operand, transpose_b: bool, t: Type) -> Operand:
        if transpose_b:
            last = b.rank - 1
            b = self.transpose(b, *range(last - 1), last, last - 1)
        return self._op("MatMul", [a, b], t)

    def _softmax(self, x: Operand, t: Type) -> Operand:
        return self._op("Softmax", [x], t, axis=-1)

    def _reduce(self, kind: str, x: Operand, axis: int, t: Type) -> Operand:
        return self._op(f"Reduce{kind.capitalize()}", [x, self._ints(axis)], t, keepdims=1)

    def _topk(self, x: Operand, k: int, values: Type, index: Type) -> tuple[Operand, Operand]:
        outputs = self._make(
            "TopK", [x.handle, self._ints(k)], [values, index], axis=-1, largest=1, sorted=1
        )
        return Operand(values, outputs[0]), Operand(index, outputs[1])

    # --- layout -------------------------------------------------------------------------------

    def _reshape(self, x: Operand, t: Type) -> Operand:
        if x.handle in self.initializers:
            return self._view(x, t, ELEMENTS[t.dtype])
        return self._op("Reshape", [x, self._ints(*reshape_spec(x.type, t))], t)

    def _view(self, x: Operand, t: Type, element: int) -> Operand:
        """Reinterpret stored bytes with another shape or element type, without a node or a copy of
        the weight."""
        stored = self.initializers[x.handle]
        kind = onnx.TensorProto.DataType.Name(element) if element != stored.data_type else ""
        name = f"{x.handle}[{','.join(map(str, t.shape))}]{kind}"
        if name not in self.initializers:
            self.initializers[name] = tensor = onnx.TensorProto()
            tensor.CopyFrom(stored)
            tensor.name, tensor.dims[:], tensor.data_type = name, t.shape, element
        return Operand(t, name)

    def _transpose(self, x: Operand, order: Sequence[int], t: Type) -> Operand:
        return self._op("Transpose", [x], t, perm=list(order))

    def _unsqueeze(self, x: Operand, axes: Sequence[int], t: Type) -> Operand:
        if x.handle in self.initializers:
            return self._view(x, t, ELEMENTS[t.dtype])
        return self._op("Unsqueeze", [x, self._ints(*axes)], t)

    def _concat(self, xs: Sequence[Operand], axis: int, t: Type) -> Operand:
        return self._op("Concat", xs, t, axis=axis)

    def _slice(self, x: Operand, axis: int, start: int, stop: int, t: Type) -> Operand:
        return self._op("Slice", [x, *map(self._ints, (start, stop, axis))], t)

    def _prefix(self, x: Operand, axis: int, like: Operand, t: Type) -> Operand:
        return self._op("Slice", [x, self._ints(0), self._length(like, 0), self._ints(axis)], t)

    # --- gather and scatter -------------------------------------------------------------------

    def _gather(self, x: Operand, index: Operand, axis: int, t: Type) -> Operand:
        return self._op("Gather", [x, index], t, axis=axis)

    def _gather_rows(self, x: Operand, index: Operand, t: Type) -> Operand:
        def column() -> str:
            return self.unsqueeze(self.cast(index, "i64"), 2).handle

        at = self._once(("column", index.handle), column)
        return self._op("GatherND", [x, at], t, batch_dims=1)

    def _append(self, cache: Operand, new: Operand, start: Operand, t: Type) -> Operand:
        return self._op("TensorScatter", [cache, new, start], t, axis=-2, mode="linear")

    # --- the model ----------------------------------------------------------------------------

    def name_values(self, values: Mapping[str, Operand]) -> None:
        """Name tensors after the IR values that they hold, unless the name is taken."""
        used = {*self.renamed.values(), *self.initializers, *(i.name for i in self.inputs)}
        for name, x in values.items():
            if x.handle in self.types and x.handle not in self.renamed and name not in used:
                self.renamed[x.handle] = name
                used.add(name)

    def model(self, name: str, doc: str, facts: Mapping[str, str]) -> onnx.ModelProto:
        """Return the ONNX model; `doc`: its doc_string, `facts`: its metadata properties."""
        for n in walk(self.nodes):
            _rename(n, self.renamed)
        results = [_info(k, t) for k, t in self.results.items()]
        within = [
            _info(self.renamed.get(k, k), t)
            for k, t in self.types.items()
            if self.renamed.get(k) not in self.results
        ]
        used = {i for n in walk(self.nodes) for i in n.input} | self.results.keys()
        initializers = [t for name, t in self.initializers.items() if name in used]
        graph = helper.make_graph(self.nodes, name, self.inputs, results, initializers, doc, within)
        opsets = [helper.make_opsetid("", OPSET)]
        model = helper.make_model(
            graph,
            opset_imports=opsets,
            producer_name="g4ir",
            doc_string=doc,
            ir_version=helper.find_min_ir_version_for(opsets),
        )
        helper.set_model_props(model, dict(facts))
        return model


def walk(nodes: Sequence[onnx.NodeProto]) -> Iterator[onnx.NodeProto]:
    """Yield all nodes, including those of branches."""
    for n in nodes:
        yield n
        for a in n.attribute:
            if a.type == onnx.AttributeProto.GRAPH:
                yield from walk(a.g.node)


def _rename(n: onnx.NodeProto, names: Mapping[str, str]) -> None:
    for field in (n.input, n.output):
        for i, name in enumerate(field):
            if name in names:
                field[i] = names[name]


def _info(name: str, t: Type) -> onnx.ValueInfoProto:
    shape: list[Dim] = list(t.shape)
    return helper.make_tensor_value_info(name, ELEMENTS[t.dtype], shape)


def outside(
    name: str, element: int, shape: Sequence[Dim], location: DataLocation
) -> onnx.TensorProto:
    """Return an initialiser whose data is at a location outside of the model file."""
    tensor = onnx.TensorProto(name=name, data_type=element, dims=shape)
    tensor.data_location = onnx.TensorProto.EXTERNAL
    for key, value in asdict(location).items():
        tensor.external_data.add(key=key, value=str(value))
    return tensor
