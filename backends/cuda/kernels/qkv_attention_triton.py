"""Attention of one new token per row, from its projection on: norms, rotation, the write, the rest.

The splits are those of decode_attention_triton.py. Each program norms and rotates its group's
queries. The program with the last split makes the newest key and value: it writes them into the
caches for later steps and begins its split with its registers, so that no program reads what the
kernel writes. In a ring the slot that is overwritten is one that the query no longer sees.

Programs of their own add the splits, each for some columns of a group of heads. Split-KV partial
results are published as non-zero words (fp32 whose last bit is set); reducers spin until all are
present, so no fence, counter or final program is needed. The words are zero before: the product in
front sets them. Reducers come after those that they wait for in the grid, whose order is that in
which a GPU begins programs; with the shipped settings all of them fit on it at the same time.

Numerics: the roundings of `qkv_write`, then those of `decode_attention`; the last bit of a partial
result is off by at most 2^-23 of it.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch.library import triton_op

from g4ir.ops.attention import attention

from .base import added_together
from .decode_attention_triton import (
    _attended,
    _no_keys,
    _span,
    _write,
    constants,
    factors,
)
from .launch import rounded, start, takes, tanh
from .qkv_triton import q_heads, qkv_write

Tensor = torch.Tensor


@triton.jit
def _head(x, real, cols, eps, like, D):
    """Heads at x [R, 1], of which `real` [R, 1] exist: their elements `cols` [1, DP] and those that
    a rotation pairs with them, normed."""
    mask = real & (cols < D)
    other = tl.where(cols < D // 2, cols + D // 2, cols - D // 2)
    own = tl.load(x + cols, mask=mask, other=0.0).to(tl.float32)
    pair = tl.load(x + other, mask=mask, other=0.0).to(tl.float32)
    r = tl.rsqrt(tl.sum(own * own, 1) / D + eps)[:, None]
    return own * r, pair * r


@triton.jit
def _turn(w, cos, sin, cols, D):
    """A norm's weight and a rotation as `_turned` takes them: elements `cols` of the weight, those
    that the rotation pairs with them, cosines and sines."""
    mask = cols < D
    other = tl.where(cols < D // 2, cols + D // 2, cols - D // 2)
    g = tl.load(w + cols, mask=mask, other=0.0)
    h = tl.load(w + other, mask=mask, other=0.0)
    return (
        g,
        h,
        tl.load(cos + cols, mask=mask, other=0.0),
        tl.load(sin + cols, mask=mask, other=0.0),
    )


@triton.jit
def _turned(own, pair, turn, cols, like, D):
    """Normed elements and their pairs [R, DP], times the weight, rotated; rounded after each."""
    g, h, c, s = turn
    by = rounded(rounded(pair * h.to(tl.float32), like) * s.to(tl.float32), like)
    y = rounded(rounded(own * g.to(tl.float32), like) * c.to(tl.float32), like)
    return (y + tl.where(cols < D // 2, -by, by)).to(like.dtype.element_ty)


@triton.jit
def _begun(query, k, v, inner, outer, o, top, total, CAPPED):
    """o, maximum and sums of one key k and its value v [1, DP]."""
    s = tl.sum(query.to(tl.float32) * k.to(tl.float32), 1)
    if CAPPED:
        s = outer * tanh(s * inner)
    else:
        s = s * inner
    first = (tl.arange(0, total.shape[1]) == 0)[None, :]
    return o + v.to(tl.float32), s, total + tl.where(first, 1.0, 0.0)


@triton.jit
def _words(words, row, head, WORDS, EACH):
    """The words of a row's key head, EACH of 32 bits, of WORDS of the row."""
    return words.to(tl.pointer_type(tl.int32), bitcast=True) + row * WORDS + head * EACH


@triton.jit
def _leave(words, value, keep):
    """Store fp32 numbers as non-zero words; they go to L2 at once."""
    tl.store(words, value.to(tl.int32, bitcast=True) | 1, mask=keep, cache_modifier=".wt")


@triton.jit
def _left(words, keep):
    """The words at these places; 1 where there is none. Each look goes to L2."""
    return tl.load(words, mask=keep, other=1, volatile=True)


@triton.jit
def _some_zero(words):
    return tl.min((words != 0).to(tl.int32)) == 0


@triton.jit
def _hand_on(words, share, o, top, total, GROUP, D, SPLITS):
    """Leave a share's sums o [M, DP], maximum and sum [M], relative to a maximum that is a word."""
    h, cols = tl.arange(0, o.shape[0]), tl.arange(0, o.shape[1])[None, :]
    highest = (top.to(tl.int32, bitcast=True) | 1).to(tl.float32, bitcast=True)
    fade = tl.exp2(top - highest)
    stats = words + SPLITS * GROUP * D + 2 * share * GROUP + h
    _leave(stats, highest, h < GROUP)
    _leave(stats + GROUP, total * fade, h < GROUP)
    at = words + (share * GROUP + h[:, None]) * D + cols
    _leave(at, o * fade[:, None], (h < GROUP)[:, None] & (cols < D))


@triton.jit
def _added(words, out, used, first, GROUP, D, SPLITS, F, C):
    """Columns first .. first + C - 1 of the result of a group: the sum of the shares, F at a time,
    in their order."""
    H: tl.constexpr = triton.next_power_of_2(GROUP)
    h, cols = tl.arange(0, H)[None, :, None], first + tl.arange(0, C)[None, None, :]
    top = tl.full([1, H, 1], float("-inf"), tl.float32)
    total = tl.zeros([1, H, 1], tl.float32)
    o = tl.zeros([1, H, C], tl.float32)
    for at in range(0, used, F):
        i = at + tl.arange(0, F)[:, None, None]
        live = (i < used) & (h < GROUP)
        keep = live & (cols < D)
        stats = words + SPLITS * GROUP * D + 2 * i * GROUP + h
        parts = words + (i * GROUP + h) * D + cols
        tops, sums, part = _left(stats, live), _left(stats + GROUP, live), _left(parts, keep)
        while _some_zero(tops) | _some_zero(sums) | _some_zero(part):
            tops, sums, part = _left(stats, live), _left(stats + GROUP, live), _left(parts, keep)
        its = tl.where(i < used, tops.to(tl.float32, bitcast=True), float("-inf"))
        highest = tl.maximum(top, tl.max(its, 0, keep_dims=True))
        fade, gain = tl.exp2(top - highest), tl.exp2(its - highest)
        o = o * fade + tl.sum(part.to(tl.float32, bitcast=True) * gain, 0, keep_dims=True)
        added = tl.sum(sums.to(tl.float32, bitcast=True) * gain, 0, keep_dims=True)
        top, total = highest, total * fade + added
    o = o / total
    tl.store(out + h * D + cols, o.to(out.dtype.element_ty), mask=(h < GROUP) & (cols < D))


@triton.jit
def _qkv_decode(
    x,
    norm_q,
    norm_k,
    cos,
    sin,
    lengths,
    ends,
    keys,
    values,
    words,
    out,
    slots,
    k_slot,
    k_row,
    k_head,
    v_slot,
    v_row,
    v_head,
    inner,
    outer,
    eps,
    NEW: tl.constexpr,
    HEADS: tl.constexpr,
    WINDOW: tl.constexpr,
    CAPPED: tl.constexpr,
    GROUP: tl.constexpr,
    M: tl.constexpr,
    D: tl.constexpr,
    DP: tl.constexpr,
    N: tl.constexpr,
    SPLITS: tl.constexpr,
    WORDS: tl.constexpr,
    F: tl.constexpr,
    C: tl.constexpr,
):
    """One share of one row and key head, or C columns of a group's result; x [B, HEADS, D], cos,
    sin [B, D], words [B, WORDS] of 32 bits. Grid: SPLITS shares, then DP / C programs that add
    them; n; B.

    NEW: 0, where another layer writes the caches: x has the queries alone; 1 where K and V are of
    the same heads of x, behind the queries; 2 where V has heads of its own behind them.
    """
    split, head, row = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    h, cols = tl.arange(0, M)[:, None], tl.arange(0, DP)
    keys += row * k_row + head * k_head
    values += row * v_row + head * v_head
    end, new = tl.load(ends + row), tl.load(lengths + row) > 0  # all that is read at once
    x += row * (HEADS * D)
    cos += row * D
    sin += row * D
    turn = _turn(norm_q, cos, sin, cols[None, :], D)
    own, pair = _head(x + (head * GROUP + h) * D, h < GROUP, cols[None, :], eps, x, D)
    query = _turned(own, pair, turn, cols[None, :], x, D)
    first, lo, hi, used = _span(end, slots, split, WINDOW, SPLITS, N)
    if split < used:
        o, top, total = _no_keys(M, DP, N)
        if NEW > 0:
            last = (split == used - 1) & new
            if last:
                hi -= 1
                at = x + ((tl.num_programs(1) * GROUP + head) * D + tl.zeros([1, 1], tl.int32))
                line, real = cols[None, :], tl.full([1, 1], 1, tl.int1)
                k_own, k_pair = _head(at, real, line, eps, x, D)
                k = _turned(k_own, k_pair, _turn(norm_k, cos, sin, line, D), line, x, D)
                if NEW == 2:
                    k_own, _ = _head(at + tl.num_programs(1) * D, real, line, eps, x, D)
                v = k_own.to(x.dtype.element_ty)
                slot = ((end - 1) % slots).to(tl.int64)
                tl.store(keys + slot * k_slot + line, k, mask=line < D)
                tl.store(values + slot * v_slot + line, v, mask=line < D)
                o, top, total = _begun(query, k, v, inner, outer, o, top, total, CAPPED)
        caches = (keys, values, k_slot, v_slot)
        share, sums = (lo, hi, (first % slots).to(tl.int32), slots), (o, top, total)
        o, top, total = _attended(
            query, caches, share, sums, (inner, outer), CAPPED, D, N, HALVES=DP >= 32
        )
        sums = tl.sum(total, 1)
        if SPLITS == 1 or used == 1:
            _write(out + (row * tl.num_programs(1) + head) * (GROUP * D), o, sums, GROUP, D)
        else:
            own_words = _words(words, row, head, WORDS, SPLITS * GROUP * (D + 2))
            _hand_on(own_words, split, o, top, sums, GROUP, D, SPLITS)
    elif SPLITS > 1 and split >= SPLITS and used > 1:
        own_words = _words(words, row, head, WORDS, SPLITS * GROUP * (D + 2))
        out += (row * tl.num_programs(1) + head) * (GROUP * D)
        _added(own_words, out, used, (split - SPLITS) * C, GROUP, D, SPLITS, F, C)


#: window, scale, softcap, eps
Rules = tuple[int, float, float, float]
#: splits, merges, block_n, warps, stages
Settings = tuple[int, int, int, int, int]


def _by_reference(q: Tensor, written: Tensor, caches: list[Tensor], rules: Rules) -> Tensor:
    window, scale, softcap, _ = rules
    made: Tensor = attention.reference(
        *(q, written[:, None] - 1, written, *caches), window=window, scale=scale, softcap=softcap
    )
    return made


def _start(
    x: Tensor,
    heads: int,
    norms: tuple[Tensor, Tensor],
    tables: tuple[Tensor, Tensor],
    lengths: Tensor,
    written: Tensor,
    caches: list[Tensor],
    words: Tensor,
    new: int,
    rules: Rules,
    use: Settings,
) -> Tensor:
    """Fill and return the result."""
    (window, scale, softcap, eps), (splits, merges, block_n, warps, stages) = rules, use
    d, (slots, b, n, _) = norms[0].shape[0], caches[0].shape
    out = x.new_empty((b, 1, heads, d))
    sizes = constants(out, n, window, softcap)
    columns, fan = added_together({"splits": splits, "merges": merges}, sizes["GROUP"], d)
    adding = sizes["DP"] // columns if splits > 1 else 0
    given = (t.contiguous() for t in (*tables, lengths, written))
    strides = (s for cache in caches for s in cache.stride()[:3])
    numbers = (slots, *strides, *factors(scale, softcap), eps)
    start(
        _qkv_decode,
        (splits + adding, n, b),
        (x.contiguous(), *norms, *given, *caches, words, out, *numbers),
        NEW=new,
        HEADS=x.shape[1:].numel() // d,
        N=block_n,
        SPLITS=splits,
        WORDS=2 * words.shape[1],
        F=fan,
        C=columns,
        **sizes,
        num_warps=warps,
        num_stages=stages,
    )
    return out


@triton_op("g4ir::qkv_attention", mutates_args={"caches", "words"})
def qkv_attention(
    qkv: Tensor,
    norm_q: Tensor,
    norm_k: Tensor,
    cos: Tensor,
    sin: Tensor,
    begin: Tensor,
    lengths: Tensor,
    written: Tensor,
    caches: list[Tensor],
    words: Tensor,
    heads: int,
    kv_heads: int,
    values: bool,
    eps: float,
    window: int,
    scale: float,
    softcap: float,
    splits: int,
    merges: int,
    block_n: int,
    warps: int,
    stages: int,
) -> Tensor:
    """Compute `qkv_attention`, [B,1,nq,d]; K and V go into the caches

    Operands to `lengths` as in the kernel `qkv_write`; written i64[B] tokens in the caches
    afterwards; words i64[B,w]: zeros, which are used up, w as in kernels/base.py. splits: programs
    for each row and key head, each of at least block_n keys; merges: programs that add these, 1 or
    more, a power of two. The rest as in `decode_attention`.
    """
    rules, use = (window, scale, softcap, eps), (splits, merges, block_n, warps, stages)
    if not takes(qkv):
        given = (qkv, norm_q, norm_k, cos, sin, begin, lengths, caches)
        q, _ = qkv_write(*given, heads, kv_heads, values, "plain", 0, eps, 1)
        return _by_reference(q, written, caches, rules)
    norms, tables = (norm_q, norm_k), (cos, sin)
    return _start(
        qkv, heads, norms, tables, lengths, written, caches, words, 1 + values, rules, use
    )


@triton_op("g4ir::q_attention", mutates_args={"words"})
def q_attention(
    q: Tensor,
    norm_q: Tensor,
    cos: Tensor,
    sin: Tensor,
    written: Tensor,
    caches: list[Tensor],
    words: Tensor,
    eps: float,
    window: int,
    scale: float,
    softcap: float,
    splits: int,
    merges: int,
    block_n: int,
    warps: int,
    stages: int,
) -> Tensor:
    """Compute `q_attention` of projected queries [B,1,nq,d]; operands as in `qkv_attention`."""
    heads, norms, tables = q.shape[2], (norm_q, norm_q), (cos, sin)
    rules, use = (window, scale, softcap, eps), (splits, merges, block_n, warps, stages)
    if not takes(q):
        made, _ = q_heads(q.flatten(-2), norm_q, cos, sin, heads, caches[0].shape[2], eps, 1)
        return _by_reference(made, written, caches, rules)
    return _start(q, heads, norms, tables, written, written, caches, words, 0, rules, use)
