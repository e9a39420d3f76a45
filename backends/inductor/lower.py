"""A segment as a torch module: each op by its lowering, its reference or its expansion."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from g4ir.ir.graph import Node, Value
from g4ir.ops.base import as_tuple
from g4ir.ops.types import Type, torch_dtype

from .attention import attention, attention_latent, encoder_attention
from .cache_write import cache_write
from .lowered import Coded, Lowered, Lowering

Tensor = torch.Tensor


def run_node(lowered: Lowered, n: Node, env: dict[str, Any]) -> None:
    """Run a node by its lowering, reference or expansion; its outputs are added to `env`."""
    lowering = lowered.lowering(n)
    takes = lowering.takes if lowering else ()
    inputs = (env[v.name] for v in n.inputs)
    tensors = (t if isinstance(t, takes) else dense(t) for t in inputs)
    if lowering:
        results = as_tuple(lowering.call(n, *tensors))
    elif n.definition.reference:
        results = as_tuple(n.definition.reference(*tensors, **n.attrs))
    else:
        nodes, values = n.expanded
        for inner in nodes:
            run_node(lowered, inner, env)
        results = tuple(env[v.name] for v in values)
        for inner in nodes:
            for v in inner.outputs:
                del env[v.name]
    env.update({v.name: t for v, t in zip(n.outputs, results, strict=True)})


class SegmentModule(torch.nn.Module):
    """Module that runs a segment: inputs, params and caches in the graph's order -> outputs; caches
    are written in place."""

    def __init__(self, lowered: Lowered) -> None:
        super().__init__()
        self.lowered = lowered

    def forward(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        g = self.lowered.graph
        env: dict[str, Any] = {v.name: t for v, t in zip(g.sources(), tensors, strict=True)}
        _unify_dims(g.sources(), env)
        for i, n in enumerate(g.nodes):
            run_node(self.lowered, n, env)
            for name in g.last_uses.get(i, ()):
                del env[name]
        return tuple(dense(env[v.name]).contiguous() for v in g.outputs)


def _unify_dims(values: tuple[Value, ...], env: dict[str, Any]) -> None:
    """Assert for the exporter that dims of equal names have equal sizes."""
    sizes: dict[str, Any] = {}
    for v in values:
        for i, d in enumerate(v.type.shape):
            if isinstance(d, str):
                size = env[v.name].shape[i]
                torch._check(size == sizes.setdefault(d, size))


def dense(value: Any) -> Any:
    """Return a quantised weight as a dense tensor; any other value unchanged."""
    return value.dense() if isinstance(value, Coded) else value


#: op -> default lowering of compiled programs on every device
COMMON: Mapping[str, Lowering] = {
    "attention": Lowering(attention),
    "attention_latent": Lowering(attention_latent),
    "encoder_attention": Lowering(encoder_attention),
    "cache_write": Lowering(cache_write),
}


def example(t: Type, device: str, dims: dict[str, int]) -> Tensor:
    """Return a contiguous, uninitialised tensor of the type, with named dims bound by `dims`: the
    exporter uses only its metadata."""
    shape = [int(d) for d in t.bind(dims).shape]
    return torch.empty(shape, dtype=torch_dtype(t.dtype), device=device)
