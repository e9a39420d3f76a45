"""Speculative decoding by n-grams: tokens per step and speed-up over plain decode steps, by task.

    python bench/drafts.py ENGINE [--tokens 4,7] [--new 96] [--rounds 3] [--drawn] [--text FILE]
                          [--save]

ENGINE: of trained weights, which answer a prompt by its text, built with --draft-tokens. Tasks are
those of drafts.yaml, or the text of a file to go on with; greedy or --drawn at temperature 1 (top-k
64, top-p 0.95; a seed each round). Each task runs without drafts and with up to so many in turn; a
rate counts from the first new token on.
"""

from __future__ import annotations

import time
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
) -> tuple[float, AcceptanceStats]:
    """Generate `new` tokens; return tokens/s from the first one on, and acceptance statistics."""
    params, times = SamplingParams(**drawn, ignore_eos=True), list[float]()
    handle = scheduler.submit(Request(tuple(prompt), new, params, reuse=False))
    for event in scheduler.run(handle):
        if event.error:
            raise event.error
        times.append(time.perf_counter())
    return (len(times) - 1) / (times[-1] - times[0]), handle.tally


def main() -> None:
    args = arguments(__doc__, "engine", tokens=(4, 7), new=96, rounds=3, drawn=False, text=None)
    columns = (x for k in args.tokens for x in (f"K {k}: a round", "speed-up"))
    rows: list[tuple[str, ...]] = [("task", "tokens/s", *columns)]
    with g4ir.load_engine(args.engine) as engine:
        drafts = {0: NO_DRAFT} | {k: SpeculativeConfig(NGRAM, k) for k in args.tokens}
        schedulers = {k: Scheduler(engine, SchedulerConfig(draft=d)) for k, d in drafts.items()}
        for task, text in texts(args.text).items():
            prompt = [2, *engine.tokenizer().encode(text, add_special_tokens=False).ids]
            rates: dict[int, list[float]] = {k: [] for k in drafts}
            tallies = {k: AcceptanceStats() for k in drafts}
            for scheduler in schedulers.values():  # warm-up: records steps
                written(scheduler, prompt, 12)
            for seed in range(args.rounds):
                for k, scheduler in schedulers.items():
                    settings: dict[str, Any] = {**DRAWN, "seed": seed} if args.drawn else {}
                    rate, tally = written(scheduler, prompt, args.new, **settings)
                    rates[k].append(rate)
                    tallies[k].join(tally)
            row = [f"{task}, {'drawn' if args.drawn else 'greedy'}", f"{median(rates[0]):.0f}"]
            for k in args.tokens:
                gain = median([b / a for a, b in zip(rates[0], rates[k], strict=True)])
                row += [f"{tallies[k].tokens / tallies[k].rounds:.2f}", f"{gain:.2f}"]
            rows.append((*row,))
    finish(args, "drafts", aligned(rows))


if __name__ == "__main__":
    main()
