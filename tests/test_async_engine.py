"""The scheduler in a thread: many threads submit requests, one computes."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from queue import SimpleQueue
from typing import Any
from unittest.mock import Mock

import pytest

from g4ir.backends.sampling import SamplingParams
from g4ir.engine.async_engine import AsyncEngine, AsyncEngineConfig
from g4ir.engine.engine import Engine
from g4ir.engine.requests import CANCELLED, FAILED, LENGTH, Event, Request
from g4ir.errors import BusyError, EngineError
from tests.engines import some_tokens
from tests.serve.running import WAIT, eventually
from tests.spies import spy

FREE = SamplingParams(ignore_eos=True)


@pytest.fixture(scope="module")
def engine(make_engine: Any) -> Engine:
    return make_engine("tiny-ple", backend="torch", max_seq=400, prefill_chunk=16, max_batch=4)


@pytest.fixture
def service(engine: Engine) -> Iterator[AsyncEngine]:
    with AsyncEngine(engine) as s:
        yield s


def job(count: int = 5, new: int = 6, seed: int = 0, **given: Any) -> Request:
    return Request(tuple(some_tokens(1, count, seed)[0].tolist()), new, FREE, **given)


class Asked:
    """A submitted request, whose events wait to be read."""

    def __init__(self, service: AsyncEngine, request: Request) -> None:
        self.queue = SimpleQueue[Event]()
        self.handle = service.submit(request, self.queue.put)

    def events(self) -> Iterator[Event]:
        while True:
            yield (event := self.queue.get(timeout=WAIT))
            if event.finish:
                return

    def text(self) -> list[int]:
        return [e.token for e in self.events() if e.token is not None]


def closed_gate(service: AsyncEngine, patch: pytest.MonkeyPatch) -> threading.Event:
    """Holds steps back until it is set."""
    gate = threading.Event()
    spy(patch, service.scheduler, "step", lambda: gate.wait(WAIT))
    return gate


def test_many_threads_ask(service: AsyncEngine, engine: Engine) -> None:
    jobs = [job(3 + i % 7, 5 + i % 4, i) for i in range(16)]
    want = [engine.generate([*j.tokens], j.max_new_tokens, stop_ids=()) for j in jobs]
    with ThreadPoolExecutor(len(jobs)) as pool:
        assert [*pool.map(lambda j: Asked(service, j).text(), jobs)] == want
    assert not service.waiting and service.totals.ended == {LENGTH: 16}


def test_a_callback_that_fails_ends_its_request_alone(service: AsyncEngine, engine: Engine) -> None:
    fails = Mock(side_effect=KeyError("x"))
    broken, fine = service.submit(job(new=200), fails), Asked(service, job(seed=1))
    assert fine.text() == engine.generate([*job(seed=1).tokens], 6, stop_ids=())
    eventually(lambda: broken.done)
    assert broken.state == CANCELLED


def test_a_queue_full_of_tokens(service: AsyncEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    """One may always wait, however long it is."""
    monkeypatch.setattr(service, "settings", AsyncEngineConfig(waiting_tokens=20))
    gate = closed_gate(service, monkeypatch)
    long = Asked(service, job(30))
    with pytest.raises(BusyError, match=r"30 of .* prompt tokens, and this request has 1"):
        Asked(service, job(1))
    gate.set()
    assert len(long.text()) == 6


def test_close_cancels(engine: Engine) -> None:
    before = threading.active_count()
    service = AsyncEngine(engine)
    asked = [Asked(service, job(seed=i, new=300)) for i in range(6)]
    assert asked[0].queue.get(timeout=WAIT)
    service.close()
    assert [[*a.events()][-1].finish for a in asked] == [CANCELLED] * 6
    assert threading.active_count() == before and not service.alive
    with pytest.raises(BusyError):
        Asked(service, job())
    service.close()  # once more does nothing


def test_a_thread_that_ends(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever waits is told, and so is who asks later."""
    with AsyncEngine(engine) as service:
        gate = closed_gate(service, monkeypatch)
        asked = [Asked(service, job(seed=i)) for i in range(2)]
        monkeypatch.setattr(service.scheduler, "step", Mock(side_effect=MemoryError("gone")))
        gate.set()
        for one in asked:
            last = [*one.events()][-1]
            assert last.finish == FAILED and isinstance(last.error, EngineError)
        with pytest.raises(EngineError, match="the service ended: gone"):
            Asked(service, job())
