"""Ops of text encoders in tensor primitives: texts packed into one chunk (ops/encoder.py)."""

from __future__ import annotations

import torch

from g4ir.ir.graph import Node
from g4ir.ops.encoder import MIN_NORM

from .attention import weigh
from .emitter import Operand
from .network import Network, full_slots


def packed_attention(
    net: Network, n: Node, q: Operand, k: Operand, v: Operand, ends: Operand
) -> Operand:
    """Attend within each text, bidirectionally, and within the window (0: none) on each side; q
    [1,S,heads,d]."""
    e, window = net.e, n.integer("window")
    keys, values = (e.transpose(x, 0, 2, 1, 3) for x in (k, v))

    def visible() -> Operand:
        text = _text_of_tokens(net, n, q, ends)
        mask = e.binary("eq", e.reshape(text, text.shape[1], 1), text)
        if window:
            at = e.cast(_tokens(net, q), "f32")
            apart = e.sub(e.reshape(at, at.shape[1], 1), at)
            near = e.binary("lt", e.binary("max", apart, e.unary("neg", apart)), float(window))
            mask = e.binary("and", mask, near)
        return e.unsqueeze(mask, 0, 1)

    mask = net.shared(("texts", window, n["ends"]), visible)
    return weigh(e, q, keys, values, mask, n.number("scale"))


def packed_mean(net: Network, n: Node, x: Operand, ends: Operand) -> Operand:
    """Return the mean over each text's tokens, [1,B,D], by a matmul in fp32."""
    e = net.e
    every = e.constant(torch.arange(net.limits.max_batch))
    texts = e.unsqueeze(e.prefix(every, 0, ends), 1)
    text = _text_of_tokens(net, n, x, ends)
    members = e.cast(e.binary("eq", texts, text), "f32")
    counts = e.binary("max", e.reduce("sum", members, 1), 1.0)
    sums = e.matmul(e.unsqueeze(members, 0), e.cast(x, "f32"))
    return e.cast(e.div(sums, e.unsqueeze(counts, 0)), x.dtype)


def unit_norm(net: Network, n: Node, x: Operand) -> Operand:
    e, fp32 = net.e, net.e.cast(x, "f32")
    norm = e.unary("sqrt", e.reduce("sum", e.mul(fp32, fp32), x.rank - 1))
    return e.div(fp32, e.binary("max", norm, MIN_NORM))


def _tokens(net: Network, x: Operand) -> Operand:
    """Return i64[1,S]: the index of each token of the chunk x [1,S,...]."""
    e = net.e

    def index() -> Operand:
        one = x
        for axis in range(2, x.rank):
            one = e.slice(one, axis, 0, 1)
        every = e.constant(torch.arange(full_slots(net.limits)))
        return e.unsqueeze(e.prefix(every, 0, e.reshape(one, x.shape[1])), 0)

    return net.shared(("tokens",), index)


def _text_of_tokens(net: Network, n: Node, x: Operand, ends: Operand) -> Operand:
    """Return i64[1,S]: the index of the text of each token of x [1,S,...]: the number of texts that
    end before the token."""
    e = net.e

    def number() -> Operand:
        later = e.binary("gt", e.unsqueeze(ends, 1), _tokens(net, x))
        passed = e.cast(e.unary("not", later), "f32")
        return e.cast(e.reduce("sum", passed, 0), "i64")

    return net.shared(("text", n["ends"]), number)
