"""TensorRT's lowerings that differ from the shared ones (backends/primitives), and the build
settings that choose among them."""

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
from g4ir.backends.primitives.network import ROWS, Lowering, Network, is_ring, stored_type
from g4ir.backends.primitives.pointwise import activate, capped, reciprocal_rms, times, weighed
from g4ir.ir.graph import Graph, Node
from g4ir.ops.types import torch_dtype
from g4ir.plan.engine_limits import Limits

from .experts import experts

# --- attention in separate layers -------------------------------------------------------------

#: bytes of an attention score in a bf16 engine: once in bf16 and once in fp32
BYTES_PER_SCORE = 6
#: maximum bytes of scores at a time: queries are computed in blocks within this limit
MAX_SCORE_BYTES = 2 << 30
#: fused attention gets an additive mask instead of a bool one if the maximum tokens of a prefill
#: or verification profile are fewer: builders refused two attentions that share a bool mask
MIN_INDEXED_TOKENS = 128
#: tokens per block of the MLP (enough to be compute bound), if a chunk is longer and its gate_up
#: output exceeds MAX_GATED_BYTES
GATED_ROWS, MAX_GATED_BYTES = 512, 16 << 20


def row_bytes(n: Node, limits: Limits) -> int:
    """Count the bytes of all heads' scores of one query per sequence over a ring cache's slots or
    max_seq; in an encoder, of a single query over the chunk."""
    heads = int(n["q"].type.shape[2])
    if not n.definition.cache_range:
        return heads * limits.prefill_chunk * BYTES_PER_SCORE
    cache = n.caches[0].type
    slots = int(stored_type(cache, limits).shape[2]) if is_ring(cache) else limits.max_seq
    return limits.max_batch * heads * slots * BYTES_PER_SCORE


def block_rows(n: Node, limits: Limits) -> int:
    """Return the queries per block (at least 1, at most a chunk's), so that the block's scores need
    at most MAX_SCORE_BYTES."""
    return min(max(1, MAX_SCORE_BYTES // row_bytes(n, limits)), limits.prefill_chunk)


def score_bytes(g: Graph, limits: Limits, attention: str) -> int:
    """Count the bytes of scores of a graph's largest unfused attention."""
    kinds = attention_by_head_size(g) if attention == AUTO else {}
    return max(
        (
            row_bytes(n, limits) * (block_rows(n, limits) if n["q"].type.shape[1] != 1 else 1)
            for n in g.nodes
            if n.op == PACKED
            or (n.definition.cache_range and kinds.get(head_size(n) or 0, attention) != "fused")
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
    """Attention from separate layers (`softmax` replaces the softmax layer) over q [B,S,heads,d].
    The first token uses multiply and reduce, which read the caches in place; the others use
    matmuls, for which the builder copies the caches, in a static number of query blocks. In a
    profile with S = 1 the builder drops the blocks."""
    e, chunk, rows = net.e, net.limits.prefill_chunk, block_rows(n, net.limits)
    scale, cap = n.number("scale"), n.number("softcap")

    def part(first: int, count: int) -> tuple[Operand, Operand]:
        mask = net.shared(("rows", visible, first), lambda: e.block(visible, 2, first, count))
        return e.block(q, 1, first, count), mask

    # A cache with several readers would be converted to fp32 once, in memory. A different
    # power-of-two scale per reader, which is exact, keeps the conversions distinct, so that each is
    # fused.
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
    """Decode attention (attention.weigh for q [B,1,heads,d]) by multiply and reduce over keys and
    values. Both are scaled by a `power` of two, by which the other factors are divided."""
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
    """Softmax over the last dim from five layers: TensorRT's attention fusion looks for its softmax
    layer, and fails with some masks."""
    last = x.rank - 1
    powers = e.unary("exp", e.sub(x, e.reduce("max", x, last)))
    return e.div(powers, e.reduce("sum", powers, last))


def norm_rope(net: Network, n: Node, x: Operand, w: Operand, *_: Operand) -> Operand:
    """RMS norm, then RoPE. Halves are swapped before the norm, with bit-identical results: the
    builder fuses a row that is read twice into one kernel, but not a permuted one."""
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
    """A gated product that is not materialised: the following matmul computes it in blocks."""

    x: Operand
    w: Operand
    act: str


def linear_glu(net: Network, n: Node, x: Operand, w: Operand, *up: Operand) -> Any:
    """Lower gate_up and activation. If gate_up's output may be large (MAX_GATED_BYTES), and its
    weight can have several readers, return a `Gated` for the following matmul."""
    chunk, width = net.limits.prefill_chunk, int(w.shape[-2])
    long = isinstance(x.shape[1], str) and chunk > GATED_ROWS
    nbytes = x.type.with_shape(net.limits.max_batch, chunk, width).nbytes()
    if up or not long or nbytes <= MAX_GATED_BYTES or not _has_readers(w):
        return tuple(net.expanded(n))
    return Gated(x.type.with_shape(*x.shape[:-1], width // 2), None, x, w, n.word("act"))


def linear(net: Network, n: Node, x: Operand, w: Operand) -> Operand:
    """Return x w^T; for a `Gated` x in blocks of tokens, since gate_up's output is the largest
    tensor of a model without experts. In a profile with S = 1 all blocks but the first are empty,
    and the builder drops them."""
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
    """Whether several matmuls may share a weight. For quantised weights the builder would
    materialise a dense copy, unless each reader has its own scale (weights.py). False for 4-bit
    ones (the column-major ones here): two readers crashed the builder (SIGSEGV)."""
    return not isinstance(w, weights.QuantizedWeight) or not w.columns


# --- several ranks ------------------------------------------------------------------------------


def all_reduce(net: Network, n: Node, *xs: Operand) -> tuple[Operand, ...]:
    """All-reduce in one collective. A sum of two ranks is rounded once in any dtype; one of more
    would be rounded in between, so these reduce in fp32."""
    e, ranks, last = net.e, n.integer("ranks"), xs[0].rank - 1
    if ranks == 1:
        return xs
    joined = e.concat(xs, last) if len(xs) > 1 else xs[0]
    operand = e.cast(joined, "f32") if ranks > 2 else joined
    summed = e.cast(e.exchange("all_reduce", operand, ranks), joined.dtype)
    if len(xs) == 1:
        return (summed,)
    return tuple(pieces(net, summed, *(int(x.shape[last]) for x in xs)))


def all_gather(net: Network, n: Node, x: Operand) -> Operand:
    """All-gather along the last dim; TensorRT's collective concatenates along the first."""
    e, ranks, (*rows, size) = net.e, n.integer("ranks"), x.shape
    if ranks == 1:
        return x
    parts = e.exchange("all_gather", e.unsqueeze(x, 0), ranks)
    parts = e.transpose(parts, *range(1, x.rank), 0, x.rank)
    return e.reshape(parts, *rows, ranks * int(size))


# --- fused attention --------------------------------------------------------------------------


def attend(net: Network, n: Node, q: Operand, k: Operand, v: Operand, visible: Operand) -> Operand:
    """Fused attention: one IAttention over q [B,S,heads,d], k and v [B,n,T,d], with a mask
    broadcastable to [B,heads,S,T]; also for towers. It has no scale input, so q is multiplied by
    the scale; with a softcap attention is explicit (`in_blocks`)."""
    e = net.e
    if n.attrs.get("softcap"):
        net.notes.append(f"{n.out}: explicit attention, since IAttention has no softcap")
        return in_blocks(net, n, q, k, v, visible)
    q = times(e, e.transpose(q, 0, 2, 1, 3), n.number("scale"))
    if _few_tokens(net, q):
        visible = net.shared(("added", visible), lambda: _added(e, visible, q.dtype))
    out = e.attention(q, k, v, visible)
    return e.transpose(out, 0, 2, 1, 3)


def _few_tokens(net: Network, q: Operand) -> bool:
    """Whether a profile of several tokens, prefill or verification, has a maximum below
    MIN_INDEXED_TOKENS."""
    few = net.limits.prefill_chunk < MIN_INDEXED_TOKENS or ROWS in net.env
    return isinstance(q.shape[2], str) and few


def _added(e: Emitter, visible: Operand, dtype: str) -> Operand:
    """Convert a bool mask to an additive mask."""
    zero = e.constant(torch.zeros((1,) * visible.rank, dtype=torch_dtype(dtype)))
    return e.where(visible, zero, attention.lowest_finite(dtype))


# --- settings ---------------------------------------------------------------------------------

#: kind of attention -> lowering in the text model, and in towers
ATTENTION_KINDS: Mapping[str, tuple[Callable[..., Operand], vision.EncoderAttend]] = {
    "explicit": (in_blocks, vision.attend_in_blocks),
    "plain": (
        partial(in_blocks, softmax=plain_softmax),
        partial(vision.attend_in_blocks, softmax=plain_softmax),
    ),
    "fused": (attend, attend),
}
#: maximum head dim (in bf16) for which TensorRT-RTX has an attention kernel
MAX_HEAD = 256
#: choose the kind per head size
AUTO = "auto"
#: head size -> kind
Chosen = Mapping[int, str]


def head_size(n: Node) -> int | None:
    """Return an attention node's head dim; None for other nodes."""
    return int(n["q"].type.shape[-1]) if n.op in ATTENTIONS else None


def attention_by_head_size(g: Graph) -> dict[int, str]:
    """Return head size -> attention kind: fused where TensorRT-RTX builders produced one kernel,
    else explicit."""
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


#: attention op of text encoders, for which there is one lowering
PACKED = "packed_attention"
#: ops with a choice of attention kinds
ATTENTIONS = ("attention", "attention_latent", "encoder_attention")
SETTINGS: Mapping[str, Setting] = {
    "attention": Setting(
        (AUTO, *ATTENTION_KINDS),
        AUTO,
        "auto: fused in bf16 for head dims up to 256, else explicit; explicit: matmuls and a "
        "softmax; plain: explicit, with the softmax in elementwise layers; fused: TensorRT's "
        "attention layer",
    )
}


def lowerings(kinds: str | Chosen = "explicit") -> Mapping[str, Lowering]:
    """Return op -> lowering, with one attention kind, or one per head size."""
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
