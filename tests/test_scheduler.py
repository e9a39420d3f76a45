"""Rows as scheduler: whatever runs beside a request, it gets the tokens that it gets alone.

Calls that fail in the middle of a step: the scheduler lives on, no token is lost, all ends.

Chunks of prompts beside running sequences: bounded by measured time. The clock is a fake one.
"""

from __future__ import annotations

import gc
import math
import random
import threading
import time
import tracemalloc
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from g4ir import Engine, Session, load_spec
from g4ir.backends.base import GraphRun
from g4ir.backends.cuda.token_loop import TokenLoop
from g4ir.backends.sampling import SamplingParams
from g4ir.engine import prefill
from g4ir.engine.async_engine import AsyncEngine
from g4ir.engine.batch import Batch, checked_buckets
from g4ir.engine.chunk_size import FEWEST_TOKENS, FIRST_TOKENS, ChunkSize
from g4ir.engine.device_loop import TokenSteps
from g4ir.engine.prefill import KEY_BYTES, Prefiller, PrefixCache, shared_length
from g4ir.engine.requests import (
    CANCELLED,
    FAILED,
    FINISHED,
    LENGTH,
    STOP,
    Event,
    Request,
    RequestHandle,
)
from g4ir.engine.scheduler import Scheduler, SchedulerConfig
from g4ir.engine.speculative import NGRAM, SpeculativeConfig
from g4ir.errors import CheckError, InputError, RankError
from g4ir.spec.parts import FULL, SLIDING
from tests.engines import CASES, some_tokens
from tests.spies import spy

MAX_SEQ, CHUNK, ROWS = 96, 16, 8
FREE = SamplingParams(ignore_eos=True)


LIMITS = {"max_seq": MAX_SEQ, "prefill_chunk": CHUNK, "max_batch": ROWS}


@pytest.fixture(scope="module")
def engine(make_engine: Any) -> Engine:
    """Per-layer embeddings, shared K and V, rings of 8; steps on the device."""
    return make_engine("tiny-ple", backend="torch", **LIMITS)


@pytest.fixture(scope="module")
def interpreted(make_engine: Any) -> Engine:
    """The same without a token loop: each token is chosen by the host."""
    return make_engine("tiny-ple", **LIMITS)


def prompt(count: int, seed: int = 0) -> tuple[int, ...]:
    return tuple(some_tokens(1, count, seed)[0].tolist())


def finished(scheduler: Scheduler) -> list[Event]:
    """All events until nothing is left to do."""
    out: list[Event] = []
    while scheduler.busy:
        out += scheduler.step()
    return out


def ran(scheduler: Scheduler, job: Request) -> RequestHandle:
    """The request, once it has ended."""
    handle = scheduler.submit(job)
    finished(scheduler)
    return handle


def texts(scheduler: Scheduler, jobs: Sequence[Request]) -> list[list[int]]:
    handles = [scheduler.submit(job) for job in jobs]
    finished(scheduler)
    assert all(t.state == FINISHED for t in handles)
    return [t.answers[0].tokens for t in handles]


def alone(engine: Engine, job: Request) -> list[int]:
    """By a scheduler of its own."""
    (text,) = texts(Scheduler(engine), [job])
    return text


def random_jobs(count: int, seed: int) -> list[Request]:
    """Prompts around windows and chunks, greedy and drawn, with penalties."""
    rng, out = random.Random(seed), list[Request]()
    for i in range(count):
        drawn = {"temperature": 1.0, "seed": i, "top_k": rng.choice((None, 5, 40))}
        more = {"presence_penalty": 0.5, "repetition_penalty": 1.2, "min_p": 0.05}
        given = {**(drawn if i % 3 else {}), **(more if i % 4 == 1 else {})}
        tokens = prompt(rng.choice((1, 2, 7, 8, 9, 15, 16, 17, 33, 50)), i)
        out.append(Request(tokens, rng.randint(1, 20), SamplingParams(ignore_eos=True, **given)))
    return out


def test_seeds_and_penalties_alone_and_in_company(engine: Engine) -> None:
    jobs = [replace(job, marks=(len(job.tokens) // 2,)) for job in random_jobs(12, 2)]
    want = [alone(engine, job) for job in jobs]
    assert texts(Scheduler(engine, SchedulerConfig(patience=0)), jobs) == want
    config = SchedulerConfig(buckets=(3, ROWS), prefill_first=True, chunk_tokens=5)
    scheduler = Scheduler(engine, config)
    handles = [scheduler.submit(job) for job in jobs]
    finished(scheduler)
    assert [t.answers[0].tokens for t in handles] == want
    assert scheduler.batch.sessions.keys() <= {3, ROWS} and ROWS in scheduler.totals.step_s
    for t in handles:
        c = t.counts
        assert (c.prompt, c.generated) == (len(t.request.tokens), len(t.answers[0].tokens))
        assert 0 <= c.queued_s <= c.first_token_s <= c.total_s
    assert scheduler.totals.generated == sum(map(len, want))


class Machine(RuleBasedStateMachine):
    """Admission, cancelling and steps in any order; texts are those of single runs."""

    engine: Engine
    wanted: dict[Request, list[int]] = {}
    jobs: list[Request] = []

    scheduler: Scheduler

    @initialize(gap=st.sampled_from((math.inf, 1000.0, 1e-3)))
    def start(self, gap: float) -> None:
        config = SchedulerConfig(patience=1, prefix_bytes=100_000, max_gap_ms=gap)
        self.scheduler = Scheduler(self.engine, config)
        self.handles: list[RequestHandle] = []
        self.events: list[Event] = []

    @rule(which=st.integers(0, 11), mark=st.booleans())
    def submit(self, which: int, mark: bool) -> None:
        job = self.jobs[which]
        marks = (len(job.tokens) // 2,) if mark else ()
        self.handles.append(self.scheduler.submit(replace(job, marks=marks)))

    @precondition(lambda self: self.handles)
    @rule(which=st.integers(0, 100))
    def cancel(self, which: int) -> None:
        self.handles[which % len(self.handles)].cancel()

    @rule(count=st.integers(1, 6))
    def step(self, count: int) -> None:
        for _ in range(count):
            self.events += self.scheduler.step()

    @invariant()
    def rows_are_those_of_who_decodes(self) -> None:
        holders = self.scheduler.batch.sequences
        assert [self.scheduler.batch.slots[a.slot] for a in holders] == holders
        assert len({id(a) for a in holders}) == len(holders) <= ROWS
        for a in holders:
            held = int(self.scheduler.batch.session.length[a.slot])
            assert held == len(a.handle.request.tokens) + len(a.tokens) - 1
        for t in self.handles:
            assert t.done == all(a.finish for a in t.answers)

    def teardown(self) -> None:
        self.events += finished(self.scheduler)
        for t in self.handles:
            job = replace(t.request, marks=())
            want, got = self.wanted[job], t.answers[0].tokens
            told = [e.token for e in self.events if e.handle is t and e.token is not None]
            assert told == got == want[: len(got)]
            assert t.state == (FINISHED if len(got) == len(want) else CANCELLED)
            assert sum(e.finish is not None for e in self.events if e.handle is t) == 1
        assert not self.scheduler.num_running and not self.scheduler.waiting


def test_any_order_of_admission_steps_and_cancelling(interpreted: Engine, full: bool) -> None:
    from hypothesis.stateful import run_state_machine_as_test

    jobs = random_jobs(12, 4)
    wanted = {j: alone(interpreted, j) for j in jobs}
    made = {"jobs": jobs, "engine": interpreted, "wanted": wanted}
    machine = type("M", (Machine,), made)
    shape = settings(max_examples=400 if full else 12, stateful_step_count=25, deadline=None)
    run_state_machine_as_test(machine, settings=shape)


def test_several_answers_to_one_prompt(interpreted: Engine) -> None:
    """The prompt is computed once; answer i has the seed + i; one that is stopped frees its row."""
    s, tokens = replace(FREE, temperature=1.5, seed=7), prompt(21)
    want = [alone(interpreted, Request(tokens, 9, replace(s, seed=7 + i))) for i in range(3)]
    scheduler = Scheduler(interpreted, SchedulerConfig(patience=1))
    other = scheduler.submit(Request(prompt(5, 1), 15, FREE))
    handle = scheduler.submit(Request(tokens, 9, s, n=3))
    while len(handle.answers[1].tokens) < 4:
        scheduler.step()
    handle.stop(1)
    first = scheduler.step()[0]
    assert (first.index, first.token, first.finish) == (1, None, STOP)
    assert scheduler.num_running == 3
    finished(scheduler)
    assert [a.tokens for a in handle.answers] == [want[0], want[1][:4], want[2]]
    assert handle.state == FINISHED and handle.counts.generated == 9 + 4 + 9
    assert scheduler.totals.ended[STOP] == 1 and scheduler.totals.computed == 21 + 5
    assert other.answers[0].tokens == alone(interpreted, other.request)


def test_ends(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """By a stop id of the request or the checkpoint, which is told, or by length."""
    tokens = prompt(11)
    text = engine.generate([*tokens], 12, stop_ids=())
    at = next(i for i, t in enumerate(text) if i > 2 and t not in text[:i])
    mine = replace(FREE, stop=frozenset({text[at]}))

    def end(s: SamplingParams, count: int = 12) -> Event:
        scheduler = Scheduler(engine)
        scheduler.submit(Request(tokens, count, s))
        return finished(scheduler)[-1]

    assert (end(mine).finish, end(mine).token) == (STOP, text[at])
    assert end(FREE, 3).finish == LENGTH and end(FREE, 1).token == text[0]
    monkeypatch.setattr(Engine, "stop_ids", lambda self: (text[at],))
    assert end(SamplingParams()).finish == STOP and end(FREE).finish == LENGTH
    later = Scheduler(engine)
    handle = ran(later, Request(tokens, 12, SamplingParams(min_tokens=at + 2)))
    assert len(handle.answers[0].tokens) >= at + 2
    assert text[at] not in handle.answers[0].tokens[: at + 1]


def test_the_smallest_bucket_is_used(interpreted: Engine) -> None:
    """Upwards at once, downwards after a while. Prompts that are computed together are so in a
    session of their number."""
    scheduler = Scheduler(interpreted, SchedulerConfig(patience=3))
    scheduler.submit(Request(prompt(3), 40, FREE))
    scheduler.step()
    assert len(scheduler.batch.slots) == 1
    short = [scheduler.submit(Request(prompt(3, i), 4, FREE)) for i in (1, 2)]
    sizes = []
    while scheduler.busy:
        scheduler.step()
        sizes.append(len(scheduler.batch.slots))
    assert all(t.state == FINISHED for t in short)
    assert (
        sizes[:3] == [4, 4, 4] and sizes[-1] == 1 and sorted(scheduler.batch.sessions) == [1, 2, 4]
    )
    assert sizes == sorted(sizes, reverse=True)
    burst, sizes = Scheduler(interpreted), []
    for i in range(4):
        burst.submit(Request(prompt(13, i), 40, FREE))
    for _ in range(4):
        burst.step()
        sizes.append(len(burst.batch.slots))
    assert sizes == [1, 2, 4, 4]


def test_short_prompts_are_one_chunk(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each in a row, of what is not cached: nothing but time is another, alone, beside a stream,
    with marks, or where one ends at once. The session of the first is that of the batch."""
    pairs, chunks = [*enumerate((2, 1, 2, 2))], list[int]()
    jobs = [Request(prompt(n, i), 6, FREE, marks=(1,)) for i, n in pairs]
    want = [alone(engine, job) for job in jobs]
    jobs[2] = replace(jobs[2], max_new_tokens=1)
    spy(monkeypatch, Session, "prefill_steps", lambda *given: chunks.append(given[1].numel()))
    for stream in (False, True):
        scheduler = Scheduler(engine, SchedulerConfig(prefix_bytes=200_000))
        if stream:
            running = scheduler.submit(Request(prompt(9, 9), 30, FREE))
            scheduler.step()
        handles = [scheduler.submit(job) for job in jobs]
        scheduler.step()
        assert scheduler.num_running == 3 + stream and scheduler.totals.chunks == 1 + stream
        assert chunks == [4, 4] and len(scheduler.batch.slots) == (8 if stream else 4)
        finished(scheduler)
        assert [t.answers[0].tokens for t in handles] == [*want[:2], want[2][:1], want[3]]
        assert scheduler.totals.computed == 7 + 9 * stream
        assert not stream or running.answers[0].tokens == alone(engine, running.request)
        chunks.clear()
        again = [scheduler.submit(replace(job, max_new_tokens=2)) for job in jobs]
        finished(scheduler)
        assert [t.counts.cached for t in again] == [1, 0, 1, 1] and sum(chunks) == 4
        assert [t.answers[0].tokens for t in again] == [w[:2] for w in want]
        chunks.clear()


def test_prompts_that_are_computed_by_themselves(engine: Engine) -> None:
    """Several answers, log-probabilities, a long one, one that goes on from another, and more than
    a chunk; as many rows as a bucket has."""
    prefiller, sizes = Scheduler(engine).prefiller, (2, 4)
    shapes = {(4, 4): 2, (4, 4, 4): 2, (4,) * 5: 4, (16, 1): 0, (9, 8): 0, (1, 8): 2, (8, 3, 8): 2}
    shapes |= {(1, 9, 1): 0, (4,): 0, (): 0, (50, 2): 0, (4, 1, 1, 1): 2}
    for lengths, count in shapes.items():
        prompts = [(Request(prompt(n, i)), prompt(n, i), 0) for i, n in enumerate(lengths)]
        assert prefiller.count_batchable(prompts, sizes, 16) == count, lengths
    tokens = prompt(70)
    alike = [(Request(t), t, 0) for t in (tokens, (*tokens[:66], 4))]
    assert prefiller.count_batchable(alike, sizes, 1024) == 0
    fresh = [(replace(r, reuse=False), *others) for r, *others in alike]
    assert prefiller.count_batchable(fresh, sizes, 1024) == 2
    several = Scheduler(engine).handle(Request(prompt(3), n=2))
    assert not several.batchable and Scheduler(engine).handle(Request(prompt(3))).batchable


def test_a_joint_chunk_that_fails(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its prompts are queued again, each is computed by itself, the running sequence goes on."""
    jobs = [Request(prompt(9, 9), 30, FREE), *(Request(prompt(4, i), 5, FREE) for i in range(4))]
    want = [alone(engine, job) for job in jobs]
    scheduler = Scheduler(engine)
    handles = [scheduler.submit(jobs[0])]
    scheduler.step()
    monkeypatch.setattr(Session, "prefill_steps", Mock(side_effect=MemoryError("no memory")))
    handles += map(scheduler.submit, jobs[1:])
    scheduler.step()
    assert not any(handle.started or handle.counts.queued_s for handle in handles[1:])
    finished(scheduler)
    assert [t.answers[0].tokens for t in handles] == want


def test_sizes_of_buckets() -> None:
    assert [checked_buckets(None, n) for n in (1, 3, 8)] == [(1,), (1, 2, 3), (1, 2, 4, 8)]
    assert checked_buckets((4, 2, 4), 4) == (2, 4)
    for wrong in ((), (0, 4), (2,), (4, 8)):
        with pytest.raises(InputError, match="largest of which is the engine's --max-batch 4"):
            checked_buckets(wrong, 4)


def poisoned(engine: Engine, patch: pytest.MonkeyPatch, phase: str, held: int) -> None:
    """The logits of a row that then holds so many tokens, and its caches, are NaN."""
    run = engine.runtime.run

    def broken(step: GraphRun, state: Any) -> Any:
        made, feeds = run(step, state), step.feeds
        after = feeds["positions"][:, 0] + feeds["lengths"]
        for row in ((after == held) & (feeds["lengths"] > 0)).nonzero()[:, 0].tolist():
            if step.phase == phase and made is not None:
                made["logits"][row] = torch.nan
                for t in state.row(row, MAX_SEQ).values():
                    t[...] = torch.nan
        return made

    patch.setattr(engine.runtime, "run", broken)


@pytest.mark.parametrize("phase", ["prefill", "decode"])
def test_nan_fails_its_row(
    interpreted: Engine, monkeypatch: pytest.MonkeyPatch, phase: str
) -> None:
    """And leaves nothing for who comes after it in its row."""
    jobs = [Request(prompt(n, n), 12, FREE) for n in (5, 13, 24)]
    want = [alone(interpreted, job) for job in jobs]
    scheduler = Scheduler(interpreted)
    with monkeypatch.context() as patch:
        poisoned(interpreted, patch, phase, 13 if phase == "prefill" else 13 + 8)
        handles = [scheduler.submit(job) for job in jobs]
        events = finished(scheduler)
    assert [t.state for t in handles] == [FINISHED, FAILED, FINISHED]
    (failed,) = [e for e in events if e.finish == FAILED]
    held = 13 if phase == "prefill" else 21
    assert isinstance(failed.error, CheckError)
    assert f"logits after {held} tokens: NaN or infinite" in str(failed.error)
    assert [t.answers[0].tokens for t in (handles[0], handles[2])] == [want[0], want[2]]
    assert texts(scheduler, jobs) == want


@pytest.mark.parametrize("says", CASES["requests"])
def test_a_wrong_request_takes_no_slot(engine: Engine, says: str) -> None:
    given, scheduler = CASES["requests"][says], Scheduler(engine)
    fields = {"tokens": [2, 5, 7], "max_new_tokens": 4, **given}
    fields["sampling"] = SamplingParams(**given.get("sampling", {}))
    with pytest.raises(InputError, match=says):
        scheduler.submit(Request(**fields))
    assert not scheduler.busy


def test_marks_are_where_other_prompts_begin(engine: Engine) -> None:
    """A conversation: the answer is read again, what was before it is not; another with the same
    beginning starts at its end."""
    system, turn, scheduler = prompt(20), prompt(17, 1), Scheduler(engine)
    first = Request((*system, *turn, 5), 6, FREE, marks=(20, 37))
    (answer,) = texts(scheduler, [first])
    second = Request((*system, *turn, *answer[:4], *prompt(9, 2)), 6, FREE, marks=(20, 41))
    other = Request((*system, *prompt(11, 3)), 6, FREE)
    computed = []
    for job, cached in ((second, 37), (other, 20), (second, 41)):
        before = scheduler.totals.computed
        handle = ran(scheduler, job)
        assert handle.answers[0].tokens == alone(engine, job)
        assert handle.counts.cached == cached
        computed.append(scheduler.totals.computed - before)
    assert computed == [len(second.tokens) - 37, 11, len(second.tokens) - 41]
    tokens = sum(len(j.tokens) for j in (second, other, second))
    assert scheduler.totals.cached == tokens - sum(computed)


def test_what_the_staging_row_still_holds(engine: Engine) -> None:
    """Without any mark: a prompt that goes on, and the same prompt again; one that parts earlier
    finds that rings have written over what it needs."""
    tokens, scheduler, seen = prompt(30), Scheduler(engine), []
    for job in (tokens, (*tokens, 9, 9), (*tokens, 9, 9), (*tokens[:20], 4), tokens[:25]):
        handle = ran(scheduler, Request(job, 4, FREE))
        assert handle.answers[0].tokens == alone(engine, handle.request)
        seen.append(handle.counts.cached)
    assert seen == [0, 30, 31, 0, 20]


def test_prompts_that_are_kept_apart(engine: Engine) -> None:
    tokens, scheduler, seen = prompt(30), Scheduler(engine), []
    for how in ({}, {"salt": "a"}, {"salt": "a"}, {"reuse": False}, {"reuse": False}, {}, {}):
        handle = ran(scheduler, Request(tokens, 2, FREE, marks=(12,), **how))
        seen.append(handle.counts.cached)
    assert seen == [0, 0, 29, 0, 0, 12, 29] and len(scheduler.prefixes) == 2


def test_a_cancelled_prompt_leaves_what_it_computed(engine: Engine) -> None:
    scheduler, job = Scheduler(engine), Request(prompt(60), 3, FREE)
    handle = scheduler.submit(job)
    scheduler.step()
    scheduler.step()
    handle.cancel()
    scheduler.step()
    assert handle.state == CANCELLED and scheduler.totals.computed == 2 * CHUNK
    again = ran(scheduler, job)
    assert again.counts.cached == 2 * CHUNK and again.answers[0].tokens == alone(engine, job)


def test_memory_of_prefixes_is_bounded(engine: Engine) -> None:
    """The one that was not used for longest goes first."""
    session = engine.session()
    session.prefill(torch.tensor([prompt(10)]))
    size = session.nbytes(10) + 10 * KEY_BYTES
    kept = PrefixCache(2 * size)
    pairs = (((), (1,)), ((1, 2), (1, 2, 3)), ((1, 2, 3), (1, 4, 3)))
    assert [shared_length(a, b) for a, b in pairs] == [0, 2, 1]
    a, b, c = ((*prompt(9, 1), i) for i in range(3))
    assert kept.store("", a, session) and kept.store("", b, session)
    assert kept.lookup("", (*a, 1))[0] == 10
    assert kept.store("", c, session) and kept.nbytes == 2 * size
    assert [kept.lookup("", (*k, 1))[0] for k in (a, b, c)] == [10, 0, 10]
    assert kept.lookup("x", (*a, 1)) == (0, None) == kept.lookup("", a)
    assert not PrefixCache(size - 1).store("", a, session)
    scheduler = Scheduler(engine, SchedulerConfig(prefix_bytes=3 * size))
    for i in range(9):
        scheduler.submit(Request(prompt(30, i), 1, FREE, marks=(8, 10)))
    finished(scheduler)
    assert scheduler.prefixes.nbytes <= 3 * size and 1 <= len(scheduler.prefixes) <= 3


def test_the_default_of_the_prefix_cache(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """A few long prompts whatever is free, but half of that at most; more where there is more."""
    one = Scheduler(engine, SchedulerConfig(prefix_bytes=0)).prefiller.prompt_bytes
    rows = 2 * engine.limits.max_batch * engine.session().nbytes()
    monkeypatch.setattr(prefill, "MIN_BYTES", 1)
    free = {rows + 10 * one: 4 * one, rows + 4 * one: 2 * one, rows + 100 * one: 25 * one, 0: 1}
    for room, most in free.items():
        monkeypatch.setattr(prefill, "free_on", lambda device, room=room: room)
        scheduler = Scheduler(engine)
        assert scheduler.prefixes.max_bytes == most
        assert scheduler.prefiller.capacity().startswith("prefix cache: ")
    assert "too small for a prompt of" in scheduler.prefiller.capacity()
    scheduler.submit(Request(prompt(30), 1, FREE, marks=(8, 10)))
    finished(scheduler)
    assert scheduler.prefixes.too_large == 2 and not len(scheduler.prefixes)


def test_a_thousand_short_requests(engine: Engine, full: bool) -> None:
    """Memory, threads, sessions and rows are what they were after the first."""
    scheduler = Scheduler(engine, SchedulerConfig(prefix_bytes=50_000))
    rng = random.Random(0)

    def some(count: int) -> None:
        for i in range(count):
            job = Request(prompt(rng.randint(1, 6), i % 50), rng.randint(1, 4), FREE, marks=(1,))
            scheduler.submit(job)
            scheduler.step()
        finished(scheduler)
        gc.collect()

    some(40)
    threads = threading.active_count()
    tracemalloc.start()
    some(20)
    before = tracemalloc.get_traced_memory()[0]
    some(1000 if full else 60)
    grown = tracemalloc.get_traced_memory()[0] - before
    tracemalloc.stop()
    assert grown < 100_000 and threading.active_count() == threads
    assert len(scheduler.batch.sessions) <= 4 and not (scheduler.num_running or scheduler.waiting)
    assert scheduler.prefixes.nbytes <= 50_000 and not any(scheduler.batch.slots)
    scheduler.close()
    assert not scheduler.batch.sessions and not len(scheduler.prefixes)


DRAFTING = {"max_seq": 96, "prefill_chunk": 16, "max_batch": 8, "draft_tokens": 3}
TOKENS, REQUESTS = 9, 6


@pytest.fixture(scope="module")
def ahead_engine(make_engine: Any) -> Iterator[Engine]:
    """Of a layer of each kind; its steps run ahead of the host, as on a GPU."""
    spec = load_spec("tiny-ple")
    text = {"num_hidden_layers": 2, "num_kv_shared_layers": 0, "pattern": (SLIDING, FULL)}
    spec = replace(spec, name="two-layers", text=replace(spec.text, **text))
    made: Engine = make_engine(spec, **DRAFTING)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(made), "chooses_on_device", True)
        patch.setattr(made.runtime, "token_loop", ahead(made))
        yield made


def ahead(ahead_engine: Engine) -> Callable[..., TokenLoop]:
    """A token loop over the steps of the reference."""

    def token_loop(embed: Any, state: Any, batch: int, choice: Any, tables: Any) -> TokenLoop:
        def step(feeds: dict[str, torch.Tensor]) -> torch.Tensor:
            longest = int(feeds["positions"].max()) + 1
            outputs = ahead_engine.runtime.run(GraphRun("decode", feeds, longest), state)
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
def answers(ahead_engine: Engine) -> list[list[int]]:
    """The answers of some requests, each by itself."""
    out = []
    for seed in range(REQUESTS):
        scheduler = Scheduler(ahead_engine)
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


def check(events: list[Event], handles: list[RequestHandle], answers: list[list[int]]) -> None:
    """Each request ended once; those that did not fail or were cancelled got all their tokens, the
    others the first ones."""
    for seed, handle in enumerate(handles):
        mine = [e for e in events if e.handle is handle]
        tokens = [e.token for e in mine if e.token is not None]
        assert handle.done and [e.finish is not None for e in mine].count(True) == 1
        assert tokens == answers[seed][: len(tokens)]
        assert handle.state in (CANCELLED, FAILED) or tokens == answers[seed]
        assert handle.state != FAILED or "no memory" in str(mine[-1].error)


@pytest.mark.parametrize(
    ("call", "draft"),
    [*((call, False) for call in CALLS), *((call, True) for call in CALLS if call[0] is Session)],
    ids=lambda x: f"{x[0].__name__}.{x[1]}" if isinstance(x, tuple) else f"draft={x}",
)
def test_a_call_that_fails(
    ahead_engine: Engine, answers: list[list[int]], call: tuple[type, str], draft: bool
) -> None:
    """In random company, cancelled or not."""
    config = SchedulerConfig(patience=1, prefix_bytes=50_000)
    if draft:
        config = SchedulerConfig(patience=1, draft=SpeculativeConfig(NGRAM, 3), draft_rows=8)
    for nth in (1, 4):
        rng, events = random.Random(nth), list[Event]()
        scheduler, handles = Scheduler(ahead_engine, config), list[RequestHandle]()
        with pytest.MonkeyPatch.context() as patch:
            Faults(patch, *call, nth)
            for seed in range(len(answers)):
                handles.append(scheduler.submit(job(seed, reuse=seed % 3 > 0)))
                for _ in range(rng.randint(0, 5)):
                    events += scheduler.step()
                if rng.random() < 0.3:
                    rng.choice(handles).cancel()
            while scheduler.busy:
                events += scheduler.step()
        check(events, handles, answers)
        again = scheduler.submit(job(0))
        assert [e.token for e in scheduler.run(again)] == answers[0]


#: while steps are in flight: the call that fails, whether the first request is cancelled before it,
#: and how the two end
FLIGHTS = {
    "batch that cannot grow": ((Batch, "put"), False, (FINISHED, FAILED)),
    "failing step": ((TokenSteps, "close"), False, (FAILED, FINISHED)),
    "failing step beside one that is cancelled": ((TokenSteps, "close"), True, (FAILED, FAILED)),
}


@pytest.mark.parametrize("name", FLIGHTS)
def test_a_call_that_fails_while_steps_are_in_flight(
    ahead_engine: Engine, answers: list[list[int]], monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """A batch that cannot grow fails the prompt and loses no token of the running sequence; a
    failing step of that sequence does not fail the prompt."""
    call, cancelled, states = FLIGHTS[name]
    scheduler = Scheduler(ahead_engine)
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
    check(events, handles, answers)


def test_events_before_a_rank_is_lost(
    ahead_engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The service delivers them, and ends the others by name."""
    lost = Mock(side_effect=RankError("rank 1 is gone"))
    events = dict[int, list[Event]]()
    with AsyncEngine(ahead_engine) as service:
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


def test_the_largest_unused_session_is_dropped(make_engine: Any) -> None:
    batch: Batch[Any] = Batch(make_engine("tiny-dense", max_batch=4), (1, 2, 3, 4), patience=0)
    for rows in (1, 2, 3, 4):
        batch.lend(rows)
    assert sorted(batch.sessions) == [1, 2, 4]


# --- sizes of chunks --------------------------------------------------------------------------

#: tokens of a chunk
LARGE = 128


@pytest.fixture(scope="module")
def reader(make_engine: Any) -> Engine:
    return make_engine("tiny-dense", max_seq=512, prefill_chunk=LARGE, max_batch=4)


class Clock:
    """Time, which tokens of a chunk and steps of the batch move on, and the sizes of chunks."""

    def __init__(self, token_s: float, step_s: float) -> None:
        self.now, self.token_s, self.step_s, self.sizes = 0.0, token_s, step_s, list[int]()
        self.chunk_s = 0.0

    def chunk(self, tokens: int) -> None:
        self.now += self.chunk_s + tokens * self.token_s
        self.sizes.append(tokens)

    def step(self) -> None:
        self.now += self.step_s


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock(2e-3, 10e-3)
    spy(monkeypatch, Session, "prefill_piece", lambda *given: made.chunk(given[2].width))
    spy(monkeypatch, Session, "verify", lambda *_: made.step())
    monkeypatch.setattr(time, "perf_counter", lambda: made.now)
    return made


class Streams:
    """A scheduler with a stream that runs, and when its tokens came."""

    def __init__(self, engine: Engine, clock: Clock, gap_ms: float) -> None:
        self.clock = clock
        config = SchedulerConfig(max_gap_ms=gap_ms, prefix_bytes=0)
        self.scheduler, self.times = Scheduler(engine, config), list[float]()
        self.stream = self.scheduler.submit(Request(prompt(3, 99), 400, FREE, reuse=False))
        self.scheduler.step()

    def read(self, count: int, seed: int = 1) -> RequestHandle:
        """Have a prompt computed beside the stream; it gets one token."""
        late = self.scheduler.submit(Request(prompt(count, seed), 1, FREE, reuse=False))
        while not late.done:
            events = self.scheduler.step()
            self.times += [self.clock.now] * sum(e.handle is self.stream for e in events)
        assert late.state == FINISHED
        return late

    @property
    def gaps(self) -> list[float]:
        return [b - a for a, b in pairwise(self.times)]


def test_chunks_shrink_to_the_bound_and_are_whole_alone(reader: Engine, clock: Clock) -> None:
    streams = Streams(reader, clock, 100)
    for seed in range(3):
        streams.read(400, seed)
    assert max(streams.gaps) <= 0.1 and clock.sizes[1] == FIRST_TOKENS
    assert all(30 <= size <= 35 for size in clock.sizes[8:11])
    clock.token_s = 20e-3  # another process takes the cores
    streams.read(400, 5)
    assert clock.sizes[-20:-1] == [FEWEST_TOKENS] * 19
    streams.stream.cancel()
    clock.sizes.clear()
    handle = streams.scheduler.submit(Request(prompt(300, 7), 1, FREE, reuse=False))
    [*streams.scheduler.run(handle)]
    assert clock.sizes == [LARGE, LARGE, 300 - 2 * LARGE]


def test_chunks_grow_where_there_is_time(reader: Engine, clock: Clock) -> None:
    clock.token_s = 0.1e-3
    streams = Streams(reader, clock, 100)
    streams.read(500)
    sizes = clock.sizes[1:]
    assert sizes[0] == FIRST_TOKENS and sizes[:-1] == sorted(sizes[:-1])
    assert all(b <= 2 * a for a, b in pairwise(sizes)) and max(sizes) == LARGE
    streams.read(300)
    assert clock.sizes[-3:] == [LARGE, LARGE, 300 - 2 * LARGE]
    assert max(streams.gaps) <= 0.1


@pytest.mark.parametrize("count", [40, 120])
def test_prompts_are_read_in_few_pieces(reader: Engine, clock: Clock, count: int) -> None:
    """A chunk takes as long as 37 tokens whatever its size, and 44 tokens fit beside a step."""
    clock.token_s, clock.chunk_s, clock.step_s = 0.46e-3, 17e-3, 36e-3
    streams = Streams(reader, clock, 100)
    for seed in range(20):
        streams.read(count, seed)
    pieces = clock.sizes[-30:]
    assert sum(pieces) / len(pieces) >= 36 and max(streams.gaps) <= 0.1


def test_sequences_are_counted_while_requests_wait(reader: Engine, clock: Clock) -> None:
    scheduler = Streams(reader, clock, 100).scheduler
    jobs = [Request(prompt(120, i), 1, FREE, reuse=False) for i in range(3)]
    late = [scheduler.submit(job) for job in jobs]
    seen = list[tuple[int, int]]()
    while not late[-1].done:
        scheduler.step()
        seen.append((len(scheduler.waiting), scheduler.chunk_size.queued_rows))
    slots = reader.limits.max_batch
    assert {*seen} == {(n, min(1 + n, slots) if n else 0) for n, _ in seen} and (0, 0) in seen
    assert any(n for n, _ in seen)


def test_chunks_take_as_long_as_slow_steps(reader: Engine, clock: Clock) -> None:
    """A step alone exceeds the bound: prompts get half of the time."""
    clock.step_s, clock.token_s = 1.0, 0.02
    streams = Streams(reader, clock, 0.001)
    for _ in range(3):
        streams.scheduler.step()
    for seed in range(4):
        streams.read(500, seed)
    assert 35 <= streams.scheduler.chunk_size.tokens <= 65  # 0.7 to 1.3 s


def test_steps_are_measured_alone_while_prompts_wait(reader: Engine, clock: Clock) -> None:
    """No step without a chunk was seen before."""
    clock.step_s, clock.token_s = 0.09, 1e-3
    size, now = ChunkSize(0.1, 1024), 0.0
    size.start(now)
    for _ in range(300):
        size.computed += 0 if size.probes else size.remaining
        now += clock.step_s + size.computed * clock.token_s
        size.record(now)
    assert 60 <= size.tokens <= 95


def test_one_slow_chunk_is_forgotten(reader: Engine, clock: Clock) -> None:
    clock.token_s = 0.5e-3
    streams = Streams(reader, clock, 100)
    streams.read(500)
    before = streams.scheduler.chunk_size.tokens
    assert before > 100
    clock.token_s, fast = 5e-3, clock.token_s
    streams.read(before, 2)
    streams.scheduler.step()
    assert 50 < streams.scheduler.chunk_size.tokens <= LARGE // 2
    clock.token_s = fast
    for seed in range(3):
        streams.read(500, seed)
    assert streams.scheduler.chunk_size.tokens >= before


def test_short_prompts_share_the_time_between_two_tokens(reader: Engine, clock: Clock) -> None:
    """With a bound, which is kept; the others wait."""
    clock.token_s, clock.step_s = 0.5e-3, 5e-3
    streams = Streams(reader, clock, 100)
    streams.read(500)
    room = streams.scheduler.chunk_size.tokens
    jobs = [Request(prompt(30, i), 1, FREE, reuse=False) for i in range(8)]
    late = [streams.scheduler.submit(job) for job in jobs]
    streams.times.clear()
    while not late[-1].done:
        done = sum(h.done for h in late)
        events = streams.scheduler.step()
        streams.times += [clock.now] * sum(e.handle is streams.stream for e in events)
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
