"""A projection's heads on their way to attention and the caches, all of them together."""

from __future__ import annotations

import torch

from g4ir.ir.graph import Node

from .attention import first_slot, rotate, tables
from .emitter import Emitter, Operand
from .network import Network
from .pointwise import normed


def qkv_write(net: Network, n: Node, qkv: Operand, *others: Operand) -> tuple[Operand, ...]:
    """Return q [B,S,heads,d] and the caches of K and V after the chunk. Heads lie as caches do,
    [B,heads,S,d], and have one norm, with weights of their own, and one rotation. Other forms of
    caches are written as the op says."""
    if n.word("form") != "plain":
        return tuple(net.expanded(n))
    e, heads, count = net.e, n.whole("heads"), n.whole("kv_heads")
    (b, s, _), d, own = qkv.shape, int(others[0].shape[0]), bool(n.attrs["values"])
    both = heads + count
    x = e.reshape(qkv, b, s, both + count * own, d)
    h = normed(e, e.cast(e.transpose(x, 0, 2, 1, 3), "f32"), n.number("eps"))
    made = e.cast(e.mul(h, _weights(e, others[0], others[1], heads, count, own)), qkv.dtype)
    v = e.slice(made, 1, both, both + count) if own else e.slice(h, 1, heads, both)
    made = rotate(e, e.slice(made, 1, 0, both), *tables(net, n["cos"], n["sin"], 1))
    rows = zip(n.inputs[7:], (e.slice(made, 1, heads, both), e.cast(v, qkv.dtype)), strict=True)
    caches = [e.append(net.operand(c), new, first_slot(net, c, n["start"])) for c, new in rows]
    return e.transpose(e.slice(made, 1, 0, heads), 0, 2, 1, 3), *caches


def _weights(e: Emitter, q: Operand, k: Operand, heads: int, count: int, values: bool) -> Operand:
    """Return f32[1,heads,1,d]: the weights of each head's norm; those of values are 1."""
    rows = [e.cast(e.unsqueeze(w, 0, 1, 2), "f32") for w in (q, k)]
    ones = [e.constant(torch.ones(1, count, 1, int(q.shape[0])))] if values else []
    return e.concat([rows[0]] * heads + [rows[1]] * count + ones, 1)
