"""Replace fused ops by the nodes of their expansions.

The cost and memory of a fused op, and the routers in it, follow from these nodes, so that no table
lists fusions. A fused op with its own `flops` or `traffic` is not replaced.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from .graph import Graph, Node, Value


def inner_nodes(n: Node) -> list[Node]:
    """Expand a node recursively; returns nodes in order, which define the node's results under
    their names. A node whose op has `flops` (set for `traffic` too) is returned as it is."""
    if n.definition.flops is not None:
        return [n]
    return [inner for m in parts(n) for inner in inner_nodes(m)]


def parts(n: Node) -> list[Node]:
    """Expand a fused node once; the nodes define its results under their names."""
    nodes, results = n.expanded
    results_by_name = {v.name: o for v, o in zip(results, n.outputs, strict=True)}

    def named(values: Iterable[Value]) -> tuple[Value, ...]:
        return tuple(results_by_name.get(v.name, v) for v in values)

    return [replace(m, inputs=named(m.inputs), outputs=named(m.outputs)) for m in nodes]


def flatten(g: Graph) -> Graph:
    """Return the graph with each fused node replaced, recursively, by the nodes of its expansion;
    ops with their own `flops` or `traffic` stay. Existing values keep their names; the expansions'
    intermediate values are added."""
    return replace(g, nodes=tuple(m for n in g.nodes for m in inner_nodes(n)))
