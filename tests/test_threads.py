"""Sessions of one engine in several threads."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from g4ir.backends.torch_compile import pyops
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


def test_memory_of_results_is_given_to_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """The last block that is free goes to one thread; others get new memory."""

    class Last(list[Any]):
        def __bool__(self) -> bool:
            return True  # as it seemed, before another thread took it

    monkeypatch.setitem(pyops._free, pyops.KEPT_FROM // 4, Last())
    assert pyops.empty_f32(pyops.KEPT_FROM // 4).numel() == pyops.KEPT_FROM // 4
