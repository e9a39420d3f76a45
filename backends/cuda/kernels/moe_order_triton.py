"""The choice of experts: the router's scores, and their top-k in one order for all that read them.

A key is an integer whose order is (score, then lower index), so that one integer maximum finds
both. 10 bits hold the index. Scores of 16 bits leave room for it in 32 bits; fp32 needs 64. Equal
scores go by the lower index (`torch.topk` promises no order among equals). Weights are exp(s - max
s) / sum over the chosen experts. If a rank has HELD experts from `first` on, choices of others are
passed over: no weight is read for them.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch.library import triton_op

from g4ir.ops.base import wide
from g4ir.ops.moe import own_index

from .launch import blocks, power_of_2, rounded, start, takes

Tensor = torch.Tensor

#: rows of scores that a program of the top-k takes at a time
ROWS = 16

#: index of a choice that another rank holds: less than what ends the list, and than padding
OTHERS = tl.constexpr(-3)


@triton.jit
def _keys(s, i, WIDE):
    """Scores s (fp32) and their expert indices i -> keys."""
    bits = (s + 0.0).to(tl.int32, bitcast=True)  # -0 and 0 are equal
    order = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    if WIDE:
        key = (order.to(tl.int64) << 10) | (1023 - i)
    else:
        key = (order & -1024) | (1023 - i)
    return key


@triton.jit
def _expert(key):
    return (1023 - (key & 1023)).to(tl.int64)


@triton.jit
def _score(key, WIDE):
    if WIDE:
        order = (key >> 10).to(tl.int32)
        bits = order ^ ((order >> 31) & 0x7FFFFFFF)
    else:
        bits = (key ^ ((key >> 31) & 0x7FFFFFFF)) & -1024
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def _below(key, best, WIDE):
    """Keys that are less than `best`; the others as the least of integers."""
    least: tl.constexpr = -(2**63) if WIDE else -(2**31)
    return tl.where(key < best, key, least)


@triton.jit
def _load_keys(logits, EXPERTS, E_P, WIDE):
    """Keys of one row of scores, which lie in L2; padding comes last."""
    i = tl.arange(0, E_P)
    s = tl.load(logits + i, mask=i < EXPERTS, other=float("-inf"), cache_modifier=".cg")
    return _keys(s.to(tl.float32), i, WIDE)


@triton.jit
def _expert_of(logits, slot, EXPERTS, E_P, WIDE):
    """The expert of rank `slot`."""
    key = _load_keys(logits, EXPERTS, E_P, WIDE)
    best = tl.max(key, 0)
    for _ in range(slot):
        best = tl.max(_below(key, best, WIDE), 0)
    return _expert(best)


@triton.jit
def _decoded(chosen, highest, live, WIDE):
    """Keys -> experts int64 and exp(score - highest score); expert 0 and 0 where not live."""
    ids = tl.where(live, _expert(chosen), 0)
    s = tl.where(live, _score(chosen, WIDE), highest)
    return ids, tl.where(live, tl.exp(s - highest), 0.0)


@triton.jit
def _route(logits, per_expert, slots, EXPERTS, E_P, TOP_K, WIDE):
    """Experts int64 and weights fp32 of ranks `slots`; 0 from TOP_K on."""
    key = _load_keys(logits, EXPERTS, E_P, WIDE)
    best = tl.max(key, 0)
    highest = _score(best, WIDE)
    chosen = tl.where(slots == 0, best, 0)
    for j in tl.static_range(1, TOP_K):
        best = tl.max(_below(key, best, WIDE), 0)
        chosen = tl.where(slots == j, best, chosen)
    ids, e = _decoded(chosen, highest, slots < TOP_K, WIDE)
    scale = tl.load(per_expert + ids).to(tl.float32)
    return ids, tl.div_rn(e, tl.zeros_like(e) + tl.sum(e, 0)) * scale


@triton.jit
def _topk(
    logits,
    per_expert,
    weights,
    index,
    listed,
    rows,
    first,
    EXPERTS: tl.constexpr,
    E_P: tl.constexpr,
    TOP_K: tl.constexpr,
    S: tl.constexpr,
    ROWS: tl.constexpr,
    WIDE: tl.constexpr,
    HELD: tl.constexpr,
):
    """The routing of all rows, and the list of experts in use, by one program."""
    i = tl.arange(0, E_P)
    own = i
    if HELD:
        own = i - tl.load(first).to(tl.int32)
    here = (own >= 0) & (own < (HELD if HELD else EXPERTS))
    slots = tl.arange(0, S)[None, :]
    used = tl.zeros([E_P], tl.int32)
    for r0 in range(0, rows, ROWS):
        r = r0 + tl.arange(0, ROWS)[:, None]
        at = tl.minimum(r, rows - 1) * EXPERTS + i[None, :]  # past the end the last row again
        s = tl.load(logits + at, mask=(i < EXPERTS)[None, :], other=float("-inf"))
        key = _keys(s.to(tl.float32), i[None, :], WIDE)
        best = tl.max(key, 1)[:, None]
        highest = _score(best, WIDE)
        chosen = tl.where(slots == 0, best, 0)
        for j in tl.static_range(1, TOP_K):
            best = tl.max(_below(key, best, WIDE), 1)[:, None]
            chosen = tl.where(slots == j, best, chosen)
        ids, e = _decoded(chosen, highest, slots < TOP_K, WIDE)
        scale = tl.load(per_expert + ids).to(tl.float32)
        weight = tl.div_rn(e, tl.zeros_like(e) + tl.sum(e, 1)[:, None]) * scale
        if HELD:
            ids -= tl.load(first)
            mine = (ids >= 0) & (ids < HELD)
            weight, ids = tl.where(mine, weight, 0.0), tl.where(mine, ids, OTHERS)
        inside = (r < rows) & (slots < TOP_K)
        tl.store(weights + r * TOP_K + slots, weight, mask=inside)
        tl.store(index + r * TOP_K + slots, ids, mask=inside)
        used = tl.maximum(used, tl.max((key >= best).to(tl.int32), 0))  # best: the last rank's
    used = tl.where(here, used, 0)
    before = tl.cumsum(used, 0) - used
    place = tl.where(used == 1, before, tl.sum(used, 0) + own - before)
    tl.store(listed + place, tl.where(used == 1, own, -1), mask=here)


def _is_wide(logits: Tensor) -> bool:
    return logits.dtype == torch.float32


def _rows(x: Tensor) -> Any:
    """Return the product of the leading dims, which may be symbolic."""
    return x.numel() // x.shape[-1]


def _part(first: Tensor | None, held: int) -> Any:
    """Return the constant HELD: how many experts of a part there are; 0: all."""
    return {"HELD": 0 if first is None else held}


def _topk_reference(
    logits: Tensor, per_expert: Tensor, top_k: int, first: Tensor | None = None, held: int = 0
) -> tuple[Tensor, Tensor]:
    """Compute the second half of the op `router`, with an order among equals; of a part of the
    experts their places in it."""
    scores, index = wide(logits).sort(dim=-1, descending=True, stable=True)
    index = index[..., :top_k].contiguous()
    weights = scores[..., :top_k].softmax(-1) * per_expert[index]
    if first is None:
        return weights, index
    own = own_index(index, first, held)
    return torch.where(own < held, weights, 0), torch.where(own < held, own, OTHERS.value)


def _sort_reference(
    logits: Tensor, per_expert: Tensor, top_k: int, first: Tensor | None, held: int
) -> tuple[Tensor, Tensor, Tensor]:
    weights, index = _topk_reference(logits, per_expert, top_k, first, held)
    experts = torch.arange(held or logits.shape[-1], device=logits.device)
    used = (index.flatten()[:, None] == experts).any(0)
    order = (~used).to(torch.int8).argsort(dim=0, stable=True)
    return weights, index, torch.where(used[order], order, -1).to(torch.int32)


@triton_op("g4ir::moe_sort", mutates_args={})
def moe_sort(
    logits: Tensor,
    per_expert: Tensor,
    top_k: int,
    warps: int,
    first: Tensor | None = None,
    held: int = 0,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return weights f32 and index i64 [..., top_k] of the op `router`, from scores [..., E], and
    i32[E]: the experts that some row chose, ascending, then -1. With `first` of `held` experts from
    there on, and their places among these; choices of others weigh 0."""
    if not takes(logits):
        return _sort_reference(logits, per_expert, top_k, first, held)
    experts, rows = logits.shape[-1], _rows(logits)
    shape = (*logits.shape[:-1], top_k)
    weights = logits.new_empty(shape, dtype=torch.float32)
    index = logits.new_empty(shape, dtype=torch.int64)
    listed = logits.new_empty((held or experts,), dtype=torch.int32)
    start(
        _topk,
        (1,),
        (logits, per_expert, weights, index, listed, rows, index if first is None else first),
        EXPERTS=experts,
        E_P=power_of_2(experts),
        TOP_K=top_k,
        S=power_of_2(top_k),
        ROWS=ROWS,
        WIDE=_is_wide(logits),
        **_part(first, held),
        num_warps=warps,
        num_stages=1,
    )
    return weights, index, listed


@triton.jit
def _router_logits(
    x,
    scale,
    proj,
    out,
    root,
    HIDDEN: tl.constexpr,
    EXPERTS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """BLOCK_N scores of one row."""
    row = tl.program_id(1)
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    acc = tl.zeros([BLOCK_N, BLOCK_K], tl.float32)
    for k0 in range(0, HIDDEN, BLOCK_K):
        k = k0 + tl.arange(0, BLOCK_K)
        inside = k < HIDDEN
        a = tl.load(x + row * HIDDEN + k, mask=inside, other=0.0).to(tl.float32)
        a = rounded(a * tl.load(scale + k, mask=inside, other=0.0).to(tl.float32), x)
        a = rounded(a * root, x)
        w = tl.load(
            proj + n[:, None] * HIDDEN + k[None, :],
            mask=(n < EXPERTS)[:, None] & inside[None, :],
            other=0.0,
        )
        acc += a[None, :] * w.to(tl.float32)
    tl.store(out + row * EXPERTS + n, tl.sum(acc, 1).to(out.dtype.element_ty), mask=n < EXPERTS)


@triton_op("g4ir::router_logits", mutates_args={})
def router_logits(
    x: Tensor,
    scale: Tensor,
    proj: Tensor,
    root: float,
    block_n: int,
    block_k: int,
    warps: int,
    stages: int,
) -> Tensor:
    """Return scores [..., E] of the op `router`: x [..., D] * scale [D] * root, each step rounded,
    then the product with proj [E, D]."""
    if not takes(x):
        return torch.nn.functional.linear(x * scale * root, proj)
    experts, hidden = proj.shape
    out = x.new_empty((*x.shape[:-1], experts))
    start(
        _router_logits,
        (blocks(experts, block_n), _rows(x)),
        (x, scale, proj, out, root),
        HIDDEN=hidden,
        EXPERTS=experts,
        BLOCK_N=block_n,
        BLOCK_K=block_k,
        num_warps=warps,
        num_stages=stages,
    )
    return out
