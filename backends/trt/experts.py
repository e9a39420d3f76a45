"""Routed experts (MoE): gathers the chosen experts' weights for single tokens, and sorts the tokens
of a chunk by expert.

Multiplying a chunk with every expert costs E / K times the routed work, and a network has no
conditionals (dialect.py). So shapes are sized for the worst case. The first tokens of each expert,
up to its capacity (at least four times the average), are one block of a batched matmul over all
experts, which reads the weights in place (4-bit ones gathered, see `Emitter.stack`). Overflow
tokens are in spare blocks, as many as a chunk can need: an expert of n tokens needs floor((n - 1) /
capacity), and all n add up to K S. The weights of spare blocks are gathered, all at once: several
gathers of one weight would make a builder write all of it dense. Token positions are computed by
comparisons: no sort, no scatter.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from g4ir.backends.primitives import moe
from g4ir.backends.primitives.emitter import Emitter, Operand
from g4ir.backends.primitives.network import Network
from g4ir.backends.primitives.weights import Weight, gathered_weight, read_weight
from g4ir.ir.graph import Node
from g4ir.plan.engine_limits import Limits

#: memory passes over a gathered weight: read, write, read
MOVED = 3
#: minimum tokens of a block: the tile of a matmul
MIN_BLOCK_ROWS = 16


def experts(
    net: Network, n: Node, x: Operand, weights: Operand, index: Operand, *params: Operand
) -> Operand:
    """Return the routed experts' sum. By default each sequence's first token gathers its experts'
    weights, and the other tokens (none in a decode step) are left to `_later_tokens`; if a decode
    step of the whole batch may choose a third of the experts or more (`gathers`), all experts
    multiply every token."""
    e, count = net.e, int(params[0].shape[0])
    few = gathers(net.limits, int(index.shape[2]), count)
    if x.shape[1] == 1 or not few:
        mode = "gather" if few else "all"
        return moe.experts(net, n, x, weights, index, *params, mode=mode)
    first = (e.slice(t, 1, 0, 1) for t in (x, weights, index))
    sums = [moe.experts(net, n, *first, *params, mode="gather")]
    if net.limits.prefill_chunk > 1:
        sums.append(_later_tokens(net, n, x, weights, index, *params))
    return e.reshape(e.concat(sums, 1), *x.shape)


def gathers(limits: Limits, top_k: int, count: int) -> bool:
    """Whether a decode step gathers the chosen experts' weights: if that moves fewer bytes than
    reading the weights of all experts once."""
    return limits.max_batch * top_k * MOVED < count


def _later_tokens(
    net: Network, n: Node, x: Operand, weights: Operand, index: Operand, *params: Operand
) -> Operand:
    """Return the experts' sum for all tokens of x but each sequence's first: sorted by expert if x
    has the whole chunk and the blocks' rows are at most half of those that all experts would
    compute, else by all experts."""
    e, chunk, count = net.e, net.limits.prefill_chunk, int(params[0].shape[0])
    capacity = block_rows(chunk, int(index.shape[2]), count)
    chunked = x.shape[1] == net.env["positions"].shape[1]
    x, weights, index = (e.block(t, 1, 1, chunk - 1) for t in (x, weights, index))
    if not chunked or 2 * sorted_rows(chunk, int(index.shape[2]), count) > count * chunk:
        return moe.experts(net, n, x, weights, index, *params, mode="all")
    if len(params) > 2:
        weights, index = moe.local_choices(e, weights, index, params[2], count)
    return Sorted(net, capacity, index, count).sum(x, weights, n.word("act"), params[0], params[1])


def block_rows(chunk: int, top_k: int, count: int) -> int:
    """Return an expert's capacity, the tokens per block: four times the average, rounded up to a
    power of two, at least MIN_BLOCK_ROWS and 2 * top_k. A smaller one would need more spare blocks
    for overflow, whose gathered weights take the most memory."""
    mean = -(-chunk * top_k // count)
    return max(MIN_BLOCK_ROWS, 1 << (4 * mean - 1).bit_length(), 2 * top_k)


def sorted_rows(chunk: int, top_k: int, count: int) -> int:
    """Count the tokens of all blocks of a chunk: one block per expert, and the maximum number of
    spare blocks."""
    capacity = block_rows(chunk, top_k, count)
    return capacity * (count + chunk * top_k // capacity)


@dataclass(frozen=True)
class Blocks:
    """Indices [B,N,R] of the tokens of N blocks of R, padded with 0; and the weights of each
    block's expert: `first` gate_up, `second` down."""

    tokens: Operand
    first: Weight
    second: Weight


class Sorted:
    """A chunk's tokens sorted by expert, from their choices [B,S,K]. Counts and positions are
    integers stored in fp32."""

    def __init__(self, net: Network, capacity: int, index: Operand, count: int) -> None:
        self.net, self.capacity, self.count = net, capacity, count
        e = self.e = net.e
        self.choices = index
        chunk = net.limits.prefill_chunk
        self.position, self.before = net.shared("places", lambda: _token_positions(net, chunk))
        ids = net.shared(("ids", count), lambda: e.constant(torch.arange(count)[None, None, None]))
        self.chosen = e.binary("eq", e.unsqueeze(index, 3), ids)
        once = e.reduce("max", _flag(e, self.chosen), 2)
        once = e.reshape(once, *index.shape[:2], count)
        #: [B,S,E]: number of earlier tokens that chose the expert
        self.rank = e.matmul(self.before, once)
        #: `rank`, or -1 if the token did not choose the expert
        self.chosen_rank = e.where(e.binary("gt", once, 0.5), self.rank, -1.0)
        spare = e.sub(e.reduce("sum", once, 1), 1.0)
        spare = e.cast(e.binary("max", spare, 0.0), "i32")
        spare = e.cast(e.binary("floor_div", spare, capacity), "f32")
        smaller = e.constant(torch.ones(1, count, count).triu(1))
        #: [B,1,E]: number of spare blocks of the experts before this one (`start`), and including
        #: this one (`end`)
        self.start = e.matmul(spare, smaller)
        self.end = e.add(self.start, spare)

    def sum(self, x: Operand, weights: Operand, act: str, *params: Operand) -> Operand:
        """Return the weighted sums of expert outputs for x [B,S,H], weights [B,S,K]."""
        e, (b, s, k) = self.e, self.choices.shape
        first = e.block(self.position, 1, 0, self.capacity)
        matrices = (moe.for_all(e, read_weight(e, w)) for w in params)
        blocks = Blocks(self._tokens(self.chosen_rank, e.unsqueeze(first, 1, 2)), *matrices)
        rows = e.concat([self._computed(x, act, some) for some in (blocks, self._spare(params))], 1)
        size = e.unsqueeze(e.reduce("sum", _flag(e, e.binary("gt", first, -1.0)), 1), 2)
        at = e.cast(e.reshape(self._slots(size), b, f"{s}*{k}"), "i64")
        chosen = e.reshape(e.gather_rows(rows, at), b, s, k, x.shape[2])
        chosen = e.mul(e.cast(chosen, "f32"), e.unsqueeze(weights, 3))
        return e.cast(e.reshape(e.reduce("sum", chosen, 2), *x.shape), x.dtype)

    def _slots(self, size: Operand) -> Operand:
        """Return the index [B,S,K] of each choice in the tokens of the concatenated blocks; `size`
        [1,1,1]: rows of each expert's first block, fewer than the capacity in a short chunk."""
        e, capacity, count = self.e, self.capacity, self.count
        number = e.constant(torch.arange(count, dtype=torch.float32)[None, None])
        near = e.add(e.mul(number, size), self.rank)
        far = e.add(e.mul(self.start, float(capacity)), e.sub(self.rank, float(capacity)))
        far = e.add(far, e.mul(size, float(count)))
        slots = e.where(e.binary("lt", self.rank, float(capacity)), near, far)
        selected = e.where(self.chosen, e.unsqueeze(slots, 2), 0.0)
        return e.reshape(e.reduce("sum", selected, 3), *self.choices.shape)

    def _tokens(self, ranks: Operand, target: Operand) -> Operand:
        """Return the index [B,N,R] of the token whose rank (number of earlier tokens that chose the
        block's expert; `ranks` [B,S,N], -1 for others) equals `target` [B or 1,1,N or 1,R]; 0 if
        there is none."""
        e = self.e
        same = e.binary("eq", e.unsqueeze(ranks, 3), target)
        tokens = e.reduce("sum", e.where(same, e.unsqueeze(self.position, 2, 3), 0.0), 1)
        return e.reshape(tokens, tokens.shape[0], *tokens.shape[2:])

    def _spare(self, params: tuple[Operand, ...]) -> Blocks:
        """Return the spare blocks: S - C + K of them, but at most chunk K / C, with capacity C.

        They are enough: an expert of n tokens needs floor((n - 1) / C), no n is above S, and all n
        together are at most K S. So none is needed up to S = C; for S > C all experts need at most
        K (S - 1) / C <= S - 1 - C + K, since K <= C.
        """
        e, k = self.e, int(self.choices.shape[2])
        offset, count = self.capacity - k, self.net.limits.prefill_chunk * k // self.capacity
        at = e.unsqueeze(e.sub(e.block(self.position, 1, offset, count), float(offset)), 2)
        expert = _flag(e, e.binary("gt", e.add(at, 0.5), self.end))
        expert = e.binary("min", e.reduce("sum", expert, 2), float(self.count - 1))
        number = e.constant(torch.arange(self.count, dtype=torch.float32)[None, None])
        is_expert = e.binary("eq", expert, number)
        start = e.reduce("sum", e.where(is_expert, self.start, 0.0), 2)
        row = e.constant(torch.arange(self.capacity, dtype=torch.float32)[None, None])
        target = e.add(e.mul(e.add(e.sub(at, start), 1.0), float(self.capacity)), row)
        ranks = e.matmul(self.chosen_rank, _flag(e, is_expert), transpose_b=True)
        index = e.cast(e.reshape(expert, *expert.shape[:2]), "i64")
        weights = (gathered_weight(self.net, w, index) for w in params)
        return Blocks(self._tokens(ranks, e.unsqueeze(target, 1)), *weights)

    def _computed(self, x: Operand, act: str, some: Blocks) -> Operand:
        """Run the experts on the tokens of blocks [B,N,R]; return their outputs [B,N R,H]."""
        e, (b, n, r) = self.e, some.tokens.shape
        at = e.cast(e.reshape(some.tokens, b, f"{n}*{r}"), "i64")
        rows = e.reshape(e.gather_rows(x, at), b, n, r, x.shape[2])
        outputs = moe.mlp(e, rows, act, some.first, some.second)
        return e.reshape(outputs, b, f"{n}*{r}", x.shape[2])


def _token_positions(net: Network, chunk: int) -> tuple[Operand, Operand]:
    """Return f32[1,S]: the indices 0, 1, ... of a chunk's tokens after its first one; and
    f32[1,S,S]: 1 if the token of the last dim is before that of the middle dim, else 0."""
    e = net.e
    at = e.slice(net.env["positions"], 0, 0, 1)
    position = e.sub(e.block(at, 1, 1, chunk - 1), e.add(e.slice(at, 1, 0, 1), 1))
    position = e.cast(position, "f32")
    return position, _flag(e, e.binary("gt", e.unsqueeze(position, 2), e.unsqueeze(position, 1)))


def _flag(e: Emitter, x: Operand) -> Operand:
    """Convert bool to 1.0 and 0.0."""
    return e.where(x, e.constant(torch.ones((1,) * x.rank)), 0.0)
