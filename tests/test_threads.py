"""Sessions of one engine in several threads. `python -m tests.test_threads DIR` exits with 1 where
a thread gets other results than it gets alone: a process of its own, since what goes wrong between
threads can end the process."""

from __future__ import annotations

import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import pytest
import torch

import g4ir
from g4ir.engine.engine import Engine
from g4ir.engine.scheduler import Scheduler
from g4ir.engine.speculative import NO_DRAFT


def test_no_scheduler_is_lent_twice(engines: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Though both threads look for it at the same time."""
    engine = engines("reference", "tiny-ple")

    class Slow(Engine):
        @property
        def _idle(self) -> Any:
            time.sleep(0.05)
            return vars(self)["kept"]

        @_idle.setter
        def _idle(self, scheduler: Any) -> None:
            vars(self)["kept"] = scheduler

    def lend(_: int) -> Scheduler:
        with engine.lent_scheduler(1, NO_DRAFT) as scheduler:
            both.wait()
            return scheduler

    with engine.lent_scheduler(1, NO_DRAFT) as kept:
        monkeypatch.setitem(vars(engine), "kept", kept)
    monkeypatch.setattr(engine, "__class__", Slow)
    both = threading.Barrier(2, timeout=20)
    with ThreadPoolExecutor(2) as pool:
        one, other = pool.map(lend, range(2))
    assert one is not other


THREADS, STEPS, ROUNDS = 8, 6, 2


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


if __name__ == "__main__":
    wrong = disturbed(g4ir.load_engine(sys.argv[1]))
    print(f"threads with other results: {wrong}" if wrong else "same results")
    sys.exit(bool(wrong))
