"""Writing the rows of new tokens into a cache [C,B,n,d], in place."""

from __future__ import annotations

import torch

from g4ir.ir.graph import Node

Tensor = torch.Tensor


def cache_write(n: Node, cache: Tensor, new: Tensor, start: Tensor, lengths: Tensor) -> Tensor:
    """Write new rows [B,S,n,d] to a ring or full-length cache. fp8 values are copied as bytes,
    since Inductor has no `where` on fp8."""
    bytewise = cache.dtype == torch.float8_e4m3fn
    target, rows = (t.view(torch.uint8) if bytewise else t for t in (cache, new))
    ring = not isinstance(n["cache"].type.shape[0], str) and n["new"].type.shape[1] != 1
    (write_ring if ring else write_list)(target, rows, start, lengths)
    return cache


def write_list(cache: Tensor, new: Tensor, start: Tensor, lengths: Tensor) -> None:
    """Write each sequence's tokens to slots (start + i) mod C, i < lengths, of a cache [C,B,n,d]: a
    full-length one, or a ring if S is 1. Padding rewrites the old contents of the slots that
    follow; no slot is written twice, since no chunk is longer than the cache."""
    torch._check(new.shape[1] <= cache.shape[0])
    tokens = torch.arange(new.shape[1], device=new.device)[:, None]
    rows = torch.arange(new.shape[0], device=new.device)[None].expand(new.shape[1], -1)
    slot = torch.remainder(start + tokens, cache.shape[0])
    real = (tokens < lengths)[:, :, None, None]
    cache.index_put_((slot, rows), torch.where(real, new.transpose(0, 1), cache[slot, rows]))


def write_ring(cache: Tensor, new: Tensor, start: Tensor, lengths: Tensor) -> None:
    """Write each sequence's min(chunk, C) newest tokens to their slots of a ring [C,B,n,d], so
    that no slot is written twice. If a sequence has fewer tokens, its other slots are rewritten
    with their old contents."""
    count = torch.sym_min(new.shape[1], cache.shape[0])
    rows = torch.arange(new.shape[0], device=new.device)[None].expand(count, -1)
    tokens = lengths - count + torch.arange(count, device=new.device)[:, None]
    slot = torch.remainder(start + tokens, cache.shape[0])
    picked = new[rows, tokens.clamp(min=0)]
    real = (tokens >= 0)[:, :, None, None]
    cache.index_put_((slot, rows), torch.where(real, picked, cache[slot, rows]))
