"""Calls that fail in the middle of a step: the scheduler lives on, no token is lost, all ends."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from g4ir.backends.cuda.token_loop import TokenLoop
from g4ir.backends.sampling import SamplingParams
from g4ir.engine.async_engine import AsyncEngine
from g4ir.engine.batch import Batch
from g4ir.engine.device_loop import TokenSteps
from g4ir.engine.engine import Engine
from g4ir.engine.prefill import Prefiller
from g4ir.engine.requests import CANCELLED, FAILED, FINISHED, Event, Request, RequestHandle
from g4ir.engine.scheduler import Scheduler, SchedulerConfig
from g4ir.engine.session import Session
from g4ir.engine.speculative import NGRAM, SpeculativeConfig
from g4ir.errors import RankError
from tests.engines import some_tokens

LIMITS = {"max_seq": 96, "prefill_chunk": 16, "max_batch": 8, "draft_tokens": 3}
FREE = SamplingParams(ignore_eos=True)
TOKENS, REQUESTS = 9, 6


@pytest.fixture(scope="module")
def engine(make_engine: Any) -> Iterator[Engine]:
    """Its steps run ahead of the host, as on a GPU."""
    made: Engine = make_engine("tiny-ple", **LIMITS)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(made), "chooses_on_device", True)
        patch.setattr(made.runtime, "token_loop", ahead(made))
        yield made


def ahead(engine: Engine) -> Callable[..., TokenLoop]:
    """A token loop over the steps of the reference."""

    def token_loop(embed: Any, state: Any, batch: int, choice: Any, tables: Any) -> TokenLoop:
        def step(feeds: dict[str, torch.Tensor]) -> torch.Tensor:
            longest = int(feeds["positions"].max()) + 1
            outputs = engine.runtime.run("decode", feeds, state, longest, True)
            assert outputs
            return outputs["logits"]

        def choose(logits: torch.Tensor, *_: torch.Tensor) -> torch.Tensor:
            return logits[:, 0].argmax(-1)

        return TokenLoop(embed, step, choose, batch, "cpu", lambda work: work)

    return token_loop


def job(seed: int, count: int = TOKENS, **options: Any) -> Request:
    tokens = some_tokens(1, 3 + seed % 7, seed)[0].tolist()
    return Request(tuple(tokens), count, FREE, **options)


@pytest.fixture(scope="module")
def alone(engine: Engine) -> list[list[int]]:
    """The answers of some requests, each alone."""
    out = []
    for seed in range(REQUESTS):
        scheduler = Scheduler(engine)
        handle = scheduler.submit(job(seed))
        out.append([e.token for e in scheduler.run(handle)])
    return out


#: what may fail
MAY_FAIL: dict[type, str] = {
    TokenLoop: "read start advance",
    TokenSteps: "close",
    Batch: "put adopt shrink lend take",
    Session: "prefill_piece copy_row reset verify truncate extend prefill_steps",
    Prefiller: "chunks prefill_batch",
}
CALLS = [(owner, name) for owner, names in MAY_FAIL.items() for name in names.split()]


class Faults:
    """One call of a method raises MemoryError."""

    def __init__(self, patch: pytest.MonkeyPatch, owner: type, name: str, nth: int) -> None:
        self.calls, self.nth, call = 0, nth, getattr(owner, name)

        def failing(*args: Any, **options: Any) -> Any:
            self.calls += 1
            if self.calls == self.nth:
                raise MemoryError("no memory for this")
            return call(*args, **options)

        patch.setattr(owner, name, failing)


def check(events: list[Event], handles: list[RequestHandle], alone: list[list[int]]) -> None:
    """Each request ended once; those that did not fail or were cancelled got all their tokens, the
    others the first ones."""
    for seed, handle in enumerate(handles):
        mine = [e for e in events if e.handle is handle]
        tokens = [e.token for e in mine if e.token is not None]
        assert handle.done and [e.finish is not None for e in mine].count(True) == 1
        assert tokens == alone[seed][: len(tokens)]
        assert handle.state in (CANCELLED, FAILED) or tokens == alone[seed]
        assert handle.state != FAILED or "no memory" in str(mine[-1].error)


@pytest.mark.parametrize(
    ("call", "draft"),
    [*((call, False) for call in CALLS), *((call, True) for call in CALLS if call[0] is Session)],
    ids=lambda x: f"{x[0].__name__}.{x[1]}" if isinstance(x, tuple) else f"draft={x}",
)
def test_a_call_that_fails(
    engine: Engine, alone: list[list[int]], call: tuple[type, str], draft: bool
) -> None:
    """In random company, cancelled or not."""
    config = SchedulerConfig(patience=1, prefix_bytes=50_000)
    if draft:
        config = SchedulerConfig(patience=1, draft=SpeculativeConfig(NGRAM, 3), draft_rows=8)
    for nth in (1, 4):
        rng, events = random.Random(nth), list[Event]()
        scheduler, handles = Scheduler(engine, config), list[RequestHandle]()
        with pytest.MonkeyPatch.context() as patch:
            Faults(patch, *call, nth)
            for seed in range(len(alone)):
                handles.append(scheduler.submit(job(seed, reuse=seed % 3 > 0)))
                for _ in range(rng.randint(0, 5)):
                    events += scheduler.step()
                if rng.random() < 0.3:
                    rng.choice(handles).cancel()
            while scheduler.busy:
                events += scheduler.step()
        check(events, handles, alone)
        again = scheduler.submit(job(0))
        assert [e.token for e in scheduler.run(again)] == alone[0]


#: while steps are in flight: the call that fails, whether the first request is cancelled before it,
#: and how the two end
FLIGHTS = {
    "batch that cannot grow": ((Batch, "put"), False, (FINISHED, FAILED)),
    "failing step": ((TokenSteps, "close"), False, (FAILED, FINISHED)),
    "failing step beside one that is cancelled": ((TokenSteps, "close"), True, (FAILED, FAILED)),
}


@pytest.mark.parametrize("name", FLIGHTS)
def test_a_call_that_fails_while_steps_are_in_flight(
    engine: Engine, alone: list[list[int]], monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """A batch that cannot grow fails the prompt and loses no token of the running sequence; a
    failing step of that sequence does not fail the prompt."""
    call, cancelled, states = FLIGHTS[name]
    scheduler = Scheduler(engine)
    handles, events = [scheduler.submit(job(seed)) for seed in range(1 + cancelled)], list[Event]()
    for _ in range(3 + cancelled):
        events += scheduler.step()
    Faults(monkeypatch, *call, 1)
    if cancelled:
        handles[0].cancel()
    else:
        handles.append(scheduler.submit(job(1)))
    while scheduler.busy:
        events += scheduler.step()
    assert tuple(handle.state for handle in handles) == states
    check(events, handles, alone)


def test_events_before_a_rank_is_lost(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """The service delivers them, and ends the others by name."""
    lost = Mock(side_effect=RankError("rank 1 is gone"))
    events = dict[int, list[Event]]()
    with AsyncEngine(engine) as service:
        step = service.scheduler.step

        def cancelling() -> list[Event]:
            made = step()
            if service.scheduler.num_running == 2:
                handles[0].cancel()
                monkeypatch.setattr(service.scheduler, "_decode_step", lost)
            return made

        monkeypatch.setattr(service.scheduler, "step", cancelling)
        handles = []
        for seed in range(2):
            mine = events.setdefault(seed, [])
            handles.append(service.submit(job(seed, 80), mine.append))
        service._thread.join(20)
        assert not service.alive and isinstance(service.error, RankError)
    ends = [mine[-1] for mine in events.values()]
    assert [e.finish for e in ends] == [CANCELLED, FAILED]
    assert "the service ended: rank 1 is gone" in str(ends[1].error)
