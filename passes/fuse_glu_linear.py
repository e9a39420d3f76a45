"""g, h = norm_linear(.., up); linear(g, w)  ->  y, h = norm_glu_linear(..)

For a device on which each kernel of a step waits for the one before (`on`), and for one token of a
row: the gate of a per-layer embedding and its projection. A gated row that has an up of its own is
short; that of an MLP, whose up is in its weight, is not, and stays as it is.
"""

from __future__ import annotations

from g4ir.ir.graph import Builder, Graph, Node, splice_all

from .match import Left, Note, ignore, only_user

AFTER = "fuse_attention"  # the last: what is in front of it has its final form


def fuse_glu_linear(g: Graph, note: Note = ignore, on: bool = False) -> Graph:
    """Fuse a norm and the gated product behind it with the one product of that."""
    edits: list[tuple[list[Node], list[Node]]] = []
    for n in g.find("norm_linear") if on else ():
        name = n.outputs[0].name
        try:
            product = _product(g, n)
        except Left as reason:
            note(name, f"left: {reason}")
            continue
        b, names = Builder(), [product.out.name, n.outputs[1].name]
        given = (*n.inputs[:4], product["w"], *n.inputs[4:])
        b.emit_all("norm_glu_linear", *given, **n.attrs, name=names)
        edits.append(([n, product], b.nodes))
        note(name, f"fused with {product.out}")
    return splice_all(g, edits)


def _product(g: Graph, n: Node) -> Node:
    """Return the one product that takes the gated row; Left where there is none."""
    made = n.outputs[0]
    if not _has_up(n):
        raise Left(f"{made} has no up of its own")
    if made.type.shape[1] != 1:
        raise Left(f"{made} is of several tokens")
    product = only_user(g, made, "linear", "does not go into one product alone")
    return product


def _has_up(n: Node) -> bool:
    """Whether a `norm_linear` is gated by an input behind those of its norm."""
    weighted = n.attrs["weighted"]
    assert isinstance(weighted, tuple)
    return len(n.inputs) > 4 + bool(n.attrs["scaled"]) + sum(weighted)


# --- what it must leave to nobody --------------------------------------------------------------


def left(g: Graph, n: Node, on: bool = False) -> bool:
    """Whether a node is a product that alone reads a gated row of one token."""
    made = g.producers().get(n["x"].name) if on and n.op == "linear" else None
    return bool(
        made
        and made.op == "norm_linear"
        and _has_up(made)
        and n["x"] == made.outputs[0]
        and n["x"].type.shape[1:-1] == (1,)
        and g.users()[n["x"].name] == [n]
    )
