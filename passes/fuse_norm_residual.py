"""h = residual + rms_norm(x, w); [h = h * scalar]; n_i = rms_norm(h [, w_i])  ->  norm_residual

Crosses layer boundaries: the fused op includes the pre-norm of the next block. The three norms of
one residual in a layer with experts share their rsqrt.
"""

from __future__ import annotations

from g4ir.ir.graph import Graph, Node

from .match import Edit, NoMatch, Note, edit_each, ignore, producer_of

AFTER = "fuse_norm_rope"  # the norms of Q and K are no norms of a residual


def fuse_norm_residual(g: Graph, note: Note = ignore) -> Graph:
    """Fuse post-norm, residual add, layer scalar and the following pre-norms into one op."""
    return edit_each(g, g.find("add"), lambda n: _edit(g, n), note)


def _edit(g: Graph, add: Node) -> Edit:
    post = _post_norm(g, add)
    (residual,) = (v for v in add.inputs if v != post.out)
    scalar = [n for n in g.readers(add.out) if n.op == "mul" and n["x"] == add.out]
    if len(g.readers(add.out)) > 1 or any(n["w"].type.shape != (1,) for n in scalar):
        scalar = []
    h = (*scalar, add)[0].out
    pre = [n for n in g.readers(h) if _is_pre_norm(g, n, post) and n["x"] == h]
    weighted = tuple(len(n.inputs) > 1 for n in pre)
    weights = [v for n in (*scalar, *pre) for v in n.inputs[1:]]
    inputs = (post["x"], residual, post["w"], *weights)
    attrs = {**post.attrs, "scaled": bool(scalar), "weighted": weighted}
    fused = Node("norm_residual", inputs, (h, *(n.out for n in pre)), attrs)
    return Edit([post, add, *scalar, *pre], [fused], f"fused with {len(pre)} pre-norms")


def _post_norm(g: Graph, add: Node) -> Node:
    # The second input is the branch; if both are norms, the first stays the residual.
    norms = (producer_of(g, v, "rms_norm") for v in reversed(add.inputs))
    post = next((n for n in norms if n and len(n.inputs) == 2), None)
    if post is None:
        raise NoMatch("neither operand is a norm with a weight")
    if len(g.readers(post.out)) > 1 or add["a"] == add["b"]:
        raise NoMatch(f"{post.out} is used more than once")
    return post


def _is_pre_norm(g: Graph, n: Node, post: Node) -> bool:
    """Return whether a node is a norm with the eps of `post` that is not itself a post-norm."""
    if n.op != "rms_norm" or n.attrs != post.attrs:
        return False
    return [u.op for u in g.readers(n.out)] != ["add"]
