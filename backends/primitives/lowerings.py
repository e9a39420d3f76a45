"""Lowers ops to tensor primitives (rule N: docs/semantics.md); ops without an entry are lowered by
their expansion. Rounds like the ops' references, except in `linear_bias`: each primitive rounds to
its operands' dtype, and casts surround what a reference computes in fp32."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from g4ir.ir.graph import Node
from g4ir.ops import OPS

from . import attention, audio, encoder, moe, vision
from .emitter import Operand
from .network import Lowering, Network
from .pointwise import activate, capped, layer_norm, normed, times, weighed, weight_like
from .weights import linear, quantized_weight


def _linear_bias(net: Network, n: Node, x: Operand, w: Operand, b: Operand) -> Operand:
    """Return x w^T + b; rounded twice, unless the target fuses the bias."""
    e = net.e
    y = e.linear(x, w)
    return e.add(y, weight_like(e, b, y))


def pieces(net: Network, x: Operand, *sizes: int) -> list[Operand]:
    """Split the last dim into parts of these sizes."""
    ends = [sum(sizes[: i + 1]) for i in range(len(sizes))]
    return [net.e.slice(x, x.rank - 1, end - n, end) for n, end in zip(sizes, ends, strict=True)]


def _clip(net: Network, n: Node, x: Operand, low: Operand, high: Operand) -> Operand:
    e = net.e
    low, high = (e.unsqueeze(bound, *range(x.rank)) for bound in (low, high))
    return e.binary("min", e.binary("max", x, low), high)


def _limit(net: Network, n: Node, x: Operand) -> Operand:
    """Clamp x to +-`most`, or to the dtype's largest finite value if that is smaller."""
    bound = min(n.number("most"), -attention.lowest_finite(x.dtype))
    return net.e.binary("min", net.e.binary("max", x, -bound), bound)


def _last_row(net: Network, n: Node, x: Operand, lengths: Operand) -> Operand:
    """Gather the last valid token of each sequence, [B,1,..]; the first token of a sequence without
    valid ones."""
    e = net.e

    def index() -> Operand:
        last = e.binary("max", e.sub(lengths, 1), 0)
        return e.unsqueeze(last, 1)

    return e.gather_rows(x, net.shared(("last", n["lengths"]), index))


def _greedy(net: Network, n: Node, logits: Operand) -> Operand:
    _, at = net.e.topk(logits, 1)
    return net.e.reshape(at, logits.shape[0])


def _cluster_head(
    net: Network, n: Node, x: Operand, heads: Operand, rows: Operand, order: Operand
) -> tuple[Operand, Operand]:
    """Return the logits and token ids of the tokens in the best clusters, [B,S,total] each."""
    e, (b, s, _), (count, size, width) = net.e, x.shape, rows.shape
    total = n.outputs[0].type.shape[-1]
    _, best = e.topk(e.linear(x, heads), n.integer("top_k"))
    picked = e.reshape(e.gather(rows, best, 0), b, s, total, width)
    logits = e.matmul(e.unsqueeze(x, 2), picked, transpose_b=True)
    ids = e.gather(e.reshape(order, count, size), best, 0)
    return e.reshape(logits, b, s, total), e.reshape(ids, b, s, total)


def _pick_id(net: Network, n: Node, ids: Operand, at: Operand) -> Operand:
    e, (b, _, count) = net.e, ids.shape
    return e.reshape(e.gather_rows(e.reshape(ids, b, count), e.unsqueeze(at, 1)), b)


def _row_start(net: Network, n: Node, positions: Operand) -> Operand:
    return net.e.reshape(net.e.slice(positions, 1, 0, 1), positions.shape[0])


def _rms_norm(net: Network, n: Node, x: Operand, w: Operand | None = None) -> Operand:
    """Return the RMS norm, computed in fp32, rounded once (rule 10). Norms of one value with equal
    eps share its product with the reciprocal RMS."""
    e, eps = net.e, n.number("eps")
    h = net.once(f"normed {eps}", x, lambda: normed(e, e.cast(x, "f32"), eps))
    return weighed(e, h, w, x.dtype)


def _rope(net: Network, n: Node, x: Operand, cos: Operand, sin: Operand) -> Operand:
    return attention.rotate(net.e, x, *attention.tables(net, n["cos"], n["sin"], 2))


def _latent_row(net: Network, n: Node, v: Operand, k: Operand) -> Operand:
    e, pairs, last = net.e, n.integer("pairs"), v.rank - 1
    if not pairs:
        return v
    half = n["k"].type.shape[-1] // 2  # type: ignore[operator]
    rotated = [e.slice(k, last, at, at + pairs) for at in (0, half)]
    return e.concat([v, *rotated], last)


def _glu(net: Network, n: Node, gate: Operand, up: Operand) -> Operand:
    return net.e.mul(activate(net.e, gate, n.word("act")), up)


def _mask_ids(net: Network, n: Node, tokens: Operand) -> Operand:
    e = net.e
    for i in n.integers("ids"):
        keep = e.unary("not", e.binary("eq", tokens, i))
        tokens = e.where(keep, tokens, n.integer("pad"))
    return tokens


def _unstack_layers(net: Network, n: Node, x: Operand) -> tuple[Operand, ...]:
    e, out = net.e, []
    for i, v in enumerate(n.outputs):
        e.scope = v.name
        out.append(e.gather(x, e.constant(torch.tensor(i)), 0))
    return tuple(out)


_MODULES = (attention, audio, encoder, moe, vision)
#: op -> (network, node, *operands) -> results; functions of the other modules have their op's name
LOWERINGS: Mapping[str, Lowering] = {
    **{op: f for module in _MODULES for op, f in vars(module).items() if op in OPS},
    "dequantize": quantized_weight,
    "dequantize_columns": quantized_weight,
    "linear": lambda net, n, x, w: linear(net.e, x, w),
    "linear_bias": _linear_bias,
    "concat": lambda net, n, *xs: net.e.concat(xs, n.integer("axis")),
    "split": lambda net, n, x: tuple(pieces(net, x, *n.integers("sizes"))),
    "heads": lambda net, n, x: net.e.reshape(x, *n.out.type.shape),
    "merge_heads": lambda net, n, x: net.e.reshape(x, *n.out.type.shape),
    "add": lambda net, n, a, b: net.e.add(a, b),
    "mul": lambda net, n, x, w: net.e.mul(x, weight_like(net.e, w, x)),
    "one_plus": lambda net, n, w: net.e.add(net.e.cast(w, n.out.type.dtype), 1.0),
    "scale": lambda net, n, x: times(net.e, x, n.number("value")),
    "softcap": lambda net, n, x: capped(net.e, x, n.number("cap")),
    "clip": _clip,
    "limit": _limit,
    "cast": lambda net, n, x: net.e.cast(x, n.word("dtype")),
    "activation": lambda net, n, x: activate(net.e, x, n.word("act")),
    "last_row": _last_row,
    "pick_rows": lambda net, n, x, rows: net.e.gather_rows(x, rows),
    "greedy": _greedy,
    "cluster_head": _cluster_head,
    "pick_id": _pick_id,
    "row_start": _row_start,
    "rms_norm": _rms_norm,
    "layer_norm": lambda net, n, x, w, b=None: layer_norm(net.e, x, w, b, n.number("eps")),
    "rope_table": lambda net, n, positions: attention.rope_rows(net, n.attrs, positions),
    "rope": _rope,
    "latent_row": _latent_row,
    "glu": _glu,
    "mask_ids": _mask_ids,
    "stack_layers": lambda net, n, x: net.e.transpose(x, 2, 0, 1, 3),
    "unstack_layers": _unstack_layers,
}

#: ops without a lowering here: embedding tables are gathered outside (embed.onnx has lowerings of
#: its own), values that depend on weights only are computed at build, caches have the engine's
#: dtype, activations are not quantised, and LoRA adapters are added to graphs after a build, which
#: networks do not support
OUTSIDE = frozenset(
    {
        *("embedding", "embedding_quantized", "embedding_tiles", "relative_keys"),
        *("quantize", "columns", "tiles", "dequantize_tiles", "as_bytes", "narrow_row"),
        *("by_cluster", "lora"),
        "fake_quantize",
    }
)
