"""Speculative decoding: draft tokens, and one step that verifies all of them.

A verification step feeds a sequence's newest token and k draft tokens; after each, a token is
sampled as usual, from the sequence's random stream. While the sample equals the draft token, the
next logits are valid too: a step yields 1 to k + 1 tokens, those of plain decode steps but for
rounding (matmuls of several tokens may sum in another order).
Draft tokens come from n-gram matches in the sequence's text (`NgramProposer`), or from a draft
model (MTP) that continues from the target's hidden state.
"""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

import numpy as np

from g4ir.errors import InputError
from g4ir.plan.options import BuildConfig

NONE, NGRAM, MTP = "none", "ngram", "mtp"
#: sources of drafts
DRAFTS = (NONE, NGRAM, MTP)
#: shortest n-gram that yields a draft, and the longest compared
MIN_MATCH, MAX_MATCH = 2, 16
#: assumed cost of a draft token, as a fraction of a step, until measured
COST = 0.12
#: min extra cost of a verification step, as a fraction of a plain one: it may seem free if the two
#: were measured at different times, and drafts that are never accepted would then not be paused
MIN_EXTRA = 0.1
#: number of newest measurements per (batch, tokens) that count
NEWEST = 9
#: decay factor, per verification step, of earlier draft tokens in the acceptance rate
MEMORY = 0.7
#: first and longest pause, in steps, after drafts that cost more than they saved; a pause lasts
#: longer if the credit needs it
FIRST_PAUSE, LONGEST_PAUSE = 8, 64
#: plain steps per batch size that are measured before the first draft: the cost of drafts is
#: relative to them
PLAIN_STEPS = 3
#: initial credit in steps, and the credit that each step earns: drafts that are all rejected cost
#: less than 3 % of the time of an answer of 32 or more tokens
CREDIT, CREDIT_PER_STEP = 0.4, 0.015


@dataclass(frozen=True)
class SpeculativeConfig:
    """Source of drafts, and the maximum draft tokens per verification step (0: as many as the
    engine was built for). `proposer`: creates the proposer for a prompt's tokens, if the source is
    NGRAM; default: NgramProposer."""

    source: str = NONE
    tokens: int = 0
    proposer: Callable[[Sequence[int]], Any] | None = None

    def __bool__(self) -> bool:
        return self.source != NONE


NO_DRAFT = SpeculativeConfig()


def resolve_draft(
    config: BuildConfig, label: str, source: str, tokens: int | None = None
) -> SpeculativeConfig:
    """Return the config of --draft and --draft-tokens; InputError if an engine of this config
    cannot do it. `label`: the engine's name in errors."""
    if source not in DRAFTS:
        raise InputError(f"--draft {source!r}: expected one of {', '.join(DRAFTS)}")
    max_tokens = config.draft_tokens
    if source == NONE:
        if tokens is not None:
            fix = f"leave it out, or give --draft {NGRAM} or {MTP}"
            raise InputError(f"--draft-tokens {tokens}: nothing is drafted; {fix}")
        return NO_DRAFT
    again = "build the engine again with"
    if source == MTP and config.drafter is None:
        raise InputError(f"--draft {MTP}: {label} has no draft model; {again} --drafter DIR")
    if not max_tokens:
        why = f"{label} verifies no drafted tokens"
        raise InputError(f"--draft {source}: {why}; {again} --draft-tokens K")
    if tokens is not None and not 1 <= tokens <= max_tokens:
        raise InputError(
            f"--draft-tokens {tokens}: expected 1 to {max_tokens}, which this engine was built "
            "for; build it again with a larger --draft-tokens for more"
        )
    return SpeculativeConfig(source, tokens or max_tokens)


class NgramProposer:
    """Prompt lookup: drafts the tokens that followed an earlier match of the text's end."""

    def __init__(self, tokens: Sequence[int]) -> None:
        self._ids = np.empty(max(64, 2 * len(tokens)), np.int64)
        self._count = 0
        self.extend(tokens)

    def extend(self, tokens: Sequence[int]) -> None:
        end = self._count + len(tokens)
        if end > len(self._ids):
            self._ids = np.concatenate((self._ids, np.empty(max(end, len(self._ids)), np.int64)))
        self._ids[self._count : end] = tokens
        self._count = end

    def propose(self, count: int) -> list[int]:
        """Return the `count` tokens that follow the longest earlier match of the text's end, the
        latest of equal length; if the text ends first, the draft repeats. Empty without a match of
        MIN_MATCH tokens."""
        ids = self._ids[: self._count]
        ends = np.flatnonzero(ids[:-1] == ids[-1]) if len(ids) else ids
        size = min(1, len(ends))
        while 0 < size < MAX_MATCH:
            longer = ends[ends >= size]
            longer = longer[ids[longer - size] == ids[-1 - size]]
            if not len(longer):
                break
            ends, size = longer, size + 1
        if size < MIN_MATCH:
            return []
        start = int(ends[-1]) + 1
        return np.resize(ids[start:], count).tolist()


class StepCosts:
    """Measured step times by batch and tokens per sequence; `of` relates them to one-token steps.

    They decide how many tokens are drafted: speed only, never the output."""

    def __init__(self) -> None:
        #: (batch, tokens) -> seconds of the newest steps, without the first one (warm-up)
        self._seconds: dict[tuple[int, int], deque[float]] = {}

    def add(self, batch: int, tokens: int, seconds: float) -> None:
        """Record a step of this batch size, with `tokens` per sequence."""
        if (batch, tokens) in self._seconds:
            self._seconds[batch, tokens].append(seconds)
        else:
            self._seconds[batch, tokens] = deque(maxlen=NEWEST)

    def is_measured(self, batch: int) -> bool:
        """Whether enough plain steps of this batch size are measured to compare drafts with."""
        return len(self._seconds.get((batch, 1), ())) >= PLAIN_STEPS

    def of(self, batch: int, max_tokens: int) -> list[float]:
        """Return the costs of steps of 1 to max_tokens tokens per sequence, relative to a
        one-token step. Costs never fall with the number of tokens, and several tokens cost at least
        1 + MIN_EXTRA. An unmeasured size costs COST per additional token more than the next smaller
        measured one, but no more than the next larger one, so that it is tried."""
        measured = {t: median(s) for (b, t), s in self._seconds.items() if b == batch and s}
        tokens, sizes = np.arange(1, max_tokens + 1), sorted(measured)
        if sizes[:1] != [1]:
            return (1 + COST * (tokens - 1)).tolist()
        seconds = np.array([measured[t] for t in sizes])
        seconds = np.minimum.accumulate(seconds[::-1])[::-1] / measured[1]
        below = np.searchsorted(sizes, tokens, side="right") - 1
        above = np.append(seconds, np.inf)[np.searchsorted(sizes, tokens)]
        costs = np.minimum(seconds[below] + COST * (tokens - np.take(sizes, below)), above)
        return np.maximum(costs, 1 + MIN_EXTRA * (tokens > 1)).tolist()


class Pace:
    """Draft length of a sequence, from its recent acceptance rate and the cost of steps. The credit
    bounds the cost of drafts that are all rejected."""

    def __init__(self, max_tokens: int) -> None:
        self.max_tokens = self._count = max_tokens
        #: accepted and verified draft tokens; those of older steps decay (MEMORY)
        self._right, self._tried = 1.0, 2.0
        #: credit: steps saved minus the cost of drafts, in steps; and the maximum to which plain
        #: steps may raise it
        self._credit, self._most_earned = CREDIT, CREDIT
        #: steps until the next draft, and the length of the next pause
        self.pause, self._next_pause = 0, FIRST_PAUSE

    def record_plain_steps(self, steps: int) -> None:
        """Record steps without a draft; they count towards the pause, and earn credit."""
        self.pause = max(0, self.pause - steps)
        earned = min(self._most_earned, self._credit + CREDIT_PER_STEP * steps)
        self._credit = max(self._credit, earned)

    def count(self, costs: Sequence[float]) -> int:
        """Return the draft length that maximises tokens per cost, if each token is accepted with
        the same probability, among lengths up to `_count` whose rejection the credit covers; 0
        during a pause, and if there is none. costs: of steps of 1, 2, ... tokens."""
        self._most_earned = max(CREDIT, costs[1] - 1)
        affordable = sum(cost - 1 <= self._credit for cost in costs[1 : self._count + 1])
        if not affordable:
            self._wait(costs)
        if self.pause:
            return 0
        share = self._right / self._tried
        tokens = np.cumsum(share ** np.arange(affordable + 1))
        return 1 + int(np.argmax(tokens[1:] / costs[1 : affordable + 1]))

    def record(self, drafted: int, accepted: int, costs: Sequence[float]) -> None:
        """Record a step: its number of draft tokens (0: a plain step) and of accepted ones; costs
        as in `count`."""
        self.record_plain_steps(1)
        if not drafted:
            return
        self._right = MEMORY * self._right + accepted
        self._tried = MEMORY * self._tried + min(drafted, accepted + 1)
        # Capped at the cost of two drafts of the maximum length, or 2 steps if that is more.
        max_credit = max(2.0, 2 * (costs[-1] - 1))
        self._credit = min(max_credit, self._credit + accepted + 1 - costs[drafted])
        self._count = min(self.max_tokens, 2 * self._count if accepted == drafted else accepted + 1)
        if accepted == drafted and costs[drafted] < drafted + 1:
            self._next_pause = FIRST_PAUSE
        if costs[1] - 1 > self._credit:
            self.pause = self._next_pause
            self._next_pause = min(2 * self._next_pause, LONGEST_PAUSE)
            self._wait(costs)

    def _wait(self, costs: Sequence[float]) -> None:
        """Pause until the credit covers the shortest draft."""
        needed = costs[1] - 1 - self._credit
        self.pause = max(self.pause, 1, math.ceil(needed / CREDIT_PER_STEP))


class RowDrafts:
    """Speculative decoding of one sequence: draft length, stats, and its n-gram proposer."""

    def __init__(
        self,
        draft: SpeculativeConfig,
        prompt: Sequence[int],
        stats: Sequence[AcceptanceStats],
        costs: StepCosts,
    ) -> None:
        self.source, self.pace, self._stats = draft.source, Pace(draft.tokens), stats
        self._costs = costs
        proposer = draft.proposer or NgramProposer
        self.text = proposer(prompt) if draft.source == NGRAM else None
        #: number of generated tokens already in `text`
        self._followed = 0

    def count(self, max_tokens: int, batch: int) -> int:
        """Return how many tokens to draft in a step of this batch size, at most max_tokens; 0
        until enough plain steps are measured."""
        if not self._costs.is_measured(batch):
            return 0
        return max(
            0, min(self.pace.count(self._costs.of(batch, self.pace.max_tokens + 1)), max_tokens)
        )

    def record_plain_steps(self, steps: int) -> None:
        """Record plain decode steps (one token each) in the pace and the acceptance stats."""
        self.pace.record_plain_steps(steps)
        for entry in self._stats:
            for _ in range(steps):
                entry.add(0, 1)

    def record(self, drafted: int, tokens: int, batch: int) -> None:
        """Record a step of this batch size: the sequence's draft tokens, and the tokens that it got
        (accepted + 1)."""
        self.pace.record(drafted, tokens - 1, self._costs.of(batch, self.pace.max_tokens + 1))
        for entry in self._stats:
            entry.add(drafted, tokens)

    def propose(self, generated: Sequence[int], count: int) -> list[int]:
        """Return up to `count` n-gram draft tokens after the generated ones."""
        assert self.text
        self.text.extend(generated[self._followed :])
        self._followed = len(generated)
        return self.text.propose(count) if count else []


@dataclass
class AcceptanceStats:
    """Steps of sequences (`rounds`: verification and plain steps), the tokens they yielded, and
    draft tokens proposed and accepted, by position in the draft."""

    rounds: int = 0
    tokens: int = 0
    drafted: Counter[int] = field(default_factory=Counter)
    accepted: Counter[int] = field(default_factory=Counter)

    def add(self, drafted: int, tokens: int) -> None:
        """Count a step of one sequence: its draft tokens, and the tokens it yielded (accepted +
        1)."""
        self.rounds += 1
        self.tokens += tokens
        self.drafted.update(range(drafted))
        self.accepted.update(range(min(drafted, tokens - 1)))

    def join(self, other: AcceptanceStats) -> None:
        self.rounds += other.rounds
        self.tokens += other.tokens
        self.drafted.update(other.drafted)
        self.accepted.update(other.accepted)

    def to_dict(self) -> dict[str, object]:
        """Return a JSON object: steps (`rounds`), tokens per step (None without steps), and the
        acceptance rate by draft position."""
        shares = [round(self.accepted[i] / n, 4) for i, n in sorted(self.drafted.items())]
        per_round = round(self.tokens / self.rounds, 4) if self.rounds else None
        return {"rounds": self.rounds, "tokens_per_round": per_round, "accepted": shares}
