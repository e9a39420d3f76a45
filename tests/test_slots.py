"""Rows as slots: whatever runs beside a request, it gets the tokens that it gets alone."""

from __future__ import annotations

import gc
import random
import threading
import tracemalloc
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

import g4ir
from g4ir.backends.row_sampling import RowSampling
from g4ir.engine import prefill
from g4ir.engine.batch import checked_buckets, powers
from g4ir.engine.engine import Engine
from g4ir.engine.prefix_cache import KEY_BYTES, PrefixCache, prompt_keys, shared
from g4ir.engine.scheduler import (
    CANCELLED,
    FAILED,
    FINISHED,
    LENGTH,
    STOP,
    Event,
    Request,
    RequestHandle,
    Scheduler,
    SchedulerConfig,
)
from g4ir.errors import CheckError, InputError
from g4ir.media.soft import Soft
from tests.engines import some_tokens

MAX_SEQ, CHUNK, ROWS = 96, 16, 8
FREE = RowSampling(ignore_eos=True)
#: per-layer embeddings and shared K and V; experts and K=V; both have rings of 8
VARIANTS = ("tiny-ple", "tiny-moe")


def built(folder: Path, variant: str, **options: Any) -> Engine:
    limits = {"max_seq": MAX_SEQ, "prefill_chunk": CHUNK, "max_batch": ROWS}
    return g4ir.build(
        variant, folder, backend="reference", random_weights=0, **{**limits, **options}
    )


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], Engine]]:
    folder, found = tmp_path_factory.mktemp("slots"), dict[str, Engine]()

    def engine(variant: str) -> Engine:
        if variant not in found:
            found[variant] = built(folder / variant, variant)
        return found[variant]

    yield engine
    for e in found.values():
        e.close()


@pytest.fixture
def engine(made: Callable[[str], Engine]) -> Engine:
    return made("tiny-ple")


WIDE = """
schema: 1
extends: tiny-dense
text:
  max_position_embeddings: 8192
  num_attention_heads: 8
  sliding: {head_dim: 256, num_key_value_heads: 8, window: 4096}
  full: {head_dim: 512, num_key_value_heads: 1}
"""


def prompt(count: int, seed: int = 0) -> tuple[int, ...]:
    return tuple(some_tokens(1, count, seed)[0].tolist())


def finished(slots: Scheduler) -> list[Event]:
    """All events until nothing is left to do."""
    out: list[Event] = []
    while slots.busy:
        out += slots.step()
    return out


def texts(slots: Scheduler, jobs: Sequence[Request]) -> list[list[int]]:
    tickets = [slots.submit(job) for job in jobs]
    finished(slots)
    assert all(t.state == FINISHED for t in tickets)
    return [t.answers[0].tokens for t in tickets]


def alone(engine: Engine, job: Request) -> list[int]:
    """By slots of its own, that know nothing."""
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
        out.append(Request(tokens, rng.randint(1, 20), RowSampling(ignore_eos=True, **given)))
    return out


# --- equal to single runs -----------------------------------------------------------------------


@pytest.mark.parametrize("variant", VARIANTS)
def test_greedy_texts_are_those_of_generate(made: Any, variant: str, full: bool) -> None:
    """Eight at a time, and by the engine one by one."""
    engine, rng = made(variant), random.Random(1)
    count = (50 if full else 24) if variant == "tiny-ple" else 16
    jobs = [Request(prompt(rng.randint(1, 60), i), rng.randint(1, 16), FREE) for i in range(count)]
    want = [engine.generate([*j.tokens], j.max_new_tokens, stop_ids=()) for j in jobs]
    slots = Scheduler(engine, SchedulerConfig(chunks=6))
    assert texts(slots, jobs) == want
    assert max(slots.totals.steps) == ROWS == max(slots.totals.step_s)
    assert slots.totals.generated == sum(map(len, want))


@pytest.mark.parametrize(
    "caches", [{"kv_dtype": "float8"}, {"kv_dtype": "int8"}, {"latent_kv": "raw"}], ids=str
)
def test_caches_of_other_forms(tmp_path: Path, caches: dict[str, str]) -> None:
    """Rows in fewer bits, and one cache in the place of K and V."""
    with built(tmp_path / "engine", "tiny-moe", max_batch=3, **caches) as engine:
        jobs = [Request(prompt(n, n), 9, FREE) for n in (20, 7, 33, 12)]
        jobs += [replace(jobs[0], marks=(9,)), replace(jobs[0], tokens=(*jobs[0].tokens[:9], 4, 5))]
        want = [engine.generate([*j.tokens], 9, stop_ids=()) for j in jobs]
        slots = Scheduler(engine, SchedulerConfig(patience=0))
        assert texts(slots, jobs) == want and slots.totals.restored == 1 and slots.rows.moved


def test_plain_draws_are_those_of_generate(engine: Engine) -> None:
    given = {"temperature": 0.8, "top_k": 20, "top_p": 0.9}
    jobs = [Request(prompt(5 + i, i), 12, replace(FREE, seed=i, **given)) for i in range(6)]
    texts_of = enumerate(jobs)
    want = [engine.generate([*j.tokens], 12, stop_ids=(), seed=i, **given) for i, j in texts_of]
    assert texts(Scheduler(engine), jobs) == want


def test_seeds_and_penalties_alone_and_in_company(engine: Engine, full: bool) -> None:
    jobs = random_jobs(20 if full else 12, 2)
    want = [alone(engine, job) for job in jobs]
    assert texts(Scheduler(engine), jobs) == want
    assert texts(Scheduler(engine, SchedulerConfig(patience=0)), jobs) == want
    slots = Scheduler(engine, SchedulerConfig(buckets=(3, ROWS), chunks=3, chunk_tokens=5))
    assert texts(slots, jobs) == want and slots.rows.sessions.keys() <= {3, ROWS}


def test_cancelled_rows_change_no_other(engine: Engine, full: bool) -> None:
    jobs, rng = random_jobs(24 if full else 14, 3), random.Random(5)
    want = [alone(engine, job) for job in jobs]
    slots = Scheduler(engine, SchedulerConfig(patience=1))
    tickets = [slots.submit(job) for job in jobs]
    while slots.busy:
        slots.step()
        if rng.random() < 0.3:
            rng.choice(tickets).cancel()
    ends = [t.state for t in tickets]
    assert {FINISHED, CANCELLED} == {*ends}
    for ticket, text in zip(tickets, want, strict=True):
        got = ticket.answers[0].tokens
        assert got == (text if ticket.state == FINISHED else text[: len(got)])


class Machine(RuleBasedStateMachine):
    """Admission, cancelling and steps in any order; texts are those of single runs."""

    engine: Engine
    wanted: dict[Request, list[int]] = {}
    jobs: list[Request] = []

    def __init__(self) -> None:
        super().__init__()
        self.slots = Scheduler(self.engine, SchedulerConfig(patience=1, prefix_bytes=100_000))
        self.tickets: list[RequestHandle] = []
        self.events: list[Event] = []

    @rule(which=st.integers(0, 11), priority=st.integers(0, 1), mark=st.booleans())
    def submit(self, which: int, priority: int, mark: bool) -> None:
        job = self.jobs[which]
        marks = (len(job.tokens) // 2,) if mark else ()
        self.tickets.append(self.slots.submit(replace(job, priority=priority, marks=marks)))

    @precondition(lambda self: self.tickets)
    @rule(which=st.integers(0, 100))
    def cancel(self, which: int) -> None:
        self.tickets[which % len(self.tickets)].cancel()

    @precondition(lambda self: self.tickets)
    @rule(which=st.integers(0, 100))
    def pause(self, which: int) -> None:
        ticket = self.tickets[which % len(self.tickets)]
        ticket.paused = not ticket.paused

    @rule(count=st.integers(1, 6))
    def step(self, count: int) -> None:
        for _ in range(count):
            self.events += self.slots.step()

    @invariant()
    def rows_are_those_of_who_decodes(self) -> None:
        holders = self.slots.rows.holders
        assert [self.slots.rows.held[a.row] for a in holders] == holders
        assert len({id(a) for a in holders}) == len(holders) <= ROWS
        for a in holders:
            held = int(self.slots.rows.session.length[a.row])
            assert held == len(a.ticket.job.tokens) + len(a.tokens) - 1
        for t in self.tickets:
            assert t.done == all(a.finish for a in t.answers)

    def teardown(self) -> None:
        for t in self.tickets:
            t.paused = False
        self.events += finished(self.slots)
        for t in self.tickets:
            job = replace(t.job, priority=0, marks=())
            want, got = self.wanted[job], t.answers[0].tokens
            told = [e.token for e in self.events if e.ticket is t and e.token is not None]
            assert told == got == want[: len(got)]
            assert t.state == (FINISHED if len(got) == len(want) else CANCELLED)
            assert sum(e.finish is not None for e in self.events if e.ticket is t) == 1
        assert not self.slots.active and not self.slots.waiting


def test_any_order_of_admission_steps_and_cancelling(engine: Engine, full: bool) -> None:
    from hypothesis.stateful import run_state_machine_as_test

    jobs = random_jobs(12, 4)
    made = {"jobs": jobs, "engine": engine, "wanted": {j: alone(engine, j) for j in jobs}}
    machine = type("M", (Machine,), made)
    shape = settings(max_examples=400 if full else 12, stateful_step_count=25, deadline=None)
    run_state_machine_as_test(machine, settings=shape)


# --- several answers, priorities, ends ----------------------------------------------------------


def test_several_answers_to_one_prompt(engine: Engine) -> None:
    """The prompt is computed once; answer i has the seed + i."""
    s, tokens = replace(FREE, temperature=1.5, seed=7), prompt(21)
    want = [alone(engine, Request(tokens, 9, replace(s, seed=7 + i))) for i in range(3)]
    slots = Scheduler(engine)
    other = slots.submit(Request(prompt(5, 1), 15, FREE))
    ticket = slots.submit(Request(tokens, 9, s, n=3))
    events = finished(slots)
    assert [a.tokens for a in ticket.answers] == want and ticket.counts.generated == 27
    assert slots.totals.computed == 21 + 5
    assert {e.index for e in events if e.ticket is ticket} == {0, 1, 2}
    assert other.answers[0].tokens == alone(engine, other.job)


def test_an_answer_that_is_stopped_frees_its_row(engine: Engine) -> None:
    s, tokens = replace(FREE, temperature=1.5, seed=7), prompt(21)
    want = [alone(engine, Request(tokens, 9, replace(s, seed=7 + i))) for i in range(3)]
    slots = Scheduler(engine, SchedulerConfig(patience=1))
    ticket = slots.submit(Request(tokens, 9, s, n=3))
    while len(ticket.answers[1].tokens) < 4:
        slots.step()
    ticket.stop(1)
    first = slots.step()[0]
    assert (first.index, first.token, first.finish) == (1, None, STOP)
    assert slots.active == 2
    finished(slots)
    assert [a.tokens for a in ticket.answers] == [want[0], want[1][:4], want[2]]
    assert ticket.state == FINISHED and ticket.counts.generated == 9 + 4 + 9
    assert slots.totals.ended[STOP] == 1


def test_priority_comes_before_order(engine: Engine) -> None:
    slots = Scheduler(engine)
    tickets = [
        slots.submit(Request(prompt(4, i), 2, FREE, priority=p)) for i, p in enumerate((0, 2, 1, 2))
    ]
    begun = dict.fromkeys(e.ticket for e in finished(slots))
    assert [*begun] == [tickets[1], tickets[3], tickets[2], tickets[0]]


def test_ends(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """By a stop id of the request or the checkpoint, which is told, or by length."""
    tokens = prompt(11)
    text = engine.generate([*tokens], 12, stop_ids=())
    at = next(i for i, t in enumerate(text) if i > 2 and t not in text[:i])
    mine = replace(FREE, stop=frozenset({text[at]}))

    def end(s: RowSampling, count: int = 12) -> Event:
        slots = Scheduler(engine)
        slots.submit(Request(tokens, count, s))
        return finished(slots)[-1]

    assert (end(mine).finish, end(mine).token) == (STOP, text[at])
    assert end(FREE, 3).finish == LENGTH and end(FREE, 1).token == text[0]
    monkeypatch.setattr(Engine, "stop_ids", lambda self: (text[at],))
    assert end(RowSampling()).finish == STOP and end(FREE).finish == LENGTH
    later = Scheduler(engine)
    ticket = later.submit(Request(tokens, 12, RowSampling(min_tokens=at + 2)))
    finished(later)
    assert len(ticket.answers[0].tokens) >= at + 2
    assert text[at] not in ticket.answers[0].tokens[: at + 1]


def test_counts_and_times(engine: Engine) -> None:
    slots = Scheduler(engine)
    tickets = [slots.submit(Request(prompt(30, i), 5, FREE)) for i in range(3)]
    finished(slots)
    for t in tickets:
        c = t.counts
        assert (c.prompt, c.cached, c.generated) == (30, 0, 5)
        assert 0 <= c.queued_s <= c.first_token_s <= c.total_s
    assert tickets[0].counts.queued_s < tickets[2].counts.queued_s


def test_rows_decode_while_a_prompt_is_read(engine: Engine) -> None:
    """One chunk between two tokens of the others."""
    slots = Scheduler(engine)
    slots.submit(Request(prompt(3), 40, FREE))
    slots.step()
    late = slots.submit(Request(prompt(5 * CHUNK, 1), 2, FREE))
    for _ in range(4):
        assert [e.token is not None for e in slots.step()] == [True]
        assert late.state == "prefilling"
    assert {e.ticket for e in slots.step()} > {late}


def test_smaller_pieces_while_rows_decode(engine: Engine) -> None:
    slots = Scheduler(engine, SchedulerConfig(chunk_tokens=4))
    slots.submit(Request(prompt(3), 30, FREE))
    slots.step()
    slots.submit(Request(prompt(17, 1), 2, FREE))
    before = slots.totals.chunks
    slots.step()
    assert (slots.totals.chunks - before, slots.totals.computed) == (1, 3 + 4)


def test_a_job_fills_the_context(engine: Engine) -> None:
    slots = Scheduler(engine)
    jobs = [Request(prompt(MAX_SEQ - 9, i), 10, FREE) for i in range(2)]
    assert texts(slots, jobs) == [engine.generate([*j.tokens], 10, stop_ids=()) for j in jobs]


# --- buckets ------------------------------------------------------------------------------------


def test_the_smallest_bucket_is_used(engine: Engine) -> None:
    """Upwards at once, downwards after a while."""
    slots = Scheduler(engine, SchedulerConfig(patience=3))
    slots.submit(Request(prompt(3), 40, FREE))
    slots.step()
    assert len(slots.rows.held) == 1
    short = [slots.submit(Request(prompt(3, i), 4, FREE)) for i in (1, 2)]
    sizes = []
    while slots.busy:
        slots.step()
        sizes.append(len(slots.rows.held))
    assert all(t.state == FINISHED for t in short)
    assert sizes[:3] == [2, 4, 4] and sizes[-1] == 1 and [*slots.rows.sessions] == [1, 2, 4]
    assert sizes == [2] + [4] * sizes.count(4) + [2] * (sizes.count(2) - 1) + [1] * sizes.count(1)


def test_sizes_of_buckets() -> None:
    assert [powers(n) for n in (1, 2, 3, 6, 8)] == [
        (1,),
        (1, 2),
        (1, 2, 3),
        (1, 2, 4, 6),
        (1, 2, 4, 8),
    ]
    assert checked_buckets((4, 2, 4), 4) == (2, 4)
    for wrong in ((), (0, 4), (2,), (4, 8)):
        with pytest.raises(InputError, match="largest of which is the engine's --max-batch 4"):
            checked_buckets(wrong, 4)


# --- failures -----------------------------------------------------------------------------------


def poisoned(engine: Engine, patch: pytest.MonkeyPatch, phase: str, held: int) -> None:
    """The logits of a row that then holds so many tokens, and its caches, are NaN."""
    run = engine.runtime.run

    def broken(found: str, feeds: Any, state: Any, *rest: Any) -> Any:
        made = run(found, feeds, state, *rest)
        after = feeds["positions"][:, 0] + feeds["lengths"]
        for row in ((after == held) & (feeds["lengths"] > 0)).nonzero()[:, 0].tolist():
            if found == phase and made is not None:
                made["logits"][row] = torch.nan
                for t in state.row(row, MAX_SEQ).values():
                    t[...] = torch.nan
        return made

    patch.setattr(engine.runtime, "run", broken)


@pytest.mark.parametrize("phase", ["prefill", "decode"])
def test_a_row_of_nan_fails_alone(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, phase: str
) -> None:
    """And leaves nothing for who comes after it in its row."""
    jobs = [Request(prompt(n, n), 12, FREE) for n in (5, 13, 24)]
    want = [alone(engine, job) for job in jobs]
    slots = Scheduler(engine)
    with monkeypatch.context() as patch:
        poisoned(engine, patch, phase, 13 if phase == "prefill" else 13 + 8)
        tickets = [slots.submit(job) for job in jobs]
        events = finished(slots)
    assert [t.state for t in tickets] == [FINISHED, FAILED, FINISHED]
    (failed,) = [e for e in events if e.finish == FAILED]
    held = 13 if phase == "prefill" else 21
    assert isinstance(failed.error, CheckError)
    assert f"logits after {held} tokens: NaN or infinite" in str(failed.error)
    assert [t.answers[0].tokens for t in (tickets[0], tickets[2])] == [want[0], want[2]]
    assert texts(slots, jobs) == want


@pytest.mark.parametrize("phase", ["prefill", "decode"])
def test_an_exception_fails_the_requests_of_its_step(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, phase: str
) -> None:
    """Those that wait are answered."""
    jobs = [Request(prompt(20, i), 6, FREE) for i in range(ROWS + 2)]
    want, run, slots = [alone(engine, job) for job in jobs], engine.runtime.run, Scheduler(engine)
    tickets = [slots.submit(job) for job in jobs]
    for _ in range(7):
        slots.step()

    def broken(found: str, *rest: Any) -> Any:
        if found == phase:
            raise RuntimeError("out of memory")
        return run(found, *rest)

    with monkeypatch.context() as patch:
        patch.setattr(engine.runtime, "run", broken)
        events = slots.step()
    failed = [e for e in events if e.finish == FAILED]
    assert failed and all("out of memory" in str(e.error) for e in failed)
    assert len(failed) == 1 or phase == "decode"
    finished(slots)
    assert {t.state for t in tickets} == {FINISHED, FAILED}
    for t, text in zip(tickets, want, strict=True):
        got = t.answers[0].tokens
        assert got == text[: len(got)] and (t.state == FAILED or got == text)
    assert texts(slots, jobs) == want


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"tokens": ()}, "prompt is empty"),
    ({"tokens": (2, 512)}, "token 512 at index 1 is outside the vocabulary"),
    (
        {"tokens": prompt(MAX_SEQ), "max_new_tokens": 2},
        f"do not fit the engine's --max-seq {MAX_SEQ}",
    ),
    ({"max_new_tokens": 0}, "max_new_tokens 0"),
    ({"n": ROWS + 1}, f"n {ROWS + 1}: this engine answers 1 to {ROWS}"),
    ({"n": 0}, "n 0"),
    ({"marks": (9,)}, "mark 9: the prompt has 3 tokens"),
    ({"sampling": RowSampling(stop=frozenset({600}))}, "stop: token 600"),
    ({"sampling": RowSampling(logit_bias=((-1, 1.0),))}, "logit_bias: token -1"),
    ({"sampling": RowSampling(logprobs=513)}, "logprobs 513"),
    ({"soft": (Soft("image", (torch.ones(1, 64),)),)}, "this engine takes text, no image"),
]


@pytest.mark.parametrize("given, says", REFUSED, ids=[says for _, says in REFUSED])
def test_a_wrong_job_takes_no_row(engine: Engine, given: dict[str, Any], says: str) -> None:
    slots = Scheduler(engine)
    with pytest.raises(InputError, match=says):
        slots.submit(Request(**{"tokens": (2, 5, 7), "max_new_tokens": 4, **given}))
    assert not slots.busy


@pytest.mark.parametrize("name", ["chunks", "chunk_tokens", "patience", "prefix_bytes"])
def test_settings_that_are_wrong(name: str) -> None:
    with pytest.raises(InputError, match=f"{name} -1: expected at least"):
        SchedulerConfig(**{name: -1})


# --- prefixes -----------------------------------------------------------------------------------


def test_marks_are_where_other_prompts_begin(engine: Engine) -> None:
    """A conversation: the answer is read again, what was before it is not; another with the same
    beginning starts at its end."""
    system, turn, slots = prompt(20), prompt(17, 1), Scheduler(engine)
    first = Request((*system, *turn, 5), 6, FREE, marks=(20, 37))
    (answer,) = texts(slots, [first])
    second = Request((*system, *turn, *answer[:4], *prompt(9, 2)), 6, FREE, marks=(20, 41))
    other = Request((*system, *prompt(11, 3)), 6, FREE)
    computed = []
    for job, cached in ((second, 37), (other, 20), (second, 41)):
        before = slots.totals.computed
        ticket = slots.submit(job)
        finished(slots)
        assert ticket.answers[0].tokens == alone(engine, job)
        assert ticket.counts.cached == cached
        computed.append(slots.totals.computed - before)
    assert computed == [len(second.tokens) - 37, 11, len(second.tokens) - 41]
    assert slots.totals.cached == sum(len(j.tokens) for j in (second, other, second)) - sum(
        computed
    )


def test_what_the_staging_row_still_holds(engine: Engine) -> None:
    """Without any mark: a prompt that goes on, and the same prompt again; one that parts earlier
    finds that rings have written over what it needs."""
    tokens, slots, seen = prompt(30), Scheduler(engine), []
    for job in (tokens, (*tokens, 9, 9), (*tokens, 9, 9), (*tokens[:20], 4), tokens[:25]):
        ticket = slots.submit(Request(job, 4, FREE))
        finished(slots)
        assert ticket.answers[0].tokens == alone(engine, ticket.job)
        seen.append(ticket.counts.cached)
    assert seen == [0, 30, 31, 0, 20]


def test_prompts_that_are_kept_apart(engine: Engine) -> None:
    tokens, slots, seen = prompt(30), Scheduler(engine), []
    for given in ({}, {"salt": "a"}, {"salt": "a"}, {"reuse": False}, {"reuse": False}, {}, {}):
        ticket = slots.submit(Request(tokens, 2, FREE, marks=(12,), **given))
        finished(slots)
        seen.append(ticket.counts.cached)
    assert seen == [0, 0, 29, 0, 0, 12, 29] and len(slots.prefixes) == 2


def test_a_cancelled_prompt_leaves_what_it_computed(engine: Engine) -> None:
    slots, job = Scheduler(engine), Request(prompt(60), 3, FREE)
    ticket = slots.submit(job)
    slots.step()
    slots.step()
    ticket.cancel()
    slots.step()
    assert ticket.state == CANCELLED and slots.totals.computed == 2 * CHUNK
    again = slots.submit(job)
    finished(slots)
    assert again.counts.cached == 2 * CHUNK and again.answers[0].tokens == alone(engine, job)


def test_memory_of_prefixes_is_bounded(engine: Engine) -> None:
    """The one that was not used for longest goes first."""
    session = engine.session()
    session.append(torch.tensor([prompt(10)]))
    size = session.held_bytes() + 10 * KEY_BYTES
    kept = PrefixCache(2 * size)
    a, b, c = ((*prompt(9, 1), i) for i in range(3))
    assert kept.keep("", a, session) and kept.keep("", b, session)
    assert kept.longest("", (*a, 1))[0] == 10
    assert kept.keep("", c, session) and kept.nbytes == 2 * size
    assert [kept.longest("", (*k, 1))[0] for k in (a, b, c)] == [10, 0, 10]
    assert kept.longest("x", (*a, 1)) == (0, None) == kept.longest("", a)
    assert not PrefixCache(size - 1).keep("", a, session)
    slots = Scheduler(engine, SchedulerConfig(prefix_bytes=3 * size))
    for i in range(9):
        slots.submit(Request(prompt(30, i), 1, FREE, marks=(8, 10)))
    finished(slots)
    assert slots.prefixes.nbytes <= 3 * size and 1 <= len(slots.prefixes) <= 3


def test_the_default_of_the_prefix_cache(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """A few long prompts whatever is free, but half of that at most; more where there is more."""
    one = Scheduler(engine, SchedulerConfig(prefix_bytes=0)).staging.prompt_bytes
    rows = 2 * engine.limits.max_batch * engine.session().nbytes()
    monkeypatch.setattr(prefill, "LEAST_BYTES", 1)
    free = {rows + 10 * one: 4 * one, rows + 4 * one: 2 * one, rows + 100 * one: 25 * one, 0: 1}
    for room, most in free.items():
        monkeypatch.setattr(prefill, "free_on", lambda device, room=room: room)
        slots = Scheduler(engine)
        assert slots.prefixes.most_bytes == most
        assert slots.staging.capacity().startswith("prefix cache: ")
    assert "too small for a prompt of" in slots.staging.capacity()
    slots.submit(Request(prompt(30), 1, FREE, marks=(8, 10)))
    finished(slots)
    assert slots.prefixes.too_large == 2 and not len(slots.prefixes)


@pytest.mark.full
def test_two_conversations_in_turns_on_large_caches(tmp_path: Path) -> None:
    """As those of 12B: a snapshot of a short prompt has more than 256 MiB of sliding-window cache.
    Each conversation finds as much of itself as if it were alone."""
    (tmp_path / "wide.yaml").write_text(WIDE)
    options: dict[str, Any] = {"backend": "reference", "random_weights": 0, "prefill_chunk": 64}
    spec = g4ir.load_spec(tmp_path / "wide.yaml")
    with g4ir.build(spec, tmp_path / "e", max_seq=8192, max_batch=1, **options) as e:
        alone, both = Scheduler(e), Scheduler(e)
        assert both.staging.prompt_bytes > 256 << 20

        def cached(slots: Scheduler, seeds: Sequence[int]) -> dict[int, list[int]]:
            found: dict[int, list[int]] = {seed: [] for seed in seeds}
            for length in (70, 110, 150):
                for seed in seeds:
                    job = Request(prompt(length, seed), 1, FREE, marks=(length - 5,))
                    ticket = slots.submit(job)
                    finished(slots)
                    found[seed].append(ticket.counts.cached)
            return found

        turns = cached(both, (1, 2))
        assert turns[1] == turns[2] == [0, 65, 105]
        assert all(a >= b - 5 for a, b in zip(turns[1], cached(alone, (1,))[1], strict=True))


def test_shared_beginnings() -> None:
    assert [shared(a, b) for a, b in (((), (1,)), ((1, 2), (1, 2, 3)), ((1, 2, 3), (1, 4, 3)))] == [
        0,
        2,
        1,
    ]


# --- media --------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def unified(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    """It sees pictures both ways."""
    folder = tmp_path_factory.mktemp("media") / "engine"
    with built(folder, "tiny-unified", max_seq=256, prefill_chunk=70, max_batch=4) as engine:
        yield engine


def picture(engine: Engine, seed: int, count: int = 12) -> Soft:
    g = torch.Generator().manual_seed(seed)
    return Soft("image", (torch.randn(count, engine.spec.text.hidden_size, generator=g),))


def shown(*soft: Soft, words: int = 5, seed: int = 0) -> Request:
    """Words, and before each run of them a picture."""
    tokens: list[int] = [2, 7]
    for i, s in enumerate(soft):
        tokens += [500] * s.count + [*prompt(words, 10 * seed + i)]
    return Request(tuple(t if t != 501 else 3 for t in tokens), 5, FREE, soft)


def test_pictures_in_rows(unified: Engine) -> None:
    """Each with its own, in pieces that cut none, beside text."""
    soft = [picture(unified, i) for i in range(4)]
    jobs = [
        shown(soft[0]),
        shown(soft[1], soft[2]),
        Request(prompt(30), 5, FREE),
        shown(soft[3], soft[0]),
    ]
    want = [_generated(unified, job) for job in jobs]
    for given in ({}, {"chunk_tokens": 5}):
        slots = Scheduler(unified, SchedulerConfig(**given))
        assert texts(slots, jobs) == want


def _generated(engine: Engine, job: Request) -> list[int]:
    session, out = engine.session(), list[int]()
    logits = session.append(torch.tensor([job.tokens]), soft=job.soft)
    for _ in range(job.max_new_tokens):
        never = torch.tensor(engine.suppressed(), dtype=torch.int64)
        out.append(int(logits[0].index_fill(0, never, -torch.inf).argmax()))
        logits = session.advance([out[-1]])
    return out


def test_equal_ids_of_other_pictures(unified: Engine) -> None:
    """Nothing behind the first difference is taken from another picture; what is equal is."""
    a, b = picture(unified, 1), picture(unified, 2)
    slots, seen = Scheduler(unified), list[int]()
    for soft in ((a, b), (a, a), (a, b), (b, b)):
        base = shown(*soft)
        job = replace(base, marks=(2, 19, 20, 25))  # the third and fourth lie in a picture
        ticket = slots.submit(job)
        finished(slots)
        assert ticket.answers[0].tokens == _generated(unified, job)
        seen.append(ticket.counts.cached)
    assert seen == [0, 19, 19, 2]
    keys = prompt_keys((2, 500, 500), (Soft("image", (a.pieces[0][:2],)),), {"image": 500})
    assert keys[0] == 2 and keys[1] != keys[2] and max(keys[1:]) < 0


@pytest.mark.parametrize(
    "soft, says",
    [
        (0, "the prompt has 12 placeholders"),
        (2, "the prompt has 12 placeholders"),
    ],
)
def test_pictures_and_placeholders_that_differ(unified: Engine, soft: int, says: str) -> None:
    job = replace(shown(picture(unified, 0)), soft=tuple(picture(unified, i) for i in range(soft)))
    with pytest.raises(InputError, match=says):
        Scheduler(unified).submit(job)


def test_a_picture_that_fits_no_chunk(unified: Engine) -> None:
    with pytest.raises(InputError, match="must be in one chunk"):
        Scheduler(unified).submit(shown(picture(unified, 0, 71)))


# --- nothing grows ------------------------------------------------------------------------------


def test_a_thousand_short_requests(engine: Engine, full: bool) -> None:
    """Memory, threads, sessions and rows are what they were after the first."""
    slots = Scheduler(engine, SchedulerConfig(prefix_bytes=50_000))
    rng = random.Random(0)

    def some(count: int) -> None:
        for i in range(count):
            job = Request(prompt(rng.randint(1, 6), i % 50), rng.randint(1, 4), FREE, marks=(1,))
            slots.submit(job)
            slots.step()
        finished(slots)
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
    assert len(slots.rows.sessions) <= 4 and not slots.active and not slots.waiting
    assert slots.prefixes.nbytes <= 50_000 and not any(slots.rows.held)
    slots.close()
    assert not slots.rows.sessions and not len(slots.prefixes)
