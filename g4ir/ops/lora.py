"""LoRA adapters of a matmul, one for each sequence."""

from __future__ import annotations

from itertools import accumulate, pairwise
from typing import Any

from .base import cases, op, require, upcast
from .budgets import PRODUCT
from .types import Type, Types


@op
class lora:
    """y plus the LoRA term B A x of adapter index[b] in each sequence b; -1: no adapter
    (Hu et al. 2021, https://arxiv.org/abs/2106.09685; scales are part of b)

    y [B, S, N], x [B, S, K], index i64 [B], a [L, P R, K], b [L, R, N] of L adapters of rank R.
    `sizes` are the widths of P parts of y's columns (packed weights), each with an A of its own:
    for i = index[b], part p gains (x a[i, p R : (p + 1) R]^T) b[i, :, columns of p]. Sums are
    fp32, rounded once.
    """

    budget = PRODUCT

    @staticmethod
    def infer(y: Type, x: Type, index: Type, a: Type, b: Type, *, sizes: tuple[int, ...]) -> Type:
        fits = y.rank == x.rank == 3 and x.shape[:2] == y.shape[:2]
        require(fits, f"lora: x {x} does not fit y {y}")
        require(index == Type("i64", y.shape[:1]), f"lora: index {index} does not fit y {y}")
        fits = a.rank == b.rank == 3 and sum(sizes) == y.shape[2]
        require(fits, f"lora: sizes {sizes} do not add up to y {y}, or a {a}, b {b} are not rank 3")
        slots, rank, _ = b.shape
        want = [(slots, len(sizes) * int(rank), x.shape[2]), (slots, rank, y.shape[2])]
        fits = [a.shape, b.shape] == want and a.dtype == b.dtype == x.dtype == y.dtype
        require(fits, f"lora: a {a} and b {b} do not fit x {x} and y {y}")
        return y

    @staticmethod
    def reference(y: Any, x: Any, index: Any, a: Any, b: Any, *, sizes: tuple[int, ...]) -> Any:
        out, x = upcast(y).clone(), upcast(x)
        for row, slot in enumerate(index.tolist()):
            if slot < 0:
                continue
            low, high = (x[row] @ a[slot].to(x.dtype).mT).unflatten(-1, (len(sizes), -1)), b[slot]
            for part, (start, stop) in enumerate(pairwise(accumulate(sizes, initial=0))):
                out[row, :, start:stop] += low[:, part] @ high[:, start:stop].to(x.dtype)
        return out.to(y.dtype)

    @staticmethod
    def flops(ins: Types, outs: Types, *, sizes: tuple[int, ...]) -> int:
        y, _, _, a, b = ins
        rows = y.numel() // int(y.shape[2])
        return 2 * rows * (int(a.shape[1]) * int(a.shape[2]) + int(b.shape[1]) * int(b.shape[2]))

    samples = cases(
        "f32[2,3,12] f32[2,3,8] i64[2]@-1:2 f32[2,8,8] f32[2,4,12] {sizes=(8, 4)}",
        "f32[3,1,41] f32[3,1,33] i64[3]@-1:4 f32[4,5,33] f32[4,5,41] {sizes=(41,)}",
    )
