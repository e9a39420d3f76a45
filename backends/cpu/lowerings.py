"""Lowerings for the CPU, of graphs that are no step programs: large matmuls by the C kernels."""

from __future__ import annotations

import torch

from g4ir.backends.inductor import lower
from g4ir.backends.inductor.cache_write import cache_write, write_list
from g4ir.backends.inductor.lower import COMMON
from g4ir.backends.inductor.lowered import Lowered, LoweredByOp, Lowering, Run
from g4ir.ir.graph import Graph, Node
from g4ir.model.decoder import TOKENS, VERIFY
from g4ir.ops.attention import slot_positions

from . import pyops
from .isa import FROM

Tensor = torch.Tensor


def lowered(g: Graph) -> Lowered:
    """Return a graph with the CPU's lowerings."""
    return LoweredByOp(g, LOWERINGS)


def compiled(g: Graph) -> Lowered:
    """Return a graph with torch's ops alone."""
    return LoweredByOp(g, {**COMMON, "cache_write": LOWERINGS["cache_write"]})


def _clip(m: Run, n: Node, x: Tensor, low: Tensor, high: Tensor) -> Tensor:
    """Clamp by scalars: ten times as fast as by tensors."""
    return x.clamp(float(low), float(high))


def _linear(m: Run, n: Node, x: Tensor, w: Tensor) -> Tensor:
    return pyops.linear(x, w) if w.numel() >= FROM else lower.linear(m, n, x, w)


def _write(n: Node, cache: Tensor, new: Tensor, start: Tensor, lengths: Tensor) -> None:
    """Write a chunk: draft tokens, which may be rejected, to their slots; other chunks rewrite the
    full cache, which was measured to be faster."""
    few = n["new"].type.shape[1] == TOKENS[VERIFY]
    (write_list if few else _rewrite)(cache, new, start, lengths)


def _rewrite(cache: Tensor, new: Tensor, start: Tensor, lengths: Tensor) -> None:
    """Write every slot of the cache [C,B,n,d]: the chunk's newest token for it, or its old
    contents."""
    rows = torch.arange(new.shape[0], device=new.device)
    source = slot_positions(start + lengths, cache.shape[0]) - start
    picked = new[rows, source.clamp(min=0)]
    cache.copy_(torch.where((source >= 0)[:, :, None, None], picked, cache))


#: op -> lowering; default: its reference
LOWERINGS: dict[str, Lowering] = {
    **COMMON,
    "clip": Lowering(_clip),
    "linear": Lowering(_linear),
    "cache_write": Lowering(cache_write(_write)),
}
