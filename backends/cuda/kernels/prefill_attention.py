"""Prefill attention: a chunk of new tokens over the KV cache and the chunk itself."""

from __future__ import annotations

from typing import Any

from g4ir.backends.inductor.target import Target
from g4ir.ir.graph import Graph, Node

from .base import Choice, Kernel, Shape, Use, attention_shape, masking


def _shape(g: Graph, n: Node, target: Target) -> Shape | None:
    cache_dtype = n.caches[0].type.dtype  # other KV cache dtypes run on torch
    return attention_shape(n) if n.chunk and cache_dtype == n["q"].type.dtype else None


def _estimate(shape: Shape) -> Use:
    small = shape["d"] <= 256
    tile = {"block_m": 128, "block_n": 64} if small else {"block_m": 64, "block_n": 32}
    return {**tile, "warps": 8, "stages": 2}


def _attention(
    n: Node, choice: Choice, q: Any, positions: Any, written: Any, *operands: Any
) -> Any:
    """Attend over K and V of cache and chunk; or over latent rows, if the first of `operands` is
    the weight of K's norm."""
    from .prefill_attention_triton import prefill_attention

    w, rows = (operands[0], operands[1:]) if len(operands) % 2 else (None, operands)
    inputs = (q, positions, written, w, list(rows))
    return prefill_attention(*inputs, **masking(n), **choice.use)


KERNELS = (
    Kernel(
        op="attention",
        large=True,
        starts={"prefill_attention": 1},
        rule=_shape,
        call=_attention,
        uses={"prefill_attention": _estimate},
    ),
    Kernel(
        op="attention_latent",
        large=True,
        starts={"prefill_attention_latent": 1},
        rule=_shape,
        call=_attention,
        uses={"prefill_attention_latent": {"block_m": 64, "block_n": 32, "warps": 8, "stages": 3}},
    ),
)
