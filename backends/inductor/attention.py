"""Attention by torch ops: over K and V, over a latent cache, and for towers (`encoder_attention`).

In the first two q is [B,S,nq,d], keys and values are [T,B,n,d] (slot-major, like the caches), the
mask is [B,S,T]; the query heads of a KV head are rows of one matmul, so that keys are read once.
"""

from __future__ import annotations

from typing import Any

import torch

from g4ir.ir.graph import Node
from g4ir.ops.attention import last_visible, slot_positions, split_chunk, visible
from g4ir.ops.kv_quant import dequantize_rows

Tensor = torch.Tensor


def attention(
    n: Node,
    q: Tensor,
    positions: Tensor,
    written: Tensor,
    cache_k: Tensor,
    cache_v: Tensor,
    *chunk: Tensor,
) -> Tensor:
    """Compute the op `attention` by torch's SDPA, with the query heads of a KV head as rows
    (`_grouped`); with a softcap by the op's reference."""
    if n.attrs["softcap"]:
        return _reference(n, q, positions, written, cache_k, cache_v, *chunk)
    fresh, block_ids = split_chunk(chunk, 2)
    mask = _mask(n, positions, written, cache_k, bool(fresh), block_ids)
    keys, values = _joined((cache_k, cache_v), fresh, q.dtype)
    return _grouped(q, keys, values, mask, n.number("scale"))


def attention_latent(
    n: Node, q: Tensor, positions: Tensor, written: Tensor, w: Tensor, *operands: Tensor
) -> Tensor:
    """Compute the op `attention_latent` by SDPA over a latent cache, whose rows are both keys and
    values (as in MLA); with a softcap by the op's reference."""
    if n.attrs["softcap"]:
        return _reference(n, q, positions, written, w, *operands)
    cache, *chunk = operands
    fresh, block_ids = split_chunk(chunk, 1)
    mask = _mask(n, positions, written, cache, bool(fresh), block_ids)
    (rows,) = _joined((cache,), fresh, q.dtype)
    query = latent_query(n, q, w)
    return _grouped(query, rows, rows, mask, n.number("scale"))[..., : w.shape[0]]


def encoder_attention(n: Node, q: Tensor, k: Tensor, v: Tensor, valid: Tensor) -> Any:
    """Compute the op `encoder_attention` by SDPA: q [B,P,nq,d], k and v [B,T,n,d], valid bool
    [B,T]."""
    bias = torch.zeros(valid.shape, dtype=q.dtype, device=q.device)
    bias = bias.masked_fill(~valid, torch.finfo(q.dtype).min)[:, None, None]
    heads, keys, values = (x.transpose(1, 2) for x in (q, k, v))
    out = torch.nn.functional.scaled_dot_product_attention(
        heads,
        keys,
        values,
        attn_mask=bias.expand(*bias.shape[:2], q.shape[1], -1),
        scale=n.number("scale"),
        enable_gqa=q.shape[2] != k.shape[2],
    )
    return out.transpose(1, 2)


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
    last = None if block_ids is None else last_visible(positions, block_ids)
    return visible(key_pos, positions, n.integer("window"), last)


def _joined(
    caches: tuple[Tensor, ...], fresh: tuple[Tensor, ...], dtype: torch.dtype
) -> tuple[Tensor, ...]:
    """Append the chunk's rows, if there are any, to each cache, and dequantise to a dtype."""
    return tuple(dequantize_rows(rows, dtype) for rows in _with_chunk(caches, fresh))


def _with_chunk(caches: tuple[Tensor, ...], fresh: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    if not fresh:
        return caches
    return tuple(torch.cat((old, new.transpose(0, 1))) for old, new in zip(caches, fresh))


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


def _split(x: Tensor, pairs: int) -> tuple[Tensor, ...]:
    """Split the last dim: the rotated and the other dims of its first half, then of its second
    half."""
    half = x.shape[-1] // 2
    return tuple(x.split([pairs, half - pairs, pairs, half - pairs], -1))


def _query(q: Tensor, w: Tensor, pairs: int) -> tuple[Tensor, Tensor]:
    """Split the query of a latent cache: [..., d] for the stored V, [..., 2p] for K's stored
    rotated dims. K's unrotated dims are V * w (`w`: weight of K's norm): w is multiplied into the
    query instead."""
    low, _, high, _ = _split(q, pairs)
    _, rest1, _, rest2 = _split(q * w, pairs)
    nothing = torch.zeros_like(low)
    return torch.cat((nothing, rest1, nothing, rest2), -1), torch.cat((low, high), -1)


def latent_query(n: Node, q: Tensor, w: Tensor) -> Tensor:
    """Return the query [..., d + 2p] for the rows of a latent cache."""
    return torch.cat(_query(q, w, n.integer("pairs")), -1)
