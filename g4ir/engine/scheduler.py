"""Requests of different lengths, admitted at any time, over the rows of one engine.

    slots = Scheduler(engine)
    ticket = slots.submit(Request((2, 5, 7), max_new_tokens=8))
    while slots.busy:
        for event in slots.step():
            ...

A step drops what was cancelled, decodes all active rows, and takes one chunk of one prompt. A
prompt is computed in a session of one row of its own (`staging`), so that it does not cost a chunk
of every row, and copied into its row when it is through. One thread at a time;
`RequestHandle.cancel` from any.
"""

from __future__ import annotations

import heapq
import time
from collections import Counter
from collections.abc import Collection, Generator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch

from g4ir.backends.row_sampling import Choice, Logprobs, RowSampler, RowSampling, choose_rows
from g4ir.errors import InputError, RankError
from g4ir.media.soft import Soft
from g4ir.ops.finite import not_finite

from .batch import Batch, checked_buckets
from .engine import Engine
from .prefill import Prefiller, PrefillInput
from .prefix_cache import Keys, PrefixCache
from .prompts import checked_ids, checked_prompt
from .session import check_prompt
from .speculative import (
    NO_DRAFT,
    AcceptanceStats,
    RowDrafts,
    SpeculativeConfig,
    accepted,
    find_draft,
    propose,
)

#: states of a ticket
QUEUED, PREFILLING, DECODING = "queued", "prefilling", "decoding"
#: states in which it ends; an answer ends with the last two, or with STOP or LENGTH
FINISHED, CANCELLED, FAILED = "finished", "cancelled", "failed"
STOP, LENGTH = "stop", "length"
SEEDS = 1 << 63
#: a token, or why there is none (see `choose_rows`)
Drawn = Choice | Exception | None


@dataclass(frozen=True)
class Request:
    """A request: `n` answers to one prompt, each of at most `max_new_tokens`.

    Of two jobs that wait, that of the higher `priority` comes first. `soft`, `marks`, `reuse` and
    `salt`: see PrefillInput.
    """

    tokens: tuple[int, ...]
    max_new_tokens: int = 64
    sampling: RowSampling = field(default_factory=RowSampling)
    soft: tuple[Soft, ...] = ()
    n: int = 1
    priority: int = 0
    marks: tuple[int, ...] = ()
    reuse: bool = True
    salt: str = ""

    @property
    def prompt(self) -> PrefillInput:
        return PrefillInput(self.tokens, self.soft, self.marks, self.reuse, self.salt)


@dataclass(frozen=True)
class SchedulerConfig:
    """`buckets`: numbers of rows that sessions are made for (default 1, 2, 4, ... max_batch).
    `chunks` of prompts, of at most `chunk_tokens` (default: what the engine was built for), are
    computed between two steps while rows decode. A smaller bucket is taken after `patience` steps
    for which it would have done. `prefix_bytes` is the size of the prefix cache (default: from what
    is free). Tokens are
    drafted as `draft` says, while at most `draft_rows` rows decode: products of more tokens than
    that cost more than reading the weights. A draft of 0 tokens has as many as the engine
    verifies."""

    buckets: tuple[int, ...] | None = None
    chunks: int = 1
    chunk_tokens: int | None = None
    patience: int = 16
    prefix_bytes: int | None = None
    draft: SpeculativeConfig = NO_DRAFT
    draft_rows: int = 2

    def __post_init__(self) -> None:
        least = {"chunks": 1, "chunk_tokens": 1, "patience": 0, "prefix_bytes": 0, "draft_rows": 1}
        for name, number in least.items():
            value = getattr(self, name)
            if value is not None and value < number:
                raise InputError(f"{name} {value}: expected at least {number}")


def found_settings(engine: Engine, given: SchedulerConfig | None) -> SchedulerConfig:
    """Return settings with as many drafted tokens as the engine verifies where none are said;
    InputError where it cannot draft so."""
    settings = given or SchedulerConfig()
    draft = settings.draft
    return replace(settings, draft=find_draft(engine, draft.source, draft.tokens or None))


@dataclass
class Counts:
    """Tokens of a prompt and of its answers, and times in seconds since it was submitted; None: not
    yet."""

    prompt: int
    cached: int = 0
    generated: int = 0
    queued_s: float | None = None
    first_token_s: float | None = None
    total_s: float | None = None


@dataclass
class Answer:
    """One of a ticket's answers. `row` is -1 while it has none; `finish` says how it ended."""

    index: int
    ticket: RequestHandle
    sampler: RowSampler
    row: int = -1
    finish: str | None = None
    #: whether its reader has enough of it
    enough: bool = False
    #: from its first draft on
    drafter: RowDrafts | None = None

    @property
    def tokens(self) -> list[int]:
        return self.sampler.generated


class RequestHandle:
    """A submitted job. While it is `paused` its rows wait, and the others go on."""

    def __init__(
        self, job: Request, number: int, keys: Keys, samplers: Sequence[RowSampler]
    ) -> None:
        self.job, self.number, self.keys = job, number, keys
        self.answers = tuple(Answer(i, self, s) for i, s in enumerate(samplers))
        self.state = QUEUED
        self.counts, self.tally = Counts(len(job.tokens)), AcceptanceStats()
        self.cancelled = self.paused = False
        self._begun = time.perf_counter()

    def __lt__(self, other: RequestHandle) -> bool:
        return (-self.job.priority, self.number) < (-other.job.priority, other.number)

    def cancel(self) -> None:
        """Ask that it ends before the next step. May be called from any thread, at any time."""
        self.cancelled = True

    def stop(self, index: int) -> None:
        """Ask that one answer ends before the next step, as if the model had ended it; the others
        go on. May be called from any thread, at any time."""
        self.answers[index].enough = True

    @property
    def done(self) -> bool:
        return self.state in (FINISHED, CANCELLED, FAILED)

    @property
    def started(self) -> bool:
        """Whether its prompt has been begun, or never will be."""
        return self.state != QUEUED

    def age(self) -> float:
        """Return seconds since it was submitted."""
        return time.perf_counter() - self._begun


@dataclass(frozen=True)
class Event:
    """A token of an answer, its end, or both: `finish` is STOP, LENGTH, CANCELLED or FAILED."""

    ticket: RequestHandle
    index: int
    token: int | None = None
    logprobs: Logprobs | None = None
    finish: str | None = None
    error: Exception | None = None


@dataclass
class Totals:
    """Counts of all that was done since the beginning: `steps` by number of rows that decoded,
    their seconds by bucket; `ended` by how an answer ended."""

    computed: int = 0
    cached: int = 0
    generated: int = 0
    chunks: int = 0
    chunk_s: float = 0.0
    steps: Counter[int] = field(default_factory=Counter)
    step_s: dict[int, float] = field(default_factory=dict)
    ended: Counter[str] = field(default_factory=Counter)
    restored: int = 0
    #: seconds that a request keeps its rows, times their number: the mean, the latest count most
    row_s: float = 0.0
    tally: AcceptanceStats = field(default_factory=AcceptanceStats)


class Scheduler:
    """The rows of an engine, and who waits for one."""

    def __init__(self, engine: Engine, settings: SchedulerConfig | None = None) -> None:
        self.engine, self.settings = engine, found_settings(engine, settings)
        self.most = engine.limits.max_batch
        sizes = checked_buckets(self.settings.buckets, self.most)
        self.rows: Batch[Answer] = Batch(engine, sizes, self.settings.patience)
        self.staging = Prefiller(engine, self.settings.prefix_bytes)
        self.totals = Totals()
        self._never, self._eos = engine.suppressed(), frozenset(engine.stop_ids())
        self._queue: list[RequestHandle] = []
        self._number = 0
        #: whose prompt is being computed, and the chunks that are left of it
        self._prompt: tuple[RequestHandle, Generator[torch.Tensor | None, None, None]] | None = None

    # --- asking -------------------------------------------------------------------------------

    def check(self, job: Request) -> None:
        """Raise InputError for what no row could answer. From any thread."""
        vocab, room, s = self.engine.spec.text.vocab_size, self.engine.limits.max_seq, job.sampling
        checked_prompt([*job.tokens], job.max_new_tokens, vocab, room, "prompt")
        check_prompt(self.engine, job.tokens, job.soft)
        if not 1 <= job.n <= self.most:
            raise InputError(f"n {job.n}: this engine answers 1 to {self.most} times at once")
        checked_ids([*s.stop], vocab, "stop")
        checked_ids([token for token, _ in s.logit_bias], vocab, "logit_bias")
        if s.logprobs is not None and s.logprobs > vocab:
            raise InputError(f"logprobs {s.logprobs}: the vocabulary has {vocab} tokens")
        for mark in job.marks:
            if not 0 <= mark <= len(job.tokens):
                raise InputError(f"mark {mark}: the prompt has {len(job.tokens)} tokens")

    def ticket(self, job: Request) -> RequestHandle:
        """Check a job, and return a ticket that `admit` takes. From any thread."""
        self.check(job)
        keys = self.staging.keys(job.prompt)
        return RequestHandle(job, 0, keys, [self._sampler(job, i) for i in range(job.n)])

    def submit(self, job: Request) -> RequestHandle:
        """Check a job and put it in the queue."""
        return self.admit(self.ticket(job))

    def admit(self, ticket: RequestHandle) -> RequestHandle:
        """Put a ticket in the queue."""
        self._number += 1
        ticket.number = self._number
        heapq.heappush(self._queue, ticket)
        return ticket

    def _sampler(self, job: Request, index: int) -> RowSampler:
        """Return how an answer draws: each with a seed of its own."""
        s = job.sampling
        seed = None if s.seed is None else (s.seed + index) % SEEDS
        never = tuple(dict.fromkeys((*s.suppress, *self._never)))
        stops = s.stop if s.ignore_eos else s.stop | self._eos
        return RowSampler(replace(s, seed=seed, suppress=never), job.tokens, stops)

    @property
    def prefixes(self) -> PrefixCache:
        """All that is remembered of prompts."""
        return self.staging.prefixes

    @property
    def waiting(self) -> int:
        """Number of tickets in the queue."""
        return len(self._queue)

    @property
    def active(self) -> int:
        """Number of rows that decode."""
        return len(self.rows.holders)

    @property
    def busy(self) -> bool:
        """Whether a step has something to do, now or once a pause is over."""
        return bool(self._queue or self._prompt or self.active)

    @property
    def stalled(self) -> bool:
        """Whether every row waits for its reader, and nothing else is to be done."""
        answers = self.rows.holders
        idle = all(a.ticket.paused and not (a.ticket.cancelled or a.enough) for a in answers)
        cancelled = any(t.cancelled for t in self._queue)
        return bool(answers) and idle and not (self._prompt or self._next_fits() or cancelled)

    # --- a step -------------------------------------------------------------------------------

    def step(self) -> list[Event]:
        """Do one step, and return what came of it, in order."""
        events = self._drop_cancelled()
        events += self._decode()
        decoding = any(not a.ticket.paused for a in self.rows.holders)
        for _ in range(self.settings.chunks if decoding else 1):
            events += self._advance_prompt()
        return events

    def _drop_cancelled(self) -> list[Event]:
        events: list[Event] = []
        if any(t.cancelled for t in self._queue):
            gone = [t for t in self._queue if t.cancelled]
            self._queue = [t for t in self._queue if not t.cancelled]
            heapq.heapify(self._queue)
            events += [e for t in sorted(gone) for e in self._end(t, CANCELLED)]
        if self._prompt and self._prompt[0].cancelled:
            events += self._end(self._take_prompt(), CANCELLED)
        tickets = dict.fromkeys(a.ticket for a in self.rows.holders if a.ticket.cancelled)
        events += [e for t in tickets for e in self._end(t, CANCELLED)]
        for answer in [a for a in self.rows.holders if a.enough]:
            self.rows.drop(answer)
            events.append(self._ended(answer, STOP))
        return events

    def _decode(self) -> list[Event]:
        """Give every row that is not paused its next token."""
        answers = {a.row: a for a in self.rows.holders if not a.ticket.paused}
        if not answers:
            return []
        begun = time.perf_counter()
        try:
            self.rows.settle(self._coming())
            answers = {a.row: a for a in answers.values()}  # a move changes rows
            choices = self._round(answers)
        except RankError:  # nothing can be computed any more
            raise
        except Exception as e:  # what the rows hold now is not known
            tickets = dict.fromkeys(a.ticket for a in self.rows.holders)
            self.rows.forget()
            return [event for t in tickets for event in self._end(t, FAILED, e)]
        self.totals.steps[len(answers)] += 1
        took, bucket = time.perf_counter() - begun, len(self.rows.held)
        self.totals.step_s[bucket] = self.totals.step_s.get(bucket, 0.0) + took
        return [
            self._taken(answers[row], choice, len(made) - i)
            for row, made in choices.items()
            for i, choice in enumerate(made, 1)
        ]

    def _round(self, answers: Mapping[int, Answer]) -> Mapping[int, Sequence[Drawn]]:
        """Choose a token for each row, and more where drafts of them are right."""

        def choose(logits: torch.Tensor, rows: Collection[int]) -> Mapping[int, Drawn]:
            return choose_rows(logits, {row: answers[row].sampler for row in rows})

        def goes_on(row: int, choice: Drawn, drafted: int | None) -> bool:
            right = isinstance(choice, Choice) and choice.token == drafted
            return right and drafted not in answers[row].sampler.stops

        drafts = self._drafts(answers)
        newest = {row: a.tokens[-1] for row, a in answers.items()}
        logits = self.rows.session.judged({row: [newest[row], *d] for row, d in drafts.items()})
        made = accepted(logits, drafts, choose, goes_on)
        self.rows.session.keep({row: len(choices) for row, choices in made.items()})
        for row, choices in made.items():
            drafter, drafted = answers[row].drafter, len(drafts[row])
            if drafter:
                drafter.pace.told(drafted, len(choices) - 1)
                self.totals.tally.add(drafted, len(choices))
                answers[row].ticket.tally.add(drafted, len(choices))
        return made

    def _drafts(self, answers: Mapping[int, Answer]) -> dict[int, list[int]]:
        """Return drafted tokens of each row; none where nothing is drafted, or of too many rows."""
        draft = self.settings.draft
        if not draft or len(answers) > self.settings.draft_rows:
            return {row: [] for row in answers}
        for a in answers.values():
            a.drafter = a.drafter or RowDrafts(draft, a.ticket.job.tokens)
        drafters = {row: a.drafter for row, a in answers.items() if a.drafter}
        texts = {row: a.tokens for row, a in answers.items()}
        rooms = {r: a.ticket.job.max_new_tokens - len(a.tokens) - 1 for r, a in answers.items()}
        return propose(self.rows.session, drafters, texts, rooms)

    def _coming(self) -> int:
        """Count the rows that will be needed soon."""
        waiting = [self._prompt[0]] if self._prompt else self._queue
        return min(sum(t.job.n for t in waiting), self.most - self.active)

    def _taken(self, answer: Answer, choice: Choice | Exception | None, later: int = 0) -> Event:
        """Return the event of a token, which may be the last; `later` ones came of its round."""
        ticket = answer.ticket
        if not isinstance(choice, Choice):
            error = choice or self._not_finite(ticket, answer)
            self.rows.drop(answer, clear=choice is None)
            return self._ended(answer, FAILED, error=error)
        counts = ticket.counts
        counts.generated += 1
        self.totals.generated += 1
        if counts.first_token_s is None:
            counts.first_token_s = ticket.age()
        stops = choice.token in answer.sampler.stops
        if not stops and len(answer.tokens) - later < ticket.job.max_new_tokens:
            return Event(ticket, answer.index, choice.token, choice.logprobs)
        self.rows.drop(answer)
        return self._ended(answer, STOP if stops else LENGTH, choice)

    def _not_finite(self, ticket: RequestHandle, answer: Answer) -> Exception:
        held = ticket.counts.prompt + len(answer.tokens)
        what = f"{self.engine.path}: logits after {held} tokens"
        return not_finite(what, self.engine.dtype)

    def _ended(
        self,
        answer: Answer,
        finish: str,
        choice: Choice | None = None,
        error: Exception | None = None,
    ) -> Event:
        """Return the last event of an answer; the ticket ends with its last one."""
        ticket, answer.finish = answer.ticket, finish
        if all(a.finish for a in ticket.answers):
            ends = {a.finish for a in ticket.answers}
            ticket.state = next((s for s in (FAILED, CANCELLED) if s in ends), FINISHED)
            ticket.counts.total_s = ticket.age()
            self._count_time(ticket)
        self.totals.ended[finish] += 1
        token, logprobs = (choice.token, choice.logprobs) if choice else (None, None)
        return Event(ticket, answer.index, token, logprobs, finish, error)

    def _count_time(self, ticket: RequestHandle) -> None:
        """Count how long a request that was answered kept its rows."""
        c = ticket.counts
        if ticket.state == FINISHED and c.total_s is not None and c.queued_s is not None:
            took = (c.total_s - c.queued_s) * ticket.job.n
            self.totals.row_s += (took - self.totals.row_s) * (0.2 if self.totals.row_s else 1)

    def _end(
        self, ticket: RequestHandle, finish: str, error: Exception | None = None
    ) -> list[Event]:
        """End all answers of a ticket that have not."""
        left = [a for a in ticket.answers if not a.finish]
        for answer in left:
            self.rows.drop(answer)
        return [self._ended(answer, finish, error=error) for answer in left]

    # --- prompts ------------------------------------------------------------------------------

    def _next_fits(self) -> bool:
        """Whether there are rows for the first in the queue."""
        return bool(self._queue) and self._queue[0].job.n <= self.most - self.active

    def _advance_prompt(self) -> list[Event]:
        """Compute one chunk of the prompt at hand, or of the next."""
        if not self._prompt and self._next_fits():
            ticket = heapq.heappop(self._queue)
            ticket.state, ticket.counts.queued_s = PREFILLING, ticket.age()
            self._prompt = ticket, self._chunks(ticket)
        if not self._prompt:
            return []
        ticket, chunks = self._prompt
        begun = time.perf_counter()
        try:
            logits = next(chunks)
            self.totals.chunks += 1
            self.totals.chunk_s += time.perf_counter() - begun
            return [] if logits is None else self._placed(self._take_prompt(), logits)
        except RankError:
            raise
        except Exception as e:
            self._prompt = None
            self.staging.forget()
            return self._end(ticket, FAILED, e)

    def _take_prompt(self) -> RequestHandle:
        """Return whose prompt it is, and let go of it; staging holds what it does."""
        assert self._prompt
        (ticket, chunks), self._prompt = self._prompt, None
        chunks.close()
        return ticket

    def _chunks(self, ticket: RequestHandle) -> Generator[torch.Tensor | None, None, None]:
        """Compute a prompt in staging, and count what is known and what is computed of it."""
        totals, restored, held = self.totals, self.staging.restored, -1
        for logits in self.staging.chunks(ticket.job.prompt, self._until, ticket.keys):
            if held < 0:
                held = ticket.counts.cached = self.staging.known
                totals.cached += held
                totals.restored += self.staging.restored - restored
            totals.computed += self.staging.held - held
            held = self.staging.held
            yield logits

    def _until(self, start: int) -> int:
        """Return how far a chunk may go: less far where rows wait for it."""
        size = self.settings.chunk_tokens if self.active else None
        return start + (size or self.engine.limits.prefill_chunk)

    def _placed(self, ticket: RequestHandle, logits: torch.Tensor) -> list[Event]:
        """Draw the first token of each answer, and give those that go on a row."""
        ticket.state = DECODING
        events: list[Event] = []
        for answer in ticket.answers:
            choice = choose_rows(logits, {0: answer.sampler})[0]
            if choice is None:
                self.staging.session.clear()
            events.append(self._taken(answer, choice))
        going = [a for a in ticket.answers if not a.finish]
        if going:
            self.rows.put(self.staging.session, going)
        return events

    def close(self) -> None:
        """Let go of all caches; tickets that have not ended stay as they are."""
        self._prompt, self._queue = None, []
        self.rows.forget()
        self.staging.close()
