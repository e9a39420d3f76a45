"""q, k, v = qkv_write(..); attention(q, .., k, v)  ->  out, k, v = qkv_attention(..)
q = norm_rope(x, ..); attention(q, .., k, v)    ->  out = q_attention(x, ..)

For steps that are one kernel graph on a GPU, one token of each sequence. The caches hold K and V
in the model's dtype: not in the latent form, and not quantised.
"""

from __future__ import annotations

from g4ir.ir.graph import Graph, Node

from .join import Join

AFTER = "fuse_norm_moe"  # it takes what writes the caches
GPU_ROWS = 1 << 30  # any number


def _refuses(g: Graph, before: Node, attention: Node) -> str:
    cache = attention.caches[0]
    return f"{cache} is a quantised cache" if cache.type.dtype != attention["q"].type.dtype else ""


JOINS = (
    Join("qkv_attention", one_token=True, refuses=_refuses),
    Join("q_attention", one_token=True, refuses=_refuses),
)
