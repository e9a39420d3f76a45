"""glu_packed(x @ w)  ->  linear_glu(x, w)
glu(x @ w, up)    ->  linear_glu(x, w, up)

The gate and its product in one op: of a gated MLP whose two halves are packed, and of a per-layer
embedding.
"""

from __future__ import annotations

from g4ir.ir.graph import Graph

from .join import Join, join
from .match import Note, ignore

AFTER = "quantize_activations"  # products have their last operands

JOINS = (
    Join(reader="glu", operands=("gate",), producer="linear", joined="linear_glu"),
    Join(reader="glu_packed", operands=("x",), producer="linear", joined="linear_glu"),
)


def fuse_glu(g: Graph, note: Note = ignore) -> Graph:
    """Fuse a gated activation and the product before it into one op."""
    return join(g, JOINS, note)
