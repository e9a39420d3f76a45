"""h, n = norm_residual(..); linear(n, w), or linear_glu(n, w, ..)  ->  y, h = norm_linear(..)
the same of dual_norm_residual  ->  dual_norm_linear

For a device on which each kernel of a step waits for the one before (`on`), and for one token of a
row: the product makes its row itself. Without a pre-norm the product reads h. The product's result
comes first, so that the op belongs to the layer whose weight it multiplies with.
"""

from __future__ import annotations

from g4ir.ir.graph import Builder, Graph, Node, splice_all

from .match import Left, Note, after, ignore

AFTER = "fuse_all_reduce"  # products have their activations, sums over ranks their norms

PRODUCTS = ("linear", "linear_glu")
#: a norm -> what it becomes with its product, and its inputs before the weight of that
FUSED = {"norm_residual": ("norm_linear", 3), "dual_norm_residual": ("dual_norm_linear", 6)}


def fuse_norm_linear(g: Graph, note: Note = ignore, on: bool = False) -> Graph:
    """Fuse a residual, its norm and the one product of that norm into one op."""
    edits: list[tuple[list[Node], list[Node]]] = []
    for n in g.find(*FUSED) if on else ():
        try:
            product = _product(g, n)
        except Left as reason:
            note(n.outputs[0].name, f"left: {reason}")
            continue
        b, (fused, at) = Builder(), FUSED[n.op]
        b.emit_all(
            fused,
            *n.inputs[:at],
            product["w"],
            *n.inputs[at:],
            *product.inputs[2:],
            **n.attrs,
            act=product.attrs.get("act", ""),
            name=[product.out.name, n.outputs[0].name],
        )
        edits.append(([n, product], b.nodes))
        note(n.outputs[0].name, f"fused with {product.out}")
    return splice_all(g, edits)


def _product(g: Graph, n: Node) -> Node:
    """Return the one product that multiplies the pre-norm, or, where there is none, the residual;
    Left where it is not alone."""
    h, *normed = n.outputs
    if h.type.rank != 3 or h.type.shape[1] != 1:
        raise Left(f"{h} is of several rows each")
    if len(normed) > 1:
        raise Left(f"{h} has {len(normed)} pre-norms")
    users = g.users()
    found = [u for u in users.get((normed or [h])[0].name, []) if _multiplies(u, n)]
    if len(found) != 1 or (normed and users[normed[0].name] != found):
        raise Left(f"{(normed or [h])[0]} does not go into one product alone")
    (product,) = found
    made = {v for m in after(g, n.outputs) for v in m.outputs}
    if made.intersection(product.inputs):
        raise Left(f"{product.out} reads what is made of {h}")
    return product


def _multiplies(u: Node, n: Node) -> bool:
    """Whether a user is a product of the last result with a weight."""
    return u.op in PRODUCTS and u["x"] == n.outputs[-1] and u.inputs.count(u["x"]) == 1


# --- what it must leave to nobody --------------------------------------------------------------


def left(g: Graph, n: Node, on: bool = False) -> bool:
    """Whether a node is a product that alone reads the pre-norm of one token's residual."""
    made = g.producers().get(n["x"].name) if on and n.op in PRODUCTS else None
    return bool(
        made
        and made.op in FUSED
        and len(made.outputs) == 2
        and n["x"] == made.outputs[1]
        and n["x"].type.shape[1:-1] == (1,)
        and g.users()[n["x"].name] == [n]
        and n["x"] not in n.inputs[1:]
    )
