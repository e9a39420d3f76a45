"""Prefill attention: a chunk of new tokens over the KV cache and the chunk itself."""

from __future__ import annotations

from typing import Any

from .base import Budget, Sample, attention_sample


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

BUDGETS = {
    "prefill_attention": Budget(samples=(*LISTS, *RINGS, *SHAPES, *REAL), error=1e-5, differ=None),
    "prefill_attention_latent": Budget(samples=tuple(LATENT), error=1e-5, differ=None),
}
