"""A service over slots: many threads ask, one computes, and nobody waits for a slow reader."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import g4ir
from g4ir.backends.sampling import SamplingParams
from g4ir.engine.async_engine import AsyncEngine, AsyncEngineConfig, Stream
from g4ir.engine.engine import Engine
from g4ir.engine.requests import CANCELLED, FAILED, LENGTH, Event, Request
from g4ir.errors import BusyError, EngineError, InputError
from tests.engines import some_tokens

FREE = SamplingParams(ignore_eos=True)
WAIT = 30.0


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    folder: Path = tmp_path_factory.mktemp("service") / "engine"
    limits = {"max_seq": 400, "prefill_chunk": 16, "max_batch": 4}
    with g4ir.build("tiny-ple", folder, backend="reference", random_weights=0, **limits) as e:
        yield e


@pytest.fixture
def service(engine: Engine) -> Iterator[AsyncEngine]:
    with AsyncEngine(engine) as s:
        yield s


def job(count: int = 5, new: int = 6, seed: int = 0, **given: Any) -> Request:
    return Request(tuple(some_tokens(1, count, seed)[0].tolist()), new, FREE, **given)


def text(stream: Stream) -> list[int]:
    return [e.token for e in stream if e.token is not None]


def eventually(holds: Any) -> None:
    end = time.monotonic() + WAIT
    while not holds():
        assert time.monotonic() < end
        time.sleep(0.002)


class Gate:
    """Holds steps back until it is opened."""

    def __init__(self, service: AsyncEngine, patch: pytest.MonkeyPatch) -> None:
        self.open, step = threading.Event(), service.scheduler.step

        def held() -> Any:
            assert self.open.wait(WAIT)
            return step()

        patch.setattr(service.scheduler, "step", held)


def test_many_threads_ask(service: AsyncEngine, engine: Engine) -> None:
    jobs = [job(3 + i % 7, 5 + i % 4, i) for i in range(16)]
    want = [engine.generate([*j.tokens], j.max_new_tokens, stop_ids=()) for j in jobs]
    got: dict[int, list[int]] = {}
    threads = [
        threading.Thread(target=lambda i=i, j=j: got.update({i: text(service.submit(j))}))
        for i, j in enumerate(jobs)
    ]
    for t in threads:
        t.start()
    for t in threads:
        t.join(WAIT)
    assert [got[i] for i in range(len(jobs))] == want
    assert not service.waiting and not service.active and service.totals.ended == {LENGTH: 16}


def test_a_callback_sees_the_events(service: AsyncEngine) -> None:
    seen, ended = list[Event](), threading.Event()

    def told(event: Event) -> None:
        assert threading.current_thread().name == "g4ir-scheduler"
        seen.append(event)
        if event.finish:
            ended.set()

    service.submit(job(), told)
    assert ended.wait(WAIT) and len(seen) == 6


def test_a_callback_that_fails_ends_its_request_alone(service: AsyncEngine, engine: Engine) -> None:
    def told(event: Event) -> None:
        raise KeyError("x")

    broken, fine = service.submit(job(new=200), told), service.submit(job(seed=1))
    assert text(fine) == engine.generate([*job(seed=1).tokens], 6, stop_ids=())
    eventually(lambda: broken.handle.done)
    assert broken.handle.state == CANCELLED


def test_a_wrong_job_is_refused_where_it_is_asked(service: AsyncEngine) -> None:
    with pytest.raises(InputError, match="prompt is empty"):
        service.submit(Request(()))
    assert not service.waiting and service.alive


def test_a_full_queue(service: AsyncEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests beyond it are refused; later ones are taken."""
    monkeypatch.setattr(service, "settings", AsyncEngineConfig(waiting=3))
    gate = Gate(service, monkeypatch)
    streams = [service.submit(job(seed=i)) for i in range(3)]
    with pytest.raises(BusyError, match=r"^3 requests of 15 prompt tokens wait already, of 3 and"):
        service.submit(job())
    assert service.waiting == 3
    gate.open.set()
    assert [len(text(s)) for s in streams] == [6, 6, 6]
    assert len(text(service.submit(job()))) == 6


def test_a_queue_full_of_tokens(service: AsyncEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    """One may always wait, however long it is; an event may be waited for only so long."""
    monkeypatch.setattr(service, "settings", AsyncEngineConfig(waiting_tokens=20))
    gate = Gate(service, monkeypatch)
    long = service.submit(job(30))
    with pytest.raises(BusyError, match="30 prompt tokens wait"):
        service.submit(job(1))
    with pytest.raises(TimeoutError, match="no event within"):
        long.get(0.01)
    gate.open.set()
    assert len(text(long)) == 6 and long.get(WAIT) is None


def test_cancelling_frees_the_row(service: AsyncEngine) -> None:
    stream = service.submit(job(new=300))
    assert stream.get(WAIT) is not None
    stream.cancel()
    events = [*stream]
    assert events[-1].finish == CANCELLED
    eventually(lambda: not service.active)
    assert stream.handle.counts.generated < 300
    stream.cancel()  # nothing is left to do


def test_a_reader_that_never_reads(service: AsyncEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its row is free after a while; what came before can be read."""
    monkeypatch.setattr(service, "settings", AsyncEngineConfig(unread=4, slow_s=0.1))
    stream = service.submit(job(new=300))
    eventually(lambda: stream.handle.done)
    events = [*stream]
    assert events[-1].finish == CANCELLED
    assert 4 <= len(events) < 300 and not service.active


def test_drain(engine: Engine) -> None:
    """What runs and waits is answered, nothing more is taken."""
    with AsyncEngine(engine) as service:
        streams = [service.submit(job(seed=i, new=20)) for i in range(7)]
        done: list[bool] = []
        thread = threading.Thread(target=lambda: done.append(service.drain(WAIT)))
        thread.start()
        eventually(lambda: not service.alive)
        assert not service.drain(0.001)
        with pytest.raises(BusyError, match="takes no more requests"):
            service.submit(job())
        thread.join(WAIT)
        assert done == [True] and all(len(text(s)) == 20 for s in streams)


def test_close_cancels(engine: Engine) -> None:
    before = threading.active_count()
    service = AsyncEngine(engine)
    streams = [service.submit(job(seed=i, new=300)) for i in range(6)]
    assert streams[0].get(WAIT)
    service.close()
    for stream in streams:
        assert [*stream][-1].finish == CANCELLED
    assert threading.active_count() == before and not service.alive
    with pytest.raises(BusyError):
        service.submit(job())
    service.close()  # once more does nothing


def test_a_step_that_fails(service: AsyncEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its requests fail, the next ones are answered."""
    with monkeypatch.context() as patch:

        def broken(*_: Any) -> Any:
            raise RuntimeError("no memory")

        patch.setattr(service.engine.runtime, "run", broken)
        for _ in range(2):
            (event,) = service.submit(job())
            assert event.finish == FAILED and "no memory" in str(event.error)
        assert service.alive
    assert len(text(service.submit(job()))) == 6


def test_a_thread_that_ends(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever waits is told, and so is who asks later."""
    with AsyncEngine(engine) as service:
        gate = Gate(service, monkeypatch)
        streams = [service.submit(job(seed=i)) for i in range(2)]

        def broken() -> Any:
            raise MemoryError("gone")

        monkeypatch.setattr(service.scheduler, "step", broken)
        gate.open.set()
        for stream in streams:
            last = [*stream][-1]
            assert last.finish == FAILED and isinstance(last.error, EngineError)
        assert not service.drain(WAIT)
        with pytest.raises(EngineError, match="the service ended: gone"):
            service.submit(job())


@pytest.mark.parametrize("name", ["waiting", "waiting_tokens", "unread", "slow_s"])
def test_settings_that_are_wrong(name: str) -> None:
    with pytest.raises(InputError, match=f"{name} -1: expected"):
        AsyncEngineConfig(**{name: -1})
