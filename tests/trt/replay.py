"""Networks as NVIDIA's library holds them, run on a CPU: written into TensorRT-RTX, read back layer
by layer (types, shapes, attributes, defaults), and written into the recorder, which executes them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from g4ir.backends.base import Prepared
from g4ir.backends.trt import build, dry_run
from g4ir.backends.trt.build import Written
from tests.trt.compiled import real

#: LayerType -> class, where that is not its name in one word
CLASSES = {
    "ELEMENTWISE": "IElementWiseLayer",
    "SOFTMAX": "ISoftMaxLayer",
    "TOPK": "ITopKLayer",
    "KV_CACHE_UPDATE": "IKVCacheUpdateLayer",
    "ATTENTION_INPUT": "IAttentionInputLayer",
    "ATTENTION_OUTPUT": "IAttentionOutputLayer",
}
#: LayerType -> attributes that its `add_` is given beside tensors
GIVEN: Mapping[str, Sequence[str]] = {
    "CAST": ("to_type",),
    "IDENTITY": (),
    "ELEMENTWISE": ("op",),
    "UNARY": ("op",),
    "SELECT": (),
    "SHAPE": (),
    "KV_CACHE_UPDATE": ("cache_mode",),
    "REDUCE": ("op", "axes", "keep_dims"),
}
#: numpy's name of constants -> DataType
KINDS = {"float32": "FLOAT", "float16": "HALF", "int32": "INT32", "int64": "INT64", "int8": "INT8"}


def kind_of(value: Any) -> str:
    """The name of an enum's member."""
    return str(value).rpartition(".")[2]


def given_or(get: Callable[[], Any]) -> tuple[int, ...] | None:
    """Dims, or None where none were set: reading them is an error then."""
    with suppress(ValueError, TypeError, RuntimeError):
        return tuple(get())
    return None


class Replay:
    """One network on its way. Types and shapes of every output must be what the library says."""

    def __init__(self, trt: Any, own: Any, written: Written) -> None:
        self.trt, self.own, self.written, self.source = trt, own, written, written.network
        self.builder = own.Builder(build.logger(own))
        self.n = self.builder.create_network(0)
        #: what the networks point to, as long as the written one is there
        self.held: list[Any] = written.emitter.held
        self.tensors: dict[str, Any] = {}

    def run(self) -> Written:
        for i in range(self.source.num_inputs):
            t = self.source.get_input(i)
            made = self.n.add_input(t.name, self.member(t.dtype), tuple(t.shape))
            for d in (d for d in range(len(t.shape)) if t.get_dimension_name(d)):
                made.set_dimension_name(d, t.get_dimension_name(d))
            self.tensors[t.name] = made
        for i in range(self.source.num_layers):
            self.layer(self.source.get_layer(i))
        for i in range(self.source.num_outputs):
            tensor = self.tensors[self.source.get_output(i).name]
            tensor.name = self.source.get_output(i).name
            self.n.mark_output(tensor)
        return replace(self.written, builder=self.builder, network=self.n, log=self.builder._logger)

    def member(self, value: Any) -> Any:
        """The recorder's member of the same enum and name."""
        return getattr(self.own, type(value).__name__)[kind_of(value)]

    def layer(self, layer: Any) -> None:
        kind = kind_of(layer.type)
        name = CLASSES.get(kind, f"I{kind.title().replace('_', '')}Layer")
        layer.__class__ = getattr(self.trt, name)
        tensors = [layer.get_input(j) for j in range(layer.num_inputs)]
        inputs = [None if t is None else self.tensors.get(t.name) for t in tensors]
        if kind == "ATTENTION_INPUT":
            self.attended = inputs
            return
        if kind in GIVEN:
            values = [getattr(layer, a) for a in GIVEN[kind]]
            others = [self.member(v) if hasattr(v, "__members__") else v for v in values]
            made = getattr(self.n, f"add_{kind.lower()}")(*inputs, *others)
        else:
            made = getattr(self, kind.lower())(layer, *inputs)
        made.name = layer.name
        for j in range(layer.num_outputs):
            t, mine = layer.get_output(j), made.get_output(j)
            said, ours = (kind_of(t.dtype), tuple(t.shape)), (mine.dtype.name, tuple(mine.shape))
            assert said == ours, f"{layer.name}: the library says {said}, the recorder {ours}"
            self.tensors[t.name] = mine

    # --- layers of their own ------------------------------------------------------------------

    def constant(self, layer: Any) -> Any:
        a = layer.weights
        if isinstance(a, np.ndarray):
            self.held.append(np.ascontiguousarray(a))
            kind, address, count = KINDS[str(a.dtype)], self.held[-1].ctypes.data, a.size
        else:  # codes that numpy has no type for cannot be read back
            stored = self.written.emitter._known[layer.name.removesuffix("/codes")]
            kind, count = kind_of(a.dtype), a.size
            self.held.append(stored.numbers().contiguous())
            address = self.held[-1].data_ptr()
        weights = self.own.Weights(self.own.DataType[kind], address, count)
        return self.n.add_constant(tuple(layer.shape), weights)

    def activation(self, layer: Any, x: Any) -> Any:
        kind = self.trt.IActivationLayer.type.__get__(layer)
        return self.n.add_activation(x, self.member(kind))

    def matrix_multiply(self, layer: Any, a: Any, b: Any) -> Any:
        return self.n.add_matrix_multiply(a, self.member(layer.op0), b, self.member(layer.op1))

    def softmax(self, layer: Any, x: Any) -> Any:
        return self.set(self.n.add_softmax(x), axes=layer.axes)

    def concatenation(self, layer: Any, *xs: Any) -> Any:
        return self.set(self.n.add_concatenation([*xs]), axis=layer.axis)

    def topk(self, layer: Any, x: Any) -> Any:
        index = self.member(layer.get_output(1).dtype)
        return self.n.add_topk(x, self.member(layer.op), layer.k, layer.axes, index)

    def shuffle(self, layer: Any, x: Any, *rest: Any) -> Any:
        rank = len(layer.get_output(0).shape)
        first = tuple(layer.first_transpose)[: len(x.shape)]
        second = tuple(layer.second_transpose)[:rank]
        how = {
            "first_transpose": None if first == tuple(sorted(first)) else first,
            "reshape_dims": given_or(lambda: layer.reshape_dims),
            "second_transpose": None if second == tuple(sorted(second)) else second,
        }
        made = {name: value for name, value in how.items() if value is not None}
        return self.set(self.n.add_shuffle(x), **made)

    def slice(self, layer: Any, x: Any, *given: Any) -> Any:
        parts = [given_or(lambda n=n: getattr(layer, n)) or (0,) for n in ("start", "shape")]
        made = self.n.add_slice(x, *parts, given_or(lambda: layer.stride) or (1,))
        axes = given_or(lambda: layer.axes)
        self.set(made, mode=self.member(layer.mode), **({"axes": axes} if axes else {}))
        for i, t in enumerate(given, 1):
            if t is not None:
                made.set_input(i, t)
        return made

    def gather(self, layer: Any, x: Any, index: Any) -> Any:
        mode = self.member(layer.mode)
        if mode.name == "DEFAULT":
            return self.n.add_gather(x, index, layer.axis)
        made = self.n.add_gather_v2(x, index, mode)
        return self.set(made, num_elementwise_dims=layer.num_elementwise_dims)

    def dequantize(self, layer: Any, x: Any, scale: Any, *rest: Any) -> Any:
        made = self.n.add_dequantize(x, scale, self.member(layer.to_type))
        return self.set(made, axis=layer.axis)

    def dist_collective(self, layer: Any, x: Any) -> Any:
        op = (
            "ALL_GATHER" if layer.name.rpartition("/")[2].startswith("all_gather") else "ALL_REDUCE"
        )
        join, every = "NONE" if op == "ALL_GATHER" else "SUM", [*range(layer.num_ranks)]
        kinds = self.own.CollectiveOperation[op], self.own.ReduceOperation[join]
        made = self.n.add_dist_collective(x, *kinds, -1, every)
        return self.set(made, num_ranks=layer.num_ranks)

    def attention_output(self, layer: Any, x: Any) -> Any:
        """What the library keeps as a layer before an attention and one behind it."""
        a, (*rows, mask) = layer.attention, self.attended
        kinds = self.member(a.norm_op), self.member(a.causal_kind)
        made = self.n.add_attention_v2(*rows, *kinds)
        return self.set(made, mask=mask, decomposable=a.decomposable)

    def set(self, layer: Any, **attributes: Any) -> Any:
        for name, value in attributes.items():
            setattr(layer, name, value)
        return layer


def replayed(p: Prepared, monkeypatch: pytest.MonkeyPatch) -> dict[str, float]:
    """Errors of the networks in small, in fp32, beside the interpreter's. Attention layers are
    executed by their definition."""
    own = dry_run.emulator()
    write, library = build.write_network, real()

    def through(api: Any, graph: Any, limits: Any, params: Any, settings: Any, *more: Any) -> Any:
        written = write(library, graph, limits, params, settings, *more)
        return Replay(library.trt, own.trt, written).run()

    monkeypatch.setattr(build, "write_network", through)
    with dry_run.one_thread():
        return dry_run.check_small(own, p, "f32")
