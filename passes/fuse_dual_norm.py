"""norm_residual(norm_residual(b, rms_norm(a, w_a), w_b), residual, w)  ->  dual_norm_residual

The end of a layer with experts: the norms of the dense MLP and of the experts, their sum, and
what `fuse_norm_residual` made of the sum's own norm.
"""

from __future__ import annotations

from g4ir.ir.graph import Graph, Node

from .match import Edit, Note, edit_each, ignore, made_by, parts_of

AFTER = "fuse_moe"  # it takes what fuse_norm_residual made


def fuse_dual_norm(g: Graph, note: Note = ignore) -> Graph:
    """Fuse two post-norms, their sum and the norms after it into one op."""
    return edit_each(g, g.find("norm_residual"), lambda n: _edit(g, n), note)


def _edit(g: Graph, n: Node) -> Edit:
    no_sum = f"{n['x']} is no sum of two norms"
    both = made_by(g, n["x"], "norm_residual", no_sum)
    one = made_by(g, both["residual"], "rms_norm", no_sum)
    sums = (both["x"], both["w_post"], n["w_post"], n["residual"])
    made = Node("dual_norm_residual", (*one.inputs, *sums, *n.inputs[3:]), n.outputs, n.attrs)
    note = f"fused with the norms of {one['x']} and {both['x']}"
    return Edit(parts_of(g, made), [made], note)
