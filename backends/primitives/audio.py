"""The audio tower's ops in tensor primitives (rules 33 to 36)."""

from __future__ import annotations

import math

import torch

from g4ir.ir.graph import Node, Value

from .emitter import Emitter, Operand
from .network import Network
from .pointwise import in_fp32, sigmoid, softplus, weight_like


def mask_rows(net: Network, n: Node, x: Operand, mask: Operand) -> Operand:
    e = net.e
    return e.where(e.unsqueeze(mask, *range(2, x.rank)), x, 0.0)


def halve_mask(net: Network, n: Node, mask: Operand) -> Operand:
    return net.e.gather(mask, net.e.constant(torch.arange(0, int(mask.shape[1]), 2)), 1)


def sigmoid_glu(net: Network, n: Node, x: Operand) -> Operand:
    """Return the first half times the sigmoid of the second, rounded once."""
    e, last, half = net.e, x.rank - 1, int(x.shape[-1]) // 2

    def gated(h: Operand) -> Operand:
        return e.mul(e.slice(h, last, 0, half), sigmoid(e, e.slice(h, last, half, 2 * half)))

    return in_fp32(e, x, gated)


# --- windows ----------------------------------------------------------------------------------


def windows(e: Emitter, x: Operand, at: torch.Tensor, axis: int) -> Operand:
    """Gather windows of entries `at` [count, width] along an axis, which becomes two axes: count,
    width. Zero for entries out of range."""
    size = int(x.shape[axis])
    seen = e.gather(x, e.constant(at.clamp(0, size - 1)), axis)
    inside = (at >= 0) & (at < size)
    if inside.all():
        return seen
    shape = [1] * axis + [*at.shape] + [1] * (x.rank - axis - 1)
    return e.where(e.constant(inside.view(shape)), seen, 0.0)


def steps(count: int, stride: int, first: int, width: int) -> torch.Tensor:
    """Return i64[count, width]: indices of `count` windows, `stride` apart, from `first`."""
    return torch.arange(count)[:, None] * stride + first + torch.arange(width)


def conv_halve(net: Network, n: Node, x: Operand, w: Operand) -> Operand:
    """Strided 3x3 convolution as a matmul over the 9 pixels of each window; rounds once."""
    e, (b, t, f, out) = net.e, map(int, n.out.type.shape)
    size = 9 * int(x.shape[3])
    x = windows(e, windows(e, x, steps(t, 2, -1, 3), 1), steps(f, 2, -1, 3), 3)
    x = e.reshape(e.transpose(x, 0, 1, 3, 2, 4, 5), b, t, f, size)
    rows = e.reshape(e.transpose(w, 0, 2, 3, 1), 1, 1, out, size)
    return e.matmul(x, rows, transpose_b=True)


def causal_conv(net: Network, n: Node, x: Operand, w: Operand) -> Operand:
    """Depthwise causal convolution: weighted sum of the last K frames, in fp32, rounded once."""
    e, k = net.e, int(w.shape[2])
    frames = windows(e, e.cast(x, "f32"), steps(int(x.shape[1]), 1, 1 - k, k), 1)
    taps = e.reshape(e.transpose(e.cast(w, "f32"), 1, 2, 0), 1, 1, k, int(w.shape[0]))
    return e.cast(e.reshape(e.reduce("sum", e.mul(frames, taps), 2), *x.shape), x.dtype)


# --- attention --------------------------------------------------------------------------------


def chunked_attention(
    net: Network,
    n: Node,
    q: Operand,
    k: Operand,
    v: Operand,
    relative: Operand,
    dim_scale: Operand,
    mask: Operand,
) -> Operand:
    """Attend by blocks of `chunk` queries, in fp32: q, k and v [B,T,n,d] are regrouped to [B, n,
    blocks, queries or keys of a block, d]."""
    e, (b, t, heads, d) = net.e, map(int, q.shape)
    chunk, cap = n.integer("chunk"), n.number("cap")
    visible = net.shared(
        ("seen frames", n["mask"], chunk, n.integer("left"), n.integer("right")),
        lambda: _seen(net, n, n["mask"]),
    )
    soft = e.cast(softplus(e, dim_scale), "f32")
    q = e.mul(e.mul(e.cast(q, "f32"), d**-0.5 / math.log(2)), weight_like(e, soft, q))
    k = e.mul(e.cast(k, "f32"), math.log(1 + math.e) / math.log(2))
    query_frames, context = steps(-(-t // chunk), chunk, 0, chunk), _context(n, t)
    queries, keys, values = (
        e.transpose(windows(e, x, at, 1), 0, 3, 1, 2, 4)
        for x, at in ((q, query_frames), (k, context), (e.cast(v, "f32"), context))
    )
    scores = e.matmul(queries, keys, transpose_b=True)
    scores = e.add(scores, _by_distance(e, queries, relative, context.shape[1]))
    scores = e.mul(e.unary("tanh", e.div(scores, cap)), cap)
    weights = e.softmax(e.where(visible, scores, n.number("invalid")))
    out = e.transpose(e.matmul(weights, values), 0, 2, 3, 1, 4)
    out = e.slice(e.reshape(out, b, query_frames.numel(), heads, d), 1, 0, t)
    return e.cast(out, n.out.type.dtype)


def _context(n: Node, t: int) -> torch.Tensor:
    """Return i64[blocks, width]: the frames of each block's context; those out of range do not
    exist."""
    chunk, past = n.integer("chunk"), n.integer("left") - 1
    return steps(-(-t // chunk), chunk, -past, past + chunk + n.integer("right"))


def _seen(net: Network, n: Node, mask: Value) -> Operand:
    """Return bool[B, 1, blocks, chunk, width]: which frames each query attends to: valid (not
    padding) and within its window."""
    e, x = net.e, net.operand(mask)
    t, chunk, past = int(x.shape[1]), n.integer("chunk"), n.integer("left") - 1
    at = _context(n, t)
    distance = torch.arange(chunk)[:, None] + past - torch.arange(at.shape[1])
    near = ((distance >= 0) & (distance < past)) | (
        (distance < 0) & (-distance < n.integer("right"))
    )
    inside = (at >= 0) & (at < t)
    heard = e.unsqueeze(e.gather(x, e.constant(at.clamp(0, t - 1)), 1), 1, 3)
    return e.binary("and", heard, e.constant((inside[:, None] & near)[None, None]))


def _by_distance(e: Emitter, queries: Operand, relative: Operand, width: int) -> Operand:
    """Return relative-position scores [B, n, blocks, chunk, width], shifted so that row i begins at
    column i: with rows zero-padded to width + 1, then flattened and cut into rows of `width`, each
    row begins one entry later than the one before."""
    b, heads, blocks, chunk, d = map(int, queries.shape)
    count = int(relative.shape[0])
    fill = torch.zeros(width + 1 - count, heads * d)
    keys = e.cast(relative, "f32")
    keys = e.concat([keys, e.constant(fill)], 0) if len(fill) else keys
    keys = e.transpose(e.reshape(keys, width + 1, heads, d), 1, 0, 2)
    scores = e.matmul(queries, e.unsqueeze(keys, 0, 2), transpose_b=True)
    flat = e.reshape(scores, b, heads, blocks, chunk * (width + 1))
    return e.reshape(e.slice(flat, 3, 0, chunk * width), b, heads, blocks, chunk, width)
