"""TensorRT's own lowerings beside the shared ones."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from g4ir.ir import Node

from ..primitives import attention as shared
from ..primitives import moe, vision
from ..primitives.emitter import Operand
from ..primitives.lowerings import LOWERINGS as SHARED
from ..primitives.network import Lowering, Network
from ..primitives.pointwise import times
from .emitter import TrtEmitter
from .probe import offers

#: products and softmax as layers of their own, or one attention per layer
ATTENTION = ("explicit", "fused")


def lowerings(attention: str = "explicit") -> Mapping[str, Lowering]:
    """op -> lowering, attention in one of these forms."""
    if attention not in ATTENTION:
        raise ValueError(f"attention {attention!r}: one of {', '.join(ATTENTION)}")
    return {**SHARED, "experts": experts, **(_FUSED if attention == "fused" else {})}


def experts(
    net: Network, n: Node, x: Operand, weights: Operand, index: Operand, gate_up: Operand,
    down: Operand,
) -> Operand:  # fmt: skip
    """As the shared one; inside the branch for single tokens their dim is 1 at build time, so that
    weights gathered for a whole chunk, which would be too many, are never planned for."""
    e = net.e
    assert isinstance(e, TrtEmitter)
    if net.experts != "auto" or x.shape[1] == 1:
        return moe.experts(net, n, x, weights, index, gate_up, down)

    def one() -> Operand:
        first, chosen, at = (e.slice(t, 1, 0, 1) for t in (x, weights, index))
        gather = replace(net, experts="gather")
        out = moe.experts(gather, n, first, chosen, at, gate_up, down)
        return e.repeat(out, 1, x)

    def every() -> Operand:
        return moe.experts(replace(net, experts="all"), n, x, weights, index, gate_up, down)

    return e.when_one(x, 1, one, every)


# --- fused attention --------------------------------------------------------------------------


def attend(
    net: Network, n: Node, q: Operand, keys: Operand, values: Operand, seen: Operand
) -> Operand:
    """One IAttention over q [B,S,heads,d], keys and values [B,n,T,d] with the mask
    [B,1,1,S,T] bool, whose heads are broadcast; never a causal kind beside it. There is no input
    for a scale, so q is multiplied. It may be decomposed: no kernel for the size need exist."""
    e = net.e
    assert isinstance(e, TrtEmitter)
    if n.number("softcap"):
        e.notes.append(f"{n.out}: explicit attention, since IAttention has no softcap")
        return shared.attend(net, n, q, keys, values, seen)
    mask = net.shared(("mask of 4", id(seen)), lambda: _four_dims(e, seen))
    return _fused(e, times(e, q, n.number("scale")), keys, values, mask)


def attend_patches(
    net: Network, n: Node, q: Operand, keys: Operand, values: Operand, seen: Operand
) -> Operand:
    """As `attend`, in a tower; the mask [B,1,1,1,P] is of keys alone, and IAttention wants a row
    for each query."""
    e, p = net.e, int(q.shape[1])
    assert isinstance(e, TrtEmitter)

    def rows() -> Operand:
        none = e.constant(torch.zeros(1, 1, p, 1, dtype=torch.bool))
        return e.binary("or", e.reshape(seen, *seen.shape[:3], p), none)

    mask = net.shared(("mask of 4", id(seen)), rows)
    return _fused(e, times(e, q, n.number("scale")), keys, values, mask)


def _fused(
    e: TrtEmitter, q: Operand, keys: Operand, values: Operand, mask: Operand
) -> Operand:
    """q [B,S,heads,d] scaled; mask [B,1,S,T]"""
    q = e.transpose(q, 0, 2, 1, 3)
    layer = e.named(_attention(e, *map(e.tensor, (q, keys, values))), "attention")
    layer.mask = e.tensor(mask)
    layer.decomposable = True
    return e.transpose(e.checked(layer, q.type), 0, 2, 1, 3)


def _four_dims(e: TrtEmitter, seen: Operand) -> Operand:
    """[B,1,1,S,T] -> [B,1,S,T], every named dim in its place."""
    last = e.transpose(seen, 0, 1, 3, 4, 2)
    return e.reshape(last, *last.shape[:4])


def _attention(e: TrtEmitter, *tensors: Any) -> Any:
    """By the newer of the two methods, where the module has it."""
    norm = e.trt.AttentionNormalizationOp.SOFTMAX
    if offers(e.trt, "causal kind"):
        return e.network.add_attention_v2(*tensors, norm, e.trt.CausalMaskKind.NONE)
    return e.network.add_attention(*tensors, norm, False)


_FUSED: Mapping[str, Lowering] = {
    "attention": partial(shared.attention, form=attend),
    "attention_latent": partial(shared.attention_latent, form=attend),
    "encoder_attention": partial(vision.encoder_attention, form=attend_patches),
}
