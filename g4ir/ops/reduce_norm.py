"""Norms in one op with the sum over ranks before them, or with the product after them.

The expansion of the former says what is sent, so whoever runs or counts collectives needs to know
no more.
"""

from __future__ import annotations

from typing import Any

from .base import cases, op, require
from .budgets import Budget
from .norm import NORM

#: a norm -> the op that makes the sums that it takes too, and the inputs that are summed
WITH_SUMS = {
    "norm_residual": ("all_reduce_norm_residual", ("x",)),
    "dual_norm_residual": ("all_reduce_dual_norm_residual", ("a", "b")),
}
#: the norm that is left of such an op
NORM_OF = {fused: norm for norm, (fused, _) in WITH_SUMS.items()}
#: most rows of a step whose sums and norms are one kernel: each is a program of it, and programs of
#: all ranks wait for one another
MOST_ROWS = 32


@op
class all_reduce_norm_residual:
    """h, n.. = norm_residual(all_reduce(x), residual, w_post, ..)

    What ranks have of x is summed in order of rank and rounded as `all_reduce` does. Inputs after
    x, and results, as in `norm_residual`.
    """

    budget = Budget(3, 80, "as all_reduce, then as norm_residual")
    kind = "other"
    rows = (0, 1)
    fold = False
    operands = "x residual w_post *rest"
    attrs = NORM | {"ranks": "int"}

    @staticmethod
    def expand(b: Any, x: Any, *given: Any, ranks: int, **norm: Any) -> Any:
        total = b.emit("all_reduce", x, ranks=ranks)
        return b.emit_all("norm_residual", total, *given, **norm)

    samples = cases(
        "2*f32[2,3,16] f32[16] f32[1] f32[16] {scaled=True, weighted=(True,)}",
        "2*f32[2,3,16] 3*f32[16] {scaled=False, weighted=(True, True, False)}",
        eps=1e-06,
        ranks=1,
    )


@op
class all_reduce_dual_norm_residual:
    """h, n.. = dual_norm_residual(a, w_a, b, w_b, ..) of a, b = all_reduce(a, b)

    The sums of the dense MLP and of the experts are one collective. Inputs, and results, as in
    `dual_norm_residual`.
    """

    budget = Budget(4, 88, "as all_reduce, then as dual_norm_residual")
    kind = "other"
    rows = (0, 2, 5)
    fold = False
    operands = "a w_a b w_b w_sum residual *rest"
    attrs = NORM | {"ranks": "int"}

    @staticmethod
    def expand(make: Any, *given: Any, ranks: int, **norm: Any) -> Any:
        a, w_a, b, *rest = given
        one, two = make.emit_all("all_reduce", a, b, ranks=ranks)
        return make.emit_all("dual_norm_residual", one, w_a, two, *rest, **norm)

    samples = cases(
        "f32[2,3,16] f32[16] f32[2,3,16] 2*f32[16] f32[2,3,16] f32[1] f32[16] {eps=1e-06, "
        "scaled=True, weighted=(True,), ranks=1}"
    )


def _expand(b: Any, op: str, given: tuple[Any, ...], at: int, act: str, norm: Any) -> Any:
    """Emit the norm, and the product of its last result with operand `at`."""
    end = at + 1 + norm["scaled"] + sum(norm["weighted"])
    up = given[end:]
    made = b.emit_all(op, *given[:at], *given[at + 1 : end], **norm)
    require(len(made) <= 2, f"{len(made) - 1} pre-norms, but one product")
    require(len(up) <= bool(act), f"{len(up)} inputs after those of the norm")
    x, w = made[-1], given[at]
    y = b.emit("linear_glu", x, w, *up, act=act) if act else b.emit("linear", x, w)
    return y, made[0]


@op
class norm_linear:
    """h, n = norm_residual(x, residual, w_post, ..); y = linear(n, w), or with `act` linear_glu

    Results: y, h. Without a pre-norm in `weighted`, which has one entry at most, n is h. Inputs
    after w: those of `norm_residual` after w_post, then the up of `linear_glu`, where there is one.
    """

    budget = Budget(5, 256, "as norm_residual, then as linear_glu")
    operands = "x residual w_post w *rest"
    attrs = NORM | {"act": "str"}

    @staticmethod
    def expand(b: Any, *given: Any, act: str, **norm: Any) -> tuple[Any, Any]:
        return _expand(b, "norm_residual", given, 3, act, norm)

    samples = cases(
        "2*f32[2,3,16] f32[16] f32[24,16] f32[1] f32[16] {scaled=True, weighted=(True,), act=''}",
        "2*f32[2,3,16] f32[16] f32[24,16] f32[16] {scaled=False, weighted=(True,), act='silu'}",
        "2*f32[2,3,16] f32[16] f32[8,16] f32[2,3,8] {scaled=False, weighted=(), "
        "act='gelu_pytorch_tanh'}",
        eps=1e-06,
    )


@op
class dual_norm_linear:
    """h, n = dual_norm_residual(a, w_a, b, w_b, w_sum, residual, ..); y, h as in `norm_linear`

    From a layer with experts to the product of the next. Inputs after w as in `norm_linear`.
    """

    budget = Budget(6, 256, "as dual_norm_residual, then as linear_glu")
    operands = "a w_a b w_b w_sum residual w *rest"
    attrs = NORM | {"act": "str"}

    @staticmethod
    def expand(b: Any, *given: Any, act: str, **norm: Any) -> tuple[Any, Any]:
        return _expand(b, "dual_norm_residual", given, 6, act, norm)

    samples = cases(
        "f32[2,3,16] f32[16] f32[2,3,16] 2*f32[16] f32[2,3,16] f32[24,16] f32[1] f32[16] "
        "{scaled=True, weighted=(True,), act=''}",
        "f32[2,3,16] f32[16] f32[2,3,16] 2*f32[16] f32[2,3,16] f32[24,16] {scaled=False, "
        "weighted=(), act='silu'}",
        eps=1e-06,
    )
