"""A product behind the norm that makes its rows, as one op; and with the product behind it."""

from __future__ import annotations

from typing import Any

from .base import Sample, op, require
from .budgets import Budget


def _cut(
    rest: tuple[Any, ...], scaled: bool, weighted: tuple[bool, ...]
) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    """Return what `norm_residual` takes behind w_post, and the rest: up, or nothing."""
    end = scaled + sum(weighted)
    return rest[:end], rest[end:]


def _multiplied(b: Any, made: tuple[Any, ...], w: Any, up: tuple[Any, ...], act: str) -> Any:
    """Emit the product of a norm's last result."""
    require(len(made) <= 2, f"{len(made) - 1} pre-norms, but one product")
    require(len(up) <= bool(act), f"{len(up)} inputs after those of the norm")
    if act:
        return b.emit("linear_glu", made[-1], w, *up, act=act)
    return b.emit("linear", made[-1], w)


@op
class norm_linear:
    """h, n = norm_residual(x, residual, w_post, ..); y = linear(n, w), or with `act` linear_glu

    Results: y, h. Without a pre-norm in `weighted`, which has one entry at most, n is h. Inputs
    after w: those of `norm_residual` after w_post, then the up of `linear_glu`, where there is one.
    """

    budget = Budget(5, 256, "as norm_residual, then as linear_glu")

    @staticmethod
    def expand(
        b: Any,
        x: Any,
        residual: Any,
        w_post: Any,
        w: Any,
        *rest: Any,
        eps: float,
        scaled: bool,
        weighted: tuple[bool, ...],
        act: str,
    ) -> tuple[Any, Any]:
        more, up = _cut(rest, scaled, weighted)
        norm: dict[str, Any] = {"eps": eps, "scaled": scaled, "weighted": weighted}
        made = b.emit_all("norm_residual", x, residual, w_post, *more, **norm)
        return _multiplied(b, made, w, up, act), made[0]

    samples = [
        Sample(
            ("f32[2,3,16]",) * 2 + ("f32[16]", "f32[24,16]", "f32[1]", "f32[16]"),
            {"eps": 1e-6, "scaled": True, "weighted": (True,), "act": ""},
        ),
        Sample(
            ("f32[2,3,16]",) * 2 + ("f32[16]", "f32[24,16]", "f32[16]"),
            {"eps": 1e-6, "scaled": False, "weighted": (True,), "act": "silu"},
        ),
        Sample(
            ("f32[2,3,16]",) * 2 + ("f32[16]", "f32[8,16]", "f32[2,3,8]"),
            {"eps": 1e-6, "scaled": False, "weighted": (), "act": "gelu_pytorch_tanh"},
        ),
    ]


@op
class dual_norm_linear:
    """h, n = dual_norm_residual(a, w_a, b, w_b, w_sum, residual, ..); y, h as in `norm_linear`

    From a layer with experts to the product of the next. Inputs after w as in `norm_linear`.
    """

    budget = Budget(6, 256, "as dual_norm_residual, then as linear_glu")

    @staticmethod
    def expand(
        make: Any,
        a: Any,
        w_a: Any,
        b: Any,
        w_b: Any,
        w_sum: Any,
        residual: Any,
        w: Any,
        *rest: Any,
        eps: float,
        scaled: bool,
        weighted: tuple[bool, ...],
        act: str,
    ) -> tuple[Any, Any]:
        more, up = _cut(rest, scaled, weighted)
        norm: dict[str, Any] = {"eps": eps, "scaled": scaled, "weighted": weighted}
        given = (a, w_a, b, w_b, w_sum, residual, *more)
        made = make.emit_all("dual_norm_residual", *given, **norm)
        return _multiplied(make, made, w, up, act), made[0]

    samples = [
        Sample(
            ("f32[2,3,16]", "f32[16]") * 2
            + ("f32[16]", "f32[2,3,16]", "f32[24,16]", "f32[1]", "f32[16]"),
            {"eps": 1e-6, "scaled": True, "weighted": (True,), "act": ""},
        ),
        Sample(
            ("f32[2,3,16]", "f32[16]") * 2 + ("f32[16]", "f32[2,3,16]", "f32[24,16]"),
            {"eps": 1e-6, "scaled": False, "weighted": (), "act": "silu"},
        ),
    ]
