"""Speculative decoding against single steps: one engine generates the same text both ways, in turn.

Elsewhere in a benchmark the tokens are given, and here they are the engine's own, the likeliest
ones: how many drafts are right depends on what is written. The prompt repeats a piece of itself,
as a text that is edited repeats another, unless it is taken from a text. Where rounds choose other
tokens than single steps do, that is told: in 16 bits products of several rows may round otherwise.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import pairwise

import torch

from g4ir.backends.sampling import SamplingParams
from g4ir.engine.engine import Engine
from g4ir.engine.requests import Request as Prompt
from g4ir.engine.scheduler import Scheduler, SchedulerConfig
from g4ir.engine.speculative import NO_DRAFT, AcceptanceStats, SpeculativeConfig
from g4ir.spec.reader import Line

from .measure import TAKE, RequestTiming, over, speeds
from .runners import Workload
from .schema import DraftFacts

#: tokens of the piece that a prompt repeats
PIECE = 24
#: roles, which are no runners of the workload
PLAIN, DRAFTED = "single steps", "drafted"


def repeated(w: Workload, tokens: torch.Tensor) -> torch.Tensor:
    """Return i64[B, context + input_len]: the prompt of a text, or a piece of it repeated."""
    count = w.context + w.input_len
    prompt = tokens[:, :count]
    if w.text is not None:
        return prompt
    return prompt[:, :PIECE].repeat(1, -(-count // PIECE))[:, :count]


@dataclass
class Writer:
    """Rows of an engine that write on after a prompt, with drafts and without."""

    engine: Engine
    draft: SpeculativeConfig
    w: Workload
    prompt: torch.Tensor
    texts: dict[str, list[list[int]]] = field(default_factory=dict)
    tally: AcceptanceStats = field(default_factory=AcceptanceStats)

    def __post_init__(self) -> None:
        sizes = tuple(sorted({self.w.batch, self.engine.limits.max_batch}))
        config = SchedulerConfig(sizes, True, prefix_bytes=0, draft_rows=self.w.batch)
        self.schedulers = {
            role: Scheduler(self.engine, replace(config, draft=draft))
            for role, draft in ((PLAIN, NO_DRAFT), (DRAFTED, self.draft))
        }

    def turns(self, count: int) -> dict[str, Callable[[], list[RequestTiming]]]:
        """Return what a round of a benchmark runs."""
        return {role: partial(self._timed, role, count) for role in self.schedulers}

    def _timed(self, role: str, count: int) -> list[RequestTiming]:
        return [self._written(role) for _ in range(count)]

    def _written(self, role: str) -> RequestTiming:
        """Time a text of `output_len` tokens a row: the prompts, then all of the rest."""
        scheduler, params = self.schedulers[role], SamplingParams(ignore_eos=True)
        marks = [time.perf_counter()]
        handles = [
            scheduler.submit(Prompt(tuple(row), self.w.output_len, params, reuse=False))
            for row in self.prompt.tolist()
        ]
        while scheduler.busy:
            scheduler.step()
            if len(marks) == 1 and all(h.counts.generated for h in handles):
                marks.append(time.perf_counter())
        self.texts[role] = [h.answers[0].tokens for h in handles]
        if role == DRAFTED:
            self.tally = AcceptanceStats()
            for handle in handles:
                self.tally.join(handle.tally)
        first, *rest = (b - a for a, b in pairwise([*marks, time.perf_counter()]))
        return RequestTiming(first, tuple(rest))

    def facts(self, requests: dict[str, list[list[RequestTiming]]]) -> DraftFacts:
        """Return what a report keeps."""
        plain, drafted, told = requests[PLAIN], requests[DRAFTED], self.tally
        rows = zip(self.texts[PLAIN], self.texts[DRAFTED], strict=True)
        piece = f"{PIECE} random tokens again and again (seed {self.w.seed})"
        return DraftFacts(
            Line(self.draft.source),
            self.draft.tokens,
            Line("the text's tokens" if self.w.text is not None else piece),
            told.tokens / told.rounds,
            tuple(told.accepted[i] / n for i, n in sorted(told.drafted.items())),
            sum(a == b for one, other in rows for a, b in zip(one, other, strict=True)),
            self.w.batch * self.w.output_len,
            {role: speeds(self.w, requests[role])["decode"] for role in (PLAIN, DRAFTED)},
            over(plain, drafted, TAKE["itl"]),
            over(plain, drafted, TAKE["e2el"]),
        )
