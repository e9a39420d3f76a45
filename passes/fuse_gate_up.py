"""glu(x @ gate, x @ up)  ->  glu_packed(x @ concat(gate, up))"""

from __future__ import annotations

from g4ir.ir.graph import Builder, Graph, Node

from .match import DENSE, Edit, NoMatch, Note, edit_each, format_of, ignore, pack, producer_of

AFTER = "fuse_qkv"  # not required: both pack weights, each its own


def fuse_gate_up(g: Graph, note: Note = ignore) -> Graph:
    """Pack the gate and up projections of a gated MLP into one linear."""
    return edit_each(g, g.find("glu"), lambda n: _edit(g, n), note)


def _edit(g: Graph, act: Node) -> Edit:
    if any(producer_of(g, v, "linear_clipped") for v in act.inputs):
        raise NoMatch("a projection clamps its input to bounds of its own")
    gate, up = (producer_of(g, v, "linear") for v in act.inputs)
    if gate is None or up is None:
        other = [str(v) for v, n in zip(act.inputs, (gate, up), strict=True) if n is None]
        raise NoMatch(f"no linear computes {' or '.join(other)}")
    if gate["x"] != up["x"]:
        raise NoMatch(f"{gate.out} and {up.out} project different inputs")
    formats = [format_of(g, n["w"]) for n in (gate, up)]
    if None in formats:
        raise NoMatch("a weight is not a param")
    if formats[0] != formats[1]:
        raise NoMatch("the weights have different formats")
    if any(len(g.readers(n.out)) > 1 for n in (gate, up)):
        raise NoMatch("a projection has another user")
    b, scope = Builder(), gate["w"].name.removesuffix(DENSE).rpartition(".")[0]
    y, old = pack(b, g, (gate, up), f"{scope}.w_gate_up", f"{scope}.gate_up")
    b.emit("glu_packed", y, name=act.out.name, **act.attrs)
    return Edit([*old, act], b.nodes, "packed")
