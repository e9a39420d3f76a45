"""Router and routed experts in tensor primitives (rules 23 to 25)."""

from __future__ import annotations

import torch

from g4ir.ir.graph import Node

from .emitter import Emitter, Operand
from .network import Network
from .pointwise import activate, times, weight_like
from .weights import dense_weight, gathered_weights


def router(
    net: Network, n: Node, x: Operand, scale: Operand, proj: Operand, per_expert: Operand
) -> tuple[Operand, Operand]:
    """Return weights and experts; scores rounded to x's dtype; softmax, top-k, weights in fp32."""
    e = net.e
    x = times(e, e.mul(x, weight_like(e, scale, x)), n.number("root"))
    probabilities = e.softmax(e.cast(e.linear(x, proj), "f32"))
    weights, index = e.topk(probabilities, n.whole("top_k"))
    weights = e.div(weights, e.reduce("sum", weights, weights.rank - 1))
    factor = e.cast(e.gather(per_expert, index, 0), "f32")
    return e.mul(weights, factor), index


def experts(
    net: Network,
    n: Node,
    x: Operand,
    weights: Operand,
    index: Operand,
    gate_up: Operand,
    down: Operand,
    first: Operand | None = None,
) -> Operand:
    """Return the experts' weighted sum, with the chosen weights gathered per token: three times
    their bytes, so for single tokens only unless asked for; else all experts on all tokens."""
    e, act, both = net.e, n.word("act"), (gate_up, down)
    if first is not None:
        weights, index = own_choices(e, weights, index, first, int(gate_up.shape[0]))

    def gathered() -> Operand:
        made = (gathered_weights(net, w, index) for w in both)
        y = _mlp(e, e.unsqueeze(x, 2, 3), act, *made)
        y = e.mul(e.cast(y, "f32"), e.unsqueeze(weights, 3, 4))
        return e.cast(e.reshape(e.reduce("sum", y, 2), *x.shape), x.dtype)

    def every() -> Operand:
        dense = (dense_weight(e, w) for w in both)
        made = ((e.unsqueeze(w, 0), turned) for w, turned in dense)
        y = _mlp(e, e.unsqueeze(x, 1), act, *made)
        y = e.cast(e.transpose(y, 0, 2, 1, 3), "f32")
        out = e.matmul(_by_expert(net, weights, index, int(gate_up.shape[0])), y)
        return e.cast(e.reshape(out, *x.shape), x.dtype)

    if net.experts == "auto" and x.shape[1] != 1:
        return e.when_one(x, 1, gathered, every)
    return every() if net.experts == "all" else gathered()


def own_choices(
    e: Emitter, weights: Operand, index: Operand, first: Operand, count: int
) -> tuple[Operand, Operand]:
    """Return the choices among `count` experts from `first` on: those of others weigh nothing and
    are of one that is there."""
    index = e.binary("sub", index, e.unsqueeze(first, 1, 2))
    held = e.binary("and", e.binary("gt", index, -1), e.binary("lt", index, count))
    return e.where(held, weights, 0.0), e.where(held, index, 0)


def _mlp(
    e: Emitter, x: Operand, act: str, first: tuple[Operand, bool], second: tuple[Operand, bool]
) -> Operand:
    """Multiply by weights, each with whether it is transposed."""
    y, last = _product(e, x, *first), x.rank - 1
    both = int(y.shape[last])
    gate, up = e.slice(y, last, 0, both // 2), e.slice(y, last, both // 2, both)
    return _product(e, e.mul(activate(e, gate, act), up), *second)


def _product(e: Emitter, x: Operand, w: Operand, columns: bool) -> Operand:
    return e.matmul(x, w, transpose_b=not columns)


def _by_expert(net: Network, weights: Operand, index: Operand, count: int) -> Operand:
    """Return [B, S, 1, E]: each expert's weight for the token, 0 where it was not chosen."""
    e = net.e
    ids = net.shared(
        ("experts", count),
        lambda: e.constant(torch.arange(count).view(1, 1, 1, count)),
    )
    chosen = e.binary("eq", e.unsqueeze(index, 3), ids)
    return e.reduce("sum", e.where(chosen, e.unsqueeze(weights, 3), 0.0), 2)
