"""Drafts from a text's own n-grams: tokens a round and tokens/s by task, beside single steps.

    python bench/drafts.py ENGINE [--tokens 4,7] [--new 96] [--rounds 3] [--drawn] [--bounds]
                          [--text FILE] [--save]

ENGINE: of trained weights, which answer a prompt by its text, built with --draft-tokens. Tasks are
those of drafts.yaml, or the text of a file to go on with; greedy or --drawn at temperature 1 (top-k
64, top-p 0.95; a seed each round). Each task runs without drafts and with up to so many in turn; a
rate counts from the first new token on. --bounds: also with drafts that are all rejected, and with
drafts of which 70 % are right, which bound the cost and the gain of drafts on this machine.
"""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import yaml
from common import arguments, finish

import g4ir
from g4ir.backends.sampling import SamplingParams
from g4ir.bench.measure import median
from g4ir.engine.requests import Request
from g4ir.engine.scheduler import Scheduler, SchedulerConfig
from g4ir.engine.speculative import NGRAM, NO_DRAFT, AcceptanceStats, SpeculativeConfig
from g4ir.ui.table import aligned

HERE = Path(__file__).parent
TASKS: dict[str, tuple[str | None, int, str]] = yaml.safe_load(
    (HERE / "drafts.yaml").read_text(encoding="utf-8")
)
DRAWN = {"temperature": 1.0, "top_k": 64, "top_p": 0.95}
#: shares of right draft tokens of --bounds
BOUNDS = (0.0, 0.7)


class KnownText:
    """Proposer that drafts a known text, each token right with a probability of `share`."""

    def __init__(self, text: Sequence[int], share: float, prompt: Sequence[int]) -> None:
        rng, self._at = random.Random(0), 0
        self._drafts = [t if rng.random() < share else t ^ 1 for t in text]

    def extend(self, tokens: Sequence[int]) -> None:
        self._at += len(tokens)

    def propose(self, count: int) -> list[int]:
        return self._drafts[self._at : self._at + count]


def texts(file: str | None) -> dict[str, str]:
    """Return the prompt of each task."""
    if file:
        return {file: Path(file).read_text(encoding="utf-8")}
    found = {}
    for task, (source, size, more) in TASKS.items():
        text = (HERE.parent / "tests/real" / source).read_text()[:size] if source else ""
        found[task] = text + more
    return found


def written(
    scheduler: Scheduler, prompt: list[int], new: int, **drawn: Any
) -> tuple[list[int], float, AcceptanceStats]:
    """Return the tokens of a text, tokens/s, and its acceptance statistics."""
    params = SamplingParams(**drawn, ignore_eos=True)
    handle = scheduler.submit(Request(tuple(prompt), new, params, reuse=False))
    times, tokens = list[float](), list[int]()
    for event in scheduler.run(handle):
        if event.error:
            raise event.error
        times.append(time.perf_counter())
        tokens += [] if event.token is None else [event.token]
    return tokens, (len(times) - 1) / (times[-1] - times[0]), handle.tally


def compared(engine: Any, prompt: list[int], args: Any) -> dict[str, tuple[float, float, float]]:
    """Return tokens/s, their ratio to those without drafts (medians) and tokens a round, by kind of
    draft."""
    kinds = {"none": NO_DRAFT} | {f"K {k}": SpeculativeConfig(NGRAM, k) for k in args.tokens}
    if args.bounds:
        text, *_ = written(Scheduler(engine, SchedulerConfig()), prompt, args.new)
        for share in BOUNDS:
            proposer = partial(KnownText, text, share)
            kinds[f"{share:.0%} right"] = SpeculativeConfig(NGRAM, args.tokens[0], proposer)
    schedulers = {k: Scheduler(engine, SchedulerConfig(draft=d)) for k, d in kinds.items()}
    rates: dict[str, list[float]] = {k: [] for k in kinds}
    tallies = {k: AcceptanceStats() for k in kinds}
    for scheduler in schedulers.values():  # what is recorded or measured at first
        written(scheduler, prompt, 12)
    for seed in range(args.rounds):
        for k, scheduler in schedulers.items():
            settings: dict[str, Any] = {**DRAWN, "seed": seed} if args.drawn else {}
            _, rate, tally = written(scheduler, prompt, args.new, **settings)
            rates[k].append(rate)
            tallies[k].join(tally)
    gains = {k: median([b / a for a, b in zip(rates["none"], rates[k])]) for k in kinds}
    rounds = {k: t.tokens / t.rounds if t.rounds else 1.0 for k, t in tallies.items()}
    return {k: (median(rates[k]), gains[k], rounds[k]) for k in kinds}


def main() -> None:
    args = arguments(
        __doc__, "engine", tokens=(4, 7), new=96, rounds=3, drawn=False, bounds=False, text=None
    )
    rows: list[tuple[str, ...]] = [("task", "drafts", "tokens/s", "speed-up", "a round")]
    with g4ir.load_engine(args.engine) as engine:
        for task, text in texts(args.text).items():
            prompt = [2, *engine.tokenizer().encode(text, add_special_tokens=False).ids]
            label = f"{task}, {'drawn' if args.drawn else 'greedy'}"
            for kind, (rate, gain, size) in compared(engine, prompt, args).items():
                rows.append((label, kind, f"{rate:.0f}", f"{gain:.2f}", f"{size:.2f}"))
    finish(args, "drafts", aligned(rows, left=2))


if __name__ == "__main__":
    main()
