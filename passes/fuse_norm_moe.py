"""h, n1, n2, n3 = norm_residual(..); moe_mlp(n1, n2, n3, ..)  ->  dense, moe, h = norm_moe_mlp(..)

For a device on which each kernel of a step waits for the one before (`on`), and for one token of a
row: the router makes its row itself, and the two that the experts and the dense MLP take.
"""

from __future__ import annotations

from g4ir.ir.graph import Builder, Graph, Node, splice_all

from .match import Left, Note, ignore, made_by

AFTER = "fuse_norm_linear"  # products have what is theirs
#: inputs of `moe_mlp` that has all experts
WHOLE = 10


def fuse_norm_moe(g: Graph, note: Note = ignore, on: bool = False) -> Graph:
    """Fuse a residual, its three norms, and the experts that take them into one op."""
    edits: list[tuple[list[Node], list[Node]]] = []
    for n in g.find("moe_mlp") if on else ():
        name = n.outputs[0].name
        try:
            norm = _norm(g, n)
        except Left as reason:
            note(name, f"left: {reason}")
            continue
        b, (h, *_) = Builder(), norm.outputs
        given = (*norm.inputs[:3], *n.inputs[3:], *norm.inputs[3:])
        names = [*(v.name for v in n.outputs), h.name]
        b.emit_all("norm_moe_mlp", *given, **norm.attrs, **n.attrs, name=names)
        edits.append(([norm, n], b.nodes))
        note(name, f"fused with {h}")
    return splice_all(g, edits)


def _norm(g: Graph, n: Node) -> Node:
    """Return what makes the three rows, for nobody else."""
    rows = n.inputs[:3]
    if len(n.inputs) > WHOLE:
        raise Left(f"{n['first']} says that the experts are a part")
    norm = made_by(g, rows[0], "norm_residual")
    if norm.outputs[1:] != rows:
        raise Left(f"{rows[0]} to {rows[2]} are not the norms of one residual, in this order")
    if rows[0].type.shape[1] != 1:
        raise Left(f"{rows[0]} is of several tokens")
    for v in rows:
        if g.users()[v.name] != [n]:
            raise Left(f"{v} has another user")
    return norm


# --- what it must leave to nobody --------------------------------------------------------------


def left(g: Graph, n: Node, on: bool = False) -> bool:
    """Whether a node is experts of one token that alone read the three norms of its residual."""
    made = g.producers().get(n["x_dense"].name) if on and n.op == "moe_mlp" else None
    return bool(
        made
        and made.op == "norm_residual"
        and made.outputs[1:] == n.inputs[:3]
        and len(n.inputs) == WHOLE
        and n["x_dense"].type.shape[1:-1] == (1,)
        and all(g.users()[v.name] == [n] for v in n.inputs[:3])
    )
