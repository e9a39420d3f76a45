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

import heapq
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from g4ir.backends.background_mask import PATIENCE_S
from g4ir.backends.sampling import SEEDS, Choice, Drawn, Sampler, random_seed, sample
from g4ir.errors import InputError, MissingError, RankError
from g4ir.ops.finite import not_finite

from .batch import Batch, checked_buckets
from .device_loop import Drafters, DraftRounds, Tokens, TokenSteps, open_loop
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
from .speculative import NGRAM, NO_DRAFT, RowDrafts, SpeculativeConfig, StepCosts, find_draft


@dataclass(frozen=True)
class SchedulerConfig:
    """`buckets`: batch sizes that sessions are made for (default 1, 2, 4, ... max_batch). One chunk
    of a prompt, at most `chunk_tokens` long (default: --prefill-chunk), is computed between two
    decode steps; with `prefill_first` all prompts that have a slot are. The batch shrinks after
    `patience` calls of `step` for which a smaller bucket would have been enough. `prefix_bytes`:
    size of the prefix cache (default: from what is free). `draft`: speculative decoding, while at
    most `draft_rows` sequences decode, since more tokens cost more than reading the weights; of 0
    tokens drafts as many as the engine verifies."""

    buckets: tuple[int, ...] | None = None
    prefill_first: bool = False
    chunk_tokens: int | None = None
    patience: int = 16
    prefix_bytes: int | None = None
    draft: SpeculativeConfig = NO_DRAFT
    draft_rows: int = 2

    def __post_init__(self) -> None:
        check_least(vars(self), chunk_tokens=1, patience=0, prefix_bytes=0, draft_rows=1)


#: new tokens of sequences
Made = dict[SequenceState, list[Drawn]]
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
        self.costs = StepCosts()
        self.suppress, self._eos = engine.suppressed(), frozenset(engine.stop_ids())
        self._queue: list[RequestHandle] = []
        self._number = 0
        #: the request in prefill, and the chunks that are left of its prompt
        self._prompt: tuple[RequestHandle, Chunks] | None = None
        #: steps that run on the device, and their sequences
        self._loop: TokenSteps | DraftRounds | None = None
        self._looped: list[SequenceState] = []

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
        self._number += 1
        handle.number = self._number
        heapq.heappush(self._queue, handle)
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
        """Do one step, and return its events, in order."""
        events = [*self._drop_cancelled(), *self._decode()]
        while self._prompt or self._next_fits():
            events += self._advance_prompt()
            if not self.config.prefill_first:
                break
        return events

    def _drop_cancelled(self) -> list[Event]:
        gone = sorted(handle for handle in self._queue if handle.cancelled)
        if gone:
            self._queue = [handle for handle in self._queue if not handle.cancelled]
            heapq.heapify(self._queue)
        if self._prompt and self._prompt[0].cancelled:
            gone.append(self._take_prompt())
        events = [e for handle in gone for e in self._end(handle, CANCELLED)]
        if unwanted := [s for s in self.batch.holders if s.unwanted]:
            events += self._close_loop()
            for handle in dict.fromkeys(s.handle for s in unwanted if s.handle.cancelled):
                events += self._end(handle, CANCELLED)
            events += [self._ended(s, STOP) for s in unwanted if not s.finish]
        return events

    def _decode(self) -> list[Event]:
        running = _with_masks(self.batch.holders)
        if not running:
            return self._close_loop()
        begun = time.perf_counter()
        try:
            coming = self._coming()
            shrinks = self.batch.shrinks(coming)
            if shrinks or self._looped != running:
                if events := self._close_loop():
                    return events
                if shrinks:
                    self.batch.shrink(coming)
            made = self._next_tokens(running)
        except RankError:  # nothing can be computed any more
            raise
        except Exception as e:  # the caches are undefined
            handles = dict.fromkeys(s.handle for s in self.batch.holders)
            self._loop = None
            self.batch.forget()
            return [event for handle in handles for event in self._end(handle, FAILED, e)]
        self.totals.steps[len(running)] += self._loop.steps if self._loop else 1
        took, bucket = time.perf_counter() - begun, len(self.batch.held)
        self.totals.step_s[bucket] = self.totals.step_s.get(bucket, 0.0) + took
        return self._emit(made)

    def _next_tokens(self, running: Running) -> Made:
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
        if isinstance(loop, TokenSteps) and loop.watches:
            self.costs.add(self.batch.session.batch, 1, time.perf_counter() - begun)
        return self._received(tokens)

    def _received(self, tokens: Tokens) -> Made:
        made: Made = {}
        for s in self._looped:
            for token in tokens[s.slot]:
                if s.over or s.finish or s.unwanted:
                    break
                if token is not None:
                    s.tokens.append(token)
                made.setdefault(s, []).append(None if token is None else Choice(token))
        return made

    def _halt(self) -> list[Made]:
        """Have the session take over from the device; return the tokens of steps in flight."""
        if not self._loop:
            return []
        made = []
        for tokens in self._loop.close():
            self.totals.steps[len(self._looped)] += self._loop.steps
            made.append(self._received(tokens))
        self._loop, self._looped = None, []
        return made

    def _close_loop(self) -> list[Event]:
        return [event for made in self._halt() for event in self._emit(made)]

    def _emit(self, made: Made) -> list[Event]:
        """Return the events of new tokens; sequences that end free their slots."""
        every = [made]
        if any(None in choices or s.over for s, choices in made.items()):
            every += self._halt()
        return [
            self._taken(sequence, choice)
            for made in every
            for sequence, choices in made.items()
            for choice in choices
            if not sequence.finish
        ]

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

    def _verified(self, running: Running, drafters: Drafters) -> Made:
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

    def _coming(self, taken: int = 0) -> int:
        """Return how many more rows a bucket should have room for: those that wait, but no more
        than run, since each row takes time in every step."""
        waiting = [self._prompt[0]] if self._prompt else self._queue
        count = self.active + taken
        return min(sum(handle.request.n for handle in waiting), self.max_batch - count, count)

    def _taken(self, sequence: SequenceState, choice: Drawn) -> Event:
        handle, counts = sequence.handle, sequence.handle.counts
        if not isinstance(choice, Choice):
            held = counts.prompt + len(sequence.tokens)
            what = f"{self.engine.path}: logits after {held} tokens"
            error = choice or not_finite(what, self.engine.dtype)
            return self._ended(sequence, FAILED, error=error, zero=choice is None)
        counts.generated += 1
        sequence.emitted += 1
        self.totals.generated += 1
        if counts.first_token_s is None:
            counts.first_token_s = handle.age()
        stops = choice.token in sequence.sampler.stops
        if not stops and sequence.emitted < handle.request.max_new_tokens:
            return Event(handle, sequence.index, choice.token, choice.logprobs)
        return self._ended(sequence, STOP if stops else LENGTH, choice)

    def _ended(
        self,
        sequence: SequenceState,
        finish: str,
        choice: Choice | None = None,
        error: Exception | None = None,
        zero: bool = False,
    ) -> Event:
        """Free an answer's slot and return its last event; the last one ends the request."""
        self.batch.drop(sequence, zero)
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
        return Event(handle, sequence.index, token, logprobs, finish, error)

    def _end(
        self, handle: RequestHandle, finish: str, error: Exception | None = None
    ) -> list[Event]:
        return [self._ended(s, finish, error=error) for s in handle.answers if not s.finish]

    def _next_fits(self) -> bool:
        return bool(self._queue) and self._queue[0].request.n <= self.max_batch - self.active

    def _advance_prompt(self) -> list[Event]:
        handle = self._prompt[0] if self._prompt else heapq.heappop(self._queue)
        begun = time.perf_counter()
        try:
            self._prompt = self._prompt or self._begun(handle)
            held = self.prefiller.held
            logits = next(self._prompt[1])
            self.totals.computed += self.prefiller.held - held
            self.totals.chunks += 1
            self.totals.chunk_s += time.perf_counter() - begun
            return [] if logits is None else self._placed(self._take_prompt(), logits)
        except RankError:
            raise
        except Exception as e:
            self._prompt = None
            self.prefiller.forget()
            return self._end(handle, FAILED, e)

    def _begun(self, handle: RequestHandle) -> tuple[RequestHandle, Chunks]:
        handle.state, handle.counts.queued_s = PREFILLING, handle.age()
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
        size = self.config.chunk_tokens if self.active else None
        return start + (size or self.engine.limits.prefill_chunk)

    def _placed(self, handle: RequestHandle, logits: torch.Tensor) -> list[Event]:
        """Choose the first token of each answer, and give those that go on a slot."""
        handle.state, events, session = DECODING, list[Event](), self.prefiller.session
        for sequence in handle.answers:
            choice = sample(logits, {0: sequence.sampler})[0]
            if choice is None:
                session.reset(zero=True)
            events.append(self._taken(sequence, choice))
        going = [s for s in handle.answers if not s.finish]
        if not going:
            return events
        events += self._close_loop()
        if len(going) == 1 and not handle.request.reuse and self.batch.adopt(session, going[0]):
            self.prefiller.forget()
        else:
            self.batch.put(session, going, self._coming(len(going)))
        return events

    def close(self) -> None:
        """Free all caches; requests that have not ended stay as they are."""
        self._prompt, self._queue, self._loop = None, [], None
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
