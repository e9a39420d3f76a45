"""Norms of sums over ranks: each opens with a message and goes on as the norm does.

Their expansion says what is sent, so whoever runs or counts messages needs to know no more.
"""

from __future__ import annotations

from typing import Any

from .base import Sample, op
from .budgets import Budget
from .collective import all_reduce
from .norm import dual_norm_residual, norm_residual
from .types import Type

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

    @staticmethod
    def infer(
        x: Type,
        residual: Type,
        w_post: Type,
        *rest: Type,
        eps: float,
        scaled: bool,
        weighted: tuple[bool, ...],
        ranks: int,
    ) -> tuple[Type, ...]:
        (total,) = all_reduce.infer(x, ranks=ranks)
        out: tuple[Type, ...] = norm_residual.infer(
            total, residual, w_post, *rest, eps=eps, scaled=scaled, weighted=weighted
        )
        return out

    @staticmethod
    def expand(b: Any, x: Any, *given: Any, ranks: int, **norm: Any) -> tuple[Any, ...]:
        (total,) = b.emit_all("all_reduce", x, ranks=ranks)
        made: tuple[Any, ...] = b.emit_all("norm_residual", total, *given, **norm)
        return made

    samples = [
        Sample(
            ("f32[2,3,16]",) * 2 + ("f32[16]", "f32[1]", "f32[16]"),
            {"eps": 1e-6, "scaled": True, "weighted": (True,), "ranks": 1},
        ),
        Sample(
            ("f32[2,3,16]",) * 2 + ("f32[16]",) * 3,
            {"eps": 1e-6, "scaled": False, "weighted": (True, True, False), "ranks": 1},
        ),
    ]


@op
class all_reduce_dual_norm_residual:
    """h, n.. = dual_norm_residual(a, w_a, b, w_b, ..) of a, b = all_reduce(a, b)

    The sums of the dense MLP and of the experts are one message. Inputs, and results, as in
    `dual_norm_residual`.
    """

    budget = Budget(4, 88, "as all_reduce, then as dual_norm_residual")
    kind = "other"
    rows = (0, 2, 5)
    fold = False

    @staticmethod
    def infer(
        a: Type,
        w_a: Type,
        b: Type,
        w_b: Type,
        w_sum: Type,
        residual: Type,
        *rest: Type,
        eps: float,
        scaled: bool,
        weighted: tuple[bool, ...],
        ranks: int,
    ) -> tuple[Type, ...]:
        one, two = all_reduce.infer(a, b, ranks=ranks)
        given = (one, w_a, two, w_b, w_sum, residual, *rest)
        out: tuple[Type, ...] = dual_norm_residual.infer(
            *given, eps=eps, scaled=scaled, weighted=weighted
        )
        return out

    @staticmethod
    def expand(
        make: Any, a: Any, w_a: Any, b: Any, *given: Any, ranks: int, **norm: Any
    ) -> tuple[Any, ...]:
        one, two = make.emit_all("all_reduce", a, b, ranks=ranks)
        made: tuple[Any, ...] = make.emit_all("dual_norm_residual", one, w_a, two, *given, **norm)
        return made

    samples = [
        Sample(
            ("f32[2,3,16]", "f32[16]") * 2 + ("f32[16]", "f32[2,3,16]", "f32[1]", "f32[16]"),
            {"eps": 1e-6, "scaled": True, "weighted": (True,), "ranks": 1},
        ),
    ]
