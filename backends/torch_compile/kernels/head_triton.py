"""The best tokens from logits, exactly: equal logits are ordered by their index.

A logit and its index become one int64, whose order is theirs: value first, then the lower index.
So a maximum and a sort need no second operand, and the result does not depend on how the
vocabulary is cut into blocks. -0 counts as 0; NaN is not expected.

Error budget: none, the results are those of a stable descending sort.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch.library import triton_op

from .base import CANDIDATES
from .launch import begin, blocks, power_of_2, ready, start, takes

Tensor = torch.Tensor


@triton.jit
def _keys(logits, i, live):
    """int64 keys of logits[i]; where not `live`, a key below that of -inf."""
    bits = tl.load(logits + i, mask=live, other=0).to(tl.float32).to(tl.int32, bitcast=True)
    bits = tl.where((bits & 0x7FFFFFFF) == 0, 0, bits)
    # A negative float grows as its bits, read as an integer, shrink.
    bits = tl.where(live, bits ^ ((bits >> 31) & 0x7FFFFFFF), -0x80000000)
    return (bits.to(tl.int64) << 32) | (0x7FFFFFFF - i).to(tl.int64)


@triton.jit
def _index(keys):
    return 0x7FFFFFFF - (keys & 0x7FFFFFFF)


@triton.jit
def _value(keys):
    bits = (keys >> 32).to(tl.int32)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def _best_of_block(logits, best, vocab, BLOCK: tl.constexpr, AHEAD: tl.constexpr = False):
    """best [B, blocks]: the largest key of each block of the row. Grid: blocks, B."""
    begin(AHEAD)
    ready(AHEAD)
    block, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    i = block * BLOCK + tl.arange(0, BLOCK)
    keys = _keys(logits + row * vocab, i, i < vocab)
    tl.store(best + row * tl.num_programs(0) + block, tl.max(keys, 0))


@triton.jit
def _best(best, token, count, BLOCK: tl.constexpr, AHEAD: tl.constexpr = False):
    """token [B]: the index in the largest key of best [B, count]. Grid: B."""
    begin(AHEAD)
    ready(AHEAD)
    row, i = tl.program_id(0), tl.arange(0, BLOCK)
    keys = tl.load(best + row * count + i, mask=i < count, other=-0x8000000000000000)
    tl.store(token + row, _index(tl.max(keys, 0)))


@triton.jit
def _top_of_block(
    logits, top, vocab, KEPT: tl.constexpr, BLOCK: tl.constexpr, AHEAD: tl.constexpr = False
):
    """top [B, blocks, KEPT]: the largest keys of each block of the row. Grid: blocks, B."""
    begin(AHEAD)
    ready(AHEAD)
    block, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    i = block * BLOCK + tl.arange(0, BLOCK)
    keys = tl.topk(_keys(logits + row * vocab, i, i < vocab), KEPT)
    at = (row * tl.num_programs(0) + block) * KEPT
    tl.store(top + at + tl.arange(0, KEPT), keys)


@triton.jit
def _top(
    top,
    values,
    index,
    count,
    k,
    KEPT: tl.constexpr,
    BLOCK: tl.constexpr,
    AHEAD: tl.constexpr = False,
):
    """values, index [B, k]: of the k largest keys of top [B, count], in order. Grid: B."""
    begin(AHEAD)
    ready(AHEAD)
    row, i = tl.program_id(0), tl.arange(0, BLOCK)
    keys = tl.load(top + row * count + i, mask=i < count, other=-0x8000000000000000)
    keys = tl.topk(keys, KEPT)
    at = tl.arange(0, KEPT)
    tl.store(values + row * k + at, _value(keys), mask=at < k)
    tl.store(index + row * k + at, _index(keys), mask=at < k)


@triton_op("g4ir::block_argmax", mutates_args={})
def block_argmax(logits: Tensor, block: int = 4096) -> Tensor:
    """Return the lowest index of the largest logit: [B, V] -> int64 [B]; `block`: how many logits
    one program of the first kernel reads."""
    if not takes(logits):
        return logits.argmax(-1)
    rows, vocab = logits.shape
    block = min(block, power_of_2(vocab))
    count = blocks(vocab, block)
    best = logits.new_empty((rows, count), dtype=torch.int64)
    token = logits.new_empty((rows,), dtype=torch.int64)
    start(
        _best_of_block, (count, rows), (logits.contiguous(), best, vocab), BLOCK=block, num_warps=4
    )
    start(_best, (rows,), (best, token, count), BLOCK=power_of_2(count), num_warps=1)
    return token


@triton_op("g4ir::top_candidates", mutates_args={})
def top_candidates(logits: Tensor, k: int, block: int = 4096) -> tuple[Tensor, Tensor]:
    """Return the k largest logits, descending, equal ones by index: fp32 [B, k] and int64 [B, k].

    `block` as in `block_argmax`. ValueError unless 1 <= k <= V and k <= 64.
    """
    if not 1 <= k <= min(CANDIDATES, logits.shape[-1]):
        raise ValueError(f"{k} candidates of {logits.shape[-1]} logits: expected 1 to {CANDIDATES}")
    if not takes(logits):
        values, index = logits.float().sort(dim=-1, descending=True, stable=True)
        return values[:, :k].contiguous(), index[:, :k].contiguous()
    rows, vocab = logits.shape
    kept = max(2, power_of_2(k))  # tl.topk wants a power of two, and not 1
    block = max(kept, min(block, power_of_2(vocab)))
    count = blocks(vocab, block) * kept
    top = logits.new_empty((rows, count), dtype=torch.int64)
    values = logits.new_empty((rows, k), dtype=torch.float32)
    index = logits.new_empty((rows, k), dtype=torch.int64)
    start(
        _top_of_block,
        (count // kept, rows),
        (logits.contiguous(), top, vocab),
        KEPT=kept,
        BLOCK=block,
        num_warps=8,
    )
    start(
        _top,
        (rows,),
        (top, values, index, count, k),
        KEPT=kept,
        BLOCK=power_of_2(count),
        num_warps=8,
    )
    return values, index
