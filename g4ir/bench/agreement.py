"""Whether two runners compute the same: logits and the choice at every step of the workload."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch

from g4ir.ir.distance import BUDGETS, Anchor, Budget, Errors, median_of, row_errors, worst_of

from .runners import Runner, pieces
from .workload import Workload


@dataclass(frozen=True)
class Agreement:
    """`role` against `base` over `count` choices (rows times output_len).

    cosine and relative are the worst of all; `equal` choices are the same, `close` ones differ
    where the base's two candidates lie within the budget of each other.
    """

    role: str
    base: str
    count: int
    cosine: float
    relative: float
    equal: int
    close: int
    ok: bool
    budget: str
    distance_median: float | None = None
    distance_worst: float | None = None
    base_median: float | None = None
    base_worst: float | None = None

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    def text(self) -> str:
        close = f", {self.close} close calls" if self.close else ""
        verdict = "ok" if self.ok else "DISAGREES"
        return (
            f"{self.role} against {self.base}: same token {self.equal} of {self.count}{close}, "
            f"cosine at least {self.cosine:.6f}, relative error at most {self.relative:.1e}"
            f"{self._distances()}: {verdict} ({self.budget})"
        )

    def _distances(self) -> str:
        if self.base_median is None or math.isnan(self.base_median):
            return ""
        return (
            f", distance {self.distance_median:.1e} in the median and {self.distance_worst:.1e} "
            f"at worst, that of {self.base} {self.base_median:.1e} and {self.base_worst:.1e}"
        )


def pair_budget(dtypes: Sequence[str], against: str) -> Budget:
    """The wider one where the two differ in dtype."""
    found = [BUDGETS[dtype, against] for dtype in dtypes]
    return next((b for b in found if b.cosine is not None), found[0])


def anchored(
    w: Workload, tokens: torch.Tensor, base: Runner, anchor: Anchor, dtype: str
) -> tuple[Anchor, Budget]:
    """The anchor, its rows the base's own where there is no float64, and the budget that the
    base's rounding gives; rows [rows of the batch * steps, vocab]."""
    base.rewind()
    steps = [base.step(piece).float().cpu() for piece in pieces(w, tokens)]
    want = torch.stack(steps, 1).flatten(0, 1)
    found = replace(anchor, rows=want) if anchor.reason else anchor
    return found, Budget(rounding=found.rounding(want, dtype))


def compare_runners(
    w: Workload,
    tokens: torch.Tensor,
    base: Runner,
    others: Sequence[tuple[Runner, Budget]],
    anchor: Anchor | None = None,
) -> list[Agreement]:
    """All of them side by side over one request, so that no logits are kept. `anchor`: what the
    distances of budgets with measured rounding start from, see `anchored`."""
    for runner in (base, *(r for r, _ in others)):
        runner.rewind()
    found = [Agreement(r.role, base.role, 0, 1.0, 0.0, 0, 0, True, str(b)) for r, b in others]
    distances: list[list[float]] = [[] for _ in others]
    for at, piece in enumerate(pieces(w, tokens)):
        want = base.step(piece).float().cpu()
        for i, (runner, budget) in enumerate(others):
            got = runner.step(piece).float().cpu()
            errors = row_errors(got, want)
            if budget.rounding and anchor:
                rows = anchor.rows.unflatten(0, (len(want), -1))[:, at]
                errors = replace(anchor, rows=rows).errors(got, want)
                distances[i] += errors.distance.tolist()
            found[i] = _with(found[i], got, want, errors, budget)
    return [_judged(a, d, b) for a, d, (_, b) in zip(found, distances, others, strict=True)]


def _judged(a: Agreement, distances: Sequence[float], budget: Budget) -> Agreement:
    """With what all the choices together say."""
    rounding = budget.rounding
    if rounding is None or not distances:
        return a
    median = median_of(distances)
    return replace(
        a,
        distance_median=median,
        distance_worst=worst_of(distances),
        base_median=rounding.median,
        base_worst=rounding.worst,
        ok=a.ok and rounding.fits(distances),
    )


def _with(
    a: Agreement, got: torch.Tensor, want: torch.Tensor, errors: Errors, budget: Budget
) -> Agreement:
    """One step more."""
    equal, close = _choices(got, want, budget)
    within = bool(budget.holds(errors).all()) and equal + close == len(got)
    return replace(
        a,
        count=a.count + len(got),
        equal=a.equal + equal,
        close=a.close + close,
        cosine=_worst(a.cosine, errors.cosine.min()),
        relative=-_worst(-a.relative, -errors.relative.max()),
        ok=a.ok and within,
    )


def _worst(before: float, now: torch.Tensor) -> float:
    """The smaller; what is not a number stays so."""
    return float(torch.minimum(torch.tensor(before, dtype=now.dtype), now))


def _choices(got: torch.Tensor, want: torch.Tensor, budget: Budget) -> tuple[int, int]:
    """How many rows choose the same token, and how many another that is as good."""
    mine, theirs = got.argmax(-1, keepdim=True), want.argmax(-1, keepdim=True)
    gap = (want.gather(1, theirs) - want.gather(1, mine))[:, 0]
    same = (mine == theirs)[:, 0]
    near = ~same & (gap <= budget.gap * want.pow(2).mean(-1).sqrt())
    return int(same.sum()), int(near.sum())


def void_roles(agreements: Sequence[Agreement]) -> set[str]:
    """Roles that agree with nobody: their numbers are the speed of something else."""
    roles = {a.role for a in agreements} | {a.base for a in agreements}
    return roles - {role for a in agreements if a.ok for role in (a.role, a.base)}
