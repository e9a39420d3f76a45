"""rope(rms_norm(x, w), cos, sin)  ->  norm_rope(x, w, cos, sin)"""

from __future__ import annotations

from g4ir.ir.graph import Graph, Node

from .join import Join

AFTER = "fuse_gate_up"  # heads are cut from packed products by now


def _refuses(g: Graph, norm: Node, rope: Node) -> str:
    return "" if len(norm.inputs) == 2 else f"{norm.out} is a norm without a weight"


JOINS = (
    Join(reader="rope", operands=("x",), producer="rms_norm", joined="norm_rope", refuses=_refuses),
)
