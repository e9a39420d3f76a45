"""q, k, v = qkv_write(..); attention(q, .., k, v)  ->  out, k, v = qkv_attention(..)
q = norm_rope(x, ..); attention(q, .., k, v)    ->  out = q_attention(x, ..)

For steps that are one kernel graph on a GPU, one token of each sequence. The caches hold K and V
in the model's dtype: not in the latent form, and not quantised.
"""

from __future__ import annotations

from g4ir.ir.graph import Graph, Node, Value

from .join import Join
from .match import ANY_ROWS

AFTER = "fuse_norm_moe"  # it takes what writes the caches
GPU_ROWS = ANY_ROWS


def _inputs(write: Node, attention: Node) -> tuple[Value, ...]:
    return (*write.inputs[:7], *attention.inputs[1:3], *write.inputs[7:])


def _refuses(g: Graph, before: Node, attention: Node) -> str:
    q, written = attention["q"], before.outputs[1:]
    if attention.chunk:
        return f"{q} is of several tokens"
    if attention.caches[0].type.dtype != q.type.dtype:
        return f"{attention.caches[0]} is a quantised cache"
    if written and written != attention.caches:
        return f"{attention.caches[0]} is not written with {q}"
    return ""


JOINS = (
    Join(
        reader="attention",
        operands=("q",),
        producer="qkv_write",
        joined="qkv_attention",
        one_token=True,
        refuses=_refuses,
        inputs=_inputs,
    ),
    Join(
        reader="attention",
        operands=("q",),
        producer="norm_rope",
        joined="q_attention",
        one_token=True,
        refuses=_refuses,
    ),
)
