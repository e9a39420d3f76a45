"""Norms in one op with the product after them."""

from __future__ import annotations

from typing import Any

from .base import cases, op, require
from .budgets import Budget
from .norm import NORM


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

    budget = Budget(6, 256, "as norm_residual, then as linear_glu")
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

    budget = Budget(7, 256, "as dual_norm_residual, then as linear_glu")
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
