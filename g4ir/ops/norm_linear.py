"""A product behind the norm that makes its rows, as one op."""

from __future__ import annotations

from typing import Any

from .base import Sample, op, require
from .budgets import Budget
from .linear import linear
from .mlp import linear_glu
from .norm import norm_residual
from .types import Type


def cut(
    rest: tuple[Any, ...], scaled: bool, weighted: tuple[bool, ...]
) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    """Return what `norm_residual` takes behind w_post, and the rest: up, or nothing."""
    end = scaled + sum(weighted)
    return rest[:end], rest[end:]


@op
class norm_linear:
    """h, n = norm_residual(x, residual, w_post, ..); y = linear(n, w), or with `act` linear_glu

    Results: y, h. Without a pre-norm in `weighted`, which has one entry at most, n is h. Inputs
    after w: those of `norm_residual` after w_post, then the up of `linear_glu`, where there is one.
    """

    budget = Budget(5, 256, "as norm_residual, then as linear_glu")

    @staticmethod
    def infer(
        x: Type,
        residual: Type,
        w_post: Type,
        w: Type,
        *rest: Type,
        eps: float,
        scaled: bool,
        weighted: tuple[bool, ...],
        act: str,
    ) -> tuple[Type, Type]:
        require(len(weighted) <= 1, f"norm_linear: {len(weighted)} pre-norms before one product")
        more, up = cut(rest, scaled, weighted)
        require(len(up) <= bool(act), f"norm_linear: {len(up)} inputs behind those of the norm")
        norms = norm_residual.infer(
            x, residual, w_post, *more, eps=eps, scaled=scaled, weighted=weighted
        )
        y: Type = linear_glu.infer(x, w, *up, act=act) if act else linear.infer(x, w)
        return y, norms[0]

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
        more, up = cut(rest, scaled, weighted)
        norm = {"eps": eps, "scaled": scaled, "weighted": weighted}
        made = b.emit_all("norm_residual", x, residual, w_post, *more, **norm)
        gate = {"act": act} if act else {}
        return b.emit("linear_glu" if act else "linear", made[-1], w, *up, **gate), made[0]

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
