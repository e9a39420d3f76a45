"""norm_residual(norm_residual(b, rms_norm(a, w_a), w_b), residual, w)  ->  dual_norm_residual

The end of a layer with experts: the norms of the dense MLP and of the experts, their sum, and
what `fuse_norm_residual` made of the sum's own norm.
"""

from __future__ import annotations

from g4ir.ir.graph import Builder, Graph, Node
from g4ir.ir.rewrite import splice_all

from .match import Left, Note, ignore

AFTER = "fuse_moe"  # it takes what fuse_norm_residual made


def fuse_dual_norm(g: Graph, note: Note = ignore) -> Graph:
    """Fuse two post-norms, their sum and the norms after it into one op."""
    edits: list[tuple[list[Node], list[Node]]] = []
    for n in g.find("norm_residual"):
        try:
            one, both = _match(g, n)
        except Left as reason:
            note(n.outputs[0].name, f"left: {reason}")
            continue
        b = Builder()
        b.emit_all(
            "dual_norm_residual",
            *one.inputs,
            both["x"],
            both["w_post"],
            n["w_post"],
            n["residual"],
            *n.inputs[3:],
            **n.attrs,
            name=[v.name for v in n.outputs],
        )
        edits.append(([one, both, n], b.nodes))
        note(n.outputs[0].name, f"fused with the norms of {one['x']} and {both['x']}")
    return splice_all(g, edits)


def _match(g: Graph, n: Node) -> tuple[Node, Node]:
    """Return the norm of the first branch, and the sum with that of the second."""
    both = g.producers().get(n["x"].name)
    plain = both is not None and both.op == "norm_residual" and len(both.inputs) == 3
    one = g.producers().get(both["residual"].name) if both is not None and plain else None
    if both is None or one is None or one.op != "rms_norm" or len(one.inputs) != 2:
        raise Left(f"{n['x']} is no sum of two norms")
    if len({m.attrs["eps"] for m in (one, both, n)}) > 1:
        raise Left("the norms differ in eps")
    for m, user in ((one, both), (both, n)):
        v = m.outputs[0]
        if len(m.outputs) > 1:
            raise Left(f"{v} has a pre-norm of its own")
        if g.users()[v.name] != [user] or user.inputs.count(v) > 1:
            raise Left(f"{v} has another user")
    return one, both
