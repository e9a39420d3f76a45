"""Continuous batching: requests of any length, admitted at any time, over the slots of one engine.

    scheduler = Scheduler(engine)
    handle = scheduler.submit(Request((2, 5, 7), max_new_tokens=8))
    for event in scheduler.run(handle):
        ...

A request is queued, then prefilled, then decoded until its answers have ended. A step drops what
was cancelled, decodes all running sequences, and computes one chunk of one prompt. Sequences are
decoded in one of three ways, chosen each time: by steps that run ahead on the device while the
batch stays the same and nothing needs the host (device_loop.py); by verification of draft tokens
(speculative.py); by a step whose tokens the host chooses. One thread at a time;
`RequestHandle.cancel` from any.
"""

from __future__ import annotations

import heapq
import time
from collections.abc import Collection, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from g4ir.backends.sampling import (
    SEEDS,
    Choice,
    Drawn,
    Sampler,
    random_seed,
    sample,
)
from g4ir.errors import InputError, RankError
from g4ir.ops.finite import not_finite

from .batch import Batch, checked_buckets
from .device_loop import DeviceLoop, Tokens, open_loop
from .parts import EngineParts
from .prefill import Prefiller
from .prefix_cache import PrefixCache
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
)
from .session import check_prompt, padded
from .speculative import (
    NO_DRAFT,
    RowDrafts,
    SpeculativeConfig,
    accepted,
    find_draft,
    propose,
)


@dataclass(frozen=True)
class SchedulerConfig:
    """`buckets`: batch sizes that sessions are made for (default 1, 2, 4, ... max_batch). `chunks`
    of prompts, of at most `chunk_tokens` (default: the engine's --prefill-chunk), are computed
    between two steps while sequences decode; None: all prompts that have a slot, first. The batch
    shrinks to a smaller bucket after `patience` steps in which it would have been enough.
    `prefix_bytes` is the size of the prefix cache (default: from what is free). Tokens are drafted
    as `draft` says, while at most `draft_rows` sequences decode: products of more tokens than that
    cost more than reading the weights. A draft of 0 tokens has as many as the engine verifies."""

    buckets: tuple[int, ...] | None = None
    chunks: int | None = 1
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


#: new tokens of sequences
Made = dict[SequenceState, list[Drawn]]


class Scheduler:
    """The slots of an engine, and the requests that wait for one."""

    def __init__(self, engine: EngineParts, config: SchedulerConfig | None = None) -> None:
        config = config or SchedulerConfig()
        draft = find_draft(engine, config.draft.source, config.draft.tokens or None)
        self.engine, self.config = engine, replace(config, draft=draft)
        self.max_batch = engine.limits.max_batch
        sizes = checked_buckets(config.buckets, self.max_batch)
        self.batch: Batch[SequenceState] = Batch(engine, sizes, config.patience)
        self.prefiller = Prefiller(engine, config.prefix_bytes)
        self.totals = Totals()
        self.suppress, self._eos = engine.suppressed(), frozenset(engine.stop_ids())
        self._queue: list[RequestHandle] = []
        self._number = 0
        #: the request in prefill, and the chunks that are left of its prompt
        self._prompt: tuple[RequestHandle, Generator[torch.Tensor | None, None, None]] | None = None
        #: steps that run on the device, and the sequences that they are of
        self._loop: DeviceLoop | None = None
        self._looped: list[SequenceState] = []

    # --- requests -----------------------------------------------------------------------------

    def check(self, request: Request) -> None:
        """Raise InputError for a request that no slot could answer. From any thread."""
        vocab, room, s = (
            self.engine.spec.text.vocab_size,
            self.engine.limits.max_seq,
            request.sampling,
        )
        checked_prompt([*request.tokens], request.max_new_tokens, vocab, room, "prompt")
        check_prompt(self.engine, request.tokens, request.soft)
        if not 1 <= request.n <= self.max_batch:
            raise InputError(
                f"n {request.n}: this engine answers 1 to {self.max_batch} times at once"
            )
        checked_ids([*s.stop], vocab, "stop")
        checked_ids([token for token, _ in s.logit_bias], vocab, "logit_bias")
        if s.logprobs is not None and s.logprobs > vocab:
            raise InputError(f"logprobs {s.logprobs}: the vocabulary has {vocab} tokens")
        for mark in request.marks:
            if not 0 <= mark <= len(request.tokens):
                raise InputError(f"mark {mark}: the prompt has {len(request.tokens)} tokens")

    def handle(self, request: Request) -> RequestHandle:
        """Check a request, and return a handle that `admit` takes. From any thread."""
        self.check(request)
        return RequestHandle(
            request, 0, self.prefiller.keys(request.prompt), self._samplers(request)
        )

    def submit(self, request: Request) -> RequestHandle:
        """Check a request and put it in the queue."""
        return self.admit(self.handle(request))

    def admit(self, handle: RequestHandle) -> RequestHandle:
        """Put a request in the queue."""
        self._number += 1
        handle.number = self._number
        heapq.heappush(self._queue, handle)
        return handle

    def run(self, handle: RequestHandle) -> Iterator[Event]:
        """Step until a request has ended, and yield its events; it is cancelled if they are not
        read to the end."""
        try:
            while not handle.done:
                yield from (event for event in self.step() if event.handle is handle)
        finally:
            handle.cancel()

    def _samplers(self, request: Request) -> list[Sampler]:
        """Return the samplers of the answers, each with a seed of its own."""
        s = request.sampling
        seed = random_seed() if s.seed is None else s.seed
        never = tuple(dict.fromkeys((*s.suppress, *self.suppress)))
        stops = s.stop if s.ignore_eos else s.stop | self._eos
        params = [replace(s, seed=(seed + i) % SEEDS, suppress=never) for i in range(request.n)]
        return [Sampler(p, request.tokens, stops) for p in params]

    @property
    def prefixes(self) -> PrefixCache:
        return self.prefiller.prefixes

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
        """Whether a step has something to do, now or once a pause is over."""
        return bool(self._queue or self._prompt or self.active)

    @property
    def stalled(self) -> bool:
        """Whether every slot waits for its reader, and nothing else is to be done."""
        sequences = self.batch.holders
        idle = all(s.handle.paused and not s.unwanted for s in sequences)
        cancelled = any(handle.cancelled for handle in self._queue)
        return bool(sequences) and idle and not (self._prompt or self._next_fits() or cancelled)

    # --- a step -------------------------------------------------------------------------------

    def step(self) -> list[Event]:
        """Do one step, and return its events, in order."""
        events = self._drop_cancelled()
        events += self._decode()
        chunks = self.config.chunks
        if chunks is None:
            while self._prompt or self._next_fits():
                events += self._advance_prompt()
            return events
        decoding = any(not s.handle.paused for s in self.batch.holders)
        for _ in range(chunks if decoding else 1):
            events += self._advance_prompt()
        return events

    def _drop_cancelled(self) -> list[Event]:
        events: list[Event] = []
        if any(handle.cancelled for handle in self._queue):
            gone = [handle for handle in self._queue if handle.cancelled]
            self._queue = [handle for handle in self._queue if not handle.cancelled]
            heapq.heapify(self._queue)
            events += [e for handle in sorted(gone) for e in self._end(handle, CANCELLED)]
        if self._prompt and self._prompt[0].cancelled:
            events += self._end(self._take_prompt(), CANCELLED)
        unwanted = [s for s in self.batch.holders if s.unwanted]
        if not unwanted:
            return events
        events += self._close_loop()
        handles = dict.fromkeys(s.handle for s in unwanted if s.handle.cancelled)
        events += [e for handle in handles for e in self._end(handle, CANCELLED)]
        for sequence in unwanted:
            if not sequence.finish:
                self.batch.drop(sequence)
                events.append(self._ended(sequence, STOP))
        return events

    def _decode(self) -> list[Event]:
        """Give every sequence that is not paused its next tokens."""
        running = [s for s in self.batch.holders if not s.handle.paused]
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
            self._loop, self._looped = None, []
            self.batch.forget()
            return [event for handle in handles for event in self._end(handle, FAILED, e)]
        self.totals.steps[len(running)] += 1
        took, bucket = time.perf_counter() - begun, len(self.batch.held)
        self.totals.step_s[bucket] = self.totals.step_s.get(bucket, 0.0) + took
        return self._emit(made)

    def _next_tokens(self, running: Sequence[SequenceState]) -> Made:
        """Return the tokens of the next step: of one on the device, of a verification, or of one
        that the host chooses."""
        if self._loop and self._loop.over:
            self._halt()
        if not self._loop:
            drafters = self._drafters(running)
            samplers = {s.slot: s.sampler for s in running}
            rooms = {s.slot: s.room for s in running}
            session = self.batch.session
            self._loop = open_loop(self.engine, session, samplers, rooms, self.suppress, drafters)
            if not self._loop:
                return self._verified(running, drafters)
            self._looped = [*running]
        return self._received(self._loop.step())

    def _received(self, tokens: Tokens) -> Made:
        """Append tokens of the device to their sequences, each up to its end."""
        made: Made = {}
        for sequence in self._looped:
            for token in tokens[sequence.slot]:
                if sequence.over or sequence.finish or sequence.unwanted:
                    break
                if token is not None:
                    sequence.tokens.append(token)
                made.setdefault(sequence, []).append(None if token is None else Choice(token))
        return made

    def _halt(self) -> list[Made]:
        """Have the session take over from the device; return the tokens of steps in flight."""
        if not self._loop:
            return []
        made = [self._received(tokens) for tokens in self._loop.close()]
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

    def _drafters(self, running: Sequence[SequenceState]) -> dict[int, RowDrafts]:
        """Return what drafts for each slot; nothing without speculative decoding, or if too many
        sequences decode."""
        draft = self.config.draft
        if not draft or len(running) > self.config.draft_rows:
            return {}
        out: dict[int, RowDrafts] = {}
        for s in running:
            if s.drafter is None:
                tallies = self.totals.tally, s.handle.tally
                s.drafter = RowDrafts(draft, s.handle.request.tokens, tallies)
            out[s.slot] = s.drafter
        return out

    def _verified(
        self, running: Sequence[SequenceState], drafters: Mapping[int, RowDrafts]
    ) -> Made:
        """Choose a token for each sequence, and another for each draft token that is right."""
        by_slot, session = {s.slot: s for s in running}, self.batch.session

        def choose(logits: torch.Tensor, slots: Collection[int]) -> Mapping[int, Drawn]:
            return sample(logits, {slot: by_slot[slot].sampler for slot in slots})

        def goes_on(slot: int, choice: Drawn, drafted: int | None) -> bool:
            right = isinstance(choice, Choice) and choice.token == drafted
            return right and drafted not in by_slot[slot].sampler.stops

        drafts: Mapping[int, Sequence[int]] = dict.fromkeys(by_slot, ())
        if drafters:
            texts = {slot: s.tokens for slot, s in by_slot.items()}
            rooms = {slot: s.room - 1 for slot, s in by_slot.items()}
            drafts = propose(session, drafters, texts, rooms)
        before = session.length
        fed = {slot: (s.tokens[-1], *drafts[slot]) for slot, s in by_slot.items()}
        logits = session.verify(*padded(fed, session.batch))
        made = accepted(logits, drafts, choose, goes_on)
        if logits.shape[1] > 1:
            kept = before.clone()
            for slot, choices in made.items():
                kept[slot] += len(choices)
            session.truncate(kept)
        for slot, drafter in drafters.items():
            drafter.told(len(drafts[slot]), len(made[slot]))
        return {by_slot[slot]: choices for slot, choices in made.items()}

    def _coming(self, taken: int = 0) -> int:
        """Count the slots that will be needed soon, beside those that are about to be taken."""
        waiting = [self._prompt[0]] if self._prompt else self._queue
        room = self.max_batch - self.active - taken
        return min(sum(handle.request.n for handle in waiting), room)

    def _taken(self, sequence: SequenceState, choice: Drawn) -> Event:
        """Return the event of a token, which may be the last."""
        handle = sequence.handle
        if not isinstance(choice, Choice):
            error = choice or self._not_finite(handle, sequence)
            self.batch.drop(sequence, zero=choice is None)
            return self._ended(sequence, FAILED, error=error)
        counts = handle.counts
        counts.generated += 1
        sequence.emitted += 1
        self.totals.generated += 1
        if counts.first_token_s is None:
            counts.first_token_s = handle.age()
        stops = choice.token in sequence.sampler.stops
        if not stops and sequence.emitted < handle.request.max_new_tokens:
            return Event(handle, sequence.index, choice.token, choice.logprobs)
        self.batch.drop(sequence)
        return self._ended(sequence, STOP if stops else LENGTH, choice)

    def _not_finite(self, handle: RequestHandle, sequence: SequenceState) -> Exception:
        held = handle.counts.prompt + len(sequence.tokens)
        what = f"{self.engine.path}: logits after {held} tokens"
        return not_finite(what, self.engine.dtype)

    def _ended(
        self,
        sequence: SequenceState,
        finish: str,
        choice: Choice | None = None,
        error: Exception | None = None,
    ) -> Event:
        """Return the last event of an answer; the request ends with its last one."""
        handle, sequence.finish = sequence.handle, finish
        if all(s.finish for s in handle.answers):
            ends = {s.finish for s in handle.answers}
            handle.state = next((s for s in (FAILED, CANCELLED) if s in ends), FINISHED)
            handle.counts.total_s = handle.age()
            self._count_time(handle)
        self.totals.ended[finish] += 1
        token, logprobs = (choice.token, choice.logprobs) if choice else (None, None)
        return Event(handle, sequence.index, token, logprobs, finish, error)

    def _count_time(self, handle: RequestHandle) -> None:
        """Count how long an answered request kept its slots."""
        c = handle.counts
        if handle.state == FINISHED and c.total_s is not None and c.queued_s is not None:
            took = (c.total_s - c.queued_s) * handle.request.n
            self.totals.row_s += (took - self.totals.row_s) * (0.2 if self.totals.row_s else 1)

    def _end(
        self, handle: RequestHandle, finish: str, error: Exception | None = None
    ) -> list[Event]:
        """End all answers of a request that have not."""
        left = [s for s in handle.answers if not s.finish]
        for sequence in left:
            self.batch.drop(sequence)
        return [self._ended(sequence, finish, error=error) for sequence in left]

    # --- prefill ------------------------------------------------------------------------------

    def _next_fits(self) -> bool:
        """Whether there are slots for the first in the queue."""
        return bool(self._queue) and self._queue[0].request.n <= self.max_batch - self.active

    def _advance_prompt(self) -> list[Event]:
        """Compute one chunk of the prompt in prefill, or of the next."""
        if not self._prompt and self._next_fits():
            handle = heapq.heappop(self._queue)
            handle.state, handle.counts.queued_s = PREFILLING, handle.age()
            self.prefiller.lend(self.batch.release())
            self._prompt = handle, self._chunks(handle)
        if not self._prompt:
            return []
        handle, chunks = self._prompt
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
            self.prefiller.forget()
            return self._end(handle, FAILED, e)

    def _take_prompt(self) -> RequestHandle:
        """Return the request in prefill, and leave it; the prefiller keeps what it has computed."""
        assert self._prompt
        (handle, chunks), self._prompt = self._prompt, None
        chunks.close()
        return handle

    def _chunks(self, handle: RequestHandle) -> Generator[torch.Tensor | None, None, None]:
        """Compute a prompt, and count cached and computed tokens."""
        totals, prefiller, held = self.totals, self.prefiller, -1
        restored = prefiller.restored
        for logits in prefiller.chunks(handle.request.prompt, self._until, handle.keys):
            if held < 0:
                held = handle.counts.cached = prefiller.known
                totals.cached += held
                totals.restored += prefiller.restored - restored
            totals.computed += prefiller.held - held
            held = prefiller.held
            yield logits

    def _until(self, start: int) -> int:
        """Return how far a chunk may go: less far while sequences wait for it."""
        size = self.config.chunk_tokens if self.active else None
        return start + (size or self.engine.limits.prefill_chunk)

    def _placed(self, handle: RequestHandle, logits: torch.Tensor) -> list[Event]:
        """Choose the first token of each answer, and give those that go on a slot."""
        handle.state = DECODING
        events: list[Event] = []
        for sequence in handle.answers:
            choice = sample(logits, {0: sequence.sampler})[0]
            if choice is None:
                self.prefiller.session.reset(zero=True)
            events.append(self._taken(sequence, choice))
        going = [s for s in handle.answers if not s.finish]
        if not going:
            return events
        events += self._close_loop()
        session = self.prefiller.session
        if len(going) == 1 and not handle.request.reuse and self.batch.adopt(session, going[0]):
            self.prefiller.forget()
        else:
            self.batch.put(session, going, self._coming(len(going)))
        return events

    def close(self) -> None:
        """Free all caches; requests that have not ended stay as they are."""
        self._prompt, self._queue, self._loop, self._looped = None, [], None, []
        self.batch.forget()
        self.prefiller.close()
