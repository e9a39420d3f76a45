"""Speculative decoding: draft tokens, and one step that verifies all of them.

A verification step feeds a sequence's newest token and k draft tokens, and a token is chosen after
each as ever, with the sequence's own random numbers. As long as the choice is the draft token, the
next logits are valid too: a step yields 1 to k + 1 tokens, those that single steps would have
chosen. Draft tokens come from what followed earlier in the sequence's own text (`NgramProposer`),
or from a draft model, which continues from the hidden state of the large one.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median

import numpy as np

from g4ir.errors import InputError

from .parts import EngineParts

NONE, NGRAM, MTP = "none", "ngram", "mtp"
#: where drafts come from
DRAFTS = (NONE, NGRAM, MTP)
#: tokens at the end of a text that must be found again for a draft, and that are compared at most
LEAST_MATCH, MOST_MATCH = 2, 16
#: what a draft token costs as a share of a step, until steps of so many tokens are measured
COST = 0.12
#: measured steps of a width that count: the newest
NEWEST = 9
#: how much the rounds before count against a new one
MEMORY = 0.7
#: steps of pause after drafts that did not pay: at first, and at most
FIRST_PAUSE, LONGEST_PAUSE = 8, 64


@dataclass(frozen=True)
class SpeculativeConfig:
    """Where drafts come from, and how many tokens a round drafts at most."""

    source: str = NONE
    tokens: int = 0

    def __bool__(self) -> bool:
        return self.source != NONE


NO_DRAFT = SpeculativeConfig()


def find_draft(engine: EngineParts, source: str, tokens: int | None = None) -> SpeculativeConfig:
    """Return what was asked for; InputError where the engine cannot do it."""
    if source not in DRAFTS:
        raise InputError(f"--draft {source!r}: expected one of {', '.join(DRAFTS)}")
    most = engine.draft_tokens
    if source == NONE:
        if tokens is not None:
            raise InputError(f"--draft-tokens {tokens}: nothing is drafted; give --draft too")
        return NO_DRAFT
    if not most:
        raise InputError(
            f"--draft {source}: {engine.path} verifies no drafted tokens; build the engine again "
            f"with --draft-tokens K"
        )
    if source == MTP and engine.drafter is None:
        raise InputError(
            f"--draft {MTP}: {engine.path} has no drafter; build the engine again with "
            f"--drafter DIR"
        )
    if tokens is not None and not 1 <= tokens <= most:
        raise InputError(
            f"--draft-tokens {tokens}: expected 1 to {most}, which this engine was built for; "
            f"build it again with --draft-tokens {max(tokens, 1)} for more"
        )
    return SpeculativeConfig(source, tokens or most)


class NgramProposer:
    """A row's text, and what followed earlier where it ended as it does now."""

    def __init__(self, tokens: Sequence[int]) -> None:
        self._ids = np.empty(max(64, 2 * len(tokens)), np.int64)
        self._count = 0
        self.extend(tokens)

    def extend(self, tokens: Sequence[int]) -> None:
        """Append tokens to the text."""
        end = self._count + len(tokens)
        if end > len(self._ids):
            self._ids = np.concatenate((self._ids, np.empty(max(end, len(self._ids)), np.int64)))
        self._ids[self._count : end] = tokens
        self._count = end

    def propose(self, count: int) -> list[int]:
        """Return up to `count` tokens: those behind the longest earlier match of the text's end,
        the latest of equal ones; where they run into the end itself, the draft repeats itself."""
        ids = self._ids[: self._count]
        ends = np.flatnonzero(ids[:-1] == ids[-1]) if len(ids) else ids
        size = min(1, len(ends))
        while 0 < size < MOST_MATCH:
            longer = ends[ends >= size]
            longer = longer[ids[longer - size] == ids[-1 - size]]
            if not len(longer):
                break
            ends, size = longer, size + 1
        if size < LEAST_MATCH:
            return []
        behind = int(ends[-1]) + 1
        found: list[int] = np.resize(ids[behind:], count).tolist()
        return found


class StepCosts:
    """What steps cost by their tokens per sequence, in steps of one token: measured as they happen.

    Costs decide how many tokens are drafted, and so how fast a text comes, never what it says."""

    def __init__(self) -> None:
        #: (batch, tokens) -> seconds of the newest steps, without the first one, which also
        #: prepares such steps
        self._seconds: dict[tuple[int, int], deque[float]] = {}

    def add(self, batch: int, tokens: int, seconds: float) -> None:
        """Take in a step of `batch` sequences and so many tokens each."""
        if (batch, tokens) in self._seconds:
            self._seconds[batch, tokens].append(seconds)
        else:
            self._seconds[batch, tokens] = deque(maxlen=NEWEST)

    def of(self, batch: int, most: int) -> list[float]:
        """Return the costs of steps of 1 to `most` tokens per sequence. No step costs more than one
        of more tokens; one that was not measured costs COST more for each token than the next
        smaller one that was, so that it is tried: steps of many tokens may come in pieces."""
        known = {t: median(s) for (b, t), s in self._seconds.items() if b == batch and s}
        tokens, widths = np.arange(1, most + 1), sorted(known)
        if widths[:1] != [1]:
            return (1 + COST * (tokens - 1)).tolist()
        seconds = np.array([known[t] for t in widths])
        seconds = np.minimum.accumulate(seconds[::-1])[::-1] / known[1]
        below = np.searchsorted(widths, tokens, side="right") - 1
        above = np.append(seconds, np.inf)[np.searchsorted(widths, tokens)]
        return np.minimum(seconds[below] + COST * (tokens - np.take(widths, below)), above).tolist()


class Pace:
    """How many tokens to draft for a sequence, by what became of its last drafts and by the cost of
    steps."""

    def __init__(self, most: int) -> None:
        self.most = self._count = most
        #: draft tokens that were right, and that were looked at; older rounds count less
        self._right, self._tried = 1.0, 2.0
        #: steps that were saved, less those that drafts cost
        self._credit = 1.0
        #: steps that draft nothing from now on
        self.pause, self._next_pause = 0, FIRST_PAUSE

    def undrafted(self, steps: int) -> None:
        """Take in steps without a draft: of the pause, if there is one."""
        self.pause = max(0, self.pause - steps)

    def count(self, costs: Sequence[float]) -> int:
        """Return how many tokens the next round drafts at most: as many as gain most if each is
        right with the same chance; 0 while it pauses. costs: of steps of 1, 2, ... tokens."""
        if self.pause:
            return 0
        share = self._right / self._tried
        tokens = np.cumsum(share ** np.arange(self._count + 1))
        return 1 + int(np.argmax(tokens[1:] / costs[1 : self._count + 1]))

    def told(self, drafted: int, accepted: int, costs: Sequence[float]) -> None:
        """Take in what became of a round's drafts."""
        self.undrafted(1)
        if not drafted:
            return
        self._right = MEMORY * self._right + accepted
        self._tried = MEMORY * self._tried + min(drafted, accepted + 1)
        self._credit = min(2.0, self._credit + accepted + 1 - costs[drafted])
        self._count = min(self.most, 2 * self._count if accepted == drafted else accepted + 1)
        if accepted == drafted:
            self._next_pause = FIRST_PAUSE
        if self._credit < 0:
            self._credit, self.pause = 0.0, self._next_pause
            self._next_pause = min(2 * self._next_pause, LONGEST_PAUSE)


class RowDrafts:
    """Draft tokens of one sequence: their pace and counts, and its text if they come from that."""

    def __init__(
        self,
        draft: SpeculativeConfig,
        prompt: Sequence[int],
        tallies: Sequence[AcceptanceStats],
        costs: StepCosts,
    ) -> None:
        self.source, self.pace, self._tallies = draft.source, Pace(draft.tokens), tallies
        self._costs = costs
        self.text = NgramProposer(prompt) if draft.source == NGRAM else None
        #: generated tokens that the text has already
        self._followed = 0

    def count(self, room: int, batch: int) -> int:
        """Return how many tokens to draft in a step of `batch` sequences, at most `room`."""
        return max(0, min(self.pace.count(self._costs.of(batch, self.pace.most + 1)), room))

    def undrafted(self, steps: int) -> None:
        """Count steps without a draft, which made a token each."""
        self.pace.undrafted(steps)
        for tally in self._tallies:
            for _ in range(steps):
                tally.add(0, 1)

    def told(self, drafted: int, tokens: int, batch: int) -> None:
        """Count a round that drafted so many tokens and yielded so many."""
        self.pace.told(drafted, tokens - 1, self._costs.of(batch, self.pace.most + 1))
        for tally in self._tallies:
            tally.add(drafted, tokens)

    def propose(self, generated: Sequence[int], count: int) -> list[int]:
        """Return up to `count` tokens to follow the generated ones, from the sequence's text."""
        assert self.text
        self.text.extend(generated[self._followed :])
        self._followed = len(generated)
        return self.text.propose(count) if count else []


@dataclass
class AcceptanceStats:
    """Rounds of a row, those that drafted nothing too; tokens that came of them; how often a token
    was drafted, and accepted, at each place of a draft."""

    rounds: int = 0
    tokens: int = 0
    drafted: Counter[int] = field(default_factory=Counter)
    accepted: Counter[int] = field(default_factory=Counter)

    def add(self, drafted: int, tokens: int) -> None:
        """Count a round of a row."""
        self.rounds += 1
        self.tokens += tokens
        self.drafted.update(range(drafted))
        self.accepted.update(range(min(drafted, tokens - 1)))

    def join(self, other: AcceptanceStats) -> None:
        """Add the counts of another."""
        self.rounds += other.rounds
        self.tokens += other.tokens
        self.drafted.update(other.drafted)
        self.accepted.update(other.accepted)

    def to_dict(self) -> dict[str, object]:
        """Return tokens per round, and the share that was accepted of those drafted, by place."""
        shares = [round(self.accepted[i] / n, 4) for i, n in sorted(self.drafted.items())]
        per_round = round(self.tokens / self.rounds, 4) if self.rounds else None
        return {"rounds": self.rounds, "tokens_per_round": per_round, "accepted": shares}
