"""g, h = norm_linear(.., up); linear(g, w)  ->  y, h = norm_glu_linear(..)

For steps that are one kernel graph on a GPU, one token of one sequence: the gate of a per-layer
embedding and its projection. A gated row with an up of its own is short; that of an MLP, whose up
is in its weight, is not, and stays as it is.
"""

from __future__ import annotations

from g4ir.ir.graph import Graph, Node, Value

from .join import Join, join
from .match import Note, ignore

AFTER = "fuse_attention"  # the last: what is in front of it has its final form
GPU_ROWS = 1


def _inputs(gated: Node, product: Node) -> tuple[Value, ...]:
    return (*gated.inputs[:4], product["w"], *gated.inputs[4:])


def _refuses(g: Graph, gated: Node, product: Node) -> str:
    weighted = gated.attrs["weighted"]
    assert isinstance(weighted, tuple)
    has_up = len(gated.inputs) > 4 + bool(gated.attrs["scaled"]) + sum(weighted)
    return "" if has_up else f"{gated.outputs[0]} has no up of its own"


JOINS = (
    Join(
        reader="linear",
        operands=("x",),
        producer="norm_linear",
        joined="norm_glu_linear",
        one_token=True,
        refuses=_refuses,
        inputs=_inputs,
    ),
)


def fuse_glu_linear(g: Graph, note: Note = ignore) -> Graph:
    """Fuse a norm and the gated product behind it with the one product of that."""
    return join(g, JOINS, note)
