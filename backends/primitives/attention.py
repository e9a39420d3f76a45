"""Caches, masks and attention in tensor primitives."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from g4ir.ir.graph import Node, Value
from g4ir.ops import OPS
from g4ir.ops.attention import split_chunk
from g4ir.ops.qkv import SEPARATE_CACHES
from g4ir.ops.types import FLOATS, torch_dtype

from .emitter import Emitter, Operand
from .network import SLOTS, TURNED, Network, full_slots, is_ring
from .pointwise import capped, normed, times

#: attributes that determine a RoPE table, in addition to `dim` and the positions
ROTATION = ("kind", "theta", "fraction", "factor", "dtype")


# --- rotation ---------------------------------------------------------------------------------


def rope_rows(
    net: Network, attrs: Mapping[str, Any], positions: Operand
) -> tuple[Operand, Operand]:
    """Gather cos and sin [..., dim] at positions from precomputed tables, since a target's sine of
    a large angle may be inexact. Pairs of dims that are not rotated have cos 1 and sin 0."""
    e = net.e
    tables = net.shared(
        ("rope", *(attrs[a] for a in (*ROTATION, "dim"))), lambda: _rope_tables(net, attrs)
    )
    rows = (e.gather(t, positions, 0) for t in tables)
    cos, sin = (e.concat([half, half], half.rank - 1) for half in rows)
    return cos, sin


def _rope_tables(net: Network, attrs: Mapping[str, Any]) -> tuple[Operand, ...]:
    """Return the cos and sin tables, [positions, dim / 2] each: the second half of a row would
    repeat the first."""
    reference = OPS["rope_table"].reference
    assert reference
    tables = reference(torch.arange(full_slots(net.limits))[None], **attrs)
    half = attrs["dim"] // 2
    return tuple(net.e.constant(t[0, :, :half].contiguous()) for t in tables)


def rotate(e: Emitter, x: Operand, cos: Operand, sin: Operand) -> Operand:
    """Return x * cos + rotate_half(x) * sin, three roundings (rule 14); tables of x's rank, `sin`
    from `signed`."""
    return e.add(e.mul(x, cos), e.mul(e.swap_halves(x), sin))


def signed(e: Emitter, sin: Operand) -> Operand:
    """Negate the first half of the sines, so that `rotate` need not negate half of x."""
    signs = torch.ones(int(sin.shape[-1]), dtype=torch_dtype(sin.dtype))
    signs[: len(signs) // 2] = -1
    return e.mul(sin, e.constant(signs.view(*(1,) * (sin.rank - 1), -1)))


def tables(net: Network, cos: Value, sin: Value, axis: int) -> tuple[Operand, Operand]:
    """Return the cos and sin tables [B, S, d] for `rotate`, with an axis of size 1 for the heads
    inserted at `axis`."""
    e = net.e
    return net.shared(
        ("tables", cos, sin, axis),
        lambda: (
            e.unsqueeze(net.operand(cos), axis),
            e.unsqueeze(signed(e, net.operand(sin)), axis),
        ),
    )


def rotated_half(e: Emitter, x: Operand) -> Operand:
    """Return (-second half, first half) of the last dim."""
    last, d = x.rank - 1, x.shape[-1]
    assert isinstance(d, int)
    low, high = e.slice(x, last, 0, d // 2), e.slice(x, last, d // 2, d)
    return e.concat([e.unary("neg", high), low], last)


# --- caches -----------------------------------------------------------------------------------


def cache_write(
    net: Network, n: Node, cache: Operand, new: Operand, start: Operand, lengths: Operand
) -> Operand:
    """Write the chunk contiguously into the slots from that of position `start` on (network.py),
    padding included, which masks hide."""
    first = first_slot(net, n["cache"], n["start"])
    return net.e.append(cache, net.e.transpose(new, 0, 2, 1, 3), first)


def first_slot(net: Network, cache: Value, start: Value) -> Operand:
    """Return i64[B]: the cache slot of position `start`."""
    e, at, slots = net.e, net.operand(start), int(net.operand(cache).shape[2])
    if not is_ring(cache.type):
        return at
    return net.shared(
        ("first slot", slots, start), lambda: _modulo(e, e.add(at, net.env[TURNED]), slots)
    )


def _slot_positions(net: Network, slots: int, written: Operand) -> Operand:
    """Return i32[B, slots]: the position of the token in each slot of a ring after `written` i32[B]
    tokens; negative for an empty slot."""
    e = net.e
    newest = e.sub(written, 1)
    ahead = e.add(newest, e.cast(net.env[TURNED], "i32"))
    # ahead + back: distance of each slot to the newest token's, + slots: floor_div needs ints >= 0
    back = e.constant(slots - torch.arange(slots, dtype=torch.int32)[None])
    behind = _modulo(e, e.add(e.unsqueeze(ahead, 1), back), slots)
    return e.sub(e.unsqueeze(newest, 1), behind)


def _modulo(e: Emitter, x: Operand, n: int) -> Operand:
    return e.sub(x, e.mul(e.binary("floor_div", x, n), n))


def _mask(e: Emitter, k: Operand, positions: Operand, window: int, last: Operand | None) -> Operand:
    """Return bool[B, 1, S, T]: causal, sliding-window mask of valid keys (rule 16). `k` i32[., T]:
    positions of the keys, negative for empty slots; `last` i32[B, S]: last visible position of each
    query, by default its own."""
    k = e.unsqueeze(k, 1)
    query = e.unsqueeze(e.cast(positions, "i32"), 2)
    limit = query if last is None else e.unsqueeze(last, 2)
    visible = e.unary("not", e.binary("gt", k, limit))
    visible = e.binary("and", visible, e.binary("gt", k, -1))
    if window:
        visible = e.binary("and", visible, e.binary("gt", k, e.sub(query, window)))
    return e.unsqueeze(visible, 1)


def _last_seen(net: Network, positions: Value, block_ids: Value) -> Operand:
    """Return i32[B, S]: last position of each query's image block, or its own (rule 19). The max is
    taken in fp32, which is exact for every position."""
    e = net.e

    def make() -> Operand:
        at, ids = e.cast(net.operand(positions), "f32"), e.cast(net.operand(block_ids), "i32")
        same = e.binary("eq", e.unsqueeze(ids, 2), e.unsqueeze(ids, 1))
        same = e.binary("and", same, e.binary("gt", e.unsqueeze(ids, 2), -1))
        ends = e.reduce("max", e.where(same, e.unsqueeze(at, 1), -1), 2)
        return e.cast(e.binary("max", at, e.reshape(ends, *at.shape)), "i32")

    return net.shared(("last seen", positions, block_ids), make)


def cached_rows(net: Network, n: Node, caches: tuple[Operand, ...]) -> list[Operand]:
    """Return the parts of the KV caches [B,n,T,d] that an attention reads; a chunk is in them
    already (graph.py)."""
    chunk, _ = split_chunk(n.chunk, len(n.caches))
    assert not chunk, f"{n.out} reads its chunk separately from its caches"

    def rows(cache: Value, x: Operand) -> Operand:
        if is_ring(cache.type):
            return x
        return net.shared(("held", cache), lambda: net.e.prefix(x, 2, net.env[SLOTS]))

    return [rows(v, x) for v, x in zip(n.caches, caches)]


def key_positions(net: Network, n: Node) -> Operand:
    """Return the positions i32[B or 1, T] of `cached_rows`; negative for empty ring slots."""
    cache, e = n.caches[0], net.e
    if not is_ring(cache.type):
        return net.shared("keys", lambda: e.unsqueeze(e.cast(net.env[SLOTS], "i32"), 0))
    slots, written = int(net.operand(cache).shape[2]), n["written"]

    def make() -> Operand:
        return _slot_positions(net, slots, e.cast(net.operand(written), "i32"))

    return net.shared(("keys", slots, written), make)


def mask(net: Network, n: Node, key: Operand) -> Operand:
    """Return an attention's mask [B, 1, S, T] for keys at these positions."""
    positions, window = n["positions"], n.integer("window")
    _, block_ids = split_chunk(n.chunk, len(n.caches))

    def make() -> Operand:
        last = None if block_ids is None else _last_seen(net, positions, block_ids)
        return _mask(net.e, key, net.operand(positions), window, last)

    return net.shared(("mask", key, positions, window, block_ids), make)


# --- QKV: norm, rotation, cache write ----------------------------------------------------------


def qkv_write(net: Network, n: Node, qkv: Operand, *inputs: Operand) -> tuple[Operand, ...]:
    """Return q [B,S,heads,d] and the K and V caches after the chunk. Heads have the caches' layout
    [B,heads,S,d], so that one norm (weights per head) and one rotation serve q and k. Latent caches
    are written by the op's expansion."""
    if n.word("form") not in SEPARATE_CACHES:
        return tuple(net.expanded(n))
    e, heads, count = net.e, n.integer("heads"), n.integer("kv_heads")
    (b, s, _), d, has_v = qkv.shape, int(inputs[0].shape[0]), bool(n.attrs["values"])
    both = heads + count
    x = e.transpose(e.reshape(qkv, b, s, both + count * has_v, d), 0, 2, 1, 3)
    h = normed(e, e.cast(x, "f32"), n.number("eps"))
    scaled = e.mul(h, _norm_weights(e, inputs[0], inputs[1], heads, count, has_v))
    scaled = e.cast(scaled, qkv.dtype)
    values = x if n.word("form") == "unnormed" else scaled if has_v else h
    v = e.slice(values, 1, both, both + count) if has_v else e.slice(values, 1, heads, both)
    qk = rotate(e, e.slice(scaled, 1, 0, both), *tables(net, n["cos"], n["sin"], 1))
    rows = zip(n.inputs[7:], (e.slice(qk, 1, heads, both), e.cast(v, qkv.dtype)), strict=True)
    caches = [e.append(net.operand(c), new, first_slot(net, c, n["start"])) for c, new in rows]
    return e.transpose(e.slice(qk, 1, 0, heads), 0, 2, 1, 3), *caches


def _norm_weights(
    e: Emitter, q: Operand, k: Operand, heads: int, count: int, values: bool
) -> Operand:
    """Return f32[1, heads of q, k and, if `values`, v, 1, d]: the norm weight of each head, 1 for
    those of v."""
    rows = [e.cast(e.unsqueeze(w, 0, 1, 2), "f32") for w in (q, k)]
    ones = [e.constant(torch.ones(1, count, 1, int(q.shape[0])))] if values else []
    return e.concat([rows[0]] * heads + [rows[1]] * count + ones, 1)


# --- attention --------------------------------------------------------------------------------


def attention(
    net: Network,
    n: Node,
    q: Operand,
    positions: Operand,
    written: Operand,
    *caches: Operand,
    impl: Callable[..., Operand] | None = None,
) -> Operand:
    """Attend over cached K and V; `impl`: the target's replacement of `attend`."""
    keys, values = cached_rows(net, n, caches)
    visible = mask(net, n, key_positions(net, n))
    return (impl or attend)(net, n, q, keys, values, visible)


def attention_latent(
    net: Network,
    n: Node,
    q: Operand,
    positions: Operand,
    written: Operand,
    w: Operand,
    *caches: Operand,
    impl: Callable[..., Operand] | None = None,
) -> Operand:
    """Attend over K and V recomputed from one latent cache; `impl` as in `attention`."""
    (row,) = cached_rows(net, n, caches)
    visible = mask(net, n, key_positions(net, n))
    return (impl or attend)(net, n, q, *_keys_values(net, n, row, w), visible)


def _keys_values(net: Network, n: Node, row: Operand, w: Operand) -> tuple[Operand, Operand]:
    """Return K and V [B,n,T,d] of a latent cache: K's unrotated dims are V * w, rounded once."""
    e, d = net.e, int(w.shape[0])
    half, pairs = d // 2, n.integer("pairs")
    v = e.slice(row, 3, 0, d)
    k = e.mul(v, e.unsqueeze(w, 0, 1, 2))
    cuts = [
        (row, d, d + pairs),
        (k, pairs, half),
        (row, d + pairs, d + 2 * pairs),
        (k, half + pairs, d),
    ]
    return e.concat([e.slice(x, 3, i, j) for x, i, j in cuts if i < j], 3), v


def attend(net: Network, n: Node, q: Operand, k: Operand, v: Operand, visible: Operand) -> Operand:
    return weigh(net.e, q, k, v, visible, n.number("scale"), n.number("softcap"))


def weigh(
    e: Emitter,
    q: Operand,
    keys: Operand,
    values: Operand,
    visible: Operand,
    scale: float,
    cap: float = 0.0,
    softmax: Callable[[Emitter, Operand], Operand] | None = None,
) -> Operand:
    """Return softmax(cap(q k^T * scale) + mask) v for q [B,S,heads,d], keys and values [B,n,T,d]
    and a mask broadcastable to [B,heads,S,T]; scores, probabilities and output rounded to q's
    dtype, softmax in fp32 (rule 15), or the target's own `softmax`.

    Query heads that share K and V (GQA) are rows of one matmul, which reads K and V once."""
    (b, s, heads, d), (_, count, t, _) = q.shape, keys.shape
    assert isinstance(heads, int) and isinstance(count, int)
    rows = heads // count * s if isinstance(s, int) else f"{heads // count}{s}"
    grouped = e.reshape(e.transpose(q, 0, 2, 1, 3), b, count, rows, d)
    scores = e.reshape(e.matmul(grouped, keys, transpose_b=True), b, heads, s, t)
    scores = capped(e, times(e, scores, scale), cap)
    scores = e.where(visible, scores, lowest_finite(scores.dtype))
    weights = e.cast((softmax or Emitter.softmax)(e, e.cast(scores, "f32")), q.dtype)
    out = e.matmul(e.reshape(weights, b, count, rows, t), values)
    return e.transpose(e.reshape(out, b, heads, s, d), 0, 2, 1, 3)


def lowest_finite(dtype: str) -> float:
    """Return the most negative finite value of a dtype."""
    assert dtype in FLOATS
    return float(torch.finfo(torch_dtype(dtype)).min)
