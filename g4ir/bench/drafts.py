"""Benchmark of speculative decoding: a text generated without draft tokens, with draft tokens of a
source (n-grams or a draft model), and with drafts that are all rejected or mostly right. The last
two, derived from the text itself, show what drafts cost and what good ones gain on this machine."""

from __future__ import annotations

import random
from collections.abc import Sequence
from functools import partial

from g4ir.backends.sampling import SamplingParams
from g4ir.engine.engine import Engine
from g4ir.engine.requests import Request, RequestHandle
from g4ir.engine.scheduler import Scheduler, SchedulerConfig
from g4ir.engine.speculative import (
    NGRAM,
    NO_DRAFT,
    AcceptanceStats,
    SpeculativeConfig,
    resolve_draft,
)
from g4ir.ui.progress import Progress

from .measure import median
from .report import Values

#: probability that a draft token of the kind RIGHT is right
MOSTLY = 0.7
#: kinds of drafts in addition to the source's: none, all wrong, mostly right
PLAIN, REJECTED, RIGHT = "none", "rejected", "right_70"


class KnownText:
    """Proposer that drafts the known text; each token is right with probability `right`."""

    def __init__(
        self, text: Sequence[int], right: float, vocab: int, prompt: Sequence[int]
    ) -> None:
        rng, self._at = random.Random(0), 0
        self._drafts = [t if rng.random() < right else (t + 1) % vocab for t in text]

    def extend(self, tokens: Sequence[int]) -> None:
        self._at += len(tokens)

    def propose(self, count: int) -> list[int]:
        return self._drafts[self._at : self._at + count]


def measure_drafts(
    engine: Engine, prompt: Sequence[int], new: int, source: str, rounds: int, progress: Progress
) -> Values:
    """Return the speed of `new` greedy tokens after a prompt for each kind of draft, measured in
    interleaved rounds: median tokens/s, and the median ratio to decoding without drafts; and
    `same_text`: whether all runs gave the same tokens. InputError if the engine does not support
    the source."""
    draft = resolve_draft(engine.config, engine.label, source)
    text = _generate(Scheduler(engine, SchedulerConfig()), prompt, new)[0]
    kinds = {PLAIN: NO_DRAFT, source: draft}
    for name, right in ((REJECTED, 0.0), (RIGHT, MOSTLY)):
        proposer = partial(KnownText, text, right, engine.spec.text.vocab_size)
        kinds[name] = SpeculativeConfig(NGRAM, draft.tokens, proposer)
    schedulers = {k: Scheduler(engine, SchedulerConfig(draft=d)) for k, d in kinds.items()}
    rates: dict[str, list[float]] = {k: [] for k in kinds}
    tallies = {k: AcceptanceStats() for k in kinds}
    same = True
    for number in range(rounds + 1):  # the first warms up; schedulers measure step times in it
        progress(f"drafts, round {number} of {rounds}" if number else "drafts, warming up")
        for kind, scheduler in schedulers.items():
            tokens, handle = _generate(scheduler, prompt, new)
            same &= tokens == text
            if number:
                rates[kind].append(handle.counts.tokens_per_second or 0.0)
                tallies[kind].join(handle.tally)
    by_kind = {k: _values(rates[PLAIN], rates[k], tallies[k]) for k in kinds}
    facts = {"source": source, "draft_tokens": draft.tokens, "new_tokens": new}
    return {**facts, "same_text": same, "by_kind": by_kind}


def _generate(
    scheduler: Scheduler, prompt: Sequence[int], new: int
) -> tuple[list[int], RequestHandle]:
    """Return the generated tokens, and the handle, which has their count, speed and acceptance."""
    request = Request(tuple(prompt), new, SamplingParams(ignore_eos=True), reuse=False)
    handle = scheduler.submit(request)
    *events, end = scheduler.run(handle)
    if end.error:
        raise end.error
    return [e.token for e in (*events, end) if e.token is not None], handle


def _values(plain: Sequence[float], rates: Sequence[float], tally: AcceptanceStats) -> Values:
    speedup = median(b / a for a, b in zip(plain, rates, strict=True))
    per_round = tally.tokens / tally.rounds if tally.rounds else 1.0
    facts = {**tally.to_dict(), "tokens_per_round": per_round}
    return {"tokens_per_second": median(rates), "speedup": speedup, **facts}
