"""Whether two runners compute the same: logits and the choice at every step of the workload."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch

from ..compare import BUDGETS, Budget, row_errors
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

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    def text(self) -> str:
        close = f", {self.close} close calls" if self.close else ""
        verdict = "ok" if self.ok else "DISAGREES"
        return (
            f"{self.role} against {self.base}: same token {self.equal} of {self.count}{close}, "
            f"cosine at least {self.cosine:.6f}, relative error at most {self.relative:.1e}: "
            f"{verdict} ({self.budget})"
        )


def pair_budget(dtypes: Sequence[str], against: str) -> Budget:
    """The wider one where the two differ in dtype."""
    found = [BUDGETS[dtype, against] for dtype in dtypes]
    return next((b for b in found if b.cosine is not None), found[0])


def compare_runners(
    w: Workload, tokens: torch.Tensor, base: Runner, others: Sequence[tuple[Runner, Budget]]
) -> list[Agreement]:
    """All of them side by side over one request, so that no logits are kept."""
    for runner in (base, *(r for r, _ in others)):
        runner.rewind()
    found = [Agreement(r.role, base.role, 0, 1.0, 0.0, 0, 0, True, str(b)) for r, b in others]
    for piece in pieces(w, tokens):
        want = base.step(piece).float().cpu()
        for i, (runner, budget) in enumerate(others):
            found[i] = _with(found[i], runner.step(piece).float().cpu(), want, budget)
    return found


def _with(a: Agreement, got: torch.Tensor, want: torch.Tensor, budget: Budget) -> Agreement:
    """One step more."""
    errors = row_errors(got, want)
    equal, close = _choices(got, want, budget)
    within = bool(budget.holds(errors).all()) and equal + close == len(got)
    return replace(
        a, count=a.count + len(got), equal=a.equal + equal, close=a.close + close,
        cosine=_worst(a.cosine, errors.cosine.min()),
        relative=-_worst(-a.relative, -errors.relative.max()),
        ok=a.ok and within,
    )  # fmt: skip


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
