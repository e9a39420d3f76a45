"""Matmul with a weight, and related data movement."""

from __future__ import annotations

from typing import Any

from .base import VIEW, cases, dot_products, free, op, require
from .budgets import MOVES, PRODUCT, Budget
from .types import Type, Types, torch


@op
class linear:
    """y[..., o] = sum_i x[..., i] * w[o, i]"""

    budget = PRODUCT
    rows = (0,)

    @staticmethod
    def infer(x: Type, w: Type) -> Type:
        require(w.rank == 2 and x.shape[-1] == w.shape[1], f"linear: x {x} does not fit w {w}")
        require(x.dtype == w.dtype, f"linear: x {x} and w {w} differ in dtype")
        return x.with_shape(*x.shape[:-1], w.shape[0])

    @staticmethod
    def reference(x: Any, w: Any) -> Any:
        return torch.nn.functional.linear(x, w)

    flops = dot_products(1)
    samples = cases("f32[2,3,16] f32[24,16]", "f32[1,1,33] f32[7,33]")


@op
class linear_bias:
    """y[..., o] = sum_i x[..., i] * w[o, i] + b[o], rounded once"""

    budget = Budget(1, 256, "as linear; the bias is added before the rounding")
    rows = (0,)

    @staticmethod
    def infer(x: Type, w: Type, b: Type) -> Type:
        out: Type = linear.infer(x, w)
        require(b == w.with_shape(w.shape[0]), f"linear_bias: bias {b} does not fit w {w}")
        return out

    @staticmethod
    def reference(x: Any, w: Any, b: Any) -> Any:
        return torch.nn.functional.linear(x, w, b)

    @staticmethod
    def flops(ins: Types, outs: Types) -> int:
        return outs[0].numel() * (2 * int(ins[1].shape[1]) + 1)

    samples = cases("f32[2,3,16] f32[24,16] f32[24]")


@op
class linear_clipped:
    """clamp(linear(clamp(x, in_min, in_max), w), out_min, out_max); bounds are 0-d tensors in x's
    dtype (rule 27)

    Never packed with other linears of the same x: each clamps x to bounds of its own, known only at
    load.
    """

    budget = Budget(1, 256, "as linear, which clamping only brings nearer")
    rows = (0,)

    @staticmethod
    def expand(b: Any, x: Any, w: Any, in_min: Any, in_max: Any, out_min: Any, out_max: Any) -> Any:
        y = b.emit("linear", b.emit("clip", x, in_min, in_max), w)
        return b.emit("clip", y, out_min, out_max)

    samples = cases("f32[2,3,16] f32[24,16] 4*f32[]")


@op
class concat:
    """The inputs one after the other along `axis`."""

    budget = MOVES

    @staticmethod
    def infer(*xs: Type, axis: int) -> Type:
        first = xs[0]
        require(0 <= axis < first.rank, f"concat: {first} has no axis {axis}")
        before, after = first.shape[:axis], first.shape[axis + 1 :]
        sizes = [x.shape[axis] if x.rank == first.rank else 0 for x in xs]
        for x, size in zip(xs, sizes, strict=True):
            fits = isinstance(size, int) and x == first.with_shape(*before, size, *after)
            require(fits, f"concat: {x} does not fit {first} along axis {axis}")
        return first.with_shape(*before, sum(map(int, sizes)), *after)

    @staticmethod
    def reference(*xs: Any, axis: int) -> Any:
        return torch.cat(xs, axis)

    flops = free
    samples = cases("f32[4,8] f32[2,8] f32[3,8]", axis=0)


@op
class split:
    """Cut the last dim into pieces of the given sizes, one result each."""

    budget = MOVES
    rows = (0,)

    @staticmethod
    def infer(x: Type, *, sizes: tuple[int, ...]) -> Types:
        fits = sum(sizes) == x.shape[-1] and all(n > 0 for n in sizes)
        require(fits, f"split: sizes {sizes}: expected sizes above 0 with sum {x.shape[-1]}; {x}")
        return tuple(x.with_shape(*x.shape[:-1], n) for n in sizes)

    @staticmethod
    def reference(x: Any, *, sizes: tuple[int, ...]) -> Any:
        return tuple(x.split(list(sizes), -1))

    flops, traffic = VIEW
    samples = cases("f32[2,3,12]", sizes=(6, 4, 2))


@op
class heads:
    """[..., n * d] -> [..., n, d]"""

    budget = MOVES
    rows = (0,)

    @staticmethod
    def infer(x: Type, *, n: int) -> Type:
        size = x.shape[-1]
        fits = isinstance(size, int) and n > 0 and size % n == 0
        require(fits, f"heads: {x} does not split into {n} heads")
        return x.with_shape(*x.shape[:-1], n, int(size) // n)

    @staticmethod
    def reference(x: Any, *, n: int) -> Any:
        return x.unflatten(-1, (n, -1))

    flops, traffic = VIEW
    samples = cases("f32[2,3,12]", n=4)


@op
class merge_heads:
    """[..., n, d] -> [..., n * d]"""

    budget = MOVES
    rows = (0,)

    @staticmethod
    def infer(x: Type) -> Type:
        *lead, n, d = x.shape
        require(isinstance(n, int) and isinstance(d, int), f"merge_heads: dims {n},{d} are no ints")
        return x.with_shape(*lead, int(n) * int(d))

    @staticmethod
    def reference(x: Any) -> Any:
        return x.flatten(-2)

    flops, traffic = VIEW
    samples = cases("f32[2,3,4,8]")
