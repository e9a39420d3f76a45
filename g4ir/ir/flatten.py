"""Opens fused ops: finds the nodes that a node stands for.

The simpler ops of its expansion say what a fused op costs, keeps in memory and decides (which
experts), so that no table has to know each fusion. An op that counts its own FLOPs or bytes stays
whole.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from .graph import Graph, Node, Value


def inner_nodes(n: Node) -> list[Node]:
    """Return the nodes of the expansion and of those of its nodes, in order, with the names of the
    node's own results; the node itself where it stays whole."""
    if n.definition.flops is not None:
        return [n]
    return [inner for m in parts(n) for inner in inner_nodes(m)]


def parts(n: Node) -> list[Node]:
    """Return the nodes of the expansion, in order, with the names of the node's own results."""
    nodes, results = n.expanded
    own = {v.name: o for v, o in zip(results, n.outputs, strict=True)}

    def named(values: Iterable[Value]) -> tuple[Value, ...]:
        return tuple(own.get(v.name, v) for v in values)

    return [replace(m, inputs=named(m.inputs), outputs=named(m.outputs)) for m in nodes]


def flatten(g: Graph) -> Graph:
    """Return the graph with every node opened; the same values under the same names, and more."""
    return replace(g, nodes=tuple(m for n in g.nodes for m in inner_nodes(n)))
