"""Steps of a fixed set of sequences that the device runs by itself, its choice of tokens included.

The scheduler opens a loop when no sequence needs the host between two tokens, and closes it before
it changes the batch: when a sequence ends, joins, pauses or is cancelled. `TokenSteps` decode one
token a step, and the host reads the tokens of a step while the next one runs.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from g4ir.backends.base import DeviceChoice
from g4ir.backends.sampling import GREEDY, WAYS

from .parts import EngineParts
from .requests import SequenceState
from .session import Session
from .speculative import NGRAM, RowDrafts

#: calls, each of a step or several, that may be started before the host has read the first
AHEAD = 2

#: new tokens by row of the session; None: logits that are NaN or infinite
Tokens = Mapping[int, Sequence[int | None]]
Drafters = Mapping[int, RowDrafts]


class TokenSteps:
    """Decode steps, up to the first limit of a sequence. With `drafters` of n-grams they also end
    where a pause of all drafters ends, or where one that does not pause has a draft, which is
    looked for after every step. `close` gives the session back."""

    def __init__(
        self, loop: Any, session: Session, running: Sequence[SequenceState], drafters: Drafters
    ) -> None:
        self.loop, self.session, self.running, self.drafters = loop, session, running, drafters
        pauses = [d.pace.pause for d in drafters.values()]
        #: whether a step may end them, so that none runs ahead
        self.watches = 0 in pauses
        self.left, self.started = min(s.room for s in running), 0
        if pauses and not self.watches:
            self.left = min(self.left, *pauses)
        #: steps that the last call of `step` returned the tokens of, and those of all calls
        self.steps = self.received = 0
        tokens, self.active, draws = _rows(session, running)
        samplers = {s.slot: s.sampler for s in running}
        self.draws = any(s.params.way != GREEDY for s in samplers.values())
        stops = [tuple(samplers[b].stops) if a else () for b, a in enumerate(self.active)]
        loop.start(tokens, session.length, self.active, draws, stops)

    @property
    def over(self) -> bool:
        """Whether `step` would have nothing to run, or a sequence has a draft."""
        if self.started == self.left:
            return not self.loop.unread
        return self.watches and any_draft(self.running, self.drafters)

    def step(self, prefill_follows: bool = False) -> Tokens:
        """Return the tokens of the next steps: of one, if a chunk of a prompt comes after it, while
        which no step of a loop that takes the whole device should be running."""
        single = self.watches or prefill_follows
        alone = self.watches or (prefill_follows and self.loop.exclusive)
        while self.loop.unread < (1 if alone else AHEAD) and self.started < self.left:
            room = self.left - self.started
            count = 1 if single else min(self.loop.steps_per_call, room)
            self.loop.advance(count, self._uniforms(count) if self.draws else None)
            self.started += count
        return self._read()

    def _uniforms(self, count: int) -> torch.Tensor:
        numbers = torch.zeros(count, self.session.batch, dtype=torch.float64)
        ahead = self.started - self.received
        for s in self.running:
            drawn = [s.sampler.uniform(ahead + i) for i in range(count)]
            numbers[:, s.slot] = torch.tensor(drawn, dtype=torch.float64)
        return numbers

    def _read(self) -> Tokens:
        made = self.loop.read()
        tokens = {s.slot: made[s.slot] for s in self.running}
        self.steps = max(map(len, tokens.values()))
        self.received += self.steps
        for row, drafter in self.drafters.items():
            drafter.undrafted(len(made[row]))
        return tokens

    def close(self) -> list[Tokens]:
        """Return the tokens of steps that are still running, and let the session take over."""
        rest = [self._read() for _ in range(self.loop.unread)]
        self.session.extend(self.active.long() * self.started)
        return rest


def _rows(
    session: Session, running: Iterable[SequenceState]
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return for each row its newest token, whether it is active, and the settings of its draws."""
    tokens = torch.zeros(session.batch, dtype=torch.int64)
    active = torch.zeros(session.batch, dtype=torch.bool)
    draws = torch.ones(session.batch, 4, dtype=torch.float64)
    for s in running:
        tokens[s.slot], active[s.slot] = s.tokens[-1], True
        draws[s.slot] = torch.tensor(s.sampler.params.draw, dtype=torch.float64)
    return tokens, active, draws


def any_draft(running: Iterable[SequenceState], drafters: Drafters) -> bool:
    """Whether a drafter proposes n-grams for its sequence now."""
    each = ((drafters[s.slot], s) for s in running if s.slot in drafters and s.room > 1)
    return any(not d.pace.pause and d.propose(s.tokens, 1) for d, s in each)


def open_loop(
    engine: EngineParts,
    session: Session,
    running: Sequence[SequenceState],
    suppress: tuple[int, ...],
    drafters: Drafters,
) -> TokenSteps | None:
    """Return a loop for these sequences; None if the host has to choose: the runtime has no such
    step, a table lies elsewhere, a sequence's settings need it, it has a draft of n-grams, or a
    draft model."""
    params = [s.sampler.params for s in running]
    plain = all(s.sampler.plain for s in running) and all(p.suppress == suppress for p in params)
    if not plain or not engine.chooses_on_device:
        return None
    if any(d.source != NGRAM for d in drafters.values()) or any_draft(running, drafters):
        return None
    ways = {p.way for p in params}
    choice = DeviceChoice(tuple(way for way in WAYS if way in ways), suppress)
    where = engine.embed, session.state, session.batch, choice
    loop = engine.runtime.token_loop(*where, engine.tables)
    return loop and TokenSteps(loop, session, running, drafters)
