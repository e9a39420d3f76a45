"""Attention of a chunk: the blocks of keys that a tile of queries walks over."""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl

from g4ir.backends.cuda.kernels.prefill_attention_triton import _block, _is_partial, _runs
from g4ir.ops.attention import slot_positions, visible
from tests.cases import TABLES


@triton.jit
def _walk(
    counts, blocks, first, last, begin, old, slots, WINDOW: tl.constexpr, BLOCK_N: tl.constexpr
):
    """The number of blocks of a tile and, of each, what the kernel derives."""
    oldest, slot, run, wrapped, low = _runs(first, last, begin, old, slots, WINDOW)
    count = tl.cdiv(run, BLOCK_N) + tl.cdiv(wrapped, BLOCK_N) + tl.cdiv(last + 1 - low, BLOCK_N)
    tl.store(counts, count)
    for i in range(count):
        cached, row, stop, shift = _block(
            i, oldest, slot, run, wrapped, low, last + 1, begin, slots, BLOCK_N
        )
        partial = _is_partial(row, stop, shift, begin + first, begin + last, WINDOW, BLOCK_N)
        tl.store(blocks + 5 * i, cached.to(tl.int32))
        tl.store(blocks + 5 * i + 1, row)
        tl.store(blocks + 5 * i + 2, stop)
        tl.store(blocks + 5 * i + 3, shift)
        tl.store(blocks + 5 * i + 4, partial.to(tl.int32))


def _blocks(first: int, last: int, begin: int, slots: int, window: int) -> torch.Tensor:
    count, blocks = torch.zeros((), dtype=torch.int32), torch.zeros(64, 5, dtype=torch.int32)
    _walk[(1,)](count, blocks, first, last, begin, begin, slots, WINDOW=window, BLOCK_N=16)
    return blocks[: int(count)]


WALKS = TABLES["prefill attention"]["shapes"]


@pytest.mark.parametrize("first, last, begin, slots, window", WALKS)
def test_visible_keys_only(first: int, last: int, begin: int, slots: int, window: int) -> None:
    """The rows of the blocks are those that some query of the tile sees, each once, at the right
    positions; every query sees a whole block that goes unmasked; there are no more than it takes
    for three runs."""
    written, tokens = torch.tensor([begin]), torch.arange(last + 1)[:, None]
    key_pos = torch.cat((slot_positions(written, slots), begin + tokens))
    queries = begin + torch.arange(first, last + 1)[None]
    seen = visible(key_pos, queries, window)[0]  # [queries, slots + tokens]
    walked = []
    blocks = _blocks(first, last, begin, slots, window)
    for cached, row, stop, shift, partial in blocks.tolist():
        rows = torch.arange(row, min(row + 16, stop))
        index = rows if cached else rows + slots
        assert torch.equal(key_pos[index, 0], rows + shift)
        if not partial:
            assert len(rows) == 16 and seen[:, index].all()
        walked += index.tolist()
    assert sorted(walked) == seen.any(0).nonzero()[:, 0].tolist()
    assert len(blocks) <= len(walked) // 16 + 3
    if len(walked) >= 80:
        assert not blocks[:, 4].all()
