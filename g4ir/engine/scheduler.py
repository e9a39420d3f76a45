"""Continuous batching: requests of any length, admitted at any time, over the slots of one engine.

    scheduler = Scheduler(engine)
    handle = scheduler.submit(Request((2, 5, 7), max_new_tokens=8))
    for event in scheduler.run(handle):
        ...

A step drops cancelled requests, decodes all running sequences, and computes one chunk of a prompt.
A sequence whose logits mask is still being computed sits out a step (background_mask.py).
Sequences are decoded in one of three ways, chosen each time: by steps that run ahead on the device
while the batch stays the same and nothing needs the host (device_loop.py); by verification of draft
tokens (speculative.py); by a step whose tokens the host chooses. One thread at a time;
`RequestHandle.cancel` from any.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import islice, takewhile

import torch

from g4ir.backends.background_mask import PATIENCE_S
from g4ir.backends.sampling import SEEDS, Choice, Drawn, Sampler, random_seed, sample
from g4ir.errors import InputError, MissingError, RankError
from g4ir.ops.finite import not_finite

from .batch import Batch, checked_buckets
from .chunk_size import ChunkSize
from .device_loop import Drafters, Tokens, TokenSteps, open_loop
from .inputs import padded, row_prompt
from .parts import EngineParts
from .prefill import Chunks, Prefiller
from .prompts import checked_ids, checked_prompt
from .requests import (
    CANCELLED,
    DECODING,
    FAILED,
    FINISHED,
    LENGTH,
    PREFILLING,
    STOP,
    Event,
    Request,
    RequestHandle,
    SequenceState,
    Totals,
    check_least,
)
from .session import Session
from .speculative import NGRAM, NO_DRAFT, RowDrafts, SpeculativeConfig, StepCosts, find_draft


@dataclass(frozen=True)
class SchedulerConfig:
    """`buckets`: batch sizes that sessions are made for (default 1, 2, 4, ... max_batch). One chunk
    of a prompt, at most `chunk_tokens` long (default: --prefill-chunk), is computed between two
    decode steps; with `prefill_first` all prompts that have a slot are. `max_gap_ms` bounds the
    time between two tokens of a running sequence: chunks between them become as short as that
    takes, and several short prompts are computed where there is time (chunk_size.py). The batch
    shrinks after `patience` calls of `step` for which a smaller bucket would have been enough.
    `prefix_bytes`: size of the prefix cache (default: from what is free). `draft`: speculative
    decoding, while at most `draft_rows` sequences decode, since more tokens cost more than reading
    the weights; of 0 tokens drafts as many as the engine verifies."""

    buckets: tuple[int, ...] | None = None
    prefill_first: bool = False
    chunk_tokens: int | None = None
    max_gap_ms: float = math.inf
    patience: int = 16
    prefix_bytes: int | None = None
    draft: SpeculativeConfig = NO_DRAFT
    draft_rows: int = 2

    def __post_init__(self) -> None:
        check_least(vars(self), chunk_tokens=1, patience=0, prefix_bytes=0, draft_rows=1)
        if not self.max_gap_ms > 0:
            raise InputError(f"max_gap_ms {self.max_gap_ms}: expected more than 0 milliseconds")


#: new tokens of sequences
NewTokens = dict[SequenceState, list[Drawn]]
Running = Sequence[SequenceState]


class Scheduler:
    def __init__(self, engine: EngineParts, config: SchedulerConfig | None = None) -> None:
        config = config or SchedulerConfig()
        draft = find_draft(engine, config.draft.source, config.draft.tokens or None)
        self.engine, self.config = engine, replace(config, draft=draft)
        self.max_batch = engine.limits.max_batch
        sizes = checked_buckets(config.buckets, self.max_batch)
        self.batch: Batch[SequenceState] = Batch(engine, sizes, config.patience)
        self.prefiller = Prefiller(engine, config.prefix_bytes)
        self.prefixes, self.totals = self.prefiller.prefixes, Totals()
        chunk = engine.limits.prefill_chunk
        most = min(config.chunk_tokens or chunk, chunk)
        self.chunk_size = ChunkSize(config.max_gap_ms / 1e3, most)
        self.costs = StepCosts()
        self.suppress, self._eos = engine.suppressed(), frozenset(engine.stop_ids())
        self._queue = deque[RequestHandle]()
        #: the request in prefill, and the chunks that are left of its prompt
        self._prompt: tuple[RequestHandle, Chunks] | None = None
        #: steps that run on the device, and their sequences
        self._loop: TokenSteps | None = None
        self._looped: list[SequenceState] = []
        #: events that nobody has taken yet: they outlive an exception in their step
        self._events: list[Event] = []

    def check(self, request: Request) -> None:
        """Raise InputError for a request that no slot could answer. From any thread."""
        vocab, room = self.engine.spec.text.vocab_size, self.engine.limits.max_seq
        s, size, most = request.sampling, len(request.tokens), self.max_batch
        checked_prompt(request.tokens, request.max_new_tokens, vocab, room, "prompt")
        row_prompt(self.engine, request.tokens, request.soft)
        if not 1 <= request.n <= most:
            raise InputError(f"n {request.n}: this engine answers 1 to {most} times at once")
        checked_ids([*s.stop], vocab, "stop")
        checked_ids([token for token, _ in s.logit_bias], vocab, "logit_bias")
        for name, count in (("logprobs", s.logprobs), ("prompt_logprobs", request.prompt_logprobs)):
            if count is not None and count > vocab:
                raise InputError(f"{name} {count}: the vocabulary has {vocab} tokens")
        if request.prompt_logprobs is not None:
            if not self.engine.all_logits:
                why = "needs an engine built with --all-logits, and so does echo with logprobs"
                raise MissingError(f"prompt_logprobs: {why}")
            if request.soft:
                raise MissingError("prompt_logprobs: is not supported with media")
        for mark in request.marks:
            if not 0 <= mark <= size:
                raise InputError(f"mark {mark}: the prompt has {size} tokens")

    def handle(self, request: Request) -> RequestHandle:
        """Check a request, and return a handle that `admit` takes. From any thread."""
        self.check(request)
        if request.prompt_logprobs is not None:
            request = replace(request, reuse=False)
        s = request.sampling
        seed = random_seed() if s.seed is None else s.seed
        never = tuple(dict.fromkeys((*s.suppress, *self.suppress)))
        stops = s.stop if s.ignore_eos else s.stop | self._eos
        params = [replace(s, seed=(seed + i) % SEEDS, suppress=never) for i in range(request.n)]
        samplers = [Sampler(p, request.tokens, stops) for p in params]
        return RequestHandle(request, self.prefiller.keys(request), samplers)

    def submit(self, request: Request) -> RequestHandle:
        """Check a request and put it in the queue."""
        return self.admit(self.handle(request))

    def admit(self, handle: RequestHandle) -> RequestHandle:
        """Put a request in the queue."""
        self._queue.append(handle)
        return handle

    def run(self, *handles: RequestHandle) -> Iterator[Event]:
        """Step until requests have ended, and yield their events; leaving early cancels them."""
        try:
            while not all(handle.done for handle in handles):
                yield from (event for event in self.step() if event.handle in handles)
        finally:
            for handle in handles:
                handle.cancel()

    @property
    def waiting(self) -> int:
        """Number of requests in the queue."""
        return len(self._queue)

    @property
    def active(self) -> int:
        """Number of sequences that decode."""
        return len(self.batch.holders)

    @property
    def busy(self) -> bool:
        """Whether a step has something to do."""
        return bool(self._queue or self._prompt or self.active)

    def step(self) -> list[Event]:
        """Do one step, and return its events, in order. After an exception the events that came
        before it are those of `take_events`."""
        with self._guard():
            self._drop_cancelled()
        with self._guard():
            self._decode()
        while self._prompt or self._next_fits():
            with self._guard():
                self._advance_prompts()
            more = self.active and self.chunk_size.bounded and self.chunk_size.left
            if not (self.config.prefill_first or more):
                break
        return self.take_events()

    def take_events(self) -> list[Event]:
        """Return the events that nobody has taken yet."""
        events, self._events = self._events, []
        return events

    @contextmanager
    def _guard(self) -> Iterator[None]:
        """Have an exception fail the sequences of the batch, whose caches are undefined then. A
        RankError is raised: nothing can be computed any more."""
        try:
            yield
        except RankError:
            raise
        except Exception as e:
            handles = dict.fromkeys(s.handle for s in self.batch.holders)
            self._loop, self._looped = None, []
            self.batch.forget()
            for handle in handles:
                self._end(handle, FAILED, e)

    def _drop_cancelled(self) -> None:
        gone = [handle for handle in self._queue if handle.cancelled]
        for handle in gone:
            self._queue.remove(handle)
        if self._prompt and self._prompt[0].cancelled:
            gone.append(self._take_prompt())
        for handle in gone:
            self._end(handle, CANCELLED)
        if unwanted := [s for s in self.batch.holders if s.unwanted]:
            self._close_loop()
            for handle in dict.fromkeys(s.handle for s in unwanted if s.handle.cancelled):
                self._end(handle, CANCELLED)
            for s in unwanted:
                if not s.finish:
                    self._ended(s, STOP)

    def _decode(self) -> None:
        running = _with_masks(self.batch.holders)
        if not running:
            self._close_loop()
            return
        begun, pending = time.perf_counter(), self._pending()
        shrinks = self.batch.shrinks(pending)
        if shrinks or self._looped != running:
            if self._close_loop():
                return
            if shrinks:
                self.batch.shrink(pending)
        new = self._next_tokens(running)
        self.totals.steps[len(running)] += self._loop.steps if self._loop else 1
        took, bucket = time.perf_counter() - begun, len(self.batch.held)
        self.totals.step_s[bucket] = self.totals.step_s.get(bucket, 0.0) + took
        self._publish(new)

    def _next_tokens(self, running: Running) -> NewTokens:
        if self._loop and self._loop.over:
            self._halt()
        if not self._loop:
            drafters, session = self._drafters(running), self.batch.session
            self._loop = open_loop(self.engine, session, running, self.suppress, drafters)
            if not self._loop:
                return self._verified(running, drafters)
            self._looped = [*running]
        loop, begun = self._loop, time.perf_counter()
        tokens = loop.step(prefill_follows=bool(self._prompt) or self._next_fits())
        if loop.watches:
            self.costs.add(self.batch.session.batch, 1, time.perf_counter() - begun)
        return self._poll(tokens)

    def _poll(self, tokens: Tokens) -> NewTokens:
        new: NewTokens = {}
        for s in self._looped:
            for token in tokens[s.slot]:
                if s.over or s.finish or s.unwanted:
                    break
                if token is not None:
                    s.tokens.append(token)
                new.setdefault(s, []).append(None if token is None else Choice(token))
        return new

    def _halt(self) -> list[NewTokens]:
        """Have the session take over from the device; return the tokens of steps in flight."""
        loop, self._loop = self._loop, None
        if not loop:
            return []
        out = []
        for tokens in loop.close():
            self.totals.steps[len(self._looped)] += loop.steps
            out.append(self._poll(tokens))
        self._looped = []
        return out

    def _close_loop(self) -> bool:
        """Publish the tokens of steps in flight, after which the batch may change; return whether
        there are events. A failure ends the sequences of the batch."""
        count = len(self._events)
        with self._guard():
            for new in self._halt():
                self._publish(new)
        return len(self._events) > count

    def _publish(self, new: NewTokens) -> None:
        """Append the events of new tokens; sequences that end free their slots."""
        every = [new]
        if new:
            self.chunk_size.read(time.perf_counter())
        if any(None in choices or s.over for s, choices in new.items()):
            every += self._halt()
        for step in every:
            for sequence, choices in step.items():
                for choice in choices:
                    if not sequence.finish:
                        self._accept(sequence, choice)

    def _drafters(self, running: Running) -> dict[int, RowDrafts]:
        """Return what drafts for each slot; nothing while too many sequences decode."""
        draft, out = self.config.draft, dict[int, RowDrafts]()
        if draft and len(running) <= self.config.draft_rows:
            for s in running:
                tallies = self.totals.tally, s.handle.tally
                prompt = s.handle.request.tokens
                s.drafter = s.drafter or RowDrafts(draft, prompt, tallies, self.costs)
                out[s.slot] = s.drafter
        return out

    def _drafts(self, running: Running, drafters: Drafters) -> Mapping[int, Sequence[int]]:
        if not drafters:
            return {s.slot: () for s in running}
        batch = self.batch.session.batch
        counts = {s.slot: drafters[s.slot].count(s.room - 1, batch) for s in running}
        if self.config.draft.source == NGRAM:
            return {s.slot: drafters[s.slot].propose(s.tokens, counts[s.slot]) for s in running}
        return self.batch.session.draft({s.slot: s.tokens[-1] for s in running}, counts)

    def _verified(self, running: Running, drafters: Drafters) -> NewTokens:
        """Choose a token for each sequence, and another for each draft token that is right."""
        begun, session = time.perf_counter(), self.batch.session
        drafts = self._drafts(running, drafters)
        kept, made = session.length.clone(), {s: list[Drawn]() for s in running}
        fed = {s.slot: (s.tokens[-1], *drafts[s.slot]) for s in running}
        logits, going = session.verify(*padded(fed, session.batch)), running
        for place in range(logits.shape[1]):
            going = _with_masks(going) if place else going
            chosen = sample(logits[:, place], {s.slot: s.sampler for s in going})
            for s in going:
                made[s].append(chosen[s.slot])
            going = [s for s in going if _follows(s, chosen[s.slot], drafts[s.slot][place:])]
            if not going:
                break
        if logits.shape[1] > 1:
            for s, choices in made.items():
                kept[s.slot] += len(choices)
            session.truncate(kept)
        if drafters:
            self.costs.add(session.batch, logits.shape[1], time.perf_counter() - begun)
            for s in running:
                drafters[s.slot].told(len(drafts[s.slot]), len(made[s]), session.batch)
        return made

    def _pending(self, taken: int = 0) -> int:
        """Return how many more rows a bucket should have room for: those that wait, but no more
        than run, since each row takes time in every step."""
        waiting = [self._prompt[0]] if self._prompt else self._queue
        count = self.active + taken
        return min(sum(handle.request.n for handle in waiting), self.max_batch - count, count)

    def _accept(self, sequence: SequenceState, choice: Drawn) -> None:
        handle, counts = sequence.handle, sequence.handle.counts
        if not isinstance(choice, Choice):
            held = counts.prompt + len(sequence.tokens)
            what = f"{self.engine.path}: logits after {held} tokens"
            error = choice or not_finite(what, self.engine.dtype)
            self._ended(sequence, FAILED, error=error, zero=choice is None)
            return
        counts.generated += 1
        sequence.emitted += 1
        self.totals.generated += 1
        if counts.first_token_s is None:
            counts.first_token_s = handle.age()
        stops = choice.token in sequence.sampler.stops
        if not stops and sequence.emitted < handle.request.max_new_tokens:
            event = Event(handle, sequence.index, choice.token, choice.logprobs)
            self._events.append(event)
        else:
            self._ended(sequence, STOP if stops else LENGTH, choice)

    def _ended(
        self,
        sequence: SequenceState,
        finish: str,
        choice: Choice | None = None,
        error: Exception | None = None,
        zero: bool = False,
    ) -> None:
        """Append an answer's last event and free its slot; the last one ends the request."""
        handle, sequence.finish = sequence.handle, finish
        ends, counts = {s.finish for s in handle.answers}, handle.counts
        if None not in ends:
            handle.state = next((s for s in (FAILED, CANCELLED) if s in ends), FINISHED)
            counts.total_s = handle.age()
        if handle.state == FINISHED:  # count how long it kept its slots
            took = (handle.age() - (counts.queued_s or 0.0)) * handle.request.n
            self.totals.row_s += (took - self.totals.row_s) * (0.2 if self.totals.row_s else 1)
        self.totals.ended[finish] += 1
        token, logprobs = (choice.token, choice.logprobs) if choice else (None, None)
        self._events.append(Event(handle, sequence.index, token, logprobs, finish, error))
        self.batch.drop(sequence, zero)  # last: no event is lost where this raises

    def _end(self, handle: RequestHandle, finish: str, error: Exception | None = None) -> None:
        for s in handle.answers:
            if not s.finish:
                self._ended(s, finish, error=error)

    def _next_fits(self) -> bool:
        return bool(self._queue) and self._queue[0].request.n <= self.max_batch - self.active

    def _advance_prompts(self) -> None:
        """Compute a chunk of a prompt, or of all the next ones that fit into one."""
        free = 0 if self._prompt else self.max_batch - self.active
        joining = [*takewhile(lambda h: h.joins, islice(self._queue, free))]
        room = self.chunk_size.left if self.active else self.engine.limits.prefill_chunk
        sizes = [size for size in self.batch.sizes if 1 < size <= len(joining)]
        count = self.prefiller.joined([(h.request, h.keys) for h in joining], sizes, room)
        if count:
            self._compute_together(joining[:count])
        else:
            self._advance_prompt()

    def _compute_together(self, handles: Sequence[RequestHandle]) -> None:
        """Compute whole prompts, each in a row of a session. After an exception each is computed
        by itself."""
        self._close_loop()
        begun = time.perf_counter()
        for handle in handles:
            self._starts(handle)
        self.prefiller.borrow(self.batch)
        try:
            session = self.batch.lend(len(handles))
            logits, known = self.prefiller.together(session, [(h.request, h.keys) for h in handles])
        except RankError:
            raise
        except Exception:
            self.prefiller.forget()
            if len(handles) != len(self.batch.held):
                self.batch.sessions.pop(len(handles), None)
            for handle in handles:
                handle.joins = False
            return
        for handle, cached in zip(handles, known, strict=True):
            self._queue.remove(handle)
            handle.counts.cached = cached
        computed = [h.counts.prompt - cached for h, cached in zip(handles, known, strict=True)]
        self.chunk_size.computed += len(handles) * max(computed)
        self.totals.cached += sum(known)
        self.totals.computed += sum(computed)
        self.totals.chunks += 1
        self.totals.chunk_s += time.perf_counter() - begun
        self._place_all(handles, logits, session)

    def _place_all(
        self, handles: Sequence[RequestHandle], logits: torch.Tensor, session: Session
    ) -> None:
        """Choose the first token of each answer, and give those that go on a slot."""
        rows = [handle.answers[0] for handle in handles]
        try:
            for row, s in enumerate(rows):
                s.handle.state, choice = DECODING, sample(logits, {row: s.sampler})[row]
                if choice is None:
                    session.reset([row], zero=True)
                self._accept(s, choice)
            if not self.active:
                self.chunk_size.read(time.perf_counter())
            self.batch.take(session, [None if s.finish else s for s in rows])
        except Exception as e:
            for handle in handles:
                self._end(handle, FAILED, e)
            raise

    def _starts(self, handle: RequestHandle) -> None:
        handle.state, handle.counts.queued_s = PREFILLING, handle.age()
        if not self.active:
            self.chunk_size.begin(time.perf_counter())

    def _advance_prompt(self) -> None:
        handle = self._prompt[0] if self._prompt else self._queue.popleft()
        begun = time.perf_counter()
        try:
            self._prompt = self._prompt or self._begun(handle)
            held = self.prefiller.held
            logits = next(self._prompt[1])
            self.totals.computed += self.prefiller.held - held
            self.chunk_size.computed += self.prefiller.held - held
            self.totals.chunks += 1
            self.totals.chunk_s += time.perf_counter() - begun
            if logits is not None:
                self._place(self._take_prompt(), logits)
        except RankError:
            raise
        except Exception as e:
            self._prompt = None
            self.prefiller.forget()
            self._end(handle, FAILED, e)

    def _begun(self, handle: RequestHandle) -> tuple[RequestHandle, Chunks]:
        self._starts(handle)
        self.prefiller.borrow(self.batch)
        every = None if handle.request.prompt_logprobs is None else handle.read_prompt
        chunks = self.prefiller.chunks(handle.request, self._until, handle.keys, every)
        handle.counts.cached = self.prefiller.known
        self.totals.cached += self.prefiller.known
        return handle, chunks

    def _take_prompt(self) -> RequestHandle:
        """Return the request in prefill, and leave it; the prefiller keeps what it has computed."""
        assert self._prompt
        (handle, chunks), self._prompt = self._prompt, None
        chunks.close()
        return handle

    def _until(self, start: int) -> int:
        """Return how far a chunk may go: less far while sequences wait for it."""
        size = self.chunk_size.left or self.chunk_size.tokens
        return start + (size if self.active else self.engine.limits.prefill_chunk)

    def _place(self, handle: RequestHandle, logits: torch.Tensor) -> None:
        """Choose the first token of each answer, and give those that go on a slot."""
        handle.state, session = DECODING, self.prefiller.session
        for sequence in handle.answers:
            choice = sample(logits, {0: sequence.sampler})[0]
            if choice is None:
                session.reset(zero=True)
            self._accept(sequence, choice)
        if not self.active:
            self.chunk_size.read(time.perf_counter())
        going = [s for s in handle.answers if not s.finish]
        if not going:
            return
        self._close_loop()
        if len(going) == 1 and not handle.request.reuse and self.batch.adopt(session, going[0]):
            self.prefiller.forget()
        else:
            self.batch.put(session, going, self._pending(len(going)))

    def close(self) -> None:
        """Free all caches; requests that have not ended stay as they are."""
        self._prompt, self._loop = None, None
        self._queue.clear()
        self.batch.forget()
        self.prefiller.close()


def _with_masks(running: Running) -> list[SequenceState]:
    """Return the sequences whose next masks are computed; the others sit out a step."""
    for s in running:
        s.sampler.start_mask()
    ready = [s for s in running if s.sampler.mask_ready()]
    return ready or [s for s in running if s.sampler.mask_ready(PATIENCE_S)]


def _follows(sequence: SequenceState, choice: Drawn, drafts: Sequence[int]) -> bool:
    """Whether a choice is the first of the drafts that are left, and not the sequence's last."""
    if not drafts or not isinstance(choice, Choice):
        return False
    return choice.token == drafts[0] and choice.token not in sequence.sampler.stops
