"""TensorRT's own lowerings beside the shared ones."""

from __future__ import annotations

from collections.abc import Mapping
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
from . import plugins
from .emitter import TrtEmitter
from .probe import offers

#: products and softmax as layers of their own, one attention per layer, or kernels of this project
ATTENTION = ("explicit", "fused", "plugin")
#: kernels of this project, weights of the chosen experts gathered, or all experts multiplied
EXPERTS = ("plugin", "gather", "all")


def lowerings(attention: str = "explicit") -> Mapping[str, Lowering]:
    """op -> lowering, attention in one of these forms."""
    if attention not in ATTENTION:
        raise ValueError(f"attention {attention!r}: one of {', '.join(ATTENTION)}")
    return {**SHARED, "experts": experts, **_FORMS[attention]}


def experts(net: Network, n: Node, *operands: Operand) -> Operand:
    """One form for single tokens and chunks: what would choose between two is a conditional."""
    form = plugins.experts if net.experts == "plugin" else moe.experts
    return form(net, n, *operands)


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


def _fused(e: TrtEmitter, q: Operand, keys: Operand, values: Operand, mask: Operand) -> Operand:
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


_FORMS: Mapping[str, Mapping[str, Lowering]] = {
    "explicit": {},
    "fused": {
        "attention": partial(shared.attention, form=attend),
        "attention_latent": partial(shared.attention_latent, form=attend),
        "encoder_attention": partial(vision.encoder_attention, form=attend_patches),
    },
    "plugin": plugins.ATTENTION,
}
