"""Short ways to networks of the recorder."""

from __future__ import annotations

from typing import Any

import torch

from g4ir.backends.trt.recorder import recorder


def new_network(module: Any) -> Any:
    """A strongly typed network without anything in it."""
    flag = module.NetworkDefinitionCreationFlag.STRONGLY_TYPED
    return module.INetworkDefinition(module, 1 << int(flag))


class Net:
    """A network with short ways to inputs and constants."""

    def __init__(self, version: str = "11.4.0") -> None:
        self.trt = recorder(version)
        self.network = new_network(self.trt)
        self.kept: list[torch.Tensor] = []

    def x(self, *shape: int, dtype: str = "FLOAT", name: str = "") -> Any:
        kind = self.trt.DataType[dtype]
        return self.network.add_input(name or f"x{self.network.num_inputs}", kind, shape)

    def constant(self, tensor: torch.Tensor) -> Any:
        kinds = {
            torch.float32: "FLOAT",
            torch.int32: "INT32",
            torch.int64: "INT64",
            torch.int8: "INT8",
        }
        self.kept.append(tensor.contiguous())
        weights = self.trt.Weights(
            self.trt.DataType[kinds[tensor.dtype]], self.kept[-1].data_ptr(), tensor.numel()
        )
        return self.network.add_constant(tuple(tensor.shape), weights).get_output(0)

    def sum(self, a: Any, b: Any) -> Any:
        op = self.trt.ElementWiseOperation.SUM
        return self.network.add_elementwise(a, b, op).get_output(0)

    def exp(self, x: Any) -> Any:
        return self.network.add_unary(x, self.trt.UnaryOperation.EXP).get_output(0)

    def output(self, tensor: Any, name: str = "y") -> None:
        tensor.name = name
        self.network.mark_output(tensor)

    def dequantized(self, codes: Any, scale: Any, axis: int = 0, to: str = "FLOAT") -> Any:
        layer = self.network.add_dequantize(codes, scale, self.trt.DataType[to])
        layer.axis = axis
        return layer.get_output(0)

    def product(self, a: Any, b: Any) -> Any:
        none = self.trt.MatrixOperation.NONE
        return self.network.add_matrix_multiply(a, none, b, none).get_output(0)

    def reshape(self, x: Any, *shape: int) -> Any:
        layer = self.network.add_shuffle(x)
        layer.reshape_dims = shape
        return layer.get_output(0)

    def append(self, cache: Any, new: Any, at: Any) -> Any:
        mode = self.trt.KVCacheMode.LINEAR
        return self.network.add_kv_cache_update(cache, new, at, mode).get_output(0)

    def exchange(
        self,
        x: Any,
        op: str = "ALL_REDUCE",
        reduce: str = "SUM",
        ranks: int = 2,
        root: int = -1,
        groups: tuple[int, ...] = (0, 1),
    ) -> Any:
        kinds = self.trt.CollectiveOperation[op], self.trt.ReduceOperation[reduce]
        layer = self.network.add_dist_collective(x, *kinds, root, groups)
        layer.num_ranks = ranks
        return layer.get_output(0)

    def attention(self, q: Any, k: Any, v: Any, kind: str = "NONE") -> Any:
        norm = self.trt.AttentionNormalizationOp.SOFTMAX
        causal = self.trt.CausalMaskKind[kind]
        return self.network.add_attention_v2(q, k, v, norm, causal)
