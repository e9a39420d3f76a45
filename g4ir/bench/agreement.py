"""Whether two runners compute the same: logits and the choice at every step of the workload."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from g4ir.ir.distance import BUDGETS, Anchor, Errors, Tolerance, median_of, row_errors, worst_of
from g4ir.spec.reader import Line

from .runners import BenchRunner, pieces
from .stats import Amount, Number
from .workload import Workload


@dataclass(frozen=True)
class Agreement:
    """`role` against `base` over `count` choices (rows times output_len).

    cosine and relative are the worst of all; `equal` choices are the same, `close` ones differ
    where the base's two candidates lie within the tolerance of each other.
    """

    role: str
    base: str
    count: Amount
    cosine: Number
    relative: Number
    equal: Amount
    close: Amount
    ok: bool
    budget: Line
    distance_median: Number = None
    distance_worst: Number = None
    base_median: Number = None
    base_worst: Number = None

    def text(self) -> str:
        """Return what is compared, how far it lies apart, and the verdict."""
        close = f", {self.close} close calls" if self.close else ""
        verdict = "ok" if self.ok else "DISAGREES"
        return (
            f"{self.role} against {self.base}: same token {self.equal} of {self.count}{close}, "
            f"cosine at least {_number(self.cosine):.6f}, relative error at most "
            f"{_number(self.relative):.1e}{self._distances()}: {verdict} ({self.budget})"
        )

    def _distances(self) -> str:
        own = [_number(x) for x in (self.distance_median, self.distance_worst)]
        base = [_number(x) for x in (self.base_median, self.base_worst)]
        if math.isnan(base[0]):
            return ""
        return (
            f", distance {own[0]:.1e} in the median and {own[1]:.1e} at worst, that of "
            f"{self.base} {base[0]:.1e} and {base[1]:.1e}"
        )


def _number(x: Number) -> float:
    """Return x, or NaN for the null that a report has for it."""
    return math.nan if x is None else x


def pair_budget(dtypes: Sequence[str], against: str) -> Tolerance:
    """Return the wider budget where the two differ in dtype."""
    found = [BUDGETS[dtype, against] for dtype in dtypes]
    return next((b for b in found if b.cosine is not None), found[0])


def anchored(
    w: Workload, tokens: torch.Tensor, base: BenchRunner, anchor: Anchor, dtype: str
) -> tuple[Anchor, Tolerance]:
    """Return the anchor, its rows the base's own where there is no float64, and the budget that the
    base's rounding gives; rows [rows of the batch * steps, vocab]."""
    base.rewind()
    steps = [base.step(piece).float().cpu() for piece in pieces(w, tokens)]
    want = torch.stack(steps, 1).flatten(0, 1)
    found = replace(anchor, rows=want) if anchor.reason else anchor
    return found, Tolerance(rounding=found.rounding(want, dtype))


#: of a step: errors of its rows, choices that are equal and that are close
Compared = tuple[Errors, int, int]


def compare_runners(
    w: Workload,
    tokens: torch.Tensor,
    base: BenchRunner,
    others: Sequence[tuple[BenchRunner, Tolerance]],
    anchor: Anchor | None = None,
) -> list[Agreement]:
    """Compare runners side by side over one request, so that no logits are kept. `anchor`: what the
    distances of budgets with measured rounding start from, see `anchored`."""
    for runner in (base, *(r for r, _ in others)):
        runner.rewind()
    steps: list[list[Compared]] = [[] for _ in others]
    for at, piece in enumerate(pieces(w, tokens)):
        want = base.step(piece).float().cpu()
        rows = anchor.rows.unflatten(0, (len(want), -1))[:, at] if anchor else want
        for found, (runner, budget) in zip(steps, others, strict=True):
            got = runner.step(piece).float().cpu()
            beside = replace(anchor, rows=rows) if anchor and budget.rounding else None
            errors = beside.errors(got, want) if beside else row_errors(got, want)
            found.append((errors, *_choices(got, want, budget)))
    pairs = zip(others, steps, strict=True)
    return [_judged(r.role, base.role, budget, found) for (r, budget), found in pairs]


def _judged(role: str, base: str, budget: Tolerance, steps: Sequence[Compared]) -> Agreement:
    columns = zip(*(vars(errors).values() for errors, _, _ in steps), strict=True)
    errors = Errors(*map(torch.cat, columns))
    equal, close = sum(s[1] for s in steps), sum(s[2] for s in steps)
    holds = budget.all_hold(errors) and equal + close == len(errors.cosine)
    worst = float(errors.cosine.min()), float(errors.relative.max())
    found = Agreement(role, base, len(errors.cosine), *worst, equal, close, holds, Line(budget))
    if (rounding := budget.rounding) is None:
        return found
    distances = errors.distance.tolist()
    return replace(
        found,
        distance_median=median_of(distances),
        distance_worst=worst_of(distances),
        base_median=rounding.median,
        base_worst=rounding.worst,
    )


def _choices(got: torch.Tensor, want: torch.Tensor, budget: Tolerance) -> tuple[int, int]:
    mine, theirs = got.argmax(-1, keepdim=True), want.argmax(-1, keepdim=True)
    gap = (want.gather(1, theirs) - want.gather(1, mine))[:, 0]
    same = (mine == theirs)[:, 0]
    near = ~same & (gap <= budget.gap * want.pow(2).mean(-1).sqrt())
    return int(same.sum()), int(near.sum())


def void_roles(agreements: Sequence[Agreement]) -> set[str]:
    """Return the roles that agree with nobody: their numbers are the speed of something else."""
    roles = {a.role for a in agreements} | {a.base for a in agreements}
    return roles - {role for a in agreements if a.ok for role in (a.role, a.base)}
