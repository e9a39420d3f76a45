"""What TensorRT's lowerings are where they are not the shared ones; and the settings of a build,
which choose among them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

from g4ir.ir.graph import Graph, Node
from g4ir.plan.engine_limits import Limits

from ..base import Setting
from ..primitives import attention, vision
from ..primitives.emitter import Emitter, Operand
from ..primitives.lowerings import LOWERINGS, pieces
from ..primitives.network import EXPERTS, Lowering, Network, is_ring, stored_type
from ..primitives.pointwise import times
from ..primitives.vision import Form
from .emitter import TrtEmitter
from .host import FEATURES, offers

# --- attention in layers of its own -------------------------------------------------------------

#: what the scores of an attention may take: bytes of one, in the network's dtype and in fp32 ...
BYTES_PER_SCORE = 6
#: ... and of all that exist at a time. Queries are computed in blocks that keep to it.
MOST_SCORE_BYTES = 2 << 30


def row_bytes(n: Node, limits: Limits) -> int:
    """Count the bytes of the scores of one query of every row: beside a ring as it is stored, or
    what a row may hold."""
    cache, heads = n.caches[0].type, int(n["q"].type.shape[2])
    slots = int(stored_type(cache, limits).shape[2]) if is_ring(cache) else limits.max_seq
    return limits.max_batch * heads * slots * BYTES_PER_SCORE


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
    """Attend by products and a softmax (`softmax` in the place of the layer) over q [B,S,heads,d],
    a static number of blocks of queries one after the other; some of a short chunk are empty."""
    e, chunk, rows = net.e, net.limits.prefill_chunk, block_rows(n, net.limits)
    assert isinstance(e, TrtEmitter)
    scale, cap = n.number("scale"), n.number("softcap")
    if rows == chunk or isinstance(q.shape[1], int):
        return attention.weigh(e, q, keys, values, seen, scale, cap, softmax)

    def block(first: int) -> Operand:
        mask = net.shared(("rows", id(seen), first), lambda: e.block(seen, 2, first, rows))
        part = e.block(q, 1, first, rows)
        return attention.weigh(e, part, keys, values, mask, scale, cap, softmax)

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
    """Attend by one IAttention over q [B,S,heads,d], keys and values [B,n,T,d] with a bool mask
    that fits [B,heads,S,T], in towers too; never a causal kind beside it. There is no input for a
    scale, so q is multiplied. It may be decomposed: no kernel for the size need exist."""
    e = net.e
    assert isinstance(e, TrtEmitter)
    if n.attrs.get("softcap"):
        e.notes.append(f"{n.out}: explicit attention, since IAttention has no softcap")
        return in_blocks(net, n, q, keys, values, seen)
    q = e.transpose(times(e, q, n.number("scale")), 0, 2, 1, 3)
    *rows, mask = map(e.tensor, (q, keys, values, seen))
    norm = e.trt.AttentionNormalizationOp.SOFTMAX
    if offers(e.trt, *FEATURES["causal kind"]):
        layer = e.network.add_attention_v2(*rows, norm, e.trt.CausalMaskKind.NONE)
    else:
        layer = e.network.add_attention(*rows, norm, False)
    made = e.made(layer, "attention", q.type, mask=mask, decomposable=True)
    return e.transpose(made, 0, 2, 1, 3)


# --- settings ---------------------------------------------------------------------------------


def _attention(form: Form, of_towers: Form | None = None) -> Mapping[str, Lowering]:
    """Return the lowerings of attention in a form, and of that of towers where it has one."""
    made = {
        "attention": partial(attention.attention, form=form),
        "attention_latent": partial(attention.attention_latent, form=form),
    }
    own = partial(vision.encoder_attention, form=of_towers)
    return made | ({"encoder_attention": own} if of_towers else {})


#: form of attention -> op -> lowering, replacing the shared one
ATTENTION: Mapping[str, Mapping[str, Lowering]] = {
    "explicit": _attention(in_blocks),
    "plain": _attention(
        partial(in_blocks, softmax=plain_softmax), partial(vision.in_parts, softmax=plain_softmax)
    ),
    "fused": _attention(attend, attend),
}
#: how weights lie in an engine -> builder flags. Equal weights are what an engine is given again:
#: only then are its kernels those of one that has them. It takes all weights, constants too.
WEIGHTS: Mapping[str, tuple[str, ...]] = {
    "baked": (),
    "streamed": ("WEIGHT_STREAMING",),
    "refit": ("STRIP_PLAN", "REFIT_IDENTICAL"),
}
#: where an engine runs -> level
HARDWARE: Mapping[str, str] = {"exact": "NONE", "same-capability": "SAME_COMPUTE_CAPABILITY"}

SETTINGS: Mapping[str, Setting] = {
    "attention": Setting(
        tuple(ATTENTION),
        "explicit",
        "products and a softmax; these with the softmax in plain layers; or TensorRT's own "
        "attention layer, in towers too",
    ),
    "experts": Setting(
        EXPERTS,
        "auto",
        "all experts multiplied (auto, all), or weights of the chosen experts gathered",
    ),
    "weights": Setting(
        tuple(WEIGHTS),
        "baked",
        "in the plan; in the plan, and on the device as far as they fit; or out of the plan, which "
        "takes them from the engine's safetensors when it is loaded",
    ),
    "hardware": Setting(
        tuple(HARDWARE),
        "exact",
        "the plan runs on the GPU that it was built on; or on every GPU of its compute capability",
    ),
}


def lowerings(form: str = "explicit") -> Mapping[str, Lowering]:
    """Return the lowering of each op, with attention in one of its forms."""
    own: dict[str, Lowering] = {"all_reduce": all_reduce, "all_gather": all_gather}
    return {**LOWERINGS, **own, **ATTENTION[form]}
