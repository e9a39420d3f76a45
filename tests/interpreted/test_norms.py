"""RMS norms alone, and fused with the residual add around them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from g4ir.backends.torch_compile.kernels import norms
from g4ir.ops import OPS
from g4ir.ops.base import as_tuple

pytestmark = pytest.mark.covering

EPS = 1e-6
#: leading dims, D, warps
Case = tuple[tuple[int, ...], int, int]
ONE: Case = ((1, 1), 8, 1)
ODD: Case = ((5, 1), 33, 4)
ROUND: Case = ((2, 1), 64, 2)
#: for each pre-norm whether it has a weight
PRE_NORMS = [
    (),
    (True,),
    (False,),
    (True, True),
    (False, True),
    (True, True, True),
    (True, True, False),
    (False, True, True),
    (False, False, False),
]
#: x is a stack of as many partial sums; 0: it is one row
PARTS = [0, 1, 3, 4]

dtypes = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
cases = pytest.mark.parametrize(
    "case",
    [ONE, ODD, pytest.param(ROUND, marks=pytest.mark.full)],
    ids=lambda c: f"{c[0][0]}x{c[1]}",
)
pre_norms = pytest.mark.parametrize("weighted", PRE_NORMS, ids=str)


class Eager:
    """Stands where `expand` expects a graph builder and computes instead."""

    @staticmethod
    def emit(name: str, *inputs: Any, **attrs: Any) -> Any:
        definition = OPS[name]
        assert definition.reference
        return definition.reference(*inputs, **attrs)

    @staticmethod
    def emit_all(name: str, *inputs: Any, **attrs: Any) -> tuple[Any, ...]:
        return as_tuple(Eager.emit(name, *inputs, **attrs))


class Draw:
    """Random operands for rows [*lead, d]."""

    def __init__(self, case: Case, dtype: torch.dtype) -> None:
        lead, d, self.warps = case
        self.generator = torch.Generator().manual_seed(d)
        self.shape, self.dtype = (*lead, d), dtype

    def normal(self, *shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=self.generator)

    def x(self, parts: int = 0, size: float = 1.0) -> torch.Tensor:
        if parts:
            return self.normal(parts, *self.shape) * size
        return (self.normal(*self.shape) * size).to(self.dtype)

    def weight(self) -> torch.Tensor:
        return (1 + self.normal(self.shape[-1]) / 2).to(self.dtype)

    def end(self, scaled: bool, weighted: Sequence[bool]) -> tuple[Any, ...]:
        """scalar, weights, eps"""
        scalar = self.normal(1).to(self.dtype) if scaled else None
        return scalar, [self.weight() if has else None for has in weighted], EPS


def whole(x: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Partial sums added from the first to the last in their own type, then rounded."""
    if x.dim() == like.dim():
        return x
    total = x[0]
    for part in x[1:]:
        total = total + part
    return total.to(like.dtype)


def residual_norm(
    x: torch.Tensor,
    residual: torch.Tensor,
    w_post: torch.Tensor,
    scalar: torch.Tensor | None,
    weights: Sequence[torch.Tensor | None],
    eps: float,
) -> list[torch.Tensor]:
    """The op `norm_residual`, through its expansion."""
    expand = OPS["norm_residual"].expand
    assert expand
    given = [t for t in (scalar, *weights) if t is not None]
    results = expand(
        Eager,
        whole(x, residual),
        residual,
        w_post,
        *given,
        eps=eps,
        scaled=scalar is not None,
        weighted=tuple(w is not None for w in weights),
    )
    return list(results)


def dual_residual_norm(
    a: torch.Tensor,
    w_a: torch.Tensor,
    b: torch.Tensor,
    w_b: torch.Tensor,
    w_sum: torch.Tensor,
    residual: torch.Tensor,
    *end: Any,
) -> list[torch.Tensor]:
    """The three ops that the kernel stands for."""
    first = Eager.emit("rms_norm", whole(a, residual), w_a, eps=EPS)
    (total,) = residual_norm(whole(b, residual), first, w_b, None, [], EPS)
    return residual_norm(total, residual, w_sum, *end)


def single_norm(x: torch.Tensor, w: torch.Tensor | None, eps: float) -> list[torch.Tensor]:
    return [Eager.emit("rms_norm", x, w, eps=eps)]


def launch_single(*args: Any) -> list[torch.Tensor]:
    return [norms.launch_rms_norm(*args)]


def double(arg: Any) -> Any:
    """fp32 operands in float64."""
    if isinstance(arg, list):
        return [double(a) for a in arg]
    return arg.double() if isinstance(arg, torch.Tensor) else arg


def distance(got: torch.Tensor, want: torch.Tensor) -> float:
    """Largest error, each measured against the larger of the value and its row's rms."""
    want = want.double()
    rms = want.pow(2).mean(-1, keepdim=True).sqrt()
    return float(((got.double() - want).abs() / torch.maximum(want.abs(), rms)).max())


Function = Callable[..., list[torch.Tensor]]


def check(launch: Function, reference: Function, args: Sequence[Any], warps: int) -> int:
    """Every result within its budget; how many values of bf16 results differ at all.

    fp32, against float64: 1e-6 of the row's rms, for sums in another order and for up to seven
    roundings of half a unit (6e-8). bf16, against the op in bf16: each value is rounded up to
    six times, and each may fall to the other side once: the op's own budget of two units.
    """
    got = launch(*args, warps)
    narrow = got[0].dtype == torch.bfloat16
    want = reference(*args) if narrow else reference(*map(double, args))
    assert [g.shape for g in got] == [w.shape for w in want]
    for g, w in zip(got, want, strict=True):
        assert distance(g, w) < (OPS["norm_residual"].budget.at("bf16") if narrow else 1e-6)
    return sum(int((g != w).sum()) for g, w in zip(got, want, strict=True)) if narrow else 0


@dtypes
@cases
def test_rms_norm(case: Case, dtype: torch.dtype) -> None:
    draw = Draw(case, dtype)
    for w in (None, draw.weight()):
        for size in (1e-3, 1.0, 30.0):
            args = (draw.x(size=size), w, EPS)
            assert check(launch_single, single_norm, args, draw.warps) <= 1


@dtypes
@cases
@pre_norms
def test_norm_residual(weighted: tuple[bool, ...], case: Case, dtype: torch.dtype) -> None:
    draw = Draw(case, dtype)
    for parts in PARTS:
        for scaled in (False, True):
            args = (draw.x(parts, 3.0), draw.x(), draw.weight(), *draw.end(scaled, weighted))
            assert check(norms.launch_norm_residual, residual_norm, args, draw.warps) <= 2


@dtypes
@cases
@pre_norms
def test_dual_norm_residual(weighted: tuple[bool, ...], case: Case, dtype: torch.dtype) -> None:
    draw = Draw(case, dtype)
    for i, parts in enumerate(PARTS):
        a, b = draw.x(parts, 3.0), draw.x(PARTS[i - 1], 0.2)
        args = (
            a,
            draw.weight(),
            b,
            draw.weight(),
            draw.weight(),
            draw.x(),
            *draw.end(i % 2 == 0, weighted),
        )
        assert check(norms.launch_dual_norm_residual, dual_residual_norm, args, draw.warps) <= 2


def test_a_long_row() -> None:
    """Of a real width: only values within reach of a tie may differ, one in a hundred at most."""
    draw = Draw(((2, 1), 1536, 8), torch.bfloat16)
    args = (draw.x(4), draw.x(), draw.weight(), *draw.end(True, (True, True, True)))
    assert check(norms.launch_norm_residual, residual_norm, args, 8) <= 2 * 1536 * 4 // 100


@dtypes
def test_order_of_partial_sums(dtype: torch.dtype) -> None:
    """(big - big) + small is small; in any other order most of small is lost."""
    draw = Draw(((2, 1), 16, 1), dtype)
    x = draw.x(3)
    x[0] *= 1e8
    x[1] = -x[0]
    args = (torch.zeros(draw.shape, dtype=dtype), draw.weight(), None, [None], EPS)
    check(norms.launch_norm_residual, residual_norm, (x, *args), 1)
    other = residual_norm(x.flip(0), *args)
    assert distance(norms.launch_norm_residual(x, *args, 1)[0], other[0]) > 0.1


def test_large_values() -> None:
    draw = Draw(ROUND, torch.bfloat16)
    for parts in (0, 3):
        end = draw.end(True, (True, False))
        args = (draw.x(parts, 1e4), draw.x(size=1e4), draw.weight(), *end)
        check(norms.launch_norm_residual, residual_norm, args, 1)
        assert all(y.isfinite().all() for y in norms.launch_norm_residual(*args, 1))


@dtypes
def test_a_row_of_zeros(dtype: torch.dtype) -> None:
    """eps alone is under the root, and results are zero."""
    zeros, one = torch.zeros(3, 1, 8, dtype=dtype), torch.ones(8, dtype=dtype)
    results = norms.launch_norm_residual(zeros, zeros, one, None, [None, one], EPS, 1)
    results += norms.launch_dual_norm_residual(
        zeros, one, zeros, one, one, zeros, None, [one], EPS, 1
    )
    assert all(torch.equal(y, zeros) for y in results)


def test_eps() -> None:
    draw = Draw(((2, 1), 8, 1), torch.float32)
    args = (draw.x(), draw.x(), draw.weight(), None, [None], 0.3)
    check(norms.launch_norm_residual, residual_norm, args, 1)
    check(launch_single, single_norm, (draw.x(), None, 0.3), 1)


def test_strided_operands() -> None:
    draw = Draw(((4, 1), 33, 1), torch.float32)
    x, residual = (draw.normal(33, 1, 4).permute(2, 1, 0) for _ in range(2))
    w = draw.weight()
    check(launch_single, single_norm, (x, w, EPS), 1)
    check(norms.launch_norm_residual, residual_norm, (x, residual, w, None, [w], EPS), 1)
    args = (x, w, x + 1, w, w, residual, None, [w], EPS)
    check(norms.launch_dual_norm_residual, dual_residual_norm, args, 1)


def test_a_fourth_pre_norm_is_refused() -> None:
    x, w = torch.ones(1, 1, 8), torch.ones(8)
    with pytest.raises(ValueError, match="4 pre-norms"):
        norms.launch_norm_residual(x, x, w, None, [w] * 4, EPS, 1)


@dtypes
@pre_norms
def test_off_the_gpu(off_the_gpu: None, weighted: tuple[bool, ...], dtype: torch.dtype) -> None:
    """There the ops compute what they are defined as, bit for bit."""
    draw = Draw(((2, 1), 33, 1), dtype)
    for parts in PARTS:
        end = draw.end(parts % 2 == 0, weighted)
        x, residual, w = draw.x(parts), draw.x(), draw.weight()
        same(norms.norm_residual(x, residual, w, *end, 1), residual_norm(x, residual, w, *end))
        args = (x, w, draw.x(parts), draw.weight(), draw.weight(), residual, *end)
        same(norms.dual_norm_residual(*args, 1), dual_residual_norm(*args))
        same([norms.rms_norm(residual, w, EPS, 1)], single_norm(residual, w, EPS))


def same(got: list[torch.Tensor], want: list[torch.Tensor]) -> None:
    assert len(got) == len(want) and all(map(torch.equal, got, want))
