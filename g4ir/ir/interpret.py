"""The interpreter: runs each node's reference, or those of its expansion, in order. This defines a
graph's meaning."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from g4ir.errors import InputError
from g4ir.ops.base import as_tuple
from g4ir.ops.types import FLOATS, torch, torch_dtype

from .graph import Graph, Node, Value

Tensors = Mapping[str, Any]
#: a node and its operands -> its results
Run = Callable[[Node, list[Any]], tuple[Any, ...]]


def interpret(
    g: Graph,
    inputs: Tensors,
    params: Tensors,
    state: Tensors,
    watch: Callable[[Value, Any], None] | None = None,
    run: Run | None = None,
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Run `g`; returns (outputs by name, new state by name). The arguments are not modified.

    Tensors may be wider than declared: with float64 tensors, all is computed in float64 except the
    results of ops with a fixed dtype (RoPE tables). `watch` is called with each result of each node
    of `g`: value and tensor. `run` replaces `run_node`.

    Raises InputError if a tensor is missing.
    """
    env: dict[str, Any] = {}
    for kind, values, tensors in (
        ("input", g.inputs, inputs),
        ("param", g.params, params),
        ("state", g.state, state),
    ):
        for v in values:
            if v.name not in tensors:
                raise InputError(f"graph {g.name}: {kind} %{v.name} ({v.type}) was not given")
            env[v.name] = tensors[v.name]
    for i, n in enumerate(g.nodes):
        results = (run or run_node)(n, [env[v.name] for v in n.inputs])
        for v, t in zip(n.outputs, results, strict=True):
            env[v.name] = t
            if watch:
                watch(v, t)
        for name in g.last_uses.get(i, ()):
            env.pop(name, None)
    return (
        {v.name: env[v.name] for v in g.outputs},
        {v.name: env[g.next[v.name].name if v.name in g.next else v.name] for v in g.state},
    )


def run_node(n: Node, tensors: list[Any], run: Run | None = None) -> tuple[Any, ...]:
    """Run the reference of a node's op, or else its expansion, node by node with `run` (default:
    `run_node`)."""
    definition = n.definition
    if definition.reference:
        return as_tuple(definition.reference(*tensors, **n.attrs))
    nodes, results = n.expanded
    env = {v.name: t for v, t in zip(n.inputs, tensors, strict=True)}
    for inner in nodes:
        outputs = (run or run_node)(inner, [env[v.name] for v in inner.inputs])
        env.update({v.name: t for v, t in zip(inner.outputs, outputs, strict=True)})
    return tuple(env[v.name] for v in results)


def empty_state(g: Graph, dims: Mapping[str, int], dtype: Any = None) -> dict[str, Any]:
    """Return name -> zeroed cache; `dims` binds their named dims, the torch dtype `dtype`, if
    passed, replaces floating dtypes."""
    out = {}
    for v in g.state:
        t = v.type.bind(dims)
        torch_type = (t.dtype in FLOATS and dtype) or torch_dtype(t.dtype)
        out[v.name] = torch.zeros([int(d) for d in t.shape], dtype=torch_type)
    return out
