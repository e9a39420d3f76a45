"""MoE block of a decode step in three kernels: router, gate_up, down. Experts and dense MLP share
the last two, since each alone would not fill the GPU.

`moe_route` computes the router's scores; its last program to arrive selects the experts of all rows
and lists those in use, so that each expert's weights are read once for all rows. The result
of `moe_gate_up` has, per row, top_k slots of I columns in top-k order, then the Id columns of the
dense MLP.
The caller sums the slots, so that its compiler can fuse the sum with the next read.

Top-k uses integer keys ordered by (score, then lower index), so that one integer max yields both.
The index takes 10 bits: 16-bit scores fit 32-bit keys, fp32 needs 64. Equal scores go by the lower
index (`torch.topk` promises no order among equals). Weights are exp(s - max s) / sum over the
chosen experts.

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

from g4ir.ops.base import upcast
from g4ir.ops.mlp import activate as activation

from .codes_triton import columns, format_constants, sums_of
from .launch import activate, blocks, is_last, power_of_2, rounded, start, takes, tile
from .rows_triton import dense

Tensor = torch.Tensor

#: (weight, scales, format) of the dense MLP and of the experts
Weights = tuple[tuple[Tensor, Tensor | None, str], tuple[Tensor, Tensor | None, str]]
#: rows of scores per iteration of the program that selects experts
ROWS = 16


@triton.jit
def _keys(s, i, FP32):
    """Return sort keys of scores s (fp32) and their expert indices i."""
    bits = (s + 0.0).to(tl.int32, bitcast=True)  # -0 becomes 0
    order = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    if FP32:
        key = (order.to(tl.int64) << 10) | (1023 - i)
    else:
        key = (order & -1024) | (1023 - i)
    return key


@triton.jit
def _expert(key):
    return (1023 - (key & 1023)).to(tl.int64)


@triton.jit
def _score(key, FP32):
    if FP32:
        order = (key >> 10).to(tl.int32)
        bits = order ^ ((order >> 31) & 0x7FFFFFFF)
    else:
        bits = (key ^ ((key >> 31) & 0x7FFFFFFF)) & -1024
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def _choose(logits, per_expert, slots, EXPERTS, E_P, TOP_K, FP32):
    """Top-k of rows of scores (pointers [R, 1]): return experts int64 and weights fp32 [R, S] for
    the top-k ranks `slots` [1, S] (0 from TOP_K on), and a flag for each expert that a row chose,
    i32[E_P]."""
    i = tl.arange(0, E_P)[None, :]
    # bypass L1: other programs stored them
    s = tl.load(logits + i, mask=i < EXPERTS, other=float("-inf"), cache_modifier=".cg")
    key = _keys(s.to(tl.float32), i, FP32)
    lowest: tl.constexpr = -(2**63) if FP32 else -(2**31)
    best = tl.max(key, 1)[:, None]
    highest = _score(best, FP32)
    chosen = tl.where(slots == 0, best, 0)
    for j in tl.static_range(1, TOP_K):
        best = tl.max(tl.where(key < best, key, lowest), 1)[:, None]
        chosen = tl.where(slots == j, best, chosen)
    live = slots < TOP_K
    ids = tl.where(live, _expert(chosen), 0)
    e = tl.where(live, tl.exp(tl.where(live, _score(chosen, FP32), highest) - highest), 0.0)
    scale = tl.load(per_expert + ids).to(tl.float32)
    weights = tl.div_rn(e, tl.zeros_like(e) + tl.sum(e, 1)[:, None]) * scale
    return ids, weights, tl.max((key >= best).to(tl.int32), 0)  # best: the last chosen key


@triton.jit
def _route_all(
    logits, per_expert, weights, index, listed, rows, EXPERTS, E_P, TOP_K, S, ROWS, FP32
):
    """Select the experts of all rows, and list those in use: ascending, then -1."""
    i, slots = tl.arange(0, E_P), tl.arange(0, S)[None, :]
    used = tl.zeros([E_P], tl.int32)
    for r0 in range(0, rows, ROWS):
        r = r0 + tl.arange(0, ROWS)[:, None]
        at = logits + tl.minimum(r, rows - 1) * EXPERTS  # out of range: reload the last row
        ids, weight, those = _choose(at, per_expert, slots, EXPERTS, E_P, TOP_K, FP32)
        inside = (r < rows) & (slots < TOP_K)
        tl.store(weights + r * TOP_K + slots, weight, mask=inside)
        tl.store(index + r * TOP_K + slots, ids, mask=inside)
        used = tl.maximum(used, those)
    before = tl.cumsum(used, 0) - used
    position = tl.where(used == 1, before, tl.sum(used, 0) + i - before)
    tl.store(listed + position, tl.where(used == 1, i, -1), mask=i < EXPERTS)


@triton.jit
def _route(
    x,
    scale,
    proj,
    per_expert,
    arrivals,
    logits,
    weights,
    index,
    listed,
    rows,
    root,
    HIDDEN: tl.constexpr,
    EXPERTS: tl.constexpr,
    E_P: tl.constexpr,
    TOP_K: tl.constexpr,
    S: tl.constexpr,
    ROWS: tl.constexpr,
    FP32: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Compute BLOCK_N scores of one row from x * scale * root, rounded at each step; the last
    program to arrive selects the experts. arrivals: 0 before and after. Grid: blocks, rows."""
    row = tl.program_id(1)
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    sums = tl.zeros([BLOCK_N, BLOCK_K], tl.float32)
    for k0 in range(0, HIDDEN, BLOCK_K):
        k = k0 + tl.arange(0, BLOCK_K)
        inside = k < HIDDEN
        a = tl.load(x + row * HIDDEN + k, mask=inside, other=0.0).to(tl.float32)
        a = rounded(a * tl.load(scale + k, mask=inside, other=0.0).to(tl.float32), x)
        a = rounded(a * root, x)
        at, live = n[:, None] * HIDDEN + k[None, :], (n < EXPERTS)[:, None] & inside[None, :]
        sums += a[None, :] * tl.load(proj + at, mask=live, other=0.0).to(tl.float32)
    out = tl.sum(sums, 1).to(logits.dtype.element_ty)
    tl.store(logits + row * EXPERTS + n, out, mask=n < EXPERTS)
    if is_last(arrivals, tl.num_programs(0) * tl.num_programs(1)):
        _route_all(
            *(logits, per_expert, weights, index, listed, rows),
            *(EXPERTS, E_P, TOP_K, S, ROWS, FP32),
        )
        tl.store(arrivals, 0)


@triton.jit
def _slots_of(index, expert, m, rows, TOP_K, S):
    """Return for each row m whether it chose the expert, and in which slot (top-k rank)."""
    slots = tl.arange(0, S)[None, :]
    inside = (m < rows)[:, None] & (slots < TOP_K)
    hit = tl.load(index + m[:, None] * TOP_K + slots, mask=inside, other=-2) == expert
    return tl.max(hit.to(tl.int32), 1) == 1, tl.sum(tl.where(hit, slots, 0), 1)


@triton.jit
def _glu(
    x, w, scales, base, out, live, n0, N, K, BLOCK_M, BLOCK_N, BLOCK_K, ACT, STAGES, FORMAT, GROUP
):
    """out[m][n] = act(w[base + n] @ x[m]) * (w[base + N + n] @ x[m]) for live m; x and out:
    pointers per row m. Rows of gate and up are interleaved, so that a pair is in one thread."""
    R: tl.constexpr = 2 * BLOCK_N
    r = tl.arange(0, R)
    i = n0 + r // 2
    sums = sums_of(
        *(x, live, w, scales, base + i + r % 2 * N, i < N, K),
        *(BLOCK_M, BLOCK_K, R, STAGES, FORMAT, GROUP),
    )
    gate, up = tl.split(tl.permute(tl.reshape(sums, (BLOCK_N, 2, BLOCK_M)), (0, 2, 1)))
    y = rounded(activate(rounded(gate, out), ACT), out) * rounded(up, out)
    n = n0 + tl.arange(0, BLOCK_N)
    inside = live[None, :] & (n < N)[:, None]
    tl.store(out[None, :] + n[:, None], y.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _product(
    x, w, scales, base, out, live, n0, N, K, BLOCK_M, BLOCK_N, BLOCK_K, STAGES, FORMAT, GROUP
):
    """out[m][n] = w[base + n] @ x[m] for live m; x and out: pointers per row m."""
    n = n0 + tl.arange(0, BLOCK_N)
    sums = sums_of(
        *(x, live, w, scales, base + n, n < N, K),
        *(BLOCK_M, BLOCK_K, BLOCK_N, STAGES, FORMAT, GROUP),
    )
    inside = live[None, :] & (n < N)[:, None]
    tl.store(out[None, :] + n[:, None], sums.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _gate_up(
    x_dense,
    x_moe,
    index,
    listed,
    w_dense,
    dense_scales,
    w,
    scales,
    out,
    rows,
    HIDDEN: tl.constexpr,
    INNER: tl.constexpr,
    DENSE: tl.constexpr,
    TOP_K: tl.constexpr,
    S: tl.constexpr,
    ACT: tl.constexpr,
    DENSE_FORMAT: tl.constexpr,
    DENSE_GROUP: tl.constexpr,
    FORMAT: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Compute BLOCK_M rows x BLOCK_N columns of gate_up: of the dense MLP (first in the grid), or
    of a listed expert."""
    block = tl.program_id(0)
    m = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    row = m.to(tl.int64)
    out += row * (TOP_K * INNER + DENSE)
    dense_blocks: tl.constexpr = (DENSE + BLOCK_N - 1) // BLOCK_N
    per_expert: tl.constexpr = (INNER + BLOCK_N - 1) // BLOCK_N
    if block < dense_blocks:
        _glu(
            *(x_dense + row * HIDDEN, w_dense, dense_scales, 0, out + TOP_K * INNER, m < rows),
            *(block * BLOCK_N, DENSE, HIDDEN, BLOCK_M, BLOCK_N, BLOCK_K),
            *(ACT, STAGES, DENSE_FORMAT, DENSE_GROUP),
        )
    else:
        block -= dense_blocks
        expert = tl.load(listed + block // per_expert).to(tl.int64)
        live, slot = _slots_of(index, expert, m, rows, TOP_K, S)
        if tl.max(live.to(tl.int32), 0) == 1:
            _glu(
                *(x_moe + row * HIDDEN, w, scales, expert * (2 * INNER), out + slot * INNER, live),
                *(block % per_expert * BLOCK_N, INNER, HIDDEN, BLOCK_M, BLOCK_N, BLOCK_K),
                *(ACT, STAGES, FORMAT, GROUP),
            )


@triton.jit
def _down(
    act,
    index,
    listed,
    w_dense,
    dense_scales,
    w,
    scales,
    dense,
    parts,
    rows,
    HIDDEN: tl.constexpr,
    INNER: tl.constexpr,
    DENSE: tl.constexpr,
    TOP_K: tl.constexpr,
    S: tl.constexpr,
    DENSE_FORMAT: tl.constexpr,
    DENSE_GROUP: tl.constexpr,
    FORMAT: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Compute BLOCK_M rows x BLOCK_N columns of down: of the dense MLP, or of a listed expert into
    parts [rows, TOP_K, HIDDEN], rounded, without router weights."""
    block = tl.program_id(0)
    m = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    row = m.to(tl.int64)
    act += row * (TOP_K * INNER + DENSE)
    per_expert: tl.constexpr = (HIDDEN + BLOCK_N - 1) // BLOCK_N
    n0 = block % per_expert * BLOCK_N
    if block < per_expert:
        _product(
            *(act + TOP_K * INNER, w_dense, dense_scales, 0, dense + row * HIDDEN, m < rows, n0),
            *(HIDDEN, DENSE, BLOCK_M, BLOCK_N, BLOCK_K, STAGES, DENSE_FORMAT, DENSE_GROUP),
        )
    else:
        expert = tl.load(listed + block // per_expert - 1).to(tl.int64)
        live, slot = _slots_of(index, expert, m, rows, TOP_K, S)
        if tl.max(live.to(tl.int32), 0) == 1:
            out = parts + (row * TOP_K + slot) * HIDDEN
            _product(
                *(act + slot * INNER, w, scales, expert * HIDDEN, out, live, n0),
                *(HIDDEN, INNER, BLOCK_M, BLOCK_N, BLOCK_K, STAGES, FORMAT, GROUP),
            )


# --- launches -------------------------------------------------------------------------


def route_reference(
    logits: Tensor, per_expert: Tensor, top_k: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Reference of the selection: the op `router` after its scores, with ties broken by the lower
    index, and the list of experts in use."""
    scores, index = upcast(logits).sort(dim=-1, descending=True, stable=True)
    index = index[..., :top_k].contiguous()
    weights = scores[..., :top_k].softmax(-1) * per_expert[index]
    experts = torch.arange(logits.shape[-1], device=logits.device)
    used = (index.flatten()[:, None] == experts).any(0)
    order = (~used).to(torch.int8).argsort(dim=0, stable=True)
    return weights, index, torch.where(used[order], order, -1).to(torch.int32)


def _rows(x: Tensor) -> Any:
    """Return the product of the leading dims, which may be symbolic."""
    return x.numel() // x.shape[-1]


@triton_op("g4ir::moe_route", mutates_args={"arrivals"})
def moe_route(
    x: Tensor,
    scale: Tensor,
    proj: Tensor,
    per_expert: Tensor,
    arrivals: Tensor,
    top_k: int,
    root: float,
    block_n: int,
    block_k: int,
    warps: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return weights f32 and index i64 [..., top_k] of the op `router`, and i32[E]: the experts
    that some row chose, ascending, then -1. arrivals i64[1 or more]: 0 before and after."""
    if not takes(x):
        arrivals.zero_()
        logits = torch.nn.functional.linear(x * scale * root, proj)
        return route_reference(logits, per_expert, top_k)
    (experts, hidden), rows, shape = proj.shape, _rows(x), (*x.shape[:-1], top_k)
    logits = x.new_empty((rows, experts))
    weights = x.new_empty(shape, dtype=torch.float32)
    index = x.new_empty(shape, dtype=torch.int64)
    listed = x.new_empty((experts,), dtype=torch.int32)
    inputs = (x, scale, proj, per_expert, arrivals)
    start(
        _route,
        (blocks(experts, block_n), rows),
        (*inputs, logits, weights, index, listed, rows, root),
        HIDDEN=hidden,
        EXPERTS=experts,
        E_P=power_of_2(experts),
        TOP_K=top_k,
        S=power_of_2(top_k),
        ROWS=ROWS,
        FP32=logits.dtype == torch.float32,
        BLOCK_N=block_n,
        BLOCK_K=block_k,
        num_warps=warps,
        num_stages=1,
    )
    return weights, index, listed


def _constants(hidden: int, inner: int, width: int, top_k: int, weights: Weights) -> dict[str, Any]:
    """Return the constexprs of a matmul of dense MLP and experts; weights: (weight, scales, format)
    of each."""
    sizes = {"HIDDEN": hidden, "INNER": inner, "DENSE": width}
    sizes |= {"TOP_K": top_k, "S": power_of_2(top_k)}
    return sizes | format_constants(*weights[0], "DENSE_") | format_constants(*weights[1])


def _pointers(weights: Weights) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return weights and scales; without scales the weight itself is the unused pointer."""
    first, second = ((w, w if scales is None else scales) for w, scales, _ in weights)
    return (*first, *second)


def _max_experts(listed: Tensor, index: Tensor) -> Any:
    """Return the maximum number of experts in use: all, or if fewer, one per slot of all rows."""
    return torch.sym_min(listed.shape[0], index.numel())


def _per_slot(x: Tensor, w: Tensor, index: Tensor) -> Tensor:
    """Reference matmul per slot: x [rows, slots or 1, k], w [E, n, k] -> [rows, slots, n], rounded
    once."""
    picked = w[index.flatten(0, -2)]
    return (upcast(picked) @ upcast(x)[..., None])[..., 0].to(x.dtype)


@triton_op("g4ir::moe_gate_up", mutates_args={})
def moe_gate_up(
    x_dense: Tensor,
    x_moe: Tensor,
    index: Tensor,
    listed: Tensor,
    w_dense: Tensor,
    dense_scales: Tensor | None,
    dense_form: str,
    w: Tensor,
    scales: Tensor | None,
    form: str,
    act: str,
    block_m: int,
    block_n: int,
    block_k: int,
    warps: int,
    stages: int,
) -> Tensor:
    """Return [rows, top_k*I + Id]: act(gate) * up per slot, then of the dense MLP.

    x_* [..., D], w_dense [2Id, D] and w [E, 2I, D]: gate rows first; index and listed of
    `moe_route`; block_m rows at a time: 1, or 16 or more.
    """
    weights = (w_dense, dense_scales, dense_form), (w, scales, form)
    if not takes(x_moe):
        d, e = (dense(*weight, x_moe.dtype) for weight in weights)
        slots = _per_slot(x_moe.flatten(0, -2)[:, None], e, index)
        pairs = slots, torch.nn.functional.linear(x_dense.flatten(0, -2), d)
        outputs = [activation(gate, act) * up for gate, up in (x.chunk(2, -1) for x in pairs)]
        return torch.cat((outputs[0].flatten(1), outputs[1]), 1)
    inner, width, top_k = w.shape[1] // 2, w_dense.shape[0] // 2, index.shape[-1]
    rows = _rows(x_moe)
    out = x_moe.new_empty((rows, top_k * inner + width))
    programs = blocks(width, block_n) + _max_experts(listed, index) * blocks(inner, block_n)
    start(
        _gate_up,
        (programs, blocks(rows, block_m)),
        (x_dense, x_moe, index, listed, *_pointers(weights), out, rows),
        ACT=act,
        **_constants(x_moe.shape[-1], inner, width, top_k, weights),
        **tile(block_n, block_k, warps, stages, block_m),
    )
    return out


@triton_op("g4ir::moe_down", mutates_args={})
def moe_down(
    act: Tensor,
    index: Tensor,
    listed: Tensor,
    w_dense: Tensor,
    dense_scales: Tensor | None,
    dense_form: str,
    w: Tensor,
    scales: Tensor | None,
    form: str,
    block_m: int,
    block_n: int,
    block_k: int,
    warps: int,
    stages: int,
) -> tuple[Tensor, Tensor]:
    """Return the dense MLP's output [..., D], w_dense @ its part of act, and for each slot its
    expert's w[e] @ slot, [..., top_k, D].

    act: the result of `moe_gate_up`; w_dense [D, Id], w [E, D, I]; other arguments as there.
    """
    lead, top_k, hidden = index.shape[:-1], index.shape[-1], w.shape[1]
    inner, width = columns(w, form), columns(w_dense, dense_form)
    weights = (w_dense, dense_scales, dense_form), (w, scales, form)
    if not takes(act):
        d, e = (dense(*weight, act.dtype) for weight in weights)
        slots = act[:, : top_k * inner].unflatten(1, (top_k, inner))
        out = torch.nn.functional.linear(act[:, top_k * inner :], d)
        parts = _per_slot(slots, e, index)
        return out.reshape(*lead, hidden), parts.reshape(*lead, top_k, hidden)
    rows = _rows(index)
    out, parts = act.new_empty((*lead, hidden)), act.new_empty((*lead, top_k, hidden))
    start(
        _down,
        ((1 + _max_experts(listed, index)) * blocks(hidden, block_n), blocks(rows, block_m)),
        (act, index, listed, *_pointers(weights), out, parts, rows),
        **_constants(hidden, inner, width, top_k, weights),
        **tile(block_n, block_k, warps, stages, block_m),
    )
    return out, parts
