"""Decode steps of an engine of several ranks, and what of them is exchange.

    torchrun --nproc-per-node N bench/ranks.py ENGINE [--steps 10000] [--batch 1] [--save]
    python bench/ranks.py ENGINE ...     an engine of one rank, for comparison

Every step is one of a session that begins anew where it is full. `exchange` is the time of the
first rank in the messages of a step, waiting for the others included; `call` that of telling them
the step. `bare` are sums of --bare numbers with nothing in between: what a message costs where no
rank waits. --save writes bench/results/ranks.txt.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from common import arguments, finish, seconds

import g4ir
from g4ir.bench.stats import median
from g4ir.engine.engine import Engine
from g4ir.parallel import group as groups
from g4ir.ui.table import aligned

#: steps that are not counted
WARM = 20
#: sums with nothing in between
BARE = 2000


class Clock:
    """Adds up the seconds of calls to a function, between two looks at it."""

    def __init__(self) -> None:
        self.taken: list[float] = []

    def timed(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            made: list[Any] = []
            self.taken.append(seconds(lambda: made.append(function(*args))))
            return made[0]

        return call

    def look(self) -> tuple[float, int]:
        found = sum(self.taken), len(self.taken)
        self.taken.clear()
        return found


def steps(
    engine: Engine, group: groups.Group | None, count: int, batch: int
) -> list[tuple[float, ...]]:
    """Return of each step its seconds, those of its exchanges, their number, those of the call."""
    exchange, call = Clock(), Clock()
    if group:
        group.all_reduce = exchange.timed(group.all_reduce)  # type: ignore[method-assign]
        group.all_gather = exchange.timed(group.all_gather)  # type: ignore[method-assign]
        group.tell = call.timed(group.tell)  # type: ignore[method-assign]
    session, rows = engine.session(batch), []
    step = partial(session.decode, torch.full((batch,), 7))
    for _ in range(WARM + count):
        if int(session.length.max()) == engine.limits.max_seq:
            session.reset()
        exchange.look(), call.look()
        rows.append((seconds(step), *exchange.look(), call.look()[0]))
    return rows[WARM:]


def summary(engine: Engine, rows: list[tuple[float, ...]], bare: list[float]) -> str:
    """Return a table of medians and of the slowest in a hundred, in milliseconds."""
    messages = int(rows[0][2])
    parts = {"step": [r[0] for r in rows]}
    if messages:
        parts["exchange"] = [r[1] for r in rows]
        parts["a message"] = [r[1] / messages for r in rows]
        parts["a bare one"] = bare
        parts["call"] = [r[3] for r in rows]
        parts["programs"] = [r[0] - r[1] - r[3] for r in rows]
    table = [("", "median ms", "p99 ms")] + [
        (name, f"{median(v) * 1e3:.3f}", f"{sorted(v)[len(v) * 99 // 100] * 1e3:.3f}")
        for name, v in parts.items()
    ]
    ranks = f"{engine.ranks} rank{'s' * (engine.ranks > 1)} of {torch.get_num_threads()} thread(s)"
    head = f"{engine!r}\n{len(rows)} decode steps of {ranks}, {messages} messages each"
    return f"{head}\n\n{aligned(table)}"


def main() -> None:
    args = arguments(__doc__, "engine", steps=10_000, batch=1, bare=1536)
    with g4ir.join() if groups.launched() else nullcontext() as group:
        x, bare = torch.ones(1, 1, args.bare, dtype=torch.bfloat16), []
        if group:
            add = partial(group.all_reduce, [x])
            bare = [seconds(add) for _ in range(WARM + BARE)][WARM:]
        if group and group.rank:
            g4ir.follow(group)
            return
        with g4ir.load_engine(args.engine) as engine:
            finish(
                args, "ranks", summary(engine, steps(engine, group, args.steps, args.batch), bare)
            )


if __name__ == "__main__":
    main()
