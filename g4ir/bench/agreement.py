"""Whether two runners compute the same: logits and the choice at every step of the workload."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from g4ir.check.logits import find_anchor, rounding_error
from g4ir.check.peers import EnginePeer, HfPeer
from g4ir.check.reference import float64_refusal, reference_engine
from g4ir.check.tokens import Turns
from g4ir.ir.distance import (
    BUDGETS,
    ROUNDED,
    Anchor,
    Tolerance,
    median_of,
    row_errors,
    widened,
    worst_of,
)
from g4ir.spec.reader import Line

from .measure import Amount, Number
from .runners import BenchRunner, HfRunner, Workload, pieces, reference_runner


@dataclass(frozen=True)
class Agreement:
    """`role` against `base` over `count` choices (rows times output_len).

    cosine and relative are the worst of all; `equal` choices are the same, `close` ones differ
    where the base's two candidates lie within the tolerance of each other. Distances are those to
    float64, where rounding is measured.
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
        # A report has null for what is not a number.
        n = {k: math.nan if v is None else v for k, v in vars(self).items()}
        close = f", {self.close} close calls" if self.close else ""
        apart = (
            f", distance {n['distance_median']:.1e} in the median and {n['distance_worst']:.1e} at "
            f"worst, that of {self.base} {n['base_median']:.1e} and {n['base_worst']:.1e}"
        )
        return (
            f"{self.role} against {self.base}: same token {self.equal} of {self.count}{close}, "
            f"cosine at least {n['cosine']:.6f}, relative error at most {n['relative']:.1e}"
            f"{'' if math.isnan(n['base_median']) else apart}: "
            f"{'ok' if self.ok else 'DISAGREES'} ({self.budget})"
        )


def agreements_of(
    w: Workload, tokens: torch.Tensor, runners: Sequence[BenchRunner]
) -> list[Agreement]:
    """Compare everybody with the first peer, or with the interpreter where there is none."""
    first = next(r.engine for r in runners if r.engine)
    peers = [r for r in runners if isinstance(r, HfRunner)]
    base: BenchRunner = peers[0] if peers else reference_runner(first, w.batch)
    base.hold(tokens[:, : w.context])
    want = logits_of(base, w, tokens)
    against, dtype, anchor = "hf" if peers else "reference", first.dtype, None
    sizes = [w.context + w.input_len, *[1] * (w.output_len - 1)]
    given = [Turns(ids, sizes) for ids in tokens]
    if dtype in ROUNDED:
        own = reference_engine(first, held=True)
        peer = HfPeer(peers[0].model) if peers else EnginePeer(own)
        refusal = float64_refusal(own, w.fed, w.batch * w.output_len, own.device)
        anchor = find_anchor(peer, given, want, refusal)
    measured = anchor and Tolerance(rounding=anchor.rounding(want, dtype))
    found = []
    for runner in runners:
        if runner is base:
            continue
        other = (runner.engine or first).dtype
        budget = pair_budget([dtype, other], against)
        budget = runner.tolerance or (measured if measured and other == dtype else budget)
        got = logits_of(runner, w, tokens)
        made = compared(runner.role, got, base.role, want, budget, anchor)
        if not made.ok and budget.relative is not None:
            # As verify does: random weights can make a model in which rounding grows.
            budget = widened(budget, rounding_error(first, given[0]))
            made = compared(runner.role, got, base.role, want, budget, anchor)
        found.append(made)
    return found


def pair_budget(dtypes: Sequence[str], against: str) -> Tolerance:
    """Return the wider budget where the two differ in dtype."""
    found = [BUDGETS[dtype, against] for dtype in dtypes]
    return next((b for b in found if b.cosine is not None), found[0])


def logits_of(runner: BenchRunner, w: Workload, tokens: torch.Tensor) -> torch.Tensor:
    """Return f32[rows of the batch * steps, vocab] of one request."""
    runner.rewind()
    steps = [runner.step(piece).float().cpu() for piece in pieces(w, tokens)]
    return torch.stack(steps, 1).flatten(0, 1)


def compared(
    role: str,
    got: torch.Tensor,
    base: str,
    want: torch.Tensor,
    budget: Tolerance,
    anchor: Anchor | None = None,
) -> Agreement:
    """Compare rows of logits, and the tokens that they choose. `anchor`: what the distances of a
    budget with measured rounding start from."""
    rounding = budget.rounding
    errors = anchor.errors(got, want) if anchor and rounding else row_errors(got, want)
    mine, theirs = got.argmax(-1, keepdim=True), want.argmax(-1, keepdim=True)
    gap = (want.gather(1, theirs) - want.gather(1, mine))[:, 0]
    same = (mine == theirs)[:, 0]
    near = ~same & (gap <= budget.gap * want.pow(2).mean(-1).sqrt())
    equal, close, own = int(same.sum()), int(near.sum()), errors.distance.tolist()
    return Agreement(
        role,
        base,
        len(want),
        float(errors.cosine.min()),
        float(errors.relative.max()),
        equal,
        close,
        budget.all_hold(errors) and equal + close == len(want),
        Line(budget),
        *((median_of(own), worst_of(own), rounding.median, rounding.worst) if rounding else ()),
    )


def void_roles(agreements: Sequence[Agreement]) -> set[str]:
    """Return the roles that agree with nobody: their numbers are the speed of something else."""
    roles = {a.role for a in agreements} | {a.base for a in agreements}
    return roles - {role for a in agreements if a.ok for role in (a.role, a.base)}
