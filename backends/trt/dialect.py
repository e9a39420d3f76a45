"""Emits the tensor primitives for NVIDIA's ONNX parser: ONNX, with three of NVIDIA's operators.

- `TRT_Attention`: for ONNX's `Attention` the parser multiplies queries and keys by a scale, even
  of 1, so that an engine would copy each KV cache in every step.
- `TRT_Slice`, with a start and a size: the ends of a `Slice` do not bound the size of a block, and
  its scratch memory would be that of the whole axis.
- `DistCollective`: ONNX has no collectives.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import onnx
import torch

from g4ir.backends.onnx_graph.emitter import ELEMENTS, OnnxEmitter, outside
from g4ir.backends.primitives.emitter import Operand
from g4ir.backends.primitives.network import Network
from g4ir.errors import LowerError
from g4ir.ir.graph import Graph, Value
from g4ir.ops.codecs import FORMATS
from g4ir.ops.types import Type, torch_dtype
from g4ir.plan.engine_limits import Limits

from .lowerings import AUTO, attention_by_head_size, lowerings

#: NVIDIA's operator for collectives
COLLECTIVE = "DistCollective"
#: value of `root` for a collective without a root rank
NO_ROOT = -1
FP4 = FORMATS["fp4"]
#: scale of codes whose row scales are applied after the matmul (`part`), halved for each further
#: reader: the builder fuses only a scalar with the matmul. Not 1, which the builder would drop.
PART = 2.0**-7
#: activation -> operator and attributes
ACTIVATIONS: dict[str, tuple[str, dict[str, Any]]] = {
    "gelu_pytorch_tanh": ("Gelu", {"approximate": "tanh"}),
    "gelu": ("Gelu", {"approximate": "none"}),
    "sigmoid": ("Sigmoid", {}),
    "tanh": ("Tanh", {}),
}
#: collective -> reduce_op
REDUCTIONS = {"all_reduce": "sum", "all_gather": "none"}


class Dialect(OnnxEmitter):
    """ONNX emitter for TensorRT. It emits no conditionals: for these TensorRT synchronises with the
    host."""

    gathers_codes = False

    def __init__(self, storage: Any) -> None:
        super().__init__(storage)
        #: name of a dequantised 4-bit weight -> name of its codes
        self._codes: dict[str, str] = {}
        #: names of codes whose entries are gathered
        self._gathered: set[str] = set()
        #: the first i64 input, for `_index_range`
        self._integers: Operand | None = None

    def input(self, name: str, t: Type) -> Operand:
        x = super().input(name, t)
        if t.dtype == "i64" and self._integers is None:
            self._integers = x
        return x

    def activation(self, name: str, x: Operand) -> Operand | None:
        if name not in ACTIVATIONS:
            return None
        op, attributes = ACTIVATIONS[name]
        return self._op(op, [x], x.type, **attributes)

    # --- quantised weights --------------------------------------------------------------------

    def _dequantize(self, codes: Operand, scales: Operand, axis: int, t: Type) -> Operand:
        """Dequantise with group scales, rounded once: via fp32 if the scales' dtype differs from
        the result's (no builder fused that into one kernel)."""
        dtype = t.dtype if scales.dtype == t.dtype else "f32"
        weight = super()._dequantize(codes, scales, axis, replace(t, dtype=dtype))
        weight = self.cast(weight, t.dtype)
        if codes.dtype == "u8":
            self._codes[weight.handle] = codes.handle
        return weight

    def param(self, v: Value) -> Operand:
        """Return a param's operand. Codes of `fp4` become two initialisers: e2m1 values, and an
        e4m3 scale for each 16 of them."""
        if v.type.dtype != FP4.codes:
            return super().param(v)
        *lead, size = v.type.shape
        values = FP4.values_in(int(size))
        for name, field, element, count in (
            (v.name, "low", onnx.TensorProto.FLOAT4E2M1, values),
            (f"{v.name}.scales", "integers", ELEMENTS["f8e4m3"], values // FP4.shared),
        ):
            location = self.storage.weight(v, field)
            self.initializers[name] = outside(name, element, (*lead, count), location)
        return Operand(v.type, v.name)

    def part(self, codes: Operand, dtype: str, reader: int) -> tuple[Operand, float] | None:
        power = PART / 2**reader
        scale = self.constant(torch.tensor(power, dtype=torch_dtype(dtype)))
        if codes.dtype == FP4.codes:  # codecs.py: values twice those of e2m1
            *lead, size = codes.shape
            shape = (*lead, FP4.values_in(int(size)))
            groups = Type(dtype, (*lead, FP4.values_in(int(size)) // FP4.shared))
            scales = self._op("DequantizeLinear", [f"{codes.handle}.scales", scale], groups)
            attrs = {"axis": len(shape) - 1, "block_size": FP4.shared}
            operands = [codes, scales]
            return self._op("DequantizeLinear", operands, Type(dtype, shape), **attrs), 2 / power
        scaled = self._op("DequantizeLinear", [codes, scale], Type(dtype, codes.shape))
        return scaled, 1 / power

    def stack(self, x: Operand) -> Operand:
        """Return stacked weights for a batched matmul. If entries of a 4-bit stack were gathered
        before (`_gather`), all are gathered here too: a matmul's constants have another layout, so
        the plan would store the codes twice."""
        if self._codes.get(x.handle) not in self._gathered or not self._integers:
            return x
        count, integers = int(x.shape[0]), self._integers
        index = self._once(("places", count), lambda: self._index_range(count, integers).handle)
        return self.gather(x, Operand(Type("i64", (count,)), index), 0)

    def _index_range(self, count: int, x: Operand) -> Operand:
        """Return i64[count]: 0, 1, 2, ... plus the minimum of 0 and the first entry of x, an input
        that is never negative. The sum is known only at run time: the builder would optimise away a
        gather with constant indices."""
        for axis in range(x.rank):
            x = self.slice(x, axis, 0, 1)
        zero = self.binary("min", self.reshape(x, 1), 0)
        return self.add(self.constant(torch.arange(count)), zero)

    def _gather(self, x: Operand, index: Operand, axis: int, t: Type) -> Operand:
        if x.handle in self._codes:
            self._gathered.add(self._codes[x.handle])
        return super()._gather(x, index, axis, t)

    # --- NVIDIA's operators -------------------------------------------------------------------

    def _block(self, x: Operand, axis: int, first: int, count: int, t: Type) -> Operand:
        def start() -> str:
            return self._min(self._length(x, axis), first)

        def size() -> str:
            stop = self._min(self._length(x, axis), first + count)
            remaining = self._node("Sub", [stop, begin], Type("i64", (1,)))
            # A builder bounds `stop` and `begin` separately: without an explicit bound it would
            # assume that the size may be as large as `stop`.
            return self._min(remaining, count)

        begin = self._once(("start", t.shape[axis]), start)
        amount = self._once(("size", t.shape[axis]), size)
        starts = [self._ints(0)] * x.rank
        sizes = [self._length(x, i) for i in range(x.rank)]
        starts[axis], sizes[axis] = begin, amount
        origin, extent = map(self._joined, (starts, sizes))
        return self._op("TRT_Slice", [x, origin, extent, self._ints(*[1] * x.rank)], t)

    def _min(self, n: str, bound: int) -> str:
        return self._node("Min", [n, self._ints(bound)], Type("i64", (1,)))

    def _joined(self, parts: Sequence[str]) -> str:
        """Concatenate n tensors i64[1] to i64[n]."""
        return self._node("Concat", parts, Type("i64", (len(parts),)), axis=0)

    def _attention(
        self, q: Operand, keys: Operand, values: Operand, mask: Operand, t: Type
    ) -> Operand:
        return self._op("TRT_Attention", [q, keys, values, mask], t, TRT_decomposable=1)

    def _exchange(self, op: str, x: Operand, ranks: int, t: Type) -> Operand:
        """Emit a collective over all ranks; the same node on every rank."""
        return self._op(
            COLLECTIVE,
            [x],
            t,
            collective_operation=op,
            reduce_op=REDUCTIONS[op],
            root=NO_ROOT,
            nb_rank=ranks,
            group_size=ranks,
            groups=[*range(ranks)],
        )

    # --- control ------------------------------------------------------------------------------

    def when_one(
        self, x: Operand, axis: int, then: Callable[[], Operand], otherwise: Callable[[], Operand]
    ) -> Operand:
        """Raise LowerError: a step with a conditional cannot be recorded as a CUDA graph."""
        raise LowerError(
            f"{self.scope}: a conditional in a lowering prevents recording steps as a CUDA graph; "
            f"give the op a lowering without one (backends/trt/lowerings.py)"
        )


def emitted(
    graph: Graph, limits: Limits, storage: Any, settings: Mapping[str, str]
) -> tuple[Dialect, list[str]]:
    """Return the emitter that holds a graph (primitives/graph.py) in the dialect, and notes for the
    user. LowerError names the op and the value."""
    e, attention = Dialect(storage), settings["attention"]
    how = lowerings(attention_by_head_size(graph) if attention == AUTO else attention)
    net = Network(e, graph, limits, how)
    net.emit()
    return e, net.notes
