"""TensorRT's own forms of attention beside the shared ones."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from g4ir.ir.graph import Graph, Node
from g4ir.plan.engine_limits import Limits

from ..primitives import attention as shared
from ..primitives.emitter import Emitter, Operand
from ..primitives.lowerings import pieces
from ..primitives.network import Network, is_ring, stored_type
from ..primitives.pointwise import times
from .emitter import TrtEmitter
from .probe import FEATURES, offers

# --- attention in layers of its own -------------------------------------------------------------

#: what the scores of an attention may take: bytes of one, in the network's dtype and in fp32 ...
BYTES_PER_SCORE = 6
#: ... and of all that exist at a time. Queries are computed in blocks that keep to it.
MOST_SCORE_BYTES = 2 << 30


def slots_of(n: Node, limits: Limits) -> int:
    """Count the most keys an attention looks at: a ring as it is stored, or what a row may hold."""
    cache = n.caches[0].type
    return int(stored_type(cache, limits).shape[2]) if is_ring(cache) else limits.max_seq


def row_bytes(n: Node, limits: Limits) -> int:
    """Count the bytes of the scores of one query of every row."""
    heads = n["q"].type.shape[2]
    assert isinstance(heads, int)
    return limits.max_batch * heads * slots_of(n, limits) * BYTES_PER_SCORE


def block_rows(n: Node, limits: Limits) -> int:
    """Count the queries of a chunk that are computed together."""
    return min(max(1, MOST_SCORE_BYTES // row_bytes(n, limits)), limits.prefill_chunk)


def score_bytes(g: Graph, limits: Limits) -> int:
    """Count the bytes of scores of the largest attention of a graph, where nothing is fused."""
    return max(
        (
            row_bytes(n, limits) * (block_rows(n, limits) if n["q"].type.shape[1] != 1 else 1)
            for n in g.nodes
            if n.definition.held
        ),
        default=0,
    )


def in_blocks(
    net: Network,
    n: Node,
    q: Operand,
    keys: Operand,
    values: Operand,
    seen: Operand,
    softmax: Callable[[Emitter, Operand], Operand] | None = None,
) -> Operand:
    """Attend by products and a softmax over q [B,S,heads,d], a static number of blocks of queries
    one after the other; for the last blocks of a short chunk nothing is left. `softmax` in the
    place of the layer."""
    e, chunk, rows = net.e, net.limits.prefill_chunk, block_rows(n, net.limits)
    assert isinstance(e, TrtEmitter)
    scale, cap = n.number("scale"), n.number("softcap")
    if rows == chunk or isinstance(q.shape[1], int):
        return shared.weigh(e, q, keys, values, seen, scale, cap, softmax)

    def block(first: int) -> Operand:
        mask = net.shared(("rows", id(seen), first), lambda: e.block(seen, 2, first, rows))
        part = e.block(q, 1, first, rows)
        return shared.weigh(e, part, keys, values, mask, scale, cap, softmax)

    return e.reshape(e.concat([block(i) for i in range(0, chunk, rows)], 1), *q.shape)


def plain_softmax(e: Emitter, x: Operand) -> Operand:
    """Return the softmax of the last dim in five layers: TensorRT looks for attention around its
    softmax layer, and fails at some masks that it finds there."""
    last = x.rank - 1
    powers = e.unary("exp", e.sub(x, e.reduce("max", x, last)))
    return e.div(powers, e.reduce("sum", powers, last))


# --- several ranks ------------------------------------------------------------------------------


def all_reduce(net: Network, n: Node, *xs: Operand) -> tuple[Operand, ...]:
    """Return sums over ranks in one collective: that of two is rounded once in any dtype; more
    would be rounded on their way, and travel in fp32."""
    e, ranks, last = net.e, n.whole("ranks"), xs[0].rank - 1
    assert isinstance(e, TrtEmitter)
    if ranks == 1:
        return xs
    whole = e.concat(xs, last) if len(xs) > 1 else xs[0]
    wide = e.cast(whole, "f32") if ranks > 2 else whole
    made = e.cast(e.exchange("all_reduce", wide, ranks), whole.dtype)
    if len(xs) == 1:
        return (made,)
    return tuple(pieces(net, made, *(int(x.shape[last]) for x in xs)))


def all_gather(net: Network, n: Node, x: Operand) -> Operand:
    """Return the parts of all ranks along the last dim; TensorRT joins them along the first."""
    e, ranks, (*rows, size) = net.e, n.whole("ranks"), x.shape
    assert isinstance(e, TrtEmitter)
    if ranks == 1:
        return x
    parts = e.exchange("all_gather", e.unsqueeze(x, 0), ranks)
    parts = e.transpose(parts, *range(1, x.rank), 0, x.rank)
    return e.reshape(parts, *rows, ranks * int(size))


# --- fused attention --------------------------------------------------------------------------


def attend(
    net: Network, n: Node, q: Operand, keys: Operand, values: Operand, seen: Operand
) -> Operand:
    """Attend by one IAttention over q [B,S,heads,d], keys and values [B,n,T,d] with the mask
    [B,1,S,T] bool, whose heads are broadcast; never a causal kind beside it. There is no input
    for a scale, so q is multiplied. It may be decomposed: no kernel for the size need exist."""
    e = net.e
    assert isinstance(e, TrtEmitter)
    if n.number("softcap"):
        e.notes.append(f"{n.out}: explicit attention, since IAttention has no softcap")
        return in_blocks(net, n, q, keys, values, seen)
    return _fused(e, times(e, q, n.number("scale")), keys, values, seen)


def attend_patches(
    net: Network, n: Node, q: Operand, keys: Operand, values: Operand, seen: Operand
) -> Operand:
    """Attend as `attend` does, in a tower; the mask [B,1,1,P] is of keys alone, and IAttention
    wants a row for each query."""
    e, p = net.e, int(q.shape[1])
    assert isinstance(e, TrtEmitter)

    def rows() -> Operand:
        none = e.constant(torch.zeros(1, 1, p, 1, dtype=torch.bool))
        return e.binary("or", seen, none)

    mask = net.shared(("mask of patches", id(seen)), rows)
    return _fused(e, times(e, q, n.number("scale")), keys, values, mask)


def _fused(e: TrtEmitter, q: Operand, keys: Operand, values: Operand, mask: Operand) -> Operand:
    """Attend with q [B,S,heads,d] scaled; mask [B,1,S,T]."""
    q = e.transpose(q, 0, 2, 1, 3)
    *rows, seen = map(e.tensor, (q, keys, values, mask))
    layer = e.named(_attention(e, *rows), "attention")
    layer.mask = seen
    layer.decomposable = True
    return e.transpose(e.checked(layer, q.type), 0, 2, 1, 3)


def _attention(e: TrtEmitter, *tensors: Any) -> Any:
    norm = e.trt.AttentionNormalizationOp.SOFTMAX
    if offers(e.trt, *FEATURES["causal kind"]):
        return e.network.add_attention_v2(*tensors, norm, e.trt.CausalMaskKind.NONE)
    return e.network.add_attention(*tensors, norm, False)
