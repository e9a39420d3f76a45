"""Drafts from a text's own n-grams: tokens a round and tokens/s by task, beside single steps.

    python bench/drafts.py ENGINE [--tokens 4,7] [--new 96] [--rounds 3] [--drawn] [--save]

ENGINE: of trained weights, which answer a prompt by its text, built with --draft-tokens. Tasks are
those of drafts.yaml, greedy or --drawn at temperature 1 (top-k 64, top-p 0.95; a seed each
round). Each task runs without drafts and with up to so many in turn; a rate counts from the first
new token on.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import yaml
from common import arguments, finish

import g4ir
from g4ir.bench.measure import median
from g4ir.engine.engine import Engine
from g4ir.engine.speculative import NGRAM, NONE, AcceptanceStats
from g4ir.ui.table import aligned

HERE = Path(__file__).parent
TASKS: dict[str, tuple[str | None, int, str]] = yaml.safe_load(
    (HERE / "drafts.yaml").read_text(encoding="utf-8")
)
DRAWN = {"temperature": 1.0, "top_k": 64, "top_p": 0.95}


def prompt_of(engine: Engine, task: str) -> list[int]:
    file, size, more = TASKS[task]
    text = (HERE.parent / "tests/real" / file).read_text()[:size] if file else ""
    ids: list[int] = engine.tokenizer().encode(text + more, add_special_tokens=False).ids
    return [2, *ids]


def written(
    engine: Engine, prompt: list[int], new: int, most: int, **drawn: Any
) -> tuple[float, AcceptanceStats]:
    """Return tokens/s of a text, and what became of its drafts."""
    tally, times = AcceptanceStats(), list[float]()
    drafts: dict[str, Any] = {"draft": NGRAM, "draft_tokens": most} if most else {"draft": NONE}
    engine.generate(
        prompt,
        new,
        stop_ids=(),
        on_token=lambda _: times.append(time.perf_counter()),
        tally=tally,
        **drafts,
        **drawn,
    )
    return (len(times) - 1) / (times[-1] - times[0]), tally


def main() -> None:
    args = arguments(__doc__, "engine", tokens=(4, 7), new=96, rounds=3, drawn=False)
    columns = (x for k in args.tokens for x in (f"K {k}: a round", "speed-up"))
    rows: list[tuple[str, ...]] = [("task", "tokens/s", *columns)]
    with g4ir.load_engine(args.engine) as engine:
        for task in TASKS:
            prompt, counts = prompt_of(engine, task), (0, *args.tokens)
            rates: dict[int, list[float]] = {k: [] for k in counts}
            tallies = {k: AcceptanceStats() for k in counts}
            for k in counts:  # what is recorded or measured at first
                written(engine, prompt, 12, k)
            for seed in range(args.rounds):
                for k in counts:
                    settings: dict[str, Any] = {**DRAWN, "seed": seed} if args.drawn else {}
                    rate, tally = written(engine, prompt, args.new, k, **settings)
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
