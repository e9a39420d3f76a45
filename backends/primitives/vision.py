"""The vision towers' ops in tensor primitives (rules 26 to 29, 42)."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch

from g4ir.ir.graph import Node, Value
from g4ir.ops import OPS

from .attention import rotated_half, weigh
from .emitter import Emitter, Operand
from .network import Network
from .pointwise import weight_like

#: attention scores of a tower that exist at a time, about: queries are processed in blocks, so that
#: 10080 patches (16 heads, 1.6 * 10^9 scores) need about as much memory as 2520
SCORES = 1 << 26


def centre_pixels(net: Network, n: Node, x: Operand) -> Operand:
    e = net.e
    return e.cast(e.mul(e.sub(e.cast(x, "f32"), 0.5), 2), n.word("dtype"))


# --- positions -----------------------------------------------------------------------------------


def _coordinate(e: Emitter, positions: Operand, axis: int) -> Operand:
    """Return i64[B,P]: the column (axis 0) or the row (axis 1) of each patch, of positions
    i64[B,P,2]."""
    return e.reshape(e.slice(positions, 2, axis, axis + 1), *positions.shape[:2])


def _padding(net: Network, positions: Value) -> Operand:
    """Return bool[B,P]: whether a patch is padding, at (-1, -1)."""
    e, at = net.e, net.operand(positions)

    def make() -> Operand:
        return e.binary("and", *(e.binary("eq", _coordinate(e, at, i), -1) for i in (0, 1)))

    return net.shared(("padding", positions), make)


def valid_patches(net: Network, n: Node, positions: Operand) -> Operand:
    return net.e.unary("not", _padding(net, n["positions"]))


def axial_embedding(net: Network, n: Node, table: Operand, positions: Operand) -> Operand:
    """Return axial position embeddings from one flat view of both tables of N entries, without a
    copy: entry x of table i is row i * N + x, or 2 * x + i if the tables are interleaved."""
    e, axis = net.e, n.integer("axis")
    count = int(table.shape[1 - axis])
    rows = e.reshape(table, 2 * count, int(table.shape[2]))
    step, second = (1, count) if axis == 0 else (2, 1)

    def entry(i: int) -> Operand:
        at = e.mul(e.binary("max", _coordinate(e, positions, i), 0), step)
        return e.gather(rows, e.add(at, i * second), 0)

    valid = e.unsqueeze(e.unary("not", _padding(net, n["positions"])), 2)
    return e.where(valid, e.add(entry(0), entry(1)), 0.0)


def axial_rope_table(net: Network, n: Node, positions: Operand) -> tuple[Operand, ...]:
    """Gather cos and sin rows from tables of all positions: an image of P patches is at most P wide
    or high. The first row is for padding, -1."""
    e, quarter = net.e, n.integer("dim") // 4
    coordinates = torch.arange(-1, int(positions.shape[1]))
    reference = OPS["axial_rope_table"].reference
    assert reference
    tables = reference(coordinates[None, :, None].expand(-1, -1, 2), **n.attrs)
    at = [e.add(_coordinate(e, positions, i), 1) for i in (0, 1)]

    def rows(table: torch.Tensor) -> Operand:
        constant = e.constant(table[0, :, :quarter].contiguous())
        x, y = (e.gather(constant, i, 0) for i in at)
        return e.concat([x, x, y, y], 2)

    return tuple(map(rows, tables))


def axial_rope(net: Network, n: Node, x: Operand, cos: Operand, sin: Operand) -> Operand:
    """Apply RoPE to each half of the head dim (by column, by row); three roundings."""
    e, half = net.e, int(x.shape[3]) // 2
    turned = [rotated_half(e, e.slice(x, 3, i * half, (i + 1) * half)) for i in (0, 1)]
    cos, sin = (e.unsqueeze(t, 2) for t in (cos, sin))
    return e.add(e.mul(x, cos), e.mul(e.concat(turned, 3), sin))


# --- attention --------------------------------------------------------------------------------

#: a target's attention: (network, node, q [B,P,nq,d], keys, values [B,n,P,d], valid [B,1,1,P]) ->
#: [B,P,nq,d]
EncoderAttend = Callable[[Network, Node, Operand, Operand, Operand, Operand], Operand]


def encoder_attention(
    net: Network,
    n: Node,
    q: Operand,
    k: Operand,
    v: Operand,
    valid: Operand,
    impl: EncoderAttend | None = None,
) -> Operand:
    """Attend over the valid patches, bidirectionally; `impl`: the target's own attention, instead
    of matmuls and a softmax."""
    e = net.e
    keys, values = (e.transpose(x, 0, 2, 1, 3) for x in (k, v))
    visible = net.shared(("valid keys", n["valid"]), lambda: e.unsqueeze(valid, 1, 2))
    return (impl or attend_in_blocks)(net, n, q, keys, values, visible)


def attend_in_blocks(
    net: Network,
    n: Node,
    q: Operand,
    keys: Operand,
    values: Operand,
    visible: Operand,
    softmax: Callable[[Emitter, Operand], Operand] | None = None,
) -> Operand:
    """Attend in blocks of queries, so that about SCORES scores exist at a time; `softmax` as in
    `weigh`."""
    e, (b, p, heads, _) = net.e, map(int, q.shape)
    count = math.ceil(b * heads * p * p / SCORES)
    size = math.ceil(p / count)
    cuts = [e.slice(q, 1, i, min(i + size, p)) for i in range(0, p, size)]
    scale = n.number("scale")
    outputs = [weigh(e, queries, keys, values, visible, scale, softmax=softmax) for queries in cuts]
    return outputs[0] if len(outputs) == 1 else e.concat(outputs, 1)


# --- after the layers ------------------------------------------------------------------------


def pool_patches(net: Network, n: Node, x: Operand, positions: Operand) -> Operand:
    """Average-pool patches to soft tokens by a matmul in fp32, rounded to x's dtype, then multiply
    by `root` in fp32."""
    e, k = net.e, n.integer("k")
    count = int(n.out.type.shape[1])
    column, row = (e.binary("max", _coordinate(e, positions, i), 0) for i in (0, 1))
    # fp32: TensorRT's parser has no ReduceMax of integers
    widest = e.cast(e.reduce("max", e.cast(column, "f32"), 1), "i64")
    across = e.binary("floor_div", e.add(widest, 1), k)
    square = e.add(e.binary("floor_div", column, k), e.mul(across, e.binary("floor_div", row, k)))
    squares = e.constant(torch.arange(count)[None, :, None])
    weight = e.constant(torch.full((1, 1, 1), 1 / k**2))
    weights = e.where(e.binary("eq", e.unsqueeze(square, 1), squares), weight, 0.0)
    mean = e.cast(e.matmul(weights, e.cast(x, "f32")), x.dtype)
    return e.mul(e.cast(mean, "f32"), n.number("root"))


def standardize(net: Network, n: Node, x: Operand, bias: Operand, scale: Operand) -> Operand:
    e = net.e
    bias, scale = (e.cast(weight_like(e, w, x), "f32") for w in (bias, scale))
    return e.mul(e.sub(e.cast(x, "f32"), bias), scale)
