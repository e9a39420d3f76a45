"""glu(x @ gate, x @ up)  ->  glu_packed(x @ concat(gate, up))"""

from __future__ import annotations

from collections.abc import Mapping

from g4ir.ir.graph import Builder, Graph, Node, splice_all

from .match import Note, ignore, is_free_projection, maker

AFTER = "fuse_qkv"  # it packs weights too


def fuse_gate_up(g: Graph, note: Note = ignore) -> Graph:
    """Make one matrix product of the two halves of a gated MLP."""
    producers, users = g.producers(), g.users()
    params = {v.name for v in g.params}
    edits: list[tuple[list[Node], list[Node]]] = []
    for act in g.find("glu"):
        pair = [producers.get(v.name) for v in act.inputs]
        reason = _refusal(act, pair, users, params)
        if reason:
            note(act.out.name, f"left: {reason}")
            continue
        gate, up = (n for n in pair if n)
        edits.append(([gate, up, act], _packed(gate, up, act)))
        note(act.out.name, "packed")
    return splice_all(g, edits)


def _refusal(
    act: Node, pair: list[Node | None], users: Mapping[str, list[Node]], params: set[str]
) -> str | None:
    gate, up = pair
    if any(n is not None and n.op == "linear_clipped" for n in pair):
        return "each projection clamps its input to bounds of its own"
    other = [v for v, n in zip(act.inputs, pair, strict=True) if n is None or n.op != "linear"]
    if other or not gate or not up:
        return f"{' and '.join(map(str, other))} is no projection"
    if gate["x"] != up["x"]:
        return f"{gate.out} and {up.out} project different inputs"
    if any(n["w"].name not in params for n in (gate, up)):
        return "a weight is no parameter"
    if any(len(users[n.out.name]) > 1 for n in (gate, up)):
        return "a projection has another user"
    return None


def _packed(gate: Node, up: Node, act: Node) -> list[Node]:
    b = Builder()
    weights = (gate["w"], up["w"])
    scope = weights[0].name.rpartition(".")[0]
    w = b.emit("concat", *weights, axis=0, name=f"{scope}.w_gate_up")
    y = b.emit("linear", gate["x"], w, name=f"{scope}.gate_up")
    b.emit("glu_packed", y, name=act.out.name, **act.attrs)
    return b.nodes


# --- what it must leave to nobody --------------------------------------------------------------


def left(g: Graph, n: Node) -> bool:
    """Whether a node is a gate whose two halves are products of one input."""
    if n.op != "glu":
        return False
    gate, up = maker(g, n, "gate", "linear"), maker(g, n, "up", "linear")
    return bool(
        gate
        and up
        and gate["x"] == up["x"]
        and all(is_free_projection(g, m, "glu") for m in (gate, up))
    )
