"""glu_packed(x @ w)  ->  linear_glu(x, w)
glu(x @ w, up)    ->  linear_glu(x, w, up)

The gate and its product in one op: of a gated MLP whose two halves are packed, and of a per-layer
embedding.
"""

from __future__ import annotations

from g4ir.ir.graph import Builder, Graph, Node, splice_all

from .match import Note, ignore, maker

AFTER = "quantize_activations"  # products have their last operands


def fuse_glu(g: Graph, note: Note = ignore) -> Graph:
    """Fuse a gated activation and the product before it into one op."""
    producers, users = g.producers(), g.users()
    edits: list[tuple[list[Node], list[Node]]] = []
    for act in g.find("glu", "glu_packed"):
        gate, *up = act.inputs
        product = producers.get(gate.name)
        if product is None or product.op != "linear":
            note(act.out.name, f"left: {gate} is no projection")
            continue
        if len(users[gate.name]) > 1 or gate in up:
            note(act.out.name, f"left: {gate} has another user")
            continue
        b = Builder()
        b.emit("linear_glu", *product.inputs, *up, name=act.out.name, **act.attrs)
        edits.append(([product, act], b.nodes))
        note(act.out.name, "fused")
    return splice_all(g, edits)


# --- what it must leave to nobody --------------------------------------------------------------


def left(g: Graph, n: Node) -> bool:
    """Whether a node is a gate of a product that nothing else reads."""
    x = {"glu": "gate", "glu_packed": "x"}.get(n.op)
    product = maker(g, n, x, "linear") if x else None
    return (
        product is not None
        and g.users()[product.out.name] == [n]
        and (product.out not in n.inputs[1:])
    )
