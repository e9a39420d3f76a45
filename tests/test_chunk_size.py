"""Chunks of prompts beside running sequences: bounded by measured time. The clock is a fake one."""

from __future__ import annotations

import time
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from g4ir import Engine, Session
from g4ir.backends.sampling import SamplingParams
from g4ir.engine.chunk_size import FEWEST_TOKENS, FIRST_TOKENS, ChunkSize
from g4ir.engine.requests import FINISHED, Request, RequestHandle
from g4ir.engine.scheduler import Scheduler, SchedulerConfig
from tests.engines import some_tokens
from tests.spies import spy

CHUNK, FREE = 128, SamplingParams(ignore_eos=True)


@pytest.fixture(scope="module")
def engine(make_engine: Any) -> Engine:
    return make_engine("tiny-dense", max_seq=512, prefill_chunk=CHUNK, max_batch=4)


class Machine:
    """A clock, which tokens of a chunk and steps of the batch move on, and the sizes of chunks."""

    def __init__(self, token_s: float, step_s: float) -> None:
        self.now, self.token_s, self.step_s, self.sizes = 0.0, token_s, step_s, list[int]()
        self.chunk_s = 0.0

    def chunk(self, tokens: int) -> None:
        self.now += self.chunk_s + tokens * self.token_s
        self.sizes.append(tokens)

    def step(self) -> None:
        self.now += self.step_s


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    made = Machine(2e-3, 10e-3)
    spy(monkeypatch, Session, "prefill_piece", lambda *given: made.chunk(given[2].width))
    spy(monkeypatch, Session, "verify", lambda *_: made.step())
    monkeypatch.setattr(time, "perf_counter", lambda: made.now)
    return made


def prompt(count: int, seed: int = 0) -> tuple[int, ...]:
    return tuple(some_tokens(1, count, seed)[0].tolist())


class Streams:
    """A scheduler with a stream that runs, and when its tokens came."""

    def __init__(self, engine: Engine, machine: Machine, gap_ms: float) -> None:
        self.machine = machine
        config = SchedulerConfig(max_gap_ms=gap_ms, prefix_bytes=0)
        self.scheduler, self.times = Scheduler(engine, config), list[float]()
        self.stream = self.scheduler.submit(Request(prompt(3, 99), 400, FREE, reuse=False))
        self.scheduler.step()

    def read(self, count: int, seed: int = 1) -> RequestHandle:
        """Have a prompt computed beside the stream; it gets one token."""
        late = self.scheduler.submit(Request(prompt(count, seed), 1, FREE, reuse=False))
        while not late.done:
            events = self.scheduler.step()
            self.times += [self.machine.now] * sum(e.handle is self.stream for e in events)
        assert late.state == FINISHED
        return late

    @property
    def gaps(self) -> list[float]:
        return [b - a for a, b in pairwise(self.times)]


def test_chunks_shrink_to_the_bound_and_are_whole_alone(engine: Engine, machine: Machine) -> None:
    streams = Streams(engine, machine, 100)
    for seed in range(3):
        streams.read(400, seed)
    assert max(streams.gaps) <= 0.1
    assert machine.sizes[1] == FIRST_TOKENS
    assert all(30 <= size <= 35 for size in machine.sizes[8:11])
    machine.token_s = 20e-3  # another process takes the cores
    streams.read(400, 5)
    assert machine.sizes[-20:-1] == [FEWEST_TOKENS] * 19
    streams.stream.cancel()
    machine.sizes.clear()
    handle = streams.scheduler.submit(Request(prompt(300, 7), 1, FREE, reuse=False))
    [*streams.scheduler.run(handle)]
    assert machine.sizes == [CHUNK, CHUNK, 300 - 2 * CHUNK]


def test_chunks_grow_where_there_is_time(engine: Engine, machine: Machine) -> None:
    machine.token_s = 0.1e-3
    streams = Streams(engine, machine, 100)
    streams.read(500)
    sizes = machine.sizes[1:]
    assert sizes[0] == FIRST_TOKENS and sizes[:-1] == sorted(sizes[:-1])
    assert all(b <= 2 * a for a, b in pairwise(sizes)) and max(sizes) == CHUNK
    streams.read(300)
    assert machine.sizes[-3:] == [CHUNK, CHUNK, 300 - 2 * CHUNK]
    assert max(streams.gaps) <= 0.1


@pytest.mark.parametrize("count", [40, 120])
def test_prompts_are_read_in_few_pieces(engine: Engine, machine: Machine, count: int) -> None:
    """A chunk takes as long as 37 tokens whatever its size, and 44 tokens fit beside a step."""
    machine.token_s, machine.chunk_s, machine.step_s = 0.46e-3, 17e-3, 36e-3
    streams = Streams(engine, machine, 100)
    for seed in range(20):
        streams.read(count, seed)
    pieces = machine.sizes[-30:]
    assert sum(pieces) / len(pieces) >= 36 and max(streams.gaps) <= 0.1


def test_sequences_are_counted_while_requests_wait(engine: Engine, machine: Machine) -> None:
    scheduler = Streams(engine, machine, 100).scheduler
    jobs = [Request(prompt(120, i), 1, FREE, reuse=False) for i in range(3)]
    late = [scheduler.submit(job) for job in jobs]
    seen = list[tuple[int, int]]()
    while not late[-1].done:
        scheduler.step()
        seen.append((len(scheduler.waiting), scheduler.chunk_size.queued_rows))
    slots = engine.limits.max_batch
    assert {*seen} == {(n, min(1 + n, slots) if n else 0) for n, _ in seen} and (0, 0) in seen
    assert any(n for n, _ in seen)


def test_chunks_take_as_long_as_slow_steps(engine: Engine, machine: Machine) -> None:
    """A step alone exceeds the bound: prompts get half of the time."""
    machine.step_s, machine.token_s = 1.0, 0.02
    streams = Streams(engine, machine, 0.001)
    for _ in range(3):
        streams.scheduler.step()
    for seed in range(4):
        streams.read(500, seed)
    assert 35 <= streams.scheduler.chunk_size.tokens <= 65  # 0.7 to 1.3 s


def test_steps_are_measured_alone_while_prompts_wait(engine: Engine, machine: Machine) -> None:
    """No step without a chunk was seen before."""
    machine.step_s, machine.token_s = 0.09, 1e-3
    size, now = ChunkSize(0.1, 1024), 0.0
    size.start(now)
    for _ in range(300):
        size.computed += 0 if size.probes else size.remaining
        now += machine.step_s + size.computed * machine.token_s
        size.record(now)
    assert 60 <= size.tokens <= 95


def test_one_slow_chunk_is_forgotten(engine: Engine, machine: Machine) -> None:
    machine.token_s = 0.5e-3
    streams = Streams(engine, machine, 100)
    streams.read(500)
    before = streams.scheduler.chunk_size.tokens
    assert before > 100
    machine.token_s, fast = 5e-3, machine.token_s
    streams.read(before, 2)
    streams.scheduler.step()
    assert 50 < streams.scheduler.chunk_size.tokens <= CHUNK // 2
    machine.token_s = fast
    for seed in range(3):
        streams.read(500, seed)
    assert streams.scheduler.chunk_size.tokens >= before


def test_short_prompts_share_the_time_between_two_tokens(engine: Engine, machine: Machine) -> None:
    """With a bound, which is kept; the others wait."""
    machine.token_s, machine.step_s = 0.5e-3, 5e-3
    streams = Streams(engine, machine, 100)
    streams.read(500)
    room = streams.scheduler.chunk_size.tokens
    jobs = [Request(prompt(30, i), 1, FREE, reuse=False) for i in range(8)]
    late = [streams.scheduler.submit(job) for job in jobs]
    streams.times.clear()
    while not late[-1].done:
        done = sum(h.done for h in late)
        events = streams.scheduler.step()
        streams.times += [machine.now] * sum(e.handle is streams.stream for e in events)
        assert (sum(h.done for h in late) - done) * 30 <= room + FEWEST_TOKENS
    assert len(streams.gaps) < 8 // 2 and max(streams.gaps) <= 0.1


@given(
    st.floats(1e-6, 3e-3),
    st.floats(0, 0.04),
    st.floats(0, 0.02),
    st.sampled_from((64, 100, 1024)),
    st.sampled_from(((0, 0.1), (4, 0.1), (8, 0.2), (16, 0.4), (64, 0.4))),
)
def test_a_steady_machine(
    token_s: float, step_s: float, chunk_s: float, most: int, queued: tuple[int, float]
) -> None:
    """Whatever a token, a step and a chunk cost: gaps are within the bound once chunks are
    measured, and chunks are no shorter than half of what fits. The bound is 0.1 s, and up to four
    times as much for many sequences if others wait."""
    size, now, gaps = ChunkSize(0.1, most), 0.0, []
    size.queued_rows, bound = queued
    size.start(now)
    for _ in range(40):
        size.computed += size.remaining
        took = step_s + chunk_s + size.computed * token_s
        gaps.append(took)
        now += took
        size.record(now)
    fits = (bound - step_s - chunk_s) / token_s
    if fits >= FEWEST_TOKENS:
        assert max(gaps[5:]) <= bound
        assert size.tokens >= min(most, fits / 2) - 1
    else:
        assert size.tokens == FEWEST_TOKENS
