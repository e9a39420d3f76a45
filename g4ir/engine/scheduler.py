"""Continuous batching: requests of any length, admitted at any time, over the slots of one engine.

    scheduler = Scheduler(engine)
    handle = scheduler.submit(Request((2, 5, 7), max_new_tokens=8))
    for event in scheduler.run(handle):
        ...

A step drops cancelled requests, decodes all running sequences, and prefills a chunk of one prompt,
or several short prompts together. A sequence whose logits mask is still being computed skips a step
(background_mask.py). Decode takes one of three paths: steps that run ahead on the device, while the
batch stays the same and nothing needs the host (device_loop.py); verification of draft tokens
(speculative.py); one step whose tokens the host samples. Not thread-safe, except for `check`,
`handle`, `RequestHandle.cancel` and `stop`.
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
    QUEUED,
    STOP,
    Event,
    Request,
    RequestHandle,
    SequenceState,
    Totals,
    check_minimums,
)
from .session import Session
from .speculative import NGRAM, NO_DRAFT, RowDrafts, SpeculativeConfig, StepCosts, resolve_draft

#: field of SchedulerConfig -> its minimum
MINIMUMS = {"chunk_tokens": 1, "patience": 0, "prefix_bytes": 0, "prefix_disk": 0, "draft_rows": 1}
#: max size of a prompt's last chunk while sequences decode, relative to the chunk size
MAX_LAST_CHUNK = 1.25


@dataclass(frozen=True)
class SchedulerConfig:
    """`buckets`: batch sizes (default: 1, 2, 4, multiples of 8, max_batch). One chunk of a prompt,
    of at most `chunk_tokens` (default: --prefill-chunk; the last one up to MAX_LAST_CHUNK times
    that), is prefilled between two decode steps; with `prefill_first` all prompts that have a slot
    are. `max_gap_ms` bounds the time between two tokens of a running sequence (the bound is higher
    while requests wait, or if plain decode steps are long): chunks are shortened to meet it, and
    several short prompts are prefilled if there is time (chunk_size.py). The batch shrinks after
    more than `patience` consecutive steps for which a smaller bucket would have been enough.
    `prefix_bytes`: bytes of the prefix cache (default: from free memory; 0: off), `prefix_disk`: of
    the one on disk (0: off). `draft`: speculative decoding, while at most `draft_rows` sequences
    decode: with more, the extra tokens cost more than reading the weights. `warm_up`: run a short
    request first, so that no user's request waits for what the first steps record and allocate."""

    buckets: tuple[int, ...] | None = None
    prefill_first: bool = False
    chunk_tokens: int | None = None
    max_gap_ms: float = math.inf
    patience: int = 16
    prefix_bytes: int | None = None
    prefix_disk: int = 0
    draft: SpeculativeConfig = NO_DRAFT
    draft_rows: int = 2
    warm_up: bool = False

    def __post_init__(self) -> None:
        check_minimums(vars(self), **MINIMUMS)
        if not self.max_gap_ms > 0:
            raise InputError(f"max_gap_ms {self.max_gap_ms}: expected more than 0 milliseconds")


#: tokens of the warm-up's prompt: chunks of more than three tokens run other code than shorter ones
WARM_TOKENS = 4

#: tokens sampled in a step
NewTokens = dict[SequenceState, list[Drawn]]
Running = Sequence[SequenceState]


class Scheduler:
    def __init__(self, engine: EngineParts, config: SchedulerConfig | None = None) -> None:
        config = config or SchedulerConfig()
        source, tokens = config.draft.source, config.draft.tokens or None
        draft = resolve_draft(engine.config, engine.label, source, tokens)
        draft = replace(draft, proposer=config.draft.proposer)
        self.engine, self.config = engine, replace(config, draft=draft)
        self.max_batch = engine.limits.max_batch
        sizes = checked_buckets(config.buckets, self.max_batch)
        self.batch: Batch[SequenceState] = Batch(engine, sizes, config.patience)
        self.prefiller = Prefiller(engine, config.prefix_bytes, config.prefix_disk)
        self.prefixes = self.prefiller.prefixes
        self._measure_anew()
        self.suppress, self._eos = engine.suppressed(), frozenset(engine.stop_ids())
        self.waiting = deque[RequestHandle]()
        #: the request in prefill, and its remaining chunks
        self._prompt: tuple[RequestHandle, Chunks] | None = None
        #: the batch's size at the last step
        self._bucket = 0
        #: decode loop on the device, and its sequences
        self._loop: TokenSteps | None = None
        self._loop_sequences: list[SequenceState] = []
        #: events not taken yet; an exception in a step does not lose them
        self._events: list[Event] = []
        if config.warm_up:
            self._warm_up()
            self._measure_anew()

    def _measure_anew(self) -> None:
        self.totals, self.costs = Totals(), StepCosts()
        chunk = self.engine.limits.prefill_chunk
        max_chunk = min(self.config.chunk_tokens or chunk, chunk)
        self.chunk_size = ChunkSize(self.config.max_gap_ms / 1e3, max_chunk)

    def _warm_up(self) -> None:
        size = min(WARM_TOKENS, self.engine.limits.max_seq - WARM_TOKENS)
        tokens = (self.engine.spec.tokens.bos or 0,) * size
        if tokens:
            # the warm-up's KV cache is never reused: no other request has its salt
            request = Request(tokens, 2, salt="\0warm-up", marks=(0,))
            deque(self.run(self.submit(request)), maxlen=0)

    def check(self, request: Request) -> None:
        """Raise InputError or MissingError for a request that this engine cannot serve.
        Thread-safe."""
        vocab, max_seq = self.engine.spec.text.vocab_size, self.engine.limits.max_seq
        s, size, max_batch = request.sampling, len(request.tokens), self.max_batch
        checked_prompt(request.tokens, request.max_new_tokens, vocab, max_seq, "prompt")
        row_prompt(self.engine, request.tokens, request.soft)
        if not 1 <= request.n <= max_batch:
            raise InputError(f"n {request.n}: expected 1 to {max_batch} answers (--max-batch)")
        if request.adapter:
            self.engine.loaded_adapters(request.adapter).check(request.adapter)
        checked_ids([*s.stop], vocab, "stop")
        checked_ids([token for token, _ in s.logit_bias], vocab, "logit_bias")
        for name, count in (("logprobs", s.logprobs), ("prompt_logprobs", request.prompt_logprobs)):
            if count is not None and count > vocab:
                raise InputError(f"{name} {count}: expected at most {vocab}, the vocabulary's size")
        if request.prompt_logprobs is not None:
            if not self.engine.all_logits:
                why = "needs an engine built with --all-logits, and so does echo with logprobs"
                raise MissingError(f"prompt_logprobs: {why}")
            if request.soft:
                raise MissingError("prompt_logprobs: is not supported with media")
        for mark in request.marks:
            if not 0 <= mark <= size:
                raise InputError(f"mark {mark}: expected 0 to {size}, the prompt's length")

    def handle(self, request: Request) -> RequestHandle:
        """Check a request and return its handle, for `admit`. Thread-safe."""
        self.check(request)
        if request.prompt_logprobs is not None:
            request = replace(request, reuse=False)
        handle = self._new_handle(request)
        if request.reuse and self.prefixes.disk:  # reads files, which would delay a step
            self.prefixes.lookup(handle.request.salt, handle.keys)
        return handle

    def _new_handle(self, request: Request) -> RequestHandle:
        s = request.sampling
        seed = random_seed() if s.seed is None else s.seed
        never = tuple(dict.fromkeys((*s.suppress, *self.suppress)))
        stops = s.stop if s.ignore_eos else s.stop | self._eos
        params = [replace(s, seed=(seed + i) % SEEDS, suppress=never) for i in range(request.n)]
        samplers = [Sampler(p, request.tokens, stops) for p in params]
        handle = RequestHandle(request, self.prefiller.keys(request), samplers)
        if request.adapter:
            adapters = self.engine.loaded_adapters(request.adapter)
            loaded, handle.release = adapters.use(request.adapter, handle)
            handle.adapter_slot, salt = loaded.slot, f"{request.salt}\0adapter {loaded.digest}"
            handle.request = replace(request, salt=salt)
        return handle

    def submit(self, request: Request) -> RequestHandle:
        """Check a request and put it in the queue."""
        return self.admit(self.handle(request))

    def admit(self, handle: RequestHandle) -> RequestHandle:
        """Put a request in the queue."""
        self.waiting.append(handle)
        return handle

    def run(self, *handles: RequestHandle) -> Iterator[Event]:
        """Step until the requests have ended, and yield their events; closing the iterator early
        cancels them."""
        try:
            while not all(handle.done for handle in handles):
                yield from (event for event in self.step() if event.handle in handles)
        finally:
            for handle in handles:
                handle.cancel()

    @property
    def num_running(self) -> int:
        """Number of sequences in decode."""
        return len(self.batch.sequences)

    @property
    def kv_tokens(self) -> int:
        """Prompt and generated tokens of the sequences in decode: those in the KV caches, and the
        newest of each sequence."""
        return sum(s.handle.counts.prompt + len(s.tokens) for s in self.batch.sequences)

    @property
    def kv_usage(self) -> float:
        """`kv_tokens` divided by max_batch * max_seq."""
        return self.kv_tokens / (self.max_batch * self.engine.limits.max_seq)

    @property
    def busy(self) -> bool:
        """Whether a step has something to do."""
        return bool(self.waiting or self._prompt or self.num_running)

    def step(self) -> list[Event]:
        """Run one step and return its events in order. After an exception, `take_events` returns
        the events before it."""
        with self._guard():
            self._drop_cancelled()
        with self._guard():
            self._decode()
        probes = self.num_running and self.chunk_size.probes
        while not probes and (self._prompt or self._can_admit()):
            with self._guard():
                self._schedule_prefill()
            rows = min(self.num_running + len(self.waiting), self.max_batch)
            self.chunk_size.queued_rows = rows if self.waiting else 0
            more = self.num_running and self.chunk_size.bounded and self.chunk_size.remaining
            if not (self.config.prefill_first or more):
                break
        return self.take_events()

    def take_events(self) -> list[Event]:
        """Return and clear the pending events."""
        events, self._events = self._events, []
        return events

    @contextmanager
    def _guard(self) -> Iterator[None]:
        """On an exception fail all sequences of the batch: their KV caches are undefined. RankError
        is raised again, since no rank can compute any more."""
        try:
            yield
        except RankError:
            raise
        except Exception as e:
            handles = dict.fromkeys(s.handle for s in self.batch.sequences)
            self._loop, self._loop_sequences = None, []
            self.batch.clear()
            for handle in handles:
                self._finish_all(handle, FAILED, e)

    def _drop_cancelled(self) -> None:
        cancelled = [handle for handle in self.waiting if handle.cancelled]
        for handle in cancelled:
            self.waiting.remove(handle)
        if self._prompt and self._prompt[0].cancelled:
            cancelled.append(self._pop_prompt())
        for handle in cancelled:
            self._finish_all(handle, CANCELLED)
        if aborted := [s for s in self.batch.sequences if s.aborted]:
            self._close_loop()
            for handle in dict.fromkeys(s.handle for s in aborted if s.handle.cancelled):
                self._finish_all(handle, CANCELLED)
            for s in aborted:
                if not s.finish:
                    self._finish_sequence(s, STOP)

    def _decode(self) -> None:
        running = _ready_sequences(self.batch.sequences)
        if not running:
            self._close_loop()
            return
        start, shrinks = time.perf_counter(), self.batch.should_shrink()
        if shrinks or self._loop_sequences != running:
            if self._close_loop():
                return
            if shrinks:
                self.batch.shrink()
        new = self._decode_step(running)
        self.totals.steps[len(running)] += self._loop.steps if self._loop else 1
        took, bucket = time.perf_counter() - start, len(self.batch.slots)
        self.totals.step_s[bucket] = self.totals.step_s.get(bucket, 0.0) + took
        self._publish(new)

    def _decode_step(self, running: Running) -> NewTokens:
        if self._loop and self._loop.exhausted:
            self._drain_loop()
        if not self._loop:
            drafters, session = self._open_drafters(running), self.batch.session
            self._loop = open_loop(self.engine, session, running, self.suppress, drafters)
            if not self._loop:
                return self._verify_drafts(running, drafters)
            self._loop_sequences = [*running]
        tokens = self._loop.step(prefill_follows=bool(self._prompt) or self._can_admit())
        if self._loop.seconds is not None:
            self.costs.add(self.batch.session.batch, 1, self._loop.seconds)
        return self._poll(tokens)

    def _poll(self, tokens: Tokens) -> NewTokens:
        new: NewTokens = {}
        for s in self._loop_sequences:
            for token in tokens[s.slot]:
                if s.complete or s.finish or s.aborted:
                    break
                if token is not None:
                    s.tokens.append(token)
                new.setdefault(s, []).append(None if token is None else Choice(token))
        return new

    def _drain_loop(self) -> list[NewTokens]:
        """Close the device loop, if one is open; return the tokens of steps in flight."""
        loop, self._loop = self._loop, None
        if not loop:
            return []
        steps = []
        for tokens in loop.close():
            self.totals.steps[len(self._loop_sequences)] += loop.steps
            steps.append(self._poll(tokens))
        self._loop_sequences = []
        return steps

    def _close_loop(self) -> bool:
        """Close the device loop and publish the tokens of steps in flight, so that the batch may
        change. Return whether there were events. A failure fails the sequences of the batch."""
        count = len(self._events)
        with self._guard():
            for new in self._drain_loop():
                self._publish(new)
        return len(self._events) > count

    def _publish(self, new: NewTokens) -> None:
        """Append the events of new tokens; finished sequences free their slots."""
        steps = [new]
        if new:
            bucket, size = len(self.batch.slots), self.chunk_size
            moved, self._bucket = bucket != self._bucket, bucket  # not timed after a change
            (size.start if moved else size.record)(time.perf_counter())
        if any(None in choices or s.complete for s, choices in new.items()):
            steps += self._drain_loop()
        for step in steps:
            for sequence, choices in step.items():
                for choice in choices:
                    if not sequence.finish:
                        self._accept(sequence, choice)

    def _open_drafters(self, running: Running) -> dict[int, RowDrafts]:
        """Return the draft states by slot; empty without speculative decoding, and while too many
        sequences decode."""
        draft, drafters = self.config.draft, dict[int, RowDrafts]()
        if draft and len(running) <= self.config.draft_rows:
            for s in running:
                stats = self.totals.tally, s.handle.tally
                prompt = s.handle.request.tokens
                s.drafter = s.drafter or RowDrafts(draft, prompt, stats, self.costs)
                drafters[s.slot] = s.drafter
        return drafters

    def _propose_drafts(self, running: Running, drafters: Drafters) -> Mapping[int, Sequence[int]]:
        if not drafters:
            return {s.slot: () for s in running}
        batch = self.batch.session.batch
        counts = {s.slot: drafters[s.slot].count(s.remaining - 1, batch) for s in running}
        if self.config.draft.source == NGRAM:
            return {s.slot: drafters[s.slot].propose(s.tokens, counts[s.slot]) for s in running}
        return self.batch.session.draft({s.slot: s.tokens[-1] for s in running}, counts)

    def _verify_drafts(self, running: Running, drafters: Drafters) -> NewTokens:
        """Run a verification step: per sequence one token, and one more per accepted draft token.
        Without drafts this is a plain decode step, sampled on the host."""
        start, session = time.perf_counter(), self.batch.session
        drafts = self._propose_drafts(running, drafters)
        lengths, new = session.length.clone(), {s: list[Drawn]() for s in running}
        fed = {s.slot: (s.tokens[-1], *drafts[s.slot]) for s in running}
        logits, active = session.verify(*padded(fed, session.batch)), running
        for position in range(logits.shape[1]):
            active = _ready_sequences(active) if position else active
            choices = sample(logits[:, position], {s.slot: s.sampler for s in active})
            for s in active:
                new[s].append(choices[s.slot])
            remaining = {s: drafts[s.slot][position:] for s in active}
            active = [s for s in active if _matches_draft(s, choices[s.slot], remaining[s])]
            if not active:
                break
        if logits.shape[1] > 1:
            for s, accepted in new.items():
                lengths[s.slot] += len(accepted)
            session.truncate(lengths)
        if drafters:
            self.costs.add(session.batch, logits.shape[1], time.perf_counter() - start)
            for s in running:
                drafters[s.slot].record(len(drafts[s.slot]), len(new[s]), session.batch)
        return new

    def _accept(self, sequence: SequenceState, choice: Drawn) -> None:
        handle, counts = sequence.handle, sequence.handle.counts
        if not isinstance(choice, Choice):
            num_tokens = counts.prompt + len(sequence.tokens)
            logits = f"{self.engine.label}: logits after {num_tokens} tokens"
            error = choice or not_finite(logits, self.engine.dtype)
            self._finish_sequence(sequence, FAILED, error=error, zero=choice is None)
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
            self._finish_sequence(sequence, STOP if stops else LENGTH, choice)

    def _finish_sequence(
        self,
        sequence: SequenceState,
        finish: str,
        choice: Choice | None = None,
        error: Exception | None = None,
        zero: bool = False,
    ) -> None:
        """Append a sequence's last event and free its slot; the last sequence ends the request."""
        handle, sequence.finish = sequence.handle, finish
        ends, counts = {s.finish for s in handle.answers}, handle.counts
        if None not in ends:
            handle.state = next((s for s in (FAILED, CANCELLED) if s in ends), FINISHED)
            counts.total_s = handle.age()
            handle.release()
        if handle.state == FINISHED:  # moving average of slot-seconds
            took = (handle.age() - (counts.queued_s or 0.0)) * handle.request.n
            self.totals.row_s += (took - self.totals.row_s) * (0.2 if self.totals.row_s else 1)
        self.totals.ended[finish] += 1
        token, logprobs = (choice.token, choice.logprobs) if choice else (None, None)
        self._events.append(Event(handle, sequence.index, token, logprobs, finish, error))
        self.batch.drop(sequence, zero)  # last: no event is lost if this raises

    def _finish_all(
        self, handle: RequestHandle, finish: str, error: Exception | None = None
    ) -> None:
        for s in handle.answers:
            if not s.finish:
                self._finish_sequence(s, finish, error=error)

    def _can_admit(self) -> bool:
        return bool(self.waiting) and self.waiting[0].request.n <= self.max_batch - self.num_running

    def _schedule_prefill(self) -> None:
        """Prefill several short prompts in one chunk if `count_batchable` finds them, else a chunk
        of one prompt."""
        free = 0 if self._prompt else self.max_batch - self.num_running
        candidates = [*takewhile(lambda h: h.batchable, islice(self.waiting, free))]
        limit = self.engine.limits.prefill_chunk
        max_tokens = self.chunk_size.remaining if self.num_running else limit
        sizes = [size for size in self.batch.sizes if 1 < size <= len(candidates)]
        prompts = [(h.request, h.keys, h.adapter_slot) for h in candidates]
        count = self.prefiller.count_batchable(prompts, sizes, max_tokens)
        if count:
            self._prefill_batch(candidates[:count])
        else:
            self._prefill_chunk()

    def _prefill_batch(self, handles: Sequence[RequestHandle]) -> None:
        """Prefill short prompts together, one per row of a session. After an exception each of
        them is prefilled by itself."""
        self._close_loop()
        start = time.perf_counter()
        for handle in handles:
            self._mark_prefilling(handle)
        self.prefiller.borrow_session(self.batch)
        prompts = [(h.request, h.keys, h.adapter_slot) for h in handles]
        try:
            session = self.batch.lend(len(handles))
            logits, num_cached = self.prefiller.prefill_batch(session, prompts)
        except RankError:
            raise
        except Exception:
            self.prefiller.drop_session()
            if len(handles) != len(self.batch.slots):
                self.batch.sessions.pop(len(handles), None)
            for handle in handles:
                handle.batchable, handle.state, handle.counts.queued_s = False, QUEUED, None
            return
        for handle, cached in zip(handles, num_cached, strict=True):
            self.waiting.remove(handle)
            handle.counts.cached = cached
        computed = [h.counts.prompt - cached for h, cached in zip(handles, num_cached, strict=True)]
        self.chunk_size.computed += len(handles) * max(computed)
        self.totals.cached += sum(num_cached)
        self.totals.computed += sum(computed)
        self.totals.chunks += 1
        self.totals.chunk_s += time.perf_counter() - start
        self._start_batch(handles, logits, session)

    def _start_batch(
        self, handles: Sequence[RequestHandle], logits: torch.Tensor, session: Session
    ) -> None:
        """Sample the first token after each prompt; unfinished sequences join the batch."""
        rows = [handle.answers[0] for handle in handles]
        try:
            for row, s in enumerate(rows):
                s.handle.state, choice = DECODING, sample(logits, {row: s.sampler})[row]
                if choice is None:
                    session.reset([row], zero=True)
                self._accept(s, choice)
            if not self.num_running:
                self.chunk_size.record(time.perf_counter())
            self.batch.take(session, [None if s.finish else s for s in rows])
        except Exception as e:
            for handle in handles:
                self._finish_all(handle, FAILED, e)
            raise

    def _mark_prefilling(self, handle: RequestHandle) -> None:
        handle.state, handle.counts.queued_s = PREFILLING, handle.age()
        if not self.num_running:
            self.chunk_size.start(time.perf_counter())

    def _prefill_chunk(self) -> None:
        handle = self._prompt[0] if self._prompt else self.waiting.popleft()
        start = time.perf_counter()
        try:
            self._prompt = self._prompt or self._start_prompt(handle)
            before = self.prefiller.num_computed
            logits = next(self._prompt[1])
            self.totals.computed += self.prefiller.num_computed - before
            self.chunk_size.computed += self.prefiller.num_computed - before
            self.totals.chunks += 1
            self.totals.chunk_s += time.perf_counter() - start
            if logits is not None:
                self._start_decoding(self._pop_prompt(), logits)
        except RankError:
            raise
        except Exception as e:
            self._prompt = None
            self.prefiller.drop_session()
            self._finish_all(handle, FAILED, e)

    def _start_prompt(self, handle: RequestHandle) -> tuple[RequestHandle, Chunks]:
        self._mark_prefilling(handle)
        self.prefiller.borrow_session(self.batch)
        on_logits = (
            None if handle.request.prompt_logprobs is None else handle.record_prompt_logprobs
        )
        how = self._chunk_end, handle.keys, on_logits, handle.adapter_slot
        chunks = self.prefiller.chunks(handle.request, *how)
        handle.counts.cached = self.prefiller.num_cached
        self.totals.cached += self.prefiller.num_cached
        return handle, chunks

    def _pop_prompt(self) -> RequestHandle:
        """Take the request out of prefill and return it; its computed prefix stays reusable."""
        assert self._prompt
        (handle, chunks), self._prompt = self._prompt, None
        chunks.close()
        return handle

    def _chunk_end(self, start: int) -> int:
        """Return where a chunk from `start` should end. While sequences decode, `chunk_size` gives
        its size, which MAX_LAST_CHUNK may multiply if that ends the prompt."""
        if not self.num_running or not self._prompt:
            return start + self.engine.limits.prefill_chunk
        remaining = len(self._prompt[0].keys) - start
        size = self.chunk_size.remaining or self.chunk_size.tokens
        return start + (remaining if remaining <= MAX_LAST_CHUNK * size else size)

    def _start_decoding(self, handle: RequestHandle, logits: torch.Tensor) -> None:
        """Sample the first token of each answer; unfinished sequences join the batch."""
        handle.state, session = DECODING, self.prefiller.session
        for sequence in handle.answers:
            choice = sample(logits, {0: sequence.sampler})[0]
            if choice is None:
                session.reset(zero=True)
            self._accept(sequence, choice)
        if not self.num_running:
            self.chunk_size.record(time.perf_counter())
        running = [s for s in handle.answers if not s.finish]
        if not running:
            return
        self._close_loop()
        if len(running) == 1 and not handle.request.reuse and self.batch.adopt(session, running[0]):
            self.prefiller.drop_session()
        else:
            self.batch.put(session, running)

    def close(self) -> None:
        """Free all KV caches; unfinished requests keep their state."""
        self._prompt, self._loop = None, None
        self.waiting.clear()
        self.batch.clear()
        self.prefiller.close()


def _ready_sequences(running: Running) -> list[SequenceState]:
    """Return the sequences whose logits masks are computed within PATIENCE_S; the others skip this
    step. If none is, wait another PATIENCE_S for each."""
    for s in running:
        s.sampler.start_mask()
    ready = [s for s in running if s.sampler.mask_ready()]
    return ready or [s for s in running if s.sampler.mask_ready(PATIENCE_S)]


def _matches_draft(sequence: SequenceState, choice: Drawn, drafts: Sequence[int]) -> bool:
    """Whether a choice equals the next draft token and does not end the sequence."""
    if not drafts or not isinstance(choice, Choice):
        return False
    return choice.token == drafts[0] and choice.token not in sequence.sampler.stops
