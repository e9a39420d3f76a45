"""h, n = norm_residual(..); linear(n, w), or linear_glu(n, w, ..)  ->  y, h = norm_linear(..)
the same of dual_norm_residual  ->  dual_norm_linear

For steps that are one kernel graph on a GPU, one token of one sequence: the product computes its
input row itself. Without a pre-norm the product reads h. The product's result comes first, so that
the op belongs to the layer whose weight it multiplies with.
"""

from __future__ import annotations

from g4ir.ir.graph import Graph, Node

from .join import Join

AFTER = "fuse_cache_write"  # products have their activations
GPU_ROWS = 1
PRODUCTS = ("linear", "linear_glu")


def _refuses(g: Graph, norm: Node, product: Node) -> str:
    h, *normed = norm.outputs
    if len(normed) > 1:
        return f"{h} has {len(normed)} pre-norms"
    if normed and product["x"] == h:
        return f"{h} has a pre-norm, whose product it is joined with"
    products = [u for u in g.readers(h) if u.op in PRODUCTS and u["x"] == h]
    alone = bool(normed) or len(products) == 1
    return "" if alone else f"{h} goes into several products"


JOINS = (
    Join("norm_linear", one_token=True, refuses=_refuses),
    Join("dual_norm_linear", one_token=True, refuses=_refuses),
)
