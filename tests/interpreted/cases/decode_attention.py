"""Decode attention: one new token per sequence over its KV cache (split-KV)."""

from __future__ import annotations

from .base import Budget
from .base import attention_sample as sample


def _use(splits: int, block_n: int = 4) -> dict[str, int]:
    return {"splits": splits, "block_n": block_n, "warps": 4, "stages": 2}


W = 13
SHORT, LONG = (0, 1, W - 1), (W, W + 1, 3 * W + 2)
#: slots and window: a ring cache, one with slack, full-length caches
LAYOUTS = [(W, W), (W + 5, W), (64, 0), (64, W)]
#: few and many splits, also more splits than key blocks, and than keys
LENGTHS = [
    sample(lengths, *layout, _use(splits), heads=(2, 1))
    for layout in LAYOUTS
    for lengths, splits in ((SHORT, 1), (LONG, 2), (SHORT, 4), (LONG, 7))
]
HEADS = [
    sample((W + 3, 5)[:n], 64, 0, _use(3), 0, (n * group, n), scale=0.12, softcap=softcap)
    for n, group, softcap in ((1, 1, 3.0), (2, 2, 0.0), (1, 4, 3.0), (2, 8, 0.0), (2, 1, 3.0))
]
SIZES = [
    sample((41,), 64, 0, _use(3, block_n), 0, (group, 1), d)
    for block_n, group, d in ((8, 3, 24), (16, 32, 64), (64, 3, 64), (8, 32, 24))
]
EDGE_CASES = [
    sample((41,), 64, 0, _use(3), scale=180.0),  # the maximum grows often
    sample((41,), 64, 0, _use(2), softcap=0.5),
    sample((100_003, 65_536), W, W, _use(2)),  # slots follow from late positions
]
LATENT = [
    *(
        sample((W + 1, 0, 2 * W), 64, 0, _use(3, 8), heads=(2, 1), pairs=pairs)
        for pairs in (0, 5, 8, 15)
    ),
    *(
        sample(lengths, *layout, _use(splits), heads=(2, 1), pairs=4)
        for layout, lengths, splits in zip(LAYOUTS, (SHORT, LONG) * 2, (2, 4) * 2)
    ),
    *(
        sample((W + 3, 5)[:n], 64, 0, _use(3), 0, (n * group, n), d, 0.2, softcap, 4)
        for n, group, d, softcap in ((1, 1, 32, 3.0), (2, 4, 24, 0.0), (1, 8, 24, 3.0))
    ),
]

#: quantised caches: rings, full-length, one key, more splits than blocks, padded columns, groups
NARROW = [
    sample(lengths, *layout, _use(splits, 8), 0, heads, d, kv_dtype=kv_dtype)
    for kv_dtype in ("i8", "f8e4m3")
    for lengths, layout, splits, heads, d in (
        (SHORT, LAYOUTS[0], 1, (2, 1), 32),
        (LONG, LAYOUTS[1], 3, (4, 2), 96),
        (LONG, LAYOUTS[2], 4, (2, 2), 64),
    )
]
NARROW_LATENT = [
    sample(LONG, 64, 0, _use(3, 8), heads=(4, 2), d=d, pairs=pairs, kv_dtype=kv_dtype)
    for kv_dtype in ("i8", "f8e4m3")
    for d, pairs in ((32, 8), (96, 5), (32, 0))
]

BUDGETS = {
    "decode_attention": Budget(
        samples=(*LENGTHS, *HEADS, *SIZES, *EDGE_CASES, *NARROW), error=5e-6, differ=None
    ),
    "decode_attention_latent": Budget(samples=(*LATENT, *NARROW_LATENT), error=5e-6, differ=None),
}
