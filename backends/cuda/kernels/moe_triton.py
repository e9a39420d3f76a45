"""The MoE block of a decode step: gate and up, down; experts and dense MLP together.

The op `router` becomes `router_logits` and a top-k that every reader of the scores does again, from
E scores in L2: cheaper than a kernel in between. The dense MLP of the layer is a part of the same
grids, because alone it would not fill the machine. act holds, per row, top_k slots of I in the
order of rank, then the Id columns of the dense MLP. Row by row, the weights of an expert are read
once per row that chose it; from about five rows on rows share experts (moe_sorted_triton.py).

Error: fp32 sums in another order than the reference, about 1e-6 of the rms of the terms, then the
roundings of the op. fp32: within 1e-5 of the result's rms. bf16: a rounding may fall the other way
(1 ulp) at the scores, at gate and up, at the activation and at each slot's product.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch.library import triton_op

from g4ir.ops.base import wide
from g4ir.ops.mlp import activate as activation

from .codes_triton import columns, dense, form_of, row_sums
from .launch import (
    activate,
    blocks,
    power_of_2,
    rounded,
    start,
    takes,
    tile,
)
from .moe_order_triton import _expert_of, _is_wide, _part, _route, _rows, _topk_reference
from .moe_sorted_triton import _down_sorted, _slots_of, _sum_slots, _tile_glu, glu_rows

Tensor = torch.Tensor


@triton.jit
def _glu(
    x, w, scales, base, out, live, n0, N, K, BLOCK_M, BLOCK_N, BLOCK_K, ACT, STAGES, FORM, GROUP
):
    """out[n] = act(w[base + n] @ x) * (w[base + N + n] @ x) for BLOCK_N of n from n0; x [K], or, of
    BLOCK_M rows, as in `_tile_glu`."""
    if BLOCK_M > 1:
        _tile_glu(
            *(x, w, scales, base, out, live, n0, N, K, BLOCK_M, BLOCK_N, BLOCK_K),
            *(ACT, STAGES, FORM, GROUP),
        )
    else:
        R: tl.constexpr = 2 * BLOCK_N
        i, row = glu_rows(n0, N, 1, BLOCK_N)
        row += base
        sums = row_sums(x, w, scales, row, i < N, 0, K, K, BLOCK_K, R, STAGES, FORM, GROUP)
        gate, up = tl.split(tl.permute(tl.reshape(sums, (2, BLOCK_N)), (1, 0)))
        gate = rounded(activate(rounded(gate, out), ACT), out)
        n = n0 + tl.arange(0, BLOCK_N)
        tl.store(out + n, (gate * rounded(up, out)).to(out.dtype.element_ty), mask=n < N)


@triton.jit
def _gate_up(
    x_dense,
    x_moe,
    chosen,
    listed,
    w_dense,
    dense_scales,
    gate_up,
    scales,
    first,
    out,
    rows,
    HIDDEN: tl.constexpr,
    EXPERTS: tl.constexpr,
    INNER: tl.constexpr,
    DENSE: tl.constexpr,
    TOP_K: tl.constexpr,
    S: tl.constexpr,
    E_P: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    ACT: tl.constexpr,
    WIDE: tl.constexpr,
    HELD: tl.constexpr,
    STAGES: tl.constexpr,
    DENSE_FORM: tl.constexpr,
    DENSE_GROUP: tl.constexpr,
    FORM: tl.constexpr,
    GROUP: tl.constexpr,
):
    """BLOCK_N columns of the dense MLP, or of an expert. One row and one of its slots (BLOCK_M 1),
    `chosen`: the scores; or BLOCK_M rows and a listed expert, `chosen`: the rows' experts.

    The dense blocks come first: they stream while the others wait for their top-k."""
    if BLOCK_M == 1:
        block, row, live = tl.program_id(1), tl.program_id(0).to(tl.int64), True
    else:
        block = tl.program_id(0)
        m = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
        row, live = m.to(tl.int64), m < rows
    out += row * (TOP_K * INNER + DENSE)
    dense_blocks: tl.constexpr = (DENSE + BLOCK_N - 1) // BLOCK_N
    per_expert: tl.constexpr = (INNER + BLOCK_N - 1) // BLOCK_N
    if block < dense_blocks:
        _glu(
            *(x_dense + row * HIDDEN, w_dense, dense_scales, 0, out + TOP_K * INNER, live),
            *(block * BLOCK_N, DENSE, HIDDEN, BLOCK_M, BLOCK_N, BLOCK_K),
            *(ACT, STAGES, DENSE_FORM, DENSE_GROUP),
        )
    else:
        slot, n0 = (block - dense_blocks) // per_expert, (block - dense_blocks) % per_expert
        if BLOCK_M == 1:
            expert = _expert_of(chosen + row * EXPERTS, slot, EXPERTS, E_P, WIDE)
            used = True
            if HELD:
                expert -= tl.load(first)
                used = (expert >= 0) & (expert < HELD)
        else:
            expert = tl.load(listed + slot).to(tl.int64)
            live, slot = _slots_of(chosen, expert, m, rows, TOP_K, S)
            used = tl.max(live.to(tl.int32), 0) == 1
        if used:
            _glu(
                *(x_moe + row * HIDDEN, gate_up, scales, expert * (2 * INNER), out + slot * INNER),
                *(live, n0 * BLOCK_N, INNER, HIDDEN, BLOCK_M, BLOCK_N, BLOCK_K),
                *(ACT, STAGES, FORM, GROUP),
            )


@triton.jit
def _down(
    act,
    logits,
    per_expert,
    w_dense,
    dense_scales,
    down,
    scales,
    first,
    dense,
    moe,
    HIDDEN: tl.constexpr,
    EXPERTS: tl.constexpr,
    INNER: tl.constexpr,
    DENSE: tl.constexpr,
    TOP_K: tl.constexpr,
    S: tl.constexpr,
    EACH: tl.constexpr,
    E_P: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    WIDE: tl.constexpr,
    HELD: tl.constexpr,
    STAGES: tl.constexpr,
    DENSE_FORM: tl.constexpr,
    DENSE_GROUP: tl.constexpr,
    FORM: tl.constexpr,
    GROUP: tl.constexpr,
):
    """One row; tiles of S * BLOCK_N columns of the dense MLP, or of BLOCK_N columns of all slots at
    once: both have as many rows of weights, so that both keep as many loads in flight. Grid: rows;
    programs of the dense MLP, then those of the slots, of EACH tiles."""
    row, own = tl.program_id(0).to(tl.int64), tl.program_id(1)
    act += row * (TOP_K * INNER + DENSE)
    R: tl.constexpr = S * BLOCK_N
    dense_tiles: tl.constexpr = (HIDDEN + R - 1) // R
    dense_programs: tl.constexpr = (dense_tiles + EACH - 1) // EACH
    tiles: tl.constexpr = (HIDDEN + BLOCK_N - 1) // BLOCK_N
    r = tl.arange(0, R)
    if own < dense_programs:
        for t in range(own, dense_tiles, dense_programs):
            n = t * R + r
            sums = row_sums(
                *(act + TOP_K * INNER, w_dense, dense_scales, n, n < HIDDEN, 0, DENSE, DENSE),
                *(BLOCK_K, R, STAGES, DENSE_FORM, DENSE_GROUP),
            )
            tl.store(dense + row * HIDDEN + n, sums.to(dense.dtype.element_ty), mask=n < HIDDEN)
    else:
        slots = tl.arange(0, S)
        ids, weights = _route(logits + row * EXPERTS, per_expert, slots, EXPERTS, E_P, TOP_K, WIDE)
        if HELD:
            ids -= tl.load(first)
        base = tl.reshape(tl.broadcast_to(ids[:, None], (S, BLOCK_N)), (R,)) * HIDDEN
        chosen = r // BLOCK_N < TOP_K
        if HELD:
            chosen = chosen & (base >= 0) & (base < HELD * HIDDEN)
        own -= dense_programs
        for t in range(own, tiles, tl.num_programs(1) - dense_programs):
            n = t * BLOCK_N + r % BLOCK_N
            sums = row_sums(
                *(act + tl.minimum(slots, TOP_K - 1) * INNER, down, scales, base + n),
                *(chosen & (n < HIDDEN), 0, INNER, INNER, BLOCK_K, R, STAGES, FORM, GROUP, S),
            )
            y = rounded(tl.reshape(sums, (S, BLOCK_N)), moe) * weights[:, None]
            if HELD:
                y = tl.where(((ids >= 0) & (ids < HELD))[:, None], y, 0.0)
            total = tl.zeros([BLOCK_N], tl.float32)
            for j in tl.static_range(TOP_K):  # in the order of rank, unlike tl.sum
                total += tl.sum(tl.where(slots[:, None] == j, y, 0.0), 0)
            i = t * BLOCK_N + tl.arange(0, BLOCK_N)
            tl.store(moe + row * HIDDEN + i, total.to(moe.dtype.element_ty), mask=i < HIDDEN)


def _operands(
    w_dense: Tensor, dense_scales: Tensor | None, w: Tensor, scales: Tensor | None
) -> Any:
    """Return both weights, each with its scales, or with itself for want of such."""
    own = w_dense if dense_scales is None else dense_scales, w if scales is None else scales
    return w_dense, own[0], w, own[1]


def _forms(w_dense: Tensor, dense_scales: Tensor | None, w: Tensor, scales: Tensor | None) -> Any:
    return {**form_of(w_dense, dense_scales, "DENSE_"), **form_of(w, scales)}


def _per_slot(x: Tensor, w: Tensor) -> Tensor:
    """Return products per slot: x [rows, slots or 1, k], w [rows, slots, n, k] -> [rows, slots, n],
    rounded once."""
    return (wide(w) @ wide(x)[..., None])[..., 0].to(x.dtype)


def _held(index: Tensor) -> Tensor:
    """Return [rows, slots] of experts that are there: any, for a choice that weighs nothing."""
    return index.flatten(0, -2).clamp(min=0)


def _gate_up_reference(
    x_dense: Tensor, x_moe: Tensor, index: Tensor, w_dense: Tensor, gate_up: Tensor, act: str
) -> Tensor:
    """Compute `experts` up to its second product, and the dense MLP; the weights are gathered per
    slot."""

    def glu(packed: Tensor) -> Tensor:
        gate, up = packed.chunk(2, -1)
        out: Tensor = activation(gate, act) * up
        return out

    dense = glu(torch.nn.functional.linear(x_dense.flatten(0, -2), w_dense))
    slots = glu(_per_slot(x_moe.flatten(0, -2)[:, None], gate_up[_held(index)]))
    return torch.cat((slots.flatten(1), dense), 1)


def _down_reference(
    act: Tensor, weights: Tensor, index: Tensor, w_dense: Tensor, down: Tensor
) -> tuple[Tensor, Tensor]:
    """Compute the rest of `experts` and of the dense MLP."""
    lead, top_k = index.shape[:-1], index.shape[-1]
    _, hidden, inner = down.shape
    dense = torch.nn.functional.linear(act[:, top_k * inner :], w_dense)
    y = _per_slot(act[:, : top_k * inner].unflatten(1, (top_k, inner)), down[_held(index)])
    moe = (wide(y) * weights.flatten(0, -2)[..., None]).sum(1).to(act.dtype)
    return dense.reshape(*lead, hidden), moe.reshape(*lead, hidden)


@triton_op("g4ir::moe_gate_up", mutates_args={})
def moe_gate_up(
    x_dense: Tensor,
    x_moe: Tensor,
    chosen: Tensor,
    listed: Tensor | None,
    w_dense: Tensor,
    gate_up: Tensor,
    top_k: int,
    act: str,
    block_n: int,
    block_k: int,
    warps: int,
    stages: int,
    block_m: int = 1,
    dense_scales: Tensor | None = None,
    scales: Tensor | None = None,
    first: Tensor | None = None,
) -> Tensor:
    """Return act [rows, top_k*I + Id] = act(gate) * up, per slot and then of the dense MLP.

    x_* [..., D], w_dense [2Id, D] and gate_up [E, 2I, D]: gate rows first. Row by row `chosen` is
    the scores [..., E]; with `listed`, block_m rows (16 or more) at a time, both are `moe_sort`'s.
    With `first` gate_up is of experts from there on, and nothing is written for others.
    """
    if not takes(x_moe):
        if listed is None:
            ones, part = chosen.new_ones(chosen.shape[-1]), (first, gate_up.shape[0])
            _, chosen = _topk_reference(chosen, ones, top_k, *part)
        weights = dense(w_dense, dense_scales, x_moe.dtype), dense(gate_up, scales, x_moe.dtype)
        return _gate_up_reference(x_dense, x_moe, chosen, *weights, act)
    inner, width, rows = gate_up.shape[1] // 2, w_dense.shape[0] // 2, _rows(x_moe)
    out = x_moe.new_empty((rows, top_k * inner + width))
    slots = top_k if listed is None else _most_in_use(listed, chosen)
    programs = blocks(width, block_n) + slots * blocks(inner, block_n)
    weights = _operands(w_dense, dense_scales, gate_up, scales)
    start(
        _gate_up,
        (rows, programs) if listed is None else (programs, blocks(rows, block_m)),
        (x_dense, x_moe, chosen, listed, *weights, chosen if first is None else first, out, rows),
        **_sizes(x_moe.shape[-1], inner, width, top_k),
        **_experts(chosen),
        ACT=act,
        **_part(first, gate_up.shape[0]),
        **_forms(w_dense, dense_scales, gate_up, scales),
        **tile(block_n, block_k, warps, stages, block_m),
    )
    return out


@triton_op("g4ir::moe_down", mutates_args={})
def moe_down(
    act: Tensor,
    chosen: Tensor,
    weights: Tensor,
    listed: Tensor | None,
    w_dense: Tensor,
    down: Tensor,
    top_k: int,
    block_n: int,
    block_k: int,
    warps: int,
    stages: int,
    programs: int = 0,
    block_m: int = 1,
    dense_scales: Tensor | None = None,
    scales: Tensor | None = None,
    first: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Return (w_dense @ dense part, weighted sum over the slots of down[e] @ slot), each [..., D].

    act [rows, top_k*I + Id], w_dense [D, Id], down [E, D, I]. Row by row `chosen` is the scores
    [..., E], `weights` the factors of experts [E], and about `programs` are started for a row. With
    `listed`, block_m rows (16 or more) at a time, all three are `moe_sort`'s; that is two kernels.
    """
    if not takes(act):
        index = chosen
        if listed is None:
            weights, index = _topk_reference(chosen, weights, top_k, first, down.shape[0])
        matrices = dense(w_dense, dense_scales, act.dtype), dense(down, scales, act.dtype)
        return _down_reference(act, weights, index, *matrices)
    hidden, rows, slots = down.shape[1], _rows(chosen), power_of_2(top_k)
    y_dense, y_moe = (act.new_empty((*chosen.shape[:-1], hidden)) for _ in range(2))
    given = _operands(w_dense, dense_scales, down, scales)
    sizes = _sizes(hidden, columns(down), columns(w_dense), top_k)
    sizes |= _forms(w_dense, dense_scales, down, scales)
    if listed is None:
        tiles = blocks(hidden, slots * block_n), blocks(hidden, block_n)
        each = blocks(sum(tiles), programs)
        start(
            _down,
            (rows, sum(blocks(n, each) for n in tiles)),
            (act, chosen, weights, *given, chosen if first is None else first, y_dense, y_moe),
            **_experts(chosen),
            EACH=each,
            **_part(first, down.shape[0]),
            **sizes,
            **tile(block_n, block_k, warps, stages),
        )
        return y_dense, y_moe
    parts = act.new_empty((rows, top_k, hidden))
    count = (1 + _most_in_use(listed, chosen)) * blocks(hidden, block_n)
    start(
        _down_sorted,
        (count, blocks(rows, block_m)),
        (act, chosen, listed, *given, y_dense, parts, rows),
        **sizes,
        **tile(block_n, block_k, warps, stages, block_m),
    )
    block = {"HIDDEN": hidden, "TOP_K": top_k, "BLOCK": 256, "num_warps": 1, "num_stages": 1}
    start(_sum_slots, (rows, blocks(hidden, 256)), (parts, weights, y_moe), **block)
    return y_dense, y_moe


def _sizes(hidden: int, inner: int, width: int, top_k: int) -> dict[str, Any]:
    sizes = {"HIDDEN": hidden, "INNER": inner, "DENSE": width, "TOP_K": top_k}
    return sizes | {"S": power_of_2(top_k)}


def _experts(scores: Tensor) -> dict[str, Any]:
    """Return the constants of a choice from scores."""
    count = scores.shape[-1]
    return {"EXPERTS": count, "E_P": power_of_2(count), "WIDE": _is_wide(scores)}


def _most_in_use(listed: Tensor, index: Tensor) -> Any:
    """Count the experts that can be in use: all, or one per slot of every row."""
    return torch.sym_min(listed.shape[0], index.numel())
