"""Many threads on one engine, each with its own session: `python -m tests.threads_session DIR`.

Exits with 1 where a thread gets other results than it gets alone. A process of its own, since what
goes wrong between threads can end the process.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import torch

import g4ir
from g4ir.engine.engine import Engine

THREADS, STEPS, ROUNDS = 8, 12, 2


def work(engine: Engine, steps: int, i: int) -> tuple[list[torch.Tensor], list[int]]:
    """Logits of the steps of an own session, and what `generate` makes, which lends one."""
    session = engine.session()
    seen = [session.prefill(torch.tensor([[5 + 7 * i, *range(3, 6 + i)]]))]
    seen += [session.decode(seen[-1].argmax(-1)) for _ in range(steps)]
    return seen, engine.generate([5 + 7 * i], 4, stop_ids=())


def same(a: Any, b: Any) -> bool:
    """Bit for bit."""
    return all(map(torch.equal, a[0], b[0])) and a[1] == b[1]


def disturbed(engine: Engine, steps: int = STEPS, rounds: int = ROUNDS) -> set[int]:
    """Threads that got other results than alone."""
    alone = [work(engine, steps, i) for i in range(THREADS)]
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    wrong = set()
    for _ in range(rounds):
        with ThreadPoolExecutor(THREADS) as pool:
            together = list(pool.map(partial(work, engine, steps), range(THREADS)))
        wrong |= {i for i in range(THREADS) if not same(alone[i], together[i])}
    sys.setswitchinterval(before)
    return wrong


def main(argv: Sequence[str]) -> int:
    wrong = disturbed(g4ir.load_engine(argv[0]))
    print(f"threads with other results: {wrong}" if wrong else "same results")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
