"""Writing the rows of new tokens into a cache [C,B,n,d], in place."""

from __future__ import annotations

from collections.abc import Callable

import torch

from g4ir.ir.graph import Node

from .lowered import Run

Tensor = torch.Tensor
#: (node, cache, new, start, lengths): writes a chunk of several tokens
Write = Callable[[Node, Tensor, Tensor, Tensor, Tensor], None]


def cache_write(write: Write) -> Callable[..., Tensor]:
    """Return the lowering of a cache write; `write` writes chunks of several tokens. fp8 values are
    copied as bytes: Inductor has no `where` on fp8."""

    def lowered(m: Run, n: Node, cache: Tensor, new: Tensor, *span: Tensor) -> Tensor:
        bytewise = cache.dtype == torch.float8_e4m3fn
        target, rows = (t.view(torch.uint8) if bytewise else t for t in (cache, new))
        if n["new"].type.shape[1] == 1:
            _write_one(target, rows, *span)
        else:
            write(n, target, rows, *span)
        return cache

    return lowered


def _write_one(cache: Tensor, new: Tensor, start: Tensor, lengths: Tensor) -> None:
    """Write one token of each sequence to its slot; padding rewrites the slot's old contents."""
    rows = torch.arange(new.shape[0], device=new.device)
    slot = torch.remainder(start, cache.shape[0])
    value = torch.where((lengths > 0)[:, None, None], new[:, 0], cache[slot, rows])
    cache.index_put_((slot, rows), value)


def write_list(cache: Tensor, new: Tensor, start: Tensor, lengths: Tensor) -> None:
    """Write slots start .. start + lengths - 1 of each row of the cache [C,B,n,d]. Padding rewrites
    the old contents of further slots: no chunk is longer than the cache."""
    torch._check(new.shape[1] <= cache.shape[0])
    tokens = torch.arange(new.shape[1], device=new.device)[:, None]
    rows = torch.arange(new.shape[0], device=new.device)[None].expand(new.shape[1], -1)
    slot = torch.remainder(start + tokens, cache.shape[0])
    real = (tokens < lengths)[:, :, None, None]
    cache.index_put_((slot, rows), torch.where(real, new.transpose(0, 1), cache[slot, rows]))
