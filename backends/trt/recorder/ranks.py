"""Several ranks in one process: a communicator that contexts take, and a thread for each rank."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import count
from typing import Any, TypeVar

import torch

T = TypeVar("T")
#: this rank's tensor -> those of all ranks, in order
Exchange = Callable[[torch.Tensor], Sequence[torch.Tensor]]
#: seconds that a rank waits for the others
PATIENCE_S = 600.0
#: address -> what is exchanged by
_EXCHANGES: dict[int, Exchange] = {}
_ADDRESSES = count(1)


def communicator(exchange: Exchange) -> int:
    """Return the address of a communicator, which a capsule holds that contexts are given."""
    address = next(_ADDRESSES)
    _EXCHANGES[address] = exchange
    return address


def exchange_of(capsule: Any) -> Exchange | None:
    """Return what is exchanged by; None where a capsule holds no address of `communicator`."""
    name, pointer = ctypes.pythonapi.PyCapsule_GetName, ctypes.pythonapi.PyCapsule_GetPointer
    name.restype, name.argtypes = ctypes.c_char_p, [ctypes.py_object]
    pointer.restype, pointer.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]
    return _EXCHANGES.get(pointer(capsule, name(capsule)))


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
