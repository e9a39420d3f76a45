"""Prefill attention: a chunk of new tokens over the KV cache and the chunk itself."""

from __future__ import annotations

from typing import Any

from g4ir.backends.inductor.lowered import Run
from g4ir.backends.inductor.target import Target
from g4ir.ir.graph import Graph, Node

from .base import Choice, Kernel, Sample, Shape, Use, attention_sample, attention_shape, masking


def _shape(g: Graph, n: Node, target: Target) -> Shape | None:
    cache_dtype = n.caches[0].type.dtype  # a cache narrower than the queries uses the library
    return attention_shape(n) if n.chunk and cache_dtype == n["q"].type.dtype else None


def _estimate(shape: Shape) -> Use:
    small = shape["d"] <= 256
    tile = {"block_m": 128, "block_n": 64} if small else {"block_m": 64, "block_n": 32}
    return {**tile, "warps": 8, "stages": 2}


def _attention(
    run: Run, n: Node, choice: Choice, q: Any, positions: Any, written: Any, *operands: Any
) -> Any:
    """Attend over K and V, or over a latent cache; its first operand is then the weight of K's
    norm."""
    from .prefill_attention_triton import prefill_attention

    w, rows = (operands[0], operands[1:]) if len(operands) % 2 else (None, operands)
    inputs = (q, positions, written, w, list(rows))
    return prefill_attention(*inputs, **masking(n), **choice.use)


def _sample(
    tokens: int,
    written: tuple[int, ...],
    slots: int,
    window: int = 0,
    *shape: Any,
    tile: tuple[int, int] = (16, 16),
    **named: Any,
) -> Sample:
    use = {"block_m": tile[0], "block_n": tile[1], "warps": 4, "stages": 2}
    return attention_sample(written, slots, window, use, tokens, *shape, **named)


LISTS = [
    _sample(1, (0, 30, 13), 32),
    _sample(5, (16, 3), 40, d=64),
    _sample(17, (23, 0), 40),
    _sample(40, (5,), 64, tile=(32, 16)),
    _sample(9, (33, 32), 48, 8),
    _sample(24, (7,), 48, 8, tile=(16, 32)),
]
RINGS = [
    _sample(5, (0, 6), 8, 8),
    _sample(17, (8, 13), 8, 8),
    _sample(24, (100, 3), 8, 8),
    _sample(11, (21, 40), 19, 8),
    _sample(17, (59, 70), 24, 20),
    _sample(40, (91,), 40, 33, tile=(32, 16)),
    _sample(5, (40, 9), 16),  # ring smaller than window + chunk
    _sample(9, (31,), 8, 12),
]
#: query heads and key heads; head dims; scores
SHAPES = [
    *(_sample(7, (11, 4), 16, 8, heads) for heads in ((4, 4), (4, 1), (8, 1), (6, 2), (3, 1))),
    *(_sample(6, (5, 9), 12, d=d, scale=d**-0.5) for d in (8, 24, 48, 256)),
    _sample(10, (12, 3), 16, 8, scale=1.0, softcap=3.0),
    _sample(12, (20, 31), 32, scale=3.0),  # large scores, about +-100
]
#: as on a GPU: over two tiles and a ring that wraps; of many heads
REAL = [
    _sample(70, (1300,), 1024, 1024, (4, 2), 256, 1 / 16, tile=(128, 32)),
    _sample(12, (40, 9), 64, 0, (8, 1), 512, 1 / 22, tile=(64, 16)),
]
LATENT = [
    *(_sample(17, (23, 0), 40, pairs=pairs) for pairs in (0, 4, 11, 16)),
    _sample(10, (12, 3), 16, scale=1.0, softcap=3.0, pairs=3),
    _sample(5, (16, 3), 40, 0, (8, 1), 64, pairs=8),
    _sample(9, (30, 11), 32, 0, (3, 1), 24, pairs=5),
    _sample(17, (59, 70), 24, 20, pairs=4),
    _sample(1, (12,), 16, pairs=2),
    _sample(12, (40, 7), 64, 0, (8, 1), 512, 1 / 22, tile=(64, 32), pairs=64),
]

KERNELS = (
    Kernel(
        op="attention",
        large=True,
        starts={"prefill_attention": 1},
        rule=_shape,
        call=_attention,
        samples=(*LISTS, *RINGS, *SHAPES, *REAL),
        error=1e-5,
        differ=None,
        uses={"prefill_attention": _estimate},
    ),
    Kernel(
        op="attention_latent",
        large=True,
        starts={"prefill_attention_latent": 1},
        rule=_shape,
        call=_attention,
        samples=tuple(LATENT),
        error=1e-5,
        differ=None,
        uses={"prefill_attention_latent": {"block_m": 64, "block_n": 32, "warps": 8, "stages": 3}},
    ),
)
