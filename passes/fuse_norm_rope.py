"""rope(rms_norm(x, w), cos, sin)  ->  norm_rope(x, w, cos, sin)"""

from __future__ import annotations

from g4ir.ir.graph import Builder, Graph, Node, splice_all

from .match import Note, ignore, maker

AFTER = "fuse_gate_up"  # heads are cut from packed products by now


def fuse_norm_rope(g: Graph, note: Note = ignore) -> Graph:
    """Fuse the per-head norm of Q or K and its rotation into one op."""
    producers, users = g.producers(), g.users()
    edits: list[tuple[list[Node], list[Node]]] = []
    for n in g.find("rope"):
        norm = producers.get(n["x"].name)
        if norm is None or norm.op != "rms_norm" or len(norm.inputs) != 2:
            note(n.out.name, "left: its input is not a weighted norm")
            continue
        if len(users[norm.out.name]) > 1:
            note(n.out.name, f"left: {norm.out} has another user")
            continue
        b = Builder()
        b.emit("norm_rope", *norm.inputs, *n.inputs[1:], name=n.out.name, **norm.attrs)
        edits.append(([norm, n], b.nodes))
        note(n.out.name, "fused")
    return splice_all(g, edits)


# --- what it must leave to nobody --------------------------------------------------------------


def left(g: Graph, n: Node) -> bool:
    """Whether a node is a rotation of a weighted norm."""
    norm = maker(g, n, "x", "rms_norm") if n.op == "rope" else None
    return bool(norm and len(norm.inputs) == 2 and len(g.users()[norm.out.name]) == 1)
