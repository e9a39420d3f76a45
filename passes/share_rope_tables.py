"""rope_table(p), ... rope_table(p)  ->  one rope_table(p) for each p and set of attributes

The tables move to the front of the graph, so that they belong to no layer.
"""

from __future__ import annotations

from dataclasses import replace

from g4ir.ir.graph import Graph, Node, Value
from g4ir.ir.rewrite import rebuild

from .match import Note, ignore

AFTER = None  # the first
_SHARED = "rope"


def share_rope_tables(g: Graph, note: Note = ignore) -> Graph:
    """Share one table per positions and RoPE attributes across the graph."""
    if all(n.outputs[0].name.startswith(_SHARED) for n in g.find("rope_table")):
        return g
    shared: dict[tuple[object, ...], Node] = {}
    rename: dict[str, Value] = {}
    for n in g.find("rope_table"):
        parts = zip(("cos", "sin"), n.outputs, strict=True)
        outputs = tuple(Value(f"{_SHARED}{len(shared)}.{part}", v.type) for part, v in parts)
        key = (n.inputs, tuple(sorted(n.attrs.items())))
        table = shared.setdefault(key, replace(n, outputs=outputs))
        rename.update({v.name: t for v, t in zip(n.outputs, table.outputs, strict=True)})
        note(n.outputs[0].name, f"shared as {table.outputs[0]}")
    nodes = tuple(n for n in g.nodes if n.op != "rope_table")
    return rebuild(replace(g, nodes=(*shared.values(), *nodes)), rename)
