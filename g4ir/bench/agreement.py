"""Whether two runners compute the same: logits and the choice at every step of the workload."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import torch

from g4ir.check.logits import find_anchor, rounding_error
from g4ir.check.peers import EnginePeer, HfPeer
from g4ir.check.reference import float64_refusal, reference_engine
from g4ir.check.tokens import Turns
from g4ir.ir.distance import BUDGETS, Anchor, Errors, Tolerance, judge

from .runners import BenchRunner, HfRunner, Workload, pieces, reference_runner


@dataclass(frozen=True)
class Agreement:
    """`role` against `base` over `count` choices (rows times output_len).

    cosine and relative are the worst of all; `equal` choices are the same, `close` ones differ
    where the base's two candidates lie within the tolerance of each other.
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


def agreements_of(
    w: Workload, tokens: torch.Tensor, runners: Sequence[BenchRunner]
) -> list[Agreement]:
    """Compare everybody with the first peer, or with the interpreter where there is none."""
    first = next(r.engine for r in runners if r.engine)
    peers = [r for r in runners if isinstance(r, HfRunner)]
    base: BenchRunner = peers[0] if peers else reference_runner(first, w.batch)
    base.hold(tokens[:, : w.context])
    want = logits_of(base, w, tokens)
    against = "hf" if peers else "reference"
    sizes = [w.context + w.input_len, *[1] * (w.output_len - 1)]
    given = [Turns(ids, sizes) for ids in tokens]

    @cache
    def anchor() -> Anchor | None:
        own = reference_engine(first, held=True)
        peer = HfPeer(peers[0].model) if peers else EnginePeer(own)
        refusal = float64_refusal(own, w.fed, w.batch * w.output_len, own.device)
        return find_anchor(peer, given, want, refusal)

    found = []
    for runner in runners:
        if runner is base:
            continue
        dtypes = [first.dtype, (runner.engine or first).dtype]
        measured = runner.tolerance is None and len({*dtypes}) == 1
        got = logits_of(runner, w, tokens)
        budget, (errors,) = judge(
            runner.tolerance or pair_budget(dtypes, against),
            first.dtype,
            [got],
            want,
            anchor=anchor if measured else lambda: None,
            rounding=lambda: rounding_error(first, given[0]),
        )
        found.append(compared(runner.role, got, base.role, want, budget, errors))
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
    errors: Errors,
) -> Agreement:
    """Return the agreement of rows of logits, and of the tokens that they choose."""
    mine, theirs = got.argmax(-1, keepdim=True), want.argmax(-1, keepdim=True)
    gap = (want.gather(1, theirs) - want.gather(1, mine))[:, 0]
    same = (mine == theirs)[:, 0]
    near = ~same & (gap <= budget.gap * want.pow(2).mean(-1).sqrt())
    equal, close = int(same.sum()), int(near.sum())
    return Agreement(
        role,
        base,
        len(want),
        float(errors.cosine.min()),
        float(errors.relative.max()),
        equal,
        close,
        budget.all_hold(errors) and equal + close == len(want),
        str(budget),
    )


def void_roles(agreements: Sequence[Agreement]) -> set[str]:
    """Return the roles that agree with nobody: their numbers are the speed of something else."""
    roles = {a.role for a in agreements} | {a.base for a in agreements}
    return roles - {role for a in agreements if a.ok for role in (a.role, a.base)}
