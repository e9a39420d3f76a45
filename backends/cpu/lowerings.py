"""Lowerings for the CPU: large matmuls, MoE and attention by the C kernels."""

from __future__ import annotations

from typing import Any

import torch

from g4ir.backends.inductor import lower
from g4ir.backends.inductor.cache_write import cache_write, write_list
from g4ir.backends.inductor.lower import COMMON, dense
from g4ir.backends.inductor.lowered import Coded, Lowered, LoweredByOp, Lowering, Rounded, Run
from g4ir.ir.graph import Graph, Node
from g4ir.model.decoder import TOKENS, VERIFY
from g4ir.ops.attention import slot_positions

from . import pyops
from .attention import attention, attention_latent
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


def _dequantize(m: Run, n: Node, codes: Tensor, scales: Tensor) -> Any:
    """Return the quantised weight for large matmuls, otherwise dense."""
    weight = lower.coded(m, n, codes, scales)
    return weight if n.out.type.numel() >= FROM else dense(weight)


def _linear(m: Run, n: Node, x: Tensor | Rounded, w: Tensor | Coded) -> Any:
    if isinstance(w, Coded):
        if isinstance(x, Rounded) and x.fmt == "int8":
            return pyops.linear_rounded(x.x, w.codes, w.scales, w.tiles)
        return pyops.linear_coded(dense(x), w.codes, w.scales, w.tiles)
    if w.numel() >= FROM:
        return pyops.linear(dense(x), w)
    return lower.linear(m, n, x, w)


def _experts(
    m: Run,
    n: Node,
    x: Tensor,
    weights: Tensor,
    index: Tensor,
    gate_up: Tensor | Coded,
    down: Tensor | Coded,
    first: Tensor | None = None,
) -> Any:
    act = n.word("act")
    if isinstance(gate_up, Coded) and isinstance(down, Coded):
        parts = (gate_up.codes, gate_up.scales, down.codes, down.scales)
        tiles = (gate_up.tiles, down.tiles)
        return pyops.experts_coded(x, weights, index, *parts, act, *tiles, first)
    return pyops.experts(x, weights, index, dense(gate_up), dense(down), act, first)


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
    "linear": Lowering(_linear, (Coded, Rounded)),
    "dequantize": Lowering(_dequantize),
    "dequantize_tiles": Lowering(_dequantize),
    "experts": Lowering(_experts, (Coded,)),
    "cache_write": Lowering(cache_write(_write)),
    "attention": Lowering(attention),
    "attention_latent": Lowering(attention_latent),
}
