"""Attention by the C kernels: decode, prefill chunks, towers."""

from __future__ import annotations

import torch

from g4ir.backends.inductor import attention as library
from g4ir.backends.inductor.lowered import Run
from g4ir.ir.graph import Node
from g4ir.model.decoder import TOKENS
from g4ir.ops.attention import last_visible, split_chunk

from . import pyops

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
    """Compute attention by the C kernels for decode steps and prefill chunks; otherwise by SDPA."""
    fresh, block_ids = split_chunk(chunk, 2)
    if not n.attrs["softcap"]:
        if _is_few(n, chunk):
            return _attend_few(n, q, positions, written, cache_k, cache_v)
        if fresh and q.shape[-1] % 2 == 0:
            caches = cache_k, cache_v, *fresh
            return _attend_chunk(n, q, positions, written, caches, block_ids)
    return library.attention(m, n, q, positions, written, cache_k, cache_v, *chunk)


def attention_latent(
    m: Run, n: Node, q: Tensor, positions: Tensor, written: Tensor, w: Tensor, *rows: Tensor
) -> Tensor:
    """Attend as `attention`; cache rows are both keys and values (MLA latents)."""
    cache, *chunk = rows
    if n.attrs["softcap"]:
        return library.attention_latent(m, n, q, positions, written, w, *rows)
    query = library.latent_query(n, q, w)
    fresh, block_ids = split_chunk(tuple(chunk), 1)
    if _is_few(n, tuple(chunk)):
        out = _attend_few(n, query, positions, written, cache, cache)
    elif fresh and query.shape[-1] % 2 == 0:
        caches = cache, cache, fresh[0], fresh[0]
        out = _attend_chunk(n, query, positions, written, caches, block_ids)
    else:
        return library.attention_latent(m, n, q, positions, written, w, *rows)
    return out[..., : w.shape[0]]


def _is_few(n: Node, chunk: tuple[Tensor, ...]) -> bool:
    """Whether this is a decode or verification step: its rows are in the cache already."""
    return not chunk and n["q"].type.shape[1] in TOKENS.values()


def _attend_few(
    n: Node, q: Tensor, positions: Tensor, written: Tensor, keys: Tensor, values: Tensor
) -> Tensor:
    window, scale = n.whole("window"), n.number("scale")
    return pyops.attend(q, positions, written, keys, values, window, scale)


def _attend_chunk(
    n: Node,
    q: Tensor,
    positions: Tensor,
    written: Tensor,
    caches: tuple[Tensor, ...],
    block_ids: Tensor | None,
) -> Tensor:
    """Attend for a prefill chunk; `caches`: K and V of the cache, then of the chunk."""
    last = positions if block_ids is None else last_visible(positions, block_ids)
    window, scale = n.whole("window"), n.number("scale")
    return pyops.attend_chunk(q, positions, last, written, caches, window, scale)
