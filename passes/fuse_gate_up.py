"""glu(x @ gate, x @ up)  ->  glu_packed(x @ concat(gate, up))"""

from __future__ import annotations

from functools import partial

from g4ir.ir.graph import Builder, Graph, Node

from .match import Edit, Left, Note, base, edit_each, held_as, ignore, makers, stacked

AFTER = "fuse_qkv"  # it packs weights too


def fuse_gate_up(g: Graph, note: Note = ignore) -> Graph:
    """Make one matrix product of the two halves of a gated MLP."""
    return edit_each(g, g.find("glu"), partial(_edit, g), note)


def _edit(g: Graph, act: Node) -> Edit:
    gate, up = _projections(g, act)
    weights = (gate["w"], up["w"])
    held = [held_as(g, w) for w in weights]
    if None in held:
        raise Left("a weight is no parameter")
    if held[0] != held[1]:
        raise Left("the weights are not held alike")
    if any(len(g.users()[n.out.name]) > 1 for n in (gate, up)):
        raise Left("a projection has another user")
    b, scope = Builder(), base(weights[0]).rpartition(".")[0]
    w = stacked(b, g, weights, f"{scope}.w_gate_up")
    y = b.emit("linear", gate["x"], w, name=f"{scope}.gate_up")
    b.emit("glu_packed", y, name=act.out.name, **act.attrs)
    return Edit([gate, up, act, *makers(g, (gate, up))], b.nodes, "packed")


def _projections(g: Graph, act: Node) -> tuple[Node, Node]:
    gate, up = (g.producers().get(v.name) for v in act.inputs)
    if any(n is not None and n.op == "linear_clipped" for n in (gate, up)):
        raise Left("each projection clamps its input to bounds of its own")
    pairs = zip(act.inputs, (gate, up), strict=True)
    other = [v for v, n in pairs if n is None or n.op != "linear"]
    if other or not gate or not up:
        raise Left(f"{' and '.join(map(str, other))} is no projection")
    if gate["x"] != up["x"]:
        raise Left(f"{gate.out} and {up.out} project different inputs")
    return gate, up
