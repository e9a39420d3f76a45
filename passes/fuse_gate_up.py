"""glu(x @ gate, x @ up)  ->  glu_packed(x @ concat(gate, up))"""

from __future__ import annotations

from g4ir.ir.graph import Builder, Graph, Node
from g4ir.ir.rewrite import splice_all

from .match import Note, base, held_as, ignore, makers, stacked

AFTER = "fuse_qkv"  # it packs weights too


def fuse_gate_up(g: Graph, note: Note = ignore) -> Graph:
    """Make one matrix product of the two halves of a gated MLP."""
    producers = g.producers()
    edits: list[tuple[list[Node], list[Node]]] = []
    for act in g.find("glu"):
        pair = [producers.get(v.name) for v in act.inputs]
        reason = _refusal(g, act, pair)
        if reason:
            note(act.out.name, f"left: {reason}")
            continue
        gate, up = (n for n in pair if n)
        edits.append(([gate, up, act, *makers(g, (gate, up))], _packed(g, gate, up, act)))
        note(act.out.name, "packed")
    return splice_all(g, edits)


def _refusal(g: Graph, act: Node, pair: list[Node | None]) -> str | None:
    gate, up = pair
    if any(n is not None and n.op == "linear_clipped" for n in pair):
        return "each projection clamps its input to bounds of its own"
    other = [v for v, n in zip(act.inputs, pair, strict=True) if n is None or n.op != "linear"]
    if other or not gate or not up:
        return f"{' and '.join(map(str, other))} is no projection"
    if gate["x"] != up["x"]:
        return f"{gate.out} and {up.out} project different inputs"
    held = [held_as(g, n["w"]) for n in (gate, up)]
    if None in held:
        return "a weight is no parameter"
    if held[0] != held[1]:
        return "the weights are not held alike"
    if any(len(g.users()[n.out.name]) > 1 for n in (gate, up)):
        return "a projection has another user"
    return None


def _packed(g: Graph, gate: Node, up: Node, act: Node) -> list[Node]:
    b = Builder()
    weights = (gate["w"], up["w"])
    scope = base(weights[0]).rpartition(".")[0]
    w = stacked(b, g, weights, f"{scope}.w_gate_up")
    y = b.emit("linear", gate["x"], w, name=f"{scope}.gate_up")
    b.emit("glu_packed", y, name=act.out.name, **act.attrs)
    return b.nodes
