"""Several ranks in one process, a thread for each."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TypeVar

import torch

T = TypeVar("T")
#: this rank's tensor -> those of all ranks, in order
Exchange = Callable[[torch.Tensor], Sequence[torch.Tensor]]
#: seconds that a rank waits for the others
PATIENCE_S = 600.0


def side_by_side(ranks: int, work: Callable[[int, Exchange], T]) -> list[T]:
    """Call `work(rank, exchange)` in a thread for each rank; return what they return. An error of
    one ends the others where they wait for it, and is raised here."""
    if ranks == 1:
        return [work(0, lambda x: [x])]
    shown: dict[int, torch.Tensor] = {}
    meeting = threading.Barrier(ranks, timeout=PATIENCE_S)

    def exchange(rank: int, x: torch.Tensor) -> list[torch.Tensor]:
        shown[rank] = x.clone()
        meeting.wait()
        found = [shown[i] for i in range(ranks)]
        meeting.wait()  # before anybody shows something else
        return found

    def run(rank: int) -> T:
        try:
            return work(rank, partial(exchange, rank))
        except BaseException:
            meeting.abort()
            raise

    with ThreadPoolExecutor(ranks) as pool:
        started = [pool.submit(run, rank) for rank in range(ranks)]
    errors = [e for f in started if (e := f.exception())]
    first = (e for e in errors if not isinstance(e, threading.BrokenBarrierError))
    if errors:
        raise next(first, errors[0])
    return [f.result() for f in started]
