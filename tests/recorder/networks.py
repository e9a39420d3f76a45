"""Short ways to networks of the recorder."""

from __future__ import annotations

from math import prod
from typing import Any

import torch

from g4ir.backends.trt.recorder import recorder


def new_network(module: Any) -> Any:
    """A strongly typed network without anything in it."""
    flag = module.NetworkDefinitionCreationFlag.STRONGLY_TYPED
    return module.INetworkDefinition(1 << int(flag))


class Net:
    """A network with short ways to inputs and constants."""

    def __init__(self, version: str = "11.4.0", module: Any = None, network: Any = None) -> None:
        self.trt = recorder(version) if module is None else module
        self.network = new_network(self.trt) if network is None else network
        self.kept: list[torch.Tensor] = []

    def x(self, *shape: int, dtype: str = "FLOAT", name: str = "") -> Any:
        kind = getattr(self.trt.DataType, dtype)
        return self.network.add_input(name or f"x{self.network.num_inputs}", kind, shape)

    def constant(self, tensor: torch.Tensor) -> Any:
        kinds = {torch.float32: "FLOAT", torch.int32: "INT32", torch.int64: "INT64"}
        kind = getattr(self.trt.DataType, kinds.get(tensor.dtype, "INT8"))
        self.kept.append(tensor.contiguous())
        weights = self.trt.Weights(kind, self.kept[-1].data_ptr(), tensor.numel())
        return self.network.add_constant(tuple(tensor.shape), weights).get_output(0)

    def binary(self, a: Any, b: Any, op: str = "SUM") -> Any:
        op = getattr(self.trt.ElementWiseOperation, op)
        return self.network.add_elementwise(a, b, op).get_output(0)

    def unary(self, x: Any, op: str) -> Any:
        return self.network.add_unary(x, getattr(self.trt.UnaryOperation, op)).get_output(0)

    def exp(self, x: Any) -> Any:
        return self.unary(x, "EXP")

    def cast(self, x: Any, to: str) -> Any:
        return self.network.add_cast(x, getattr(self.trt.DataType, to)).get_output(0)

    def output(self, tensor: Any, name: str = "y") -> None:
        tensor.name = name
        self.network.mark_output(tensor)

    def dequantized(self, codes: Any, scale: Any, axis: int = 0, to: str = "FLOAT") -> Any:
        return self.set(
            self.network.add_dequantize(codes, scale, getattr(self.trt.DataType, to)), axis=axis
        )

    def held(self, kind: str, dims: tuple[int, ...] = (4,)) -> Any:
        """A constant of any element type."""
        count = prod(dims)
        self.kept.append(torch.ones(max(count, 1) * 8, dtype=torch.uint8))
        address = self.kept[-1].data_ptr()
        weights = self.trt.Weights(getattr(self.trt.DataType, kind), address, count)
        return self.network.add_constant(dims, weights).get_output(0)

    def codes(
        self,
        kind: str,
        scales: tuple[int, ...] = (),
        axis: int = -1,
        to: str = "FLOAT",
        of: str = "FLOAT",
    ) -> Any:
        """Codes [64, 128] with scales of this shape."""
        scale = self.held(of, tuple(scales))
        return self.dequantized(self.held(kind, (64, 128)), scale, axis, to)

    def product(self, a: Any, b: Any) -> Any:
        none = self.trt.MatrixOperation.NONE
        return self.network.add_matrix_multiply(a, none, b, none).get_output(0)

    def set(self, layer: Any, **attributes: Any) -> Any:
        """The first output of a layer with these attributes."""
        for name, value in attributes.items():
            setattr(layer, name, value)
        return layer.get_output(0)

    def reshape(self, x: Any, to: tuple[int, ...]) -> Any:
        return self.set(self.network.add_shuffle(x), reshape_dims=to)

    def concat(self, *tensors: Any) -> Any:
        return self.set(self.network.add_concatenation([*tensors]), axis=0)

    def slice(self, x: Any, start: int, count: int, axis: int = 0) -> Any:
        return self.set(self.network.add_slice(x, (start,), (count,), (1,)), axes=(axis,))

    def gather(self, x: Any, index: Any, axis: int = 0) -> Any:
        return self.network.add_gather(x, index, axis).get_output(0)

    def gather_nd(self, x: Any, index: Any, shared: int) -> Any:
        layer = self.network.add_gather_v2(x, index, self.trt.GatherMode.ND)
        return self.set(layer, num_elementwise_dims=shared)

    def activation(self, x: Any, op: str) -> Any:
        return self.network.add_activation(x, getattr(self.trt.ActivationType, op)).get_output(0)

    def select(self, *tensors: Any) -> Any:
        return self.network.add_select(*tensors).get_output(0)

    def softmax(self, x: Any, axes: int) -> Any:
        return self.set(self.network.add_softmax(x), axes=axes)

    def reduce(self, x: Any, op: str) -> Any:
        return self.network.add_reduce(
            x, getattr(self.trt.ReduceOperation, op), 1, True
        ).get_output(0)

    def absent(self, dtype: str, count: int) -> Any:
        """Three weights that are not there."""
        weights = self.trt.Weights(getattr(self.trt.DataType, dtype), 0, count)
        return self.network.add_constant((3,), weights).get_output(0)

    def topk(self, x: Any, k: int) -> Any:
        index, op = self.trt.DataType.INT32, self.trt.TopKOperation.MAX
        return self.network.add_topk(x, op, k, 2, index).get_output(0)

    def append(self, cache: Any, new: Any, at: Any) -> Any:
        mode = self.trt.KVCacheMode.LINEAR
        return self.network.add_kv_cache_update(cache, new, at, mode).get_output(0)

    def exchange(
        self, x: Any, op: str = "ALL_REDUCE", ranks: int = 2, groups: tuple[int, ...] = (0, 1)
    ) -> Any:
        kind = getattr(self.trt.CollectiveOperation, op)
        join = getattr(self.trt.ReduceOperation, "SUM" if op == "ALL_REDUCE" else "NONE")
        layer = self.network.add_dist_collective(x, kind, join, -1, groups)
        return self.set(layer, num_ranks=ranks)

    def attention(
        self, q: Any, k: Any, v: Any, mask: Any = None, kind: str = "NONE", whole: bool = False
    ) -> Any:
        norm = self.trt.AttentionNormalizationOp.SOFTMAX
        layer = self.network.add_attention_v2(q, k, v, norm, getattr(self.trt.CausalMaskKind, kind))
        given = {} if mask is None else {"mask": mask}
        return self.set(layer, decomposable=not whole, **given)
