"""Ops of the audio tower: strided and causal convolution, chunked attention (docs/semantics.md,
rules 33 to 36).

Frames are rows [B,T,D] with a mask bool[B,T], true where there is audio.
"""

from __future__ import annotations

import math
from typing import Any

from .base import cases, dot_products, op, per_result, require, upcast
from .budgets import MOVES, POINTWISE, Budget
from .types import Dim, Type, Types, torch


def _half(size: Dim) -> int:
    require(isinstance(size, int), f"halved dim {size} must be an int")
    return -(-int(size) // 2)


@op
class mask_rows:
    """x, with zeros where the mask is False; x [B,T,...], mask bool[B,T] (rules 29, 33)"""

    budget = MOVES
    kind = "other"
    rows = (0, 1)

    @staticmethod
    def infer(x: Type, mask: Type) -> Type:
        fits = mask == Type("bool", x.shape[:2])
        require(fits, f"mask_rows: {mask} does not fit {x}")
        return x

    @staticmethod
    def reference(x: Any, mask: Any) -> Any:
        return x.masked_fill(~mask.view(*mask.shape, *(1,) * (x.dim() - 2)), 0)

    samples = cases("f32[2,5,8] bool[2,5]", "f32[2,5,3,4] bool[2,5]")


@op
class conv_halve:
    """3 x 3 convolution over time and frequency with stride 2 and a border of zeros

    x [B,T,F,C], w [O,C,3,3] -> [B, ceil(T/2), ceil(F/2), O] (rule 33)
    """

    budget = Budget(1, 256, "sums of up to nine times the channels, rounded once")
    kind = "embed"

    @staticmethod
    def infer(x: Type, w: Type) -> Type:
        fits = x.rank == 4 and w.rank == 4 and w.shape[1:] == (x.shape[3], 3, 3)
        require(fits and w.dtype == x.dtype, f"conv_halve: w {w} does not fit x {x}")
        b, t, f, _ = x.shape
        return x.with_shape(b, _half(t), _half(f), w.shape[0])

    @staticmethod
    def reference(x: Any, w: Any) -> Any:
        y = torch.nn.functional.conv2d(x.permute(0, 3, 1, 2), w, stride=2, padding=1)
        return y.permute(0, 2, 3, 1).contiguous()

    @staticmethod
    def flops(ins: Types, outs: Types) -> int:
        return 2 * outs[0].numel() * 9 * int(ins[1].shape[1])

    samples = cases("f32[1,7,6,2] f32[4,2,3,3]", "f32[2,4,5,3] f32[2,3,3,3]")


@op
class halve_mask:
    """Every second entry of a mask [B,T], as `conv_halve` halves the frames (rule 33)"""

    budget = MOVES
    kind = "other"

    @staticmethod
    def infer(mask: Type) -> Type:
        require(mask.dtype == "bool" and mask.rank == 2, f"halve_mask: {mask} is not bool[B,T]")
        return mask.with_shape(mask.shape[0], _half(mask.shape[1]))

    @staticmethod
    def reference(mask: Any) -> Any:
        return mask[:, ::2].contiguous()

    samples = cases("bool[2,7]", "bool[1,4]")


@op
class sigmoid_glu:
    """first half of x * sigmoid(second half), along the last dim (rule 34)"""

    budget = POINTWISE
    rows = (0,)

    @staticmethod
    def infer(x: Type) -> Type:
        size = x.shape[-1]
        fits = isinstance(size, int) and size % 2 == 0
        require(fits, f"sigmoid_glu: last dim of {x} is no even int")
        return x.with_shape(*x.shape[:-1], int(size) // 2)

    @staticmethod
    def reference(x: Any) -> Any:
        return torch.nn.functional.glu(x, -1)

    flops = per_result(4)
    samples = cases("f32[2,5,8]")


@op
class causal_conv:
    """y[t, c] = sum_k x[t - K + 1 + k, c] * w[c, k]: depthwise, zeros before the first frame

    x [B,T,C], w [C,1,K] (rule 34)
    """

    budget = Budget(1, 16, "sums of as many terms as the kernel has, rounded once")

    @staticmethod
    def infer(x: Type, w: Type) -> Type:
        fits = w.rank == 3 and w.shape[:2] == (x.shape[-1], 1) and w.dtype == x.dtype
        require(fits and x.rank == 3, f"causal_conv: w {w} does not fit x {x}")
        return x

    @staticmethod
    def reference(x: Any, w: Any) -> Any:
        padded = torch.nn.functional.pad(x.transpose(1, 2), (w.shape[-1] - 1, 0))
        return torch.nn.functional.conv1d(padded, w, groups=w.shape[0]).transpose(1, 2).contiguous()

    flops = dot_products(1)
    samples = cases("f32[2,7,6] f32[6,1,5]", "f32[1,2,6] f32[6,1,5]")


@op
class relative_keys:
    """Keys of the relative positions count - 1 .. 0: sinusoids [count, hidden] times w^T (rule 35)

    The sinusoids have hidden / 2 timescales from 1 to 10000, sines before cosines; they are
    computed in fp32 and rounded to w's dtype. Depends on a weight alone: in the weight prologue.
    """

    budget = Budget(1, 256, "sines and cosines rounded, then as linear")
    kind = "other"

    @staticmethod
    def infer(w: Type, *, count: int) -> Type:
        require(w.rank == 2 and count > 0, f"relative_keys: {w} is no matrix, or count {count} < 1")
        size = w.shape[1]
        fits = isinstance(size, int) and size % 2 == 0
        require(fits, f"relative_keys: last dim of {w} is no even int")
        return w.with_shape(count, w.shape[0])

    @staticmethod
    def reference(w: Any, *, count: int) -> Any:
        scales = w.shape[1] // 2
        step = math.log(10000.0) / max(scales - 1, 1)
        inverse = torch.exp(torch.arange(scales, device=w.device) * -step)
        time = torch.arange(count - 1, -1, -1, device=w.device)[:, None] * inverse
        table = torch.cat((time.sin(), time.cos()), -1).to(w.dtype)
        return torch.nn.functional.linear(table, w)

    flops = dot_products(0)
    samples = cases("f32[8,16]", count=5)


def blocks_of(x: Any, chunk: int) -> Any:
    """Reshape frames [B,T,n,d] to blocks [B, ceil(T / chunk), chunk, n, d], padded with zeros after
    the last frame."""
    b, t, n, d = x.shape
    padded = torch.nn.functional.pad(x, (0, 0, 0, 0, 0, -t % chunk))
    return padded.view(b, -1, chunk, n, d)


def contexts_of(x: Any, chunk: int, past: int, future: int) -> Any:
    """[B,T,...] -> [B, blocks, past + chunk + future, ...]: the frames around each block, padded
    with zeros (False)."""
    t = x.shape[1]
    blocks, width = -(-t // chunk), past + chunk + future
    # `pad` counts from the last dim: only dim 1, the frames, is padded.
    padding = [0, 0] * (x.dim() - 2) + [past, blocks * chunk - t + future]
    padded = torch.nn.functional.pad(x, padding)
    at = torch.arange(blocks, device=x.device)[:, None] * chunk
    return padded[:, at + torch.arange(width, device=x.device)]


def shifted(scores: Any, width: int) -> Any:
    """Shift scores by distance [..., chunk, R] to scores by key of the context [..., chunk, width]:
    entry r of row i goes to column i + r, the other columns are 0."""
    chunk, r = scores.shape[-2:]
    padded = torch.nn.functional.pad(scores, (0, width + 1 - r))
    return padded.flatten(-2)[..., : chunk * width].unflatten(-1, (chunk, width))


#: attributes of `chunked_attention`
CHUNKS = {"chunk": "int", "left": "int", "right": "int", "cap": "float", "invalid": "float"}


@op
class chunked_attention:
    """Local attention with relative positions, all in fp32 (rules 35, 36)

    q, k, v [B,T,n,d]; relative [R, n * d], keys of the distances R - 1 .. 0; dim_scale [d]; mask
    bool[B,T] of the keys. Frames are cut into blocks of `chunk`; a block's context also has
    `left` - 1 frames before it and `right` after it, in which a query attends to distances of 0 to
    left - 2 before it and up to right - 1 after. Scores are capped before masking; masked ones
    become `invalid`. The result is rounded to q's dtype.
    """

    budget = Budget(1, 512, "all in fp32, rounded once; sums reordered")
    kind = "kv"
    operands = "q k v relative dim_scale mask"
    attrs = CHUNKS

    @staticmethod
    def infer(*inputs: Type, **attrs: Any) -> Type:
        q, k, v, relative, dim_scale, mask = inputs
        chunk, left, right, cap, _ = (attrs[name] for name in CHUNKS)
        require(q.rank == 4 and q == k == v, f"chunked_attention: q {q}, k {k}, v {v} do not fit")
        b, t, n, d = q.shape
        fits = isinstance(n, int) and isinstance(d, int)
        fits = fits and relative.shape[1:] == (int(n) * int(d),) and dim_scale.shape == (d,)
        require(fits, f"chunked_attention: {relative}, {dim_scale} do not fit q {q}")
        require(mask == Type("bool", (b, t)), f"chunked_attention: mask {mask} does not fit q {q}")
        fits = chunk > 0 and left > 1 and right >= 0 and cap > 0
        values = f"chunk {chunk}, left {left}, right {right}, cap {cap}"
        expected = "expected chunk and cap above 0, left above 1, right 0 or more"
        require(fits, f"chunked_attention: {values}: {expected}")
        return q

    @staticmethod
    def reference(*inputs: Any, **attrs: Any) -> Any:
        q, k, v, relative, dim_scale, mask = inputs
        chunk, left, right, cap, invalid = (attrs[name] for name in CHUNKS)
        b, t, n, d = q.shape
        past = left - 1
        soft = torch.nn.functional.softplus(dim_scale)
        queries = upcast(q) * (d**-0.5 / math.log(2)) * soft
        keys = upcast(k) * (math.log(1 + math.e) / math.log(2))
        queries = blocks_of(queries, chunk).permute(0, 3, 1, 2, 4)
        keys, values = (contexts_of(x, chunk, past, right) for x in (keys, upcast(v)))
        distances = upcast(relative).view(-1, n, d).permute(1, 2, 0)
        scores = queries @ keys.permute(0, 3, 1, 4, 2)
        scores = scores + shifted(queries @ distances[:, None], scores.shape[-1])
        scores = torch.tanh(scores / cap) * cap
        visible = contexts_of(mask, chunk, past, right)[:, None, :, None]
        visible = visible & _near(chunk, past, right, q.device)
        weights = scores.masked_fill(~visible, invalid).softmax(-1)
        out = weights @ values.permute(0, 3, 1, 2, 4)
        return out.permute(0, 2, 3, 1, 4).reshape(b, -1, n, d)[:, :t].to(q.dtype).contiguous()

    @staticmethod
    def flops(ins: Types, outs: Types, *, chunk: int, left: int, right: int, **_: Any) -> int:
        """Count two matmuls over the context's keys and one over the relative positions."""
        visible = left - 1 + chunk + right
        return outs[0].numel() * (4 * visible + 2 * int(ins[3].shape[0]))

    samples = cases(
        "3*f32[1,11,2,8] f32[5,16] f32[8] bool[1,11] {chunk=4, left=5, right=0, cap=50.0}",
        "3*f32[2,3,2,8] f32[5,16] f32[8] bool[2,3] {chunk=4, left=3, right=2, cap=5.0}",
        invalid=-1e9,
    )


def _near(chunk: int, past: int, future: int, device: Any) -> Any:
    """Return bool [chunk, past + chunk + future]: the keys of a block's context that each of its
    queries attends to."""
    query = torch.arange(chunk, device=device)[:, None] + past
    distance = query - torch.arange(past + chunk + future, device=device)
    return ((distance >= 0) & (distance < past)) | ((distance < 0) & (-distance < future))
