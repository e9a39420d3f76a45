"""What TensorRT's lowerings are where they are not the shared ones; and the settings of a build,
which choose among them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from g4ir.backends.base import Setting
from g4ir.backends.primitives import attention, vision, weights
from g4ir.backends.primitives.emitter import Emitter, Operand
from g4ir.backends.primitives.lowerings import LOWERINGS, pieces
from g4ir.backends.primitives.network import EXPERTS, ROWS, Lowering, Network, is_ring, stored_type
from g4ir.backends.primitives.pointwise import activate, capped, reciprocal_rms, times, weighed
from g4ir.ir.graph import Graph, Node
from g4ir.ops.types import torch_dtype
from g4ir.plan.engine_limits import Limits

from .experts import experts

# --- attention in layers of its own -------------------------------------------------------------

#: what the scores of an attention may take: bytes of one, in the network's dtype and in fp32 ...
BYTES_PER_SCORE = 6
#: ... and of all that exist at a time. Queries are computed in blocks that keep to it.
MAX_SCORE_BYTES = 2 << 30
#: fewest tokens of a chunk for which a bool mask of several attentions is taken
MIN_INDEXED_TOKENS = 128
#: tokens of a chunk whose MLP is computed together, more than a product needs not to wait for its
#: weights, where that of all would take more than so many bytes
GATED_ROWS, MAX_GATED_BYTES = 512, 16 << 20


def row_bytes(n: Node, limits: Limits) -> int:
    """Count the bytes of the scores of one query of every row: beside a ring as it is stored, or
    what a row may hold."""
    cache, heads = n.caches[0].type, int(n["q"].type.shape[2])
    slots = int(stored_type(cache, limits).shape[2]) if is_ring(cache) else limits.max_seq
    return limits.max_batch * heads * slots * BYTES_PER_SCORE


def block_rows(n: Node, limits: Limits) -> int:
    """Count the queries of a chunk that are computed together."""
    return min(max(1, MAX_SCORE_BYTES // row_bytes(n, limits)), limits.prefill_chunk)


def score_bytes(g: Graph, limits: Limits, attention: str) -> int:
    """Count the bytes of scores of the largest attention of a graph that is not one layer."""
    kinds = attention_by_head_size(g) if attention == AUTO else {}
    return max(
        (
            row_bytes(n, limits) * (block_rows(n, limits) if n["q"].type.shape[1] != 1 else 1)
            for n in g.nodes
            if n.definition.cache_range and kinds.get(head_size(n) or 0, attention) != "fused"
        ),
        default=0,
    )


Softmax = Callable[[Emitter, Operand], Operand]


def in_blocks(
    net: Network,
    n: Node,
    q: Operand,
    keys: Operand,
    values: Operand,
    visible: Operand,
    softmax: Softmax | None = None,
) -> Operand:
    """Attend by layers (`softmax` in the place of the layer) over q [B,S,heads,d]: the first token
    by products and sums, which read the caches where they lie; the others by matrix products, for
    which a builder copies them, a static number of blocks of queries one after the other. Where S
    is fixed at 1 the others are none, and their layers are dropped by the builder."""
    e, chunk, rows = net.e, net.limits.prefill_chunk, block_rows(n, net.limits)
    scale, cap = n.number("scale"), n.number("softcap")

    def part(first: int, count: int) -> tuple[Operand, Operand]:
        mask = net.shared(("rows", visible, first), lambda: e.block(visible, 2, first, count))
        return e.block(q, 1, first, count), mask

    # A builder converts a cache that several layers read once, to fp32 in memory. A power of two of
    # its own for each reader, which changes no bits, makes these conversions different, and fused.
    readers: list[Node] = net.shared(("readers", n.caches), list) if n.caches else []
    readers.append(n)
    power = 2.0 ** (len(readers) - 1)
    if q.shape[1] == 1:
        return of_one(e, q, keys, values, visible, scale, cap, softmax, power)
    first = net.shared(("first row", visible), lambda: e.slice(visible, 2, 0, 1))
    outputs = [of_one(e, e.slice(q, 1, 0, 1), keys, values, first, scale, cap, softmax, power)]
    for i in range(1, chunk, rows):
        some, mask = part(i, min(rows, chunk - i))
        outputs.append(attention.weigh(e, some, keys, values, mask, scale, cap, softmax))
    return e.reshape(e.concat(outputs, 1), *q.shape)


def of_one(
    e: Emitter,
    q: Operand,
    keys: Operand,
    values: Operand,
    visible: Operand,
    scale: float,
    cap: float,
    softmax: Softmax | None,
    power: float,
) -> Operand:
    """Attend as attention.weigh, for one token for each row, q [B,1,heads,d]: keys are multiplied
    and summed up, and so are values. Both are multiplied by a `power` of two, which their factors
    are divided by."""
    (b, _, heads, d), (_, count, t, _) = q.shape, keys.shape
    groups = int(heads) // int(count)

    def summed(x: Operand, rows: Operand, axis: int) -> Operand:
        rows = e.unsqueeze(rows if power == 1 else e.mul(rows, power), 2)
        products = e.mul(times(e, e.cast(x, "f32"), 1 / power), e.cast(rows, "f32"))
        return e.cast(e.reduce("sum", products, axis), q.dtype)

    scores = summed(e.reshape(q, b, count, groups, 1, d), keys, 4)
    scores = capped(e, times(e, e.reshape(scores, b, heads, 1, t), scale), cap)
    scores = e.where(visible, scores, attention.lowest_finite(scores.dtype))
    weights = e.cast((softmax or Emitter.softmax)(e, e.cast(scores, "f32")), q.dtype)
    out = summed(e.reshape(weights, b, count, groups, t, 1), values, 3)
    return e.reshape(out, *q.shape)


def plain_softmax(e: Emitter, x: Operand) -> Operand:
    """Return the softmax of the last dim in five layers: TensorRT looks for attention around its
    softmax layer, and fails at some masks that it finds there."""
    last = x.rank - 1
    powers = e.unary("exp", e.sub(x, e.reduce("max", x, last)))
    return e.div(powers, e.reduce("sum", powers, last))


def norm_rope(net: Network, n: Node, x: Operand, w: Operand, *_: Operand) -> Operand:
    """Return the rotation of an RMS norm. Halves change places before the norm and not behind it,
    which is the same to the bit: the builder makes one kernel of a row that it reads twice, and two
    of one whose entries it moves."""
    e = net.e
    rms = reciprocal_rms(e, e.cast(x, "f32"), n.number("eps"))

    def normed(x: Operand, w: Operand) -> Operand:
        return weighed(e, e.mul(e.cast(x, "f32"), rms), w, x.dtype)

    cos, sin = attention.tables(net, n["cos"], n["sin"], 2)
    turned = normed(e.swap_halves(x), e.swap_halves(w))
    return e.add(e.mul(normed(x, w), cos), e.mul(turned, sin))


# --- the MLP ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Gated(Operand):
    """A gated product of which there is no tensor: the product behind it computes it in blocks."""

    x: Operand
    w: Operand
    act: str


def linear_glu(net: Network, n: Node, x: Operand, w: Operand, *up: Operand) -> Any:
    """Return the gated halves of a product; of a long chunk, for the product behind them."""
    chunk, width = net.limits.prefill_chunk, int(w.shape[-2])
    long = isinstance(x.shape[1], str) and chunk > GATED_ROWS
    nbytes = x.type.with_shape(net.limits.max_batch, chunk, width).nbytes()
    if up or not long or nbytes <= MAX_GATED_BYTES or not _has_readers(w):
        return tuple(net.expanded(n))
    return Gated(x.type.with_shape(*x.shape[:-1], width // 2), None, x, w, n.word("act"))


def linear(net: Network, n: Node, x: Operand, w: Operand) -> Operand:
    """Return x w^T, of a gated product in blocks of tokens: that product is twice as wide as what
    is kept of it, and the largest tensor of a model without experts. Where S is fixed at 1, all
    blocks but the first are empty, and dropped by the builder."""
    e = net.e
    if not isinstance(x, Gated):
        return weights.linear(e, x, w)
    size = GATED_ROWS if _has_readers(w) else net.limits.prefill_chunk
    outputs = []
    for i in range(-(-net.limits.prefill_chunk // size)):
        y = weights.linear(e, e.block(x.x, 1, i * size, size), x.w, i)
        gate, up = (e.slice(y, 2, at, at + int(x.shape[2])) for at in (0, int(x.shape[2])))
        outputs.append(weights.linear(e, e.mul(activate(e, gate, x.act), up), w, i))
    return e.reshape(e.concat(outputs, 1), *x.shape[:-1], outputs[0].shape[-1])


def _has_readers(w: Operand) -> bool:
    """Whether several products may read a weight. Of codes a builder would write one dense copy for
    all, but where each multiplies them by a scale of its own (weights.py): not codes of 4 bits,
    two products of which ended the builder by SIGSEGV."""
    return not isinstance(w, weights.QuantizedWeight) or not w.columns


# --- several ranks ------------------------------------------------------------------------------


def all_reduce(net: Network, n: Node, *xs: Operand) -> tuple[Operand, ...]:
    """Return sums over ranks in one collective: that of two is rounded once in any dtype; more
    would be rounded on their way, and travel in fp32."""
    e, ranks, last = net.e, n.whole("ranks"), xs[0].rank - 1
    if ranks == 1:
        return xs
    joined = e.concat(xs, last) if len(xs) > 1 else xs[0]
    operand = e.cast(joined, "f32") if ranks > 2 else joined
    summed = e.cast(e.exchange("all_reduce", operand, ranks), joined.dtype)
    if len(xs) == 1:
        return (summed,)
    return tuple(pieces(net, summed, *(int(x.shape[last]) for x in xs)))


def all_gather(net: Network, n: Node, x: Operand) -> Operand:
    """Return the parts of all ranks along the last dim; TensorRT joins them along the first."""
    e, ranks, (*rows, size) = net.e, n.whole("ranks"), x.shape
    if ranks == 1:
        return x
    parts = e.exchange("all_gather", e.unsqueeze(x, 0), ranks)
    parts = e.transpose(parts, *range(1, x.rank), 0, x.rank)
    return e.reshape(parts, *rows, ranks * int(size))


# --- fused attention --------------------------------------------------------------------------


def attend(
    net: Network, n: Node, q: Operand, keys: Operand, values: Operand, visible: Operand
) -> Operand:
    """Attend by one IAttention over q [B,S,heads,d], keys and values [B,n,T,d] with a mask that
    fits [B,heads,S,T], in towers too. There is no input for a scale, so q is multiplied."""
    e = net.e
    if n.attrs.get("softcap"):
        net.notes.append(f"{n.out}: explicit attention, since IAttention has no softcap")
        return in_blocks(net, n, q, keys, values, visible)
    q = times(e, e.transpose(q, 0, 2, 1, 3), n.number("scale"))
    if _few_tokens(net, q):
        visible = net.shared(("added", visible), lambda: _added(e, visible, q.dtype))
    out = e.attention(q, keys, values, visible)
    return e.transpose(out, 0, 2, 1, 3)


def _few_tokens(net: Network, q: Operand) -> bool:
    """Whether a profile of several tokens has room for fewer than a builder's index of a bool
    mask's blocks needs: two attentions that share one were refused there."""
    few = net.limits.prefill_chunk < MIN_INDEXED_TOKENS or ROWS in net.env
    return isinstance(q.shape[2], str) and few


def _added(e: Emitter, visible: Operand, dtype: str) -> Operand:
    """Return what a bool mask adds to scores."""
    zero = e.constant(torch.zeros((1,) * visible.rank, dtype=torch_dtype(dtype)))
    return e.where(visible, zero, attention.lowest_finite(dtype))


# --- settings ---------------------------------------------------------------------------------

#: form of attention -> its part in the text model, and in towers
ATTENTION_KINDS: Mapping[str, tuple[Callable[..., Operand], vision.EncoderAttend]] = {
    "explicit": (in_blocks, vision.attend_in_blocks),
    "plain": (
        partial(in_blocks, softmax=plain_softmax),
        partial(vision.attend_in_blocks, softmax=plain_softmax),
    ),
    "fused": (attend, attend),
}
#: largest heads, in 16 bits, for which a builder of TensorRT-RTX had an attention kernel
MAX_HEAD = 256
#: the choice of one form for each size of heads
AUTO = "auto"
#: head size -> form
Chosen = Mapping[int, str]


def head_size(n: Node) -> int | None:
    """Return the head size of an attention that has forms; None of other nodes."""
    return int(n["q"].type.shape[-1]) if n.op in ATTENTIONS else None


def attention_by_head_size(g: Graph) -> dict[int, str]:
    """Return the form for each size of heads, by what builders of TensorRT-RTX were seen to make
    one kernel of."""
    kinds = {}
    for n in g.nodes:
        if (size := head_size(n)) is not None:
            supported = size <= MAX_HEAD and n["q"].type.dtype == "bf16"
            kinds[size] = "fused" if supported and not n.attrs.get("softcap") else "explicit"
    return kinds


def _attention(chosen: Callable[[int], str]) -> Mapping[str, Lowering]:
    def of(tower: bool) -> Callable[..., Operand]:
        def attend_by_size(net: Network, n: Node, q: Operand, *inputs: Operand) -> Operand:
            return ATTENTION_KINDS[chosen(int(q.shape[3]))][tower](net, n, q, *inputs)

        return attend_by_size

    return {
        "attention": partial(attention.attention, impl=of(False)),
        "attention_latent": partial(attention.attention_latent, impl=of(False)),
        "encoder_attention": partial(vision.encoder_attention, impl=of(True)),
    }


#: ops whose attention has forms
ATTENTIONS = ("attention", "attention_latent", "encoder_attention")
SETTINGS: Mapping[str, Setting] = {
    "attention": Setting(
        (AUTO, *ATTENTION_KINDS),
        AUTO,
        "TensorRT's own attention layer in bf16 for heads of at most 256, else products and a "
        "softmax (auto); these alone; these with the softmax in plain layers; or TensorRT's own "
        "layer alone, in towers too",
    ),
    "experts": Setting(
        EXPERTS,
        "auto",
        "weights of the chosen experts gathered for single tokens, tokens of a chunk sorted by "
        "expert (auto); always gathered; or all multiplied",
    ),
}


def lowerings(kinds: str | Chosen = "explicit") -> Mapping[str, Lowering]:
    """Return the lowering of each op, with attention in one form, or in one for each size of
    heads."""
    chosen = kinds.__getitem__ if isinstance(kinds, Mapping) else lambda size: str(kinds)
    overrides: dict[str, Lowering] = {
        "all_reduce": all_reduce,
        "all_gather": all_gather,
        "experts": experts,
        "linear": linear,
        "linear_glu": linear_glu,
        "norm_rope": norm_rope,
    }
    return {**LOWERINGS, **overrides, **_attention(chosen)}
