"""Decode loop on the device: a fixed set of sequences, sampling included.

The scheduler opens a loop when no sequence needs the host between two tokens, and closes it before
the batch changes: when a sequence ends, joins or is cancelled. `TokenSteps` decodes one token of
each sequence per step; the host reads the tokens of a call while the next one runs.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from g4ir.backends.base import DeviceChoice
from g4ir.backends.sampling import GREEDY, METHODS

from .parts import EngineParts
from .requests import SequenceState
from .session import Session
from .speculative import NGRAM, RowDrafts

#: max calls (of one or several steps) in flight before the host reads the oldest
AHEAD = 2

#: new tokens by row of the session; None instead of a token: its logits are NaN or infinite
Tokens = Mapping[int, Sequence[int | None]]
Drafters = Mapping[int, RowDrafts]


class TokenSteps:
    """Decode steps until a sequence reaches its max_new_tokens. With n-gram `drafters`, also until
    the first of their pauses ends, or, if one is not paused, until it proposes a draft, checked
    after each step. `close` returns control of the session."""

    def __init__(
        self, loop: Any, session: Session, running: Sequence[SequenceState], drafters: Drafters
    ) -> None:
        self.loop, self.session, self.running, self.drafters = loop, session, running, drafters
        pauses = [d.pace.pause for d in drafters.values()]
        #: whether drafts are proposed after each step, so that no step runs ahead
        self.watches = 0 in pauses
        self.remaining, self.started = min(s.remaining for s in running), 0
        if pauses and not self.watches:
            self.remaining = min(self.remaining, *pauses)
        #: number of steps whose tokens the last read returned, and that all reads returned
        self.steps = self.received = 0
        #: duration of each of the steps that the last call of `step` read; None if unknown: for the
        #: first ones, beside a prefill chunk, and if the host was late
        self.seconds: float | None = None
        self._read_at: float | None = None
        tokens, self.active, draws = _rows(session, running)
        samplers = {s.slot: s.sampler for s in running}
        self.draws = any(s.params.method != GREEDY for s in samplers.values())
        stops = [tuple(samplers[b].stops) if a else () for b, a in enumerate(self.active)]
        loop.start(tokens, session.length, self.active, draws, stops)

    @property
    def exhausted(self) -> bool:
        """Whether all steps have run and their tokens are read, or a sequence has a draft."""
        if self.started == self.remaining:
            return not self.loop.unread
        return self.watches and any_draft(self.running, self.drafters)

    def step(self, prefill_follows: bool = False) -> Tokens:
        """Start calls, so that up to AHEAD are in flight (one single step if `watches`), and return
        the tokens of the oldest. If a prefill chunk follows, new calls are single steps, and none
        stays in flight if the loop occupies the full device: no step of it may run during the
        chunk."""
        entered = time.perf_counter()
        single = self.watches or prefill_follows
        alone = self.watches or (prefill_follows and self.loop.exclusive)
        while self.loop.unread < (1 if alone else AHEAD) and self.started < self.remaining:
            remaining = self.remaining - self.started
            count = 1 if single else min(self.loop.steps_per_call, remaining)
            self.loop.advance(count, self._uniforms(count) if self.draws else None)
            self.started += count
        tokens = self._read()
        self.seconds = self._step_seconds(entered, prefill_follows)
        return tokens

    def _step_seconds(self, entered: float, prefill_follows: bool) -> float | None:
        """Return the duration of each step that was read last: of a call that ran alone, else the
        time since the read before, if the host waited for most of it."""
        now, before = time.perf_counter(), self._read_at
        self._read_at = None if prefill_follows else now
        if before is None or prefill_follows:
            return None
        if self.watches:
            return (now - entered) / self.steps
        return (now - before) / self.steps if 2 * (now - entered) >= now - before else None

    def _uniforms(self, count: int) -> torch.Tensor:
        uniforms = torch.zeros(count, self.session.batch, dtype=torch.float64)
        ahead = self.started - self.received
        for s in self.running:
            draws = [s.sampler.uniform(ahead + i) for i in range(count)]
            uniforms[:, s.slot] = torch.tensor(draws, dtype=torch.float64)
        return uniforms

    def _read(self) -> Tokens:
        read = self.loop.read()
        tokens = {s.slot: read[s.slot] for s in self.running}
        self.steps = max(map(len, tokens.values()))
        self.received += self.steps
        for row, drafter in self.drafters.items():
            drafter.record_plain_steps(len(read[row]))
        return tokens

    def close(self) -> list[Tokens]:
        """Wait for the steps in flight, return their tokens, and update the session's lengths."""
        steps = [self._read() for _ in range(self.loop.unread)]
        self.session.extend(self.active.long() * self.started)
        return steps


def _rows(
    session: Session, running: Iterable[SequenceState]
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return each row's newest token, whether it is active, and its sampling parameters [B, 4]."""
    tokens = torch.zeros(session.batch, dtype=torch.int64)
    active = torch.zeros(session.batch, dtype=torch.bool)
    draws = torch.ones(session.batch, 4, dtype=torch.float64)
    for s in running:
        tokens[s.slot], active[s.slot] = s.tokens[-1], True
        draws[s.slot] = torch.tensor(s.sampler.params.draw, dtype=torch.float64)
    return tokens, active, draws


def any_draft(running: Iterable[SequenceState], drafters: Drafters) -> bool:
    """Whether an unpaused n-gram drafter has a proposal, for a sequence with more than one token
    left."""
    each = ((drafters[s.slot], s) for s in running if s.slot in drafters and s.remaining > 1)
    return any(not d.pace.pause and d.propose(s.tokens, 1) for d, s in each)


def open_loop(
    engine: EngineParts,
    session: Session,
    running: Sequence[SequenceState],
    suppress: tuple[int, ...],
    drafters: Drafters,
) -> TokenSteps | None:
    """Return a loop for these sequences; None if the host has to sample: the runtime has no device
    loop, an embedding table is offloaded or lacks a part of the vocabulary, a sequence's sampling
    parameters need the host, an n-gram drafter has a proposal, or a draft model drafts."""
    params = [s.sampler.params for s in running]
    plain = all(s.sampler.plain for s in running) and all(p.suppress == suppress for p in params)
    if not plain or not engine.chooses_on_device:
        return None
    if any(d.source != NGRAM for d in drafters.values()) or any_draft(running, drafters):
        return None
    methods = {p.method for p in params}
    choice = DeviceChoice(tuple(method for method in METHODS if method in methods), suppress)
    args = engine.embed_tokens, session.state, session.batch, choice
    loop = engine.runtime.token_loop(*args, engine.tables)
    return loop and TokenSteps(loop, session, running, drafters)
