"""Decode attention: one new token per sequence over its KV cache (split-KV)."""

from __future__ import annotations

from typing import Any

from g4ir.backends.inductor.target import Target
from g4ir.ir.graph import Graph, Node
from g4ir.ops.kv_quant import GROUP

from .base import Choice, Kernel, Shape, Use, attention_shape, is_row, masking, size, zeros_of

WARPS = {"warps": 8, "stages": 3}
#: maximum elements of partial results (half a MiB) that one program reduces
MAX_REDUCED = 1 << 17


def _shape(g: Graph, n: Node, target: Target) -> Shape | None:
    """Return the launch shape; None if this kernel does not apply: to several tokens per sequence,
    bidirectional media blocks, and head dims that are not a multiple of an int8 cache's scale
    group."""
    shape, cache = attention_shape(n), n.caches[0].type
    if shape is None or n.chunk or not is_row(n["q"].type):
        return None
    if cache.dtype == "i8" and size(n["q"].type, -1) % GROUP:
        return None
    return shape | {"programs": target.rows * shape["kv_heads"]}


def _estimate(shape: Shape) -> Use:
    """Return launch settings: enough splits for about 128 programs (one per SM), but at most 8 for
    a sliding window, else at most as many as one program can reduce."""
    programs = 1 << (shape["programs"] - 1).bit_length()
    max_splits = 8 if shape["window"] else max(1, MAX_REDUCED // (shape["group"] * shape["d"]))
    block_n = 64 if shape["window"] else 32
    return {"splits": min(max_splits, max(1, 128 // programs)), "block_n": block_n} | WARPS


def _latent_estimate(shape: Shape) -> Use:
    return {**_estimate(shape), "block_n": 64}


def _attention(
    n: Node, choice: Choice, q: Any, positions: Any, written: Any, *operands: Any
) -> Any:
    """Attend over the caches of K and V; for `attention_latent`, whose first operand here is the
    weight of K's norm, over a latent cache."""
    from .decode_attention_triton import decode_attention

    latent = n.op == "attention_latent"
    w, caches = (operands[0], operands[1:]) if latent else (None, operands)
    return decode_attention(*(q, written, w, list(caches), zeros_of(q)), **masking(n), **choice.use)


KERNELS = (
    Kernel(
        op="attention",
        large=True,
        starts={"decode_attention": 1},
        rule=_shape,
        call=_attention,
        uses={"decode_attention": _estimate},
    ),
    Kernel(
        op="attention_latent",
        large=True,
        starts={"decode_attention_latent": 1},
        rule=_shape,
        call=_attention,
        uses={"decode_attention_latent": _latent_estimate},
    ),
)
