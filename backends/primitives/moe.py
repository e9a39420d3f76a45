"""Router and routed experts in tensor primitives (rules 23 to 25)."""

from __future__ import annotations

import torch

from g4ir.ir.graph import Node

from .emitter import Emitter, Operand
from .network import Network
from .pointwise import activate, times, weight_like
from .weights import Weight, gathered_weight, read_weight


def router(
    net: Network, n: Node, x: Operand, scale: Operand, proj: Operand, per_expert: Operand
) -> tuple[Operand, Operand]:
    """Return (weights, expert indices); scores are rounded to x's dtype; softmax, top-k and weights
    are fp32."""
    e = net.e
    x = times(e, e.mul(x, weight_like(e, scale, x)), n.number("root"))
    probabilities = e.softmax(e.cast(e.linear(x, proj), "f32"))
    weights, index = e.topk(probabilities, n.integer("top_k"))
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
    *,
    mode: str = "auto",
) -> Operand:
    """Return the experts' weighted sum. `mode` gather: the chosen experts' weights are gathered,
    which moves their bytes three times; all: all experts multiply all tokens; auto: gather for a
    chunk of one token, else all. `first`: index of this rank's first expert (expert
    parallelism)."""
    e, act, both = net.e, n.word("act"), (gate_up, down)
    if first is not None:
        weights, index = local_choices(e, weights, index, first, int(gate_up.shape[0]))

    def gathered() -> Operand:
        gathered_weights = (gathered_weight(net, w, index) for w in both)
        y = mlp(e, e.unsqueeze(x, 2, 3), act, *gathered_weights)
        y = e.mul(e.cast(y, "f32"), e.unsqueeze(weights, 3, 4))
        return e.cast(e.reshape(e.reduce("sum", y, 2), *x.shape), x.dtype)

    def every() -> Operand:
        dense_weights = (for_all(e, read_weight(e, w)) for w in both)
        y = mlp(e, e.unsqueeze(x, 1), act, *dense_weights)
        factors = _by_expert(net, weights, index, int(gate_up.shape[0]))
        # Multiply and reduce, fused to one kernel: a matmul would need all of y in fp32.
        y = e.mul(e.cast(y, "f32"), e.transpose(factors, 0, 3, 1, 2))
        return e.cast(e.reshape(e.reduce("sum", y, 1), *x.shape), x.dtype)

    if mode == "auto" and x.shape[1] != 1:
        return e.when_one(x, 1, gathered, every)
    return every() if mode == "all" else gathered()


def local_choices(
    e: Emitter, weights: Operand, index: Operand, first: Operand, count: int
) -> tuple[Operand, Operand]:
    """Convert indices of all experts to those of the local experts, first .. first + count - 1;
    choices of other ranks' experts get weight 0 and index 0."""
    index = e.binary("sub", index, e.unsqueeze(first, 1, 2))
    local = e.binary("and", e.binary("gt", index, -1), e.binary("lt", index, count))
    return e.where(local, weights, 0.0), e.where(local, index, 0)


def for_all(e: Emitter, w: Weight) -> Weight:
    """Insert a batch dim of 1 into a weight."""
    matrix = e.unsqueeze(e.stack(w.matrix), 0)
    return Weight(matrix, w.turned, w.factors and e.unsqueeze(w.factors, 0))


def mlp(e: Emitter, x: Operand, act: str, first: Weight, second: Weight) -> Operand:
    """Apply a gated MLP, [.., rows, H] -> [.., rows, H]."""
    y, last = _product(e, x, first), x.rank - 1
    both = int(y.shape[last])
    gate, up = e.slice(y, last, 0, both // 2), e.slice(y, last, both // 2, both)
    return _product(e, e.mul(activate(e, gate, act), up), second)


def _product(e: Emitter, x: Operand, w: Weight) -> Operand:
    y = e.matmul(x, w.matrix, transpose_b=not w.turned)
    return y if w.factors is None else e.mul(y, e.unsqueeze(w.factors, w.factors.rank - 1))


def _by_expert(net: Network, weights: Operand, index: Operand, count: int) -> Operand:
    """Return [B, S, 1, E]: each expert's weight for the token, 0 where it was not chosen."""
    e = net.e
    ids = net.shared(
        ("experts", count), lambda: e.constant(torch.arange(count).view(1, 1, 1, count))
    )
    chosen = e.binary("eq", e.unsqueeze(index, 3), ids)
    return e.reduce("sum", e.where(chosen, e.unsqueeze(weights, 3), 0.0), 2)
