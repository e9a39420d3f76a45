"""Flatten fused ops into the nodes of their expansions.

Costs, memory and routing decisions of a fused op follow from these nodes, so that no table lists
fusions. An op with `flops` or `traffic` is not flattened.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from .graph import Graph, Node, Value


def inner_nodes(n: Node) -> list[Node]:
    """Expand a node recursively; returns nodes in order, which define the node's results under
    their names, or the node itself if it is not to be flattened."""
    if n.definition.flops is not None:
        return [n]
    return [inner for m in parts(n) for inner in inner_nodes(m)]


def parts(n: Node) -> list[Node]:
    """Expand a node once; the nodes define its results under their names."""
    nodes, results = n.expanded
    results_by_name = {v.name: o for v, o in zip(results, n.outputs, strict=True)}

    def named(values: Iterable[Value]) -> tuple[Value, ...]:
        return tuple(results_by_name.get(v.name, v) for v in values)

    return [replace(m, inputs=named(m.inputs), outputs=named(m.outputs)) for m in nodes]


def flatten(g: Graph) -> Graph:
    """Return the graph with every node flattened: the same values under the same names, and the
    inner ones."""
    return replace(g, nodes=tuple(m for n in g.nodes for m in inner_nodes(n)))
