"""norm_residual(norm_residual(b, rms_norm(a, w_a), w_b), residual, w)  ->  dual_norm_residual

The end of a layer with experts: the norms of the dense MLP and of the experts, their sum, and
what `fuse_norm_residual` made of the sum's own norm.
"""

from __future__ import annotations

from g4ir.ir import Builder, Graph, Node, splice_all

from . import Note, ignore


def fuse_dual_norm(g: Graph, note: Note = ignore) -> Graph:
    """Two post-norms and their sum in one op with the norms after it."""
    edits: list[tuple[list[Node], list[Node]]] = []
    for n in g.find("norm_residual"):
        try:
            one, both = _match(g, n)
        except _Left as reason:
            note(n.outputs[0].name, f"left: {reason}")
            continue
        b = Builder()
        b.emit(
            "dual_norm_residual", *one.inputs, both.inputs[0], both.inputs[2], n.inputs[2],
            n.inputs[1], *n.inputs[3:], **n.attrs, name=[v.name for v in n.outputs],
        )  # fmt: skip
        edits.append(([one, both, n], b.nodes))
        note(n.outputs[0].name, f"fused with the norms of {one.inputs[0]} and {both.inputs[0]}")
    return splice_all(g, edits)


class _Left(Exception):
    """Why a norm stays as it is."""


def _match(g: Graph, n: Node) -> tuple[Node, Node]:
    """The norm of the first branch, and the sum with that of the second."""
    both = g.producers().get(n.inputs[0].name)
    plain = both is not None and both.op == "norm_residual" and len(both.inputs) == 3
    one = g.producers().get(both.inputs[1].name) if both is not None and plain else None
    if both is None or one is None or one.op != "rms_norm" or len(one.inputs) != 2:
        raise _Left(f"{n.inputs[0]} is no sum of two norms")
    if len({m.attrs["eps"] for m in (one, both, n)}) > 1:
        raise _Left("the norms differ in eps")
    for m, user in ((one, both), (both, n)):
        v = m.outputs[0]
        if len(m.outputs) > 1:
            raise _Left(f"{v} has a pre-norm of its own")
        if g.users()[v.name] != [user] or user.inputs.count(v) > 1:
            raise _Left(f"{v} has another user")
    return one, both
