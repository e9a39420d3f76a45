"""How attention is computed: over K and V, or over one cache that says both; and that of towers.

q [B,S,nq,d] beside keys and values [T,B,n,d] (slot-major, as the caches are) and a mask
[B,S,T]. Heads of a group are query rows of one product, so that keys are read once.
"""

from __future__ import annotations

from typing import Any

import torch

from g4ir.ir.graph import Node
from g4ir.model.decoder import TOKENS
from g4ir.ops.attention import last_seen, slot_positions, split_chunk, visible
from g4ir.ops.base import wide
from g4ir.ops.kv_quant import numbers
from g4ir.ops.latent import PARTS
from g4ir.ops.rope import inverse_frequencies, rotated_pairs
from g4ir.ops.types import torch_dtype

from . import pyops
from .kernels.base import Run
from .target import has_gemm

Tensor = torch.Tensor


def attention(
    m: Run,
    n: Node,
    q: Tensor,
    positions: Tensor,
    written: Tensor,
    cache_k: Tensor,
    cache_v: Tensor,
    *chunk: Tensor,
) -> Tensor:
    """Attend in the form that measured fastest: on a CPU our kernel for few tokens, and for a chunk
    if it has instructions for it; plain products per head for a chunk over a ring in an engine for
    one row; else the library, grouped."""
    if n.attrs["softcap"]:
        return _reference(n, q, positions, written, cache_k, cache_v, *chunk)
    if _is_few(m, n, chunk):
        return _attend_few(n, q, positions, written, cache_k, cache_v)
    fresh, block_ids = split_chunk(chunk, 2)
    if fresh and _has_chunk_kernel(m, q):
        kept = cache_k, cache_v, *fresh
        return _attend_chunk(n, q, positions, written, kept, block_ids)
    mask = _mask(n, positions, written, cache_k, bool(fresh), block_ids)
    keys, values = _joined((cache_k, cache_v), fresh, q.dtype)
    return _attend(n, q, keys, values, mask, chunk=bool(fresh))


def attention_latent(
    m: Run,
    n: Node,
    q: Tensor,
    positions: Tensor,
    written: Tensor,
    w: Tensor,
    *held: Tensor,
) -> Tensor:
    """Attend in the form that measured fastest. Rows of the form `value` are keys and values; of
    `raw` K and V are made again, except for a single token of a single row."""
    if n.attrs["softcap"]:
        return _reference(n, q, positions, written, w, *held)
    form = n.word("form")
    parts = len(PARTS[form])
    caches = held[:parts]
    query = torch.cat(_query(q, w, _pairs(n)), -1) if form == "value" else q
    if form == "value" and _is_few(m, n, held[parts:]):
        out = _attend_few(n, query, positions, written, caches[0], caches[0])
        return out[..., : w.shape[0]]
    fresh, block_ids = split_chunk(held[parts:], parts)
    if fresh and form == "value" and _has_chunk_kernel(m, query):
        kept = caches[0], caches[0], fresh[0], fresh[0]
        out = _attend_chunk(n, query, positions, written, kept, block_ids)
        return out[..., : w.shape[0]]
    mask = _mask(n, positions, written, caches[0], bool(fresh), block_ids)
    if form == "value":
        (rows,) = _joined(caches, fresh, q.dtype)
        return _grouped(query, rows, rows, mask, n.number("scale"))[..., : w.shape[0]]
    key_pos = slot_positions(written, caches[0].shape[0])
    raw, rms = _with_chunk(caches, fresh)
    # fp16 holds a product with the projection only once that was divided by its rms.
    if _is_one_token(n, fresh) and q.dtype != torch.float16:
        return _one_token_raw(n, q, w, raw, rms, key_pos, mask)
    key_pos = torch.cat((key_pos, positions.t())) if fresh else key_pos
    keys, values = _keys_values(n, raw, rms, w, key_pos)
    return _attend(n, q, keys, values, mask, chunk=bool(fresh))


def encoder_attention(m: Run, n: Node, q: Tensor, k: Tensor, v: Tensor, valid: Tensor) -> Any:
    """Attend by the library, which never holds the scores; on the CPU without a mask if it can."""
    scale = n.number("scale")
    if m.device == "cpu":
        return torch.ops.g4ir.encoder_attention(q, k, v, valid, scale)
    return pyops.masked_attention(q, k, v, valid, scale)


def _reference(n: Node, *operands: Tensor) -> Any:
    assert n.definition.reference
    return n.definition.reference(*operands, **n.attrs)


def _mask(
    n: Node,
    positions: Tensor,
    written: Tensor,
    cache: Tensor,
    chunk: bool,
    block_ids: Tensor | None,
) -> Tensor:
    """Return the mask [B,S,T] bool, over the slots of the cache, then the tokens of the chunk."""
    key_pos = slot_positions(written, cache.shape[0])
    if chunk:
        key_pos = torch.cat((key_pos, positions.t()))
    last = None if block_ids is None else last_seen(positions, block_ids)
    mask: Tensor = visible(key_pos, positions, n.whole("window"), last)
    return mask


def _is_one_token(n: Node, fresh: tuple[Tensor, ...]) -> bool:
    """Whether this is a decode step of an engine for one row."""
    return not fresh and n["q"].type.shape[:2] == (1, 1)


def _is_few(m: Run, n: Node, chunk: tuple[Tensor, ...]) -> bool:
    """Whether this is a decode or verification step on a CPU: its rows are in the cache already."""
    return m.device == "cpu" and not chunk and n["q"].type.shape[1] in TOKENS.values()


def _attend_few(
    n: Node, q: Tensor, positions: Tensor, written: Tensor, keys: Tensor, values: Tensor
) -> Tensor:
    """Attend where keys and values lie."""
    window, scale = n.whole("window"), n.number("scale")
    return torch.ops.g4ir.attend(q, positions, written, keys, values, window, scale)


def _has_chunk_kernel(m: Run, q: Tensor) -> bool:
    """Whether cpu/prefill_attention.h attends for the queries of a chunk."""
    fits = q.dtype == torch.bfloat16 and q.shape[-1] % 8 == 0
    return m.device == "cpu" and fits and has_gemm()


def _attend_chunk(
    n: Node,
    q: Tensor,
    positions: Tensor,
    written: Tensor,
    kept: tuple[Tensor, ...],
    block_ids: Tensor | None,
) -> Tensor:
    """Attend for a chunk; `kept`: K and V of the cache, then those of the chunk."""
    last = positions if block_ids is None else last_seen(positions, block_ids)
    masking = n.whole("window"), n.number("scale")
    out: Tensor = torch.ops.g4ir.attend_chunk(q, positions, last, written, *kept, *masking)
    return out


def _joined(
    caches: tuple[Tensor, ...], fresh: tuple[Tensor, ...], dtype: torch.dtype
) -> tuple[Tensor, ...]:
    """Return what each cache says in a dtype, with the chunk's rows behind it."""
    return tuple(numbers(rows, dtype) for rows in _with_chunk(caches, fresh))


def _with_chunk(caches: tuple[Tensor, ...], fresh: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    if not fresh:
        return caches
    return tuple(torch.cat((old, new.transpose(0, 1))) for old, new in zip(caches, fresh))


def _attend(n: Node, q: Tensor, k: Tensor, v: Tensor, mask: Tensor, chunk: bool) -> Tensor:
    ring_of_one_row = n.attrs["window"] and n["q"].type.shape[0] == 1
    form = _per_head if chunk and ring_of_one_row else _grouped
    return form(q, k, v, mask, n.number("scale"))


def _per_head(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, scale: float) -> Tensor:
    """Attend for one row, by key head; q [1,S,nq,d], k, v [T,1,n,d], mask [1,S,T]."""
    _, s, heads, d = q.shape
    n = k.shape[2]
    group = heads // n
    outs = []
    for h in range(n):
        queries = q[0, :, h * group : (h + 1) * group].transpose(0, 1).reshape(group * s, d)
        scores = (torch.mm(queries, k[:, 0, h].t()) * scale).view(group, s, -1)
        scores = wide(scores).masked_fill(~mask, torch.finfo(torch.float32).min)
        weights = scores.softmax(-1).to(q.dtype).view(group * s, -1)
        outs.append(torch.mm(weights, v[:, 0, h]).view(group, s, d))
    return torch.cat(outs).transpose(0, 1).unsqueeze(0)


def _grouped(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, scale: float) -> Tensor:
    """Attend with the heads of a group as rows; q [B,S,nq,d], k, v [T,B,n,d], mask [B,S,T]."""
    b, s, heads, d = q.shape
    n = k.shape[2]
    group = heads // n
    queries = q.view(b, s, n, group, d).permute(0, 2, 3, 1, 4).reshape(b, n, group * s, d)
    bias = torch.zeros((), dtype=q.dtype, device=q.device).expand(mask.shape)
    bias = bias.masked_fill(~mask, torch.finfo(q.dtype).min)
    bias = bias[:, None, None].expand(b, 1, group, s, mask.shape[-1]).reshape(b, 1, group * s, -1)
    out = torch.nn.functional.scaled_dot_product_attention(
        queries, k.permute(1, 2, 0, 3), v.permute(1, 2, 0, 3), attn_mask=bias, scale=scale
    )
    return out.view(b, n, group, s, d).permute(0, 3, 1, 2, 4).reshape(b, s, heads, d)


def _pairs(n: Node) -> int:
    """Count the rotated pairs of a node that reads a latent cache."""
    kind, fraction = n.word("kind"), n.number("fraction")
    return rotated_pairs(kind, int(n["q"].type.shape[-1]), fraction)


def _split(x: Tensor, pairs: int) -> tuple[Tensor, ...]:
    """Return the last dim as rotated, rest; rotated, rest: both halves."""
    half = x.shape[-1] // 2
    return tuple(x.split([pairs, half - pairs, pairs, half - pairs], -1))


def _query(q: Tensor, w: Tensor, pairs: int) -> tuple[Tensor, Tensor]:
    """Return the query for normed rows and the query for K's rotated dims, [..., d] and [..., 2p]:
    where K is not rotated it is V * w, and the weight moves to q."""
    low, _, high, _ = _split(q, pairs)
    _, rest1, _, rest2 = _split(q * w, pairs)
    nothing = torch.zeros_like(low)
    return torch.cat((nothing, rest1, nothing, rest2), -1), torch.cat((low, high), -1)


def _weights(scores: Tensor, mask: Tensor) -> Tensor:
    """Return probabilities of a single token: softmax over scores [G,T] under a mask [1,1,T]."""
    return scores.masked_fill(~mask[0], torch.finfo(scores.dtype).min).softmax(-1)


def _one_token_raw(
    n: Node, q: Tensor, w: Tensor, raw: Tensor, rms: Tensor, key_pos: Tensor, mask: Tensor
) -> Tensor:
    """Attend for one token, V = raw * rms: the reciprocal rms moves to scores and probabilities, so
    that the projection is read as it is stored. Only K's rotated dims are made again."""
    still, turned = (x[0, 0].chunk(raw.shape[2]) for x in _query(q, w, _pairs(n)))
    low, _, high, _ = _split(raw, _pairs(n))
    w_low, _, w_high, _ = _split(w, _pairs(n))
    low, high = ((wide(x) * rms * wide(y)).to(q.dtype) for x, y in ((low, w_low), (high, w_high)))
    keys = torch.cat(_rotate(n, low, high, key_pos), -1)
    outs = []
    for h in range(raw.shape[2]):
        factor = rms[:, 0, h].t()
        scores = wide(torch.mm(still[h], raw[:, 0, h].t())) * factor
        scores = (scores + wide(torch.mm(turned[h], keys[:, 0, h].t()))) * n.number("scale")
        weights = (_weights(scores, mask) * factor).to(q.dtype)
        outs.append(torch.mm(weights, raw[:, 0, h]))
    return torch.cat(outs)[None, None]


def _keys_values(
    n: Node, raw: Tensor, rms: Tensor, w: Tensor, key_pos: Tensor
) -> tuple[Tensor, Tensor]:
    """Return K and V [T,B,n,d] of rows in the form `raw`, with the roundings of the ops."""
    h = wide(raw) * rms
    low, rest1, high, rest2 = _split((h * wide(w)).to(raw.dtype), _pairs(n))
    low, high = _rotate(n, low, high, key_pos)
    return torch.cat((low, rest1, high, rest2), -1), h.to(raw.dtype)


def keys_values_of_chunk(
    n: Node,
    positions: Tensor,
    written: Tensor,
    w: Tensor,
    caches: tuple[Tensor, ...],
    fresh: tuple[Tensor, ...],
) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
    """Return K and V of the cache [C,B,n,d] and of the chunk [B,S,n,d], from rows of form `raw`."""
    raw, rms = caches
    old = _keys_values(n, raw, rms, w, slot_positions(written, raw.shape[0]))
    raw, rms = (x.transpose(0, 1) for x in fresh)
    new = _keys_values(n, raw, rms, w, positions.t())
    return old, tuple(x.transpose(0, 1) for x in new)


def frequencies(n: Node, device: torch.device) -> Tensor:
    """Return f32 [p]: the inverse frequencies of the pairs that a node's keys are rotated in."""
    kind, d = n.word("kind"), int(n["q"].type.shape[-1])
    theta, fraction, factor = (n.number(a) for a in ("theta", "fraction", "factor"))
    with torch.device(device):  # made there: a recorded step may copy nothing from the host
        return inverse_frequencies(kind, theta, d, fraction, factor)[: _pairs(n)]


def _rotate(n: Node, low: Tensor, high: Tensor, key_pos: Tensor) -> tuple[Tensor, Tensor]:
    """Turn pairs (low, high) [T,B,n,p] by key_pos i64[T,B], rounded like `rope_table`, `rope`."""
    dtype, table = torch_dtype(n.word("dtype")), frequencies(n, key_pos.device)
    if key_pos.device.type == "cpu":
        # A product, so that the compiler fuses the positions' integer arithmetic, which it does not
        # vectorise, with nothing: sums of one term are exact.
        angles = torch.mm(key_pos.float().flatten()[:, None], table[None])
        angles = angles.view(*key_pos.shape, -1)
    else:  # a library's product may round late positions to 11 bits
        angles = key_pos.float()[..., None] * table
    cos, sin = (x.to(dtype)[:, :, None] for x in (angles.cos(), angles.sin()))
    return low * cos - high * sin, high * cos + low * sin
