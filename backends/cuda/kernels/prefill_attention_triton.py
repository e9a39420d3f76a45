"""Flash-style prefill attention of a chunk of new tokens over the KV cache and the chunk itself.

A program handles `block_m` query rows: block_m / PACK tokens with all query heads of one KV head
(GQA; PACK: these heads, rounded up to a power of two), so that a tile of K and V is read once for
the group. It iterates over the visible keys in at
most three contiguous runs: the cache up to its last slot, the cache from slot 0 if a ring wraps,
and the chunk. One loop covers all three, so that software pipelining continues across runs; blocks
fully visible to all queries are not masked.

Tolerance. Scores, softmax and sums are fp32; probabilities are rounded to the tensors' dtype before
the second product. fp32: 1e-5 of the result's rms against float64. bf16: the op's reference rounds
the scores, the capped scores, the probabilities and the result, so that the rms error against
float64 is about half of the reference's; tests allow 1.5 times the reference's.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch.library import triton_op

from g4ir.ops.attention import attention
from g4ir.ops.latent import keys_values

from .launch import blocks, power_of_2, start, takes, tanh

Tensor = torch.Tensor

LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def _runs(first, last, begin, old, slots, WINDOW):
    """Return the runs of keys visible to queries first..last of the chunk; query i is at position
    begin + i.

    Values: the oldest visible position in the cache, its slot, the number of keys from there to the
    last slot or newest key, the number of keys from slot 0 on (wrapped), and the first visible
    token of the chunk.
    """
    oldest = tl.maximum(old - slots, 0)
    token = 0
    if WINDOW > 0:
        oldest = tl.maximum(oldest, begin + first - WINDOW + 1)
        token = tl.maximum(first - WINDOW + 1, 0)
    count = tl.maximum(tl.minimum(old, begin + last + 1) - oldest, 0)
    slot = oldest % slots
    run = tl.minimum(count, slots - slot)
    return oldest, slot, run, count - run, token


@triton.jit
def _block(i, oldest, slot, run, wrapped, token, end, begin, slots, BLOCK_N):
    """Return for block i of the runs (`_runs`): whether it is in the cache (else in the chunk), its
    first row there, the end row of its run, and position minus row."""
    wraps = tl.cdiv(run, BLOCK_N)
    new = wraps + tl.cdiv(wrapped, BLOCK_N)
    row = tl.where(i < wraps, slot + i * BLOCK_N, (i - wraps) * BLOCK_N)
    row = tl.where(i < new, row, token + (i - new) * BLOCK_N)
    stop = tl.where(i < new, tl.where(i < wraps, slot + run, wrapped), end)
    shift = tl.where(i < wraps, oldest - slot, oldest - slot + slots)
    return i < new, row, stop, tl.where(i < new, shift, begin)


@triton.jit
def _is_partial(row, stop, shift, low, high, WINDOW, BLOCK_N):
    """Whether the block needs a mask: the run ends in it, or some query at positions low..high does
    not see all of it."""
    partial = (row + BLOCK_N > stop) | (row + shift + BLOCK_N - 1 > low)
    if WINDOW > 0:
        partial = partial | (row + shift <= high - WINDOW)
    return partial


@triton.jit
def _masked(scores, query, row, stop, shift, WINDOW):
    """Set scores [M,N] to -inf where a key is not visible; query: positions [M], row: rows [N] of a
    run."""
    key = row + shift
    seen = (row < stop)[None, :] & (key[None, :] <= query[:, None])
    if WINDOW > 0:
        seen = seen & (key[None, :] > query[:, None] - WINDOW)
    return tl.where(seen, scores, float("-inf"))


@triton.jit
def _weigh(scores, top, total):
    """Online softmax step, base 2: return the probabilities relative to the new maximum, the factor
    that rescales earlier sums, the new maximum [M] and the new sum [M]. The initial maximum is
    finite, so a row without visible keys needs no special case.
    """
    higher = tl.maximum(top, tl.max(scores, 1))
    p = tl.exp2(scores - higher[:, None])
    fade = tl.exp2(top - higher)
    return p, fade, higher, total * fade + tl.sum(p, 1)


@triton.jit
def _tile(base, step, row, keys, columns, stop, WIDTH, EVEN):
    """Load rows row + keys of a run with row stride `step`; zeros from row `stop` and column WIDTH
    on."""
    inside = (row + keys < stop)[:, None]
    if not EVEN:
        inside = inside & (columns < WIDTH)[None, :]
    at = base + row.to(tl.int64) * step + (keys[:, None] * step + columns[None, :])
    return tl.load(at, mask=inside, other=0.0)


@triton.jit
def _weighted(q, rows, columns, real, w, D, PAIRS):
    """Return the queries whose product with rows of V is that of q with K's unrotated dims (V * w):
    q * w, and zero on K's rotated dims; rounded to q's dtype, as the reference rounds V * w.
    """
    still = columns < D
    if PAIRS > 0:
        still = still & (columns % (D // 2) >= PAIRS)
    at = q + rows[:, None] + columns[None, :]
    query = tl.load(at, mask=real[:, None] & still[None, :], other=0.0).to(tl.float32)
    weight = tl.load(w + columns, mask=still, other=0.0).to(tl.float32)
    return (query * weight[None, :]).to(q.dtype.element_ty)


@triton.jit
def _attend(
    q,
    positions,
    written,
    w,
    cache_k,
    cache_v,
    k,
    v,
    out,
    scale,
    softcap,
    tokens,
    slots,
    by_slot,
    by_row,
    by_head,
    D: tl.constexpr,
    GROUP: tl.constexpr,
    PACK: tl.constexpr,
    WINDOW: tl.constexpr,
    CAP: tl.constexpr,
    LATENT: tl.constexpr,
    PAIRS: tl.constexpr,
    DIMS: tl.constexpr,
    KEY_DIMS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Compute attention of a tile of tokens, for one KV head of one sequence; grid (tiles, n, B).
    LATENT: rows of caches and chunk are `latent_row`s: V, then K's rotated dims; K's other dims are
    V * w (w: weight of K's norm, read only then)."""
    b, head = tl.program_id(2).to(tl.int64), tl.program_id(1)
    begin = tl.load(positions + b * tokens).to(tl.int32)
    old = tl.load(written + b).to(tl.int32)
    # The last tiles of a chunk have the most visible keys: they start first.
    first = (tl.num_programs(0) - 1 - tl.program_id(0)) * (BLOCK_M // PACK)
    last = tl.minimum(first + BLOCK_M // PACK, tokens) - 1
    heads = tl.num_programs(1) * GROUP
    m, keys = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_N)
    dims = tl.arange(0, KEY_DIMS)
    columns = tl.arange(0, DIMS)
    token, real = first + m // PACK, (first + m // PACK < tokens) & (m % PACK < GROUP)
    q += (b * tokens * heads + head * GROUP) * D
    out += ((b * tokens + first) * heads + head * GROUP) * D
    rows = (token.to(tl.int64) * heads + m % PACK) * D
    cache_k += b * by_row + head * by_head
    cache_v += b * by_row + head * by_head
    ROW_WIDTH: tl.constexpr = D + 2 * PAIRS
    fresh = tl.num_programs(1) * ROW_WIDTH  # token stride
    k += b * tokens * fresh + head * ROW_WIDTH
    v += b * tokens * fresh + head * ROW_WIDTH
    if LATENT:
        cache_k += D
        k += D
        # Store and reload: the compiler puts a loaded operand in shared memory, but a computed one
        # in registers, of which there are not enough.
        mine = out + ((m // PACK * heads + m % PACK) * D)[:, None] + columns[None, :]
        inside = real[:, None] & (columns < D)[None, :]
        tl.store(mine, _weighted(q, rows, columns, real, w, D, PAIRS), mask=inside)
        tl.debug_barrier()
        still = tl.load(mine, mask=inside, other=0.0)
    WIDTH: tl.constexpr = 2 * PAIRS if LATENT else D
    dim = tl.where(dims < PAIRS, dims, dims + D // 2 - PAIRS) if LATENT else dims
    inside = real[:, None] & (dims < WIDTH)[None, :]
    query = tl.load(q + rows[:, None] + dim[None, :], mask=inside, other=0.0)
    unit = scale / softcap if CAP else scale * LOG2E

    oldest, slot, run, wrapped, low = _runs(first, last, begin, old, slots, WINDOW)
    count = tl.cdiv(run, BLOCK_N) + tl.cdiv(wrapped, BLOCK_N) + tl.cdiv(last + 1 - low, BLOCK_N)
    # A query attends to itself. Without this hint ptxas serialises the dot products.
    tl.assume(count > 0)
    top = tl.full([BLOCK_M], -1e30, tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    sums = tl.zeros([BLOCK_M, DIMS], tl.float32)
    for i in range(count):
        cached, row, stop, shift = _block(
            i, oldest, slot, run, wrapped, low, last + 1, begin, slots, BLOCK_N
        )
        base, step = tl.where(cached, cache_k, k), tl.where(cached, by_slot, fresh)
        tile_k = _tile(base, step, row, keys, dims, stop, WIDTH, WIDTH == KEY_DIMS)
        base, step = tl.where(cached, cache_v, v), tl.where(cached, by_slot, fresh)
        tile_v = _tile(base, step, row, keys, columns, stop, D, D == DIMS)
        scores = tl.dot(query, tl.trans(tile_k), input_precision="ieee") * unit
        if LATENT:
            # Two dot products, scaled separately: if one accumulated onto the other, each half of
            # the warps would compute all of it.
            scores += tl.dot(still, tl.trans(tile_v), input_precision="ieee") * unit
        if CAP:
            scores = tanh(scores) * (softcap * LOG2E)
        if _is_partial(row, stop, shift, begin + first, begin + last, WINDOW, BLOCK_N):
            scores = _masked(scores, begin + token, row + keys, stop, shift, WINDOW)
        p, fade, top, total = _weigh(scores, top, total)
        p = p.to(tile_v.dtype)
        sums = tl.dot(p, tile_v, sums * fade[:, None], input_precision="ieee")
    result = sums / tl.where(total > 0, total, 1.0)[:, None]
    # Recomputed (with an opaque + 0): kept live, the addresses would take registers from the loop.
    m = tl.arange(0, BLOCK_M) + tl.minimum(tokens, 0)
    real = (first + m // PACK < tokens) & (m % PACK < GROUP)
    mine = out + ((m // PACK * heads + m % PACK) * D)[:, None] + columns[None, :]
    tl.store(mine, result.to(out.dtype.element_ty), mask=real[:, None] & (columns < D)[None, :])


def _sizes(d: int, group: int, pairs: int, latent: bool) -> dict[str, int]:
    """Return the constexprs that depend on sizes; a latent row has, after V, two dims per rotated
    pair."""
    dims = max(16, power_of_2(d))
    keys = max(16, power_of_2(2 * pairs)) if latent else dims
    sizes = {"D": d, "GROUP": group, "PACK": power_of_2(group)}
    return {**sizes, "PAIRS": pairs, "DIMS": dims, "KEY_DIMS": keys}


@triton_op("g4ir::prefill_attention", mutates_args={})
def prefill_attention(
    q: Tensor,
    positions: Tensor,
    written: Tensor,
    w: Tensor | None,
    caches: list[Tensor],
    window: int,
    scale: float,
    softcap: float,
    block_m: int,
    block_n: int,
    warps: int,
    stages: int,
) -> Tensor:
    """Compute the op `attention` for a chunk: q [B,S,nq,d]; `caches`: KV caches [C,B,n,d], then k,
    v [B,S,n,d] of the chunk.

    positions i64[B,S] are consecutive from positions[b, 0] >= 0 on: only the first of each sequence
    is read. written i64[B]: tokens written to the cache so far. Both caches have the same strides,
    and a contiguous last dim. Tuning: `block_m` query rows (at least the group's heads, rounded up
    to a power of two) and `block_n` keys of a tile, powers of two from 16.

    With w [d], the weight of K's norm, compute `attention_latent` over one cache [C,B,n,d + 2p] and
    the chunk's rows [B,S,n,d + 2p]. K's unrotated dims, V * w, are not computed: a tile of V serves
    both products, multiplied by q * w, rounded to the dtype; the op's reference rounds V * w.
    """
    if not takes(q):
        dense = caches if w is None else [x for rows in caches for x in keys_values(rows, w)]
        inputs = (q, positions, written, *dense)
        return attention.reference(*inputs, window=window, scale=scale, softcap=softcap)
    cache_k, cache_v, k, v = caches if w is None else (caches[0], caches[0], caches[1], caches[1])
    b, s, heads, d = q.shape
    slots, _, n, _ = cache_k.shape
    out = q.new_empty(b, s, heads, d)
    if cache_k.stride() != cache_v.stride():
        raise ValueError(f"K and V caches: unequal strides {cache_k.stride()}, {cache_v.stride()}")
    operands: list[Any] = [t.contiguous() for t in (q, positions, written)]
    operands.append(q if w is None else w)
    operands += [cache_k, cache_v, k.contiguous(), v.contiguous(), out]
    operands += [scale, softcap, s, slots, *cache_k.stride()[:3]]
    start(
        _attend,
        (blocks(s, block_m // power_of_2(heads // n)), n, b),
        operands,
        WINDOW=window,
        CAP=softcap > 0,
        LATENT=w is not None,
        **_sizes(d, heads // n, (cache_k.shape[-1] - d) // 2, w is not None),
        BLOCK_M=block_m,
        BLOCK_N=block_n,
        num_warps=warps,
        num_stages=stages,
    )
    return out
