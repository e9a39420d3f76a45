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
from .launch import blocks, power_of_2, start, takes

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
def _best_of_block(logits, best, vocab, KEPT: tl.constexpr, BLOCK: tl.constexpr):
    """best [B, blocks, KEPT]: the largest keys of each block of the row. Grid: blocks, B."""
    block, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    i = block * BLOCK + tl.arange(0, BLOCK)
    keys = _keys(logits + row * vocab, i, i < vocab)
    at = (row * tl.num_programs(0) + block) * KEPT
    if KEPT == 1:
        tl.store(best + at, tl.max(keys, 0))
    else:
        tl.store(best + at + tl.arange(0, KEPT), tl.topk(keys, KEPT))


@triton.jit
def _best(
    best,
    values,
    index,
    count,
    k,
    KEPT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """values, index [B, k]: of the k largest keys of best [B, count], in order; no values of one.
    Grid: B."""
    row, i = tl.program_id(0), tl.arange(0, BLOCK)
    keys = tl.load(best + row * count + i, mask=i < count, other=-0x8000000000000000)
    if KEPT == 1:
        tl.store(index + row, _index(tl.max(keys, 0)))
    else:
        keys, at = tl.topk(keys, KEPT), tl.arange(0, KEPT)
        tl.store(values + row * k + at, _value(keys), mask=at < k)
        tl.store(index + row * k + at, _index(keys), mask=at < k)


def _start(logits: Tensor, values: Tensor | None, index: Tensor, kept: int, block: int) -> None:
    rows, vocab = logits.shape
    block = max(kept, min(block, power_of_2(vocab)))
    count = blocks(vocab, block) * kept
    best = logits.new_empty((rows, count), dtype=torch.int64)
    warps = (4, 1) if kept == 1 else (8, 8)
    given = (logits.contiguous(), best, vocab)
    grid = (count // kept, rows)
    start(_best_of_block, grid, given, KEPT=kept, BLOCK=block, num_warps=warps[0])
    found = (best, values, index, count, index.shape[-1])
    start(_best, (rows,), found, KEPT=kept, BLOCK=power_of_2(count), num_warps=warps[1])


@triton_op("g4ir::block_argmax", mutates_args={})
def block_argmax(logits: Tensor, block: int = 4096) -> Tensor:
    """Return the lowest index of the largest logit: [B, V] -> int64 [B]; `block`: how many logits
    one program of the first kernel reads."""
    if not takes(logits):
        return logits.argmax(-1)
    token = logits.new_empty((logits.shape[0],), dtype=torch.int64)
    _start(logits, None, token, 1, block)
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
    values = logits.new_empty((logits.shape[0], k), dtype=torch.float32)
    index = logits.new_empty((logits.shape[0], k), dtype=torch.int64)
    kept = max(2, power_of_2(k))  # tl.topk wants a power of two, and not 1
    _start(logits, values, index, kept, block)
    return values, index
