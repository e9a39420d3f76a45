"""Steps of a fixed set of sequences that the device runs by itself, its choice of tokens included.

The scheduler opens a loop when no sequence needs the host between two tokens, and closes it before
it changes the batch: when a sequence ends, joins, pauses or is cancelled. `TokenSteps` decode one
token a step, and the host reads the tokens of a step while the next one runs. `DraftRounds` draft,
verify and choose several.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import torch

from g4ir.backends.base import DeviceChoice
from g4ir.backends.sampling import GREEDY, WAYS, Sampler

from .parts import EngineParts
from .session import Session
from .speculative import MTP, RowDrafts

#: steps that may have been started before the host has read the first of them
AHEAD = 2
#: random numbers that a loop of rounds is given; it is opened again when they are used up
NUMBERS = 128

#: new tokens by row of the session; None: logits that are NaN or infinite
Tokens = Mapping[int, Sequence[int | None]]


class DeviceLoop(Protocol):
    """Runs the rows of a session until it is closed; the session must not be used meanwhile."""

    @property
    def over(self) -> bool:
        """Whether `step` would have nothing to run."""

    def step(self) -> Tokens:
        """Return the tokens of the next step."""

    def close(self) -> list[Tokens]:
        """Return the tokens of steps that are still running, and let the session take over."""


class TokenSteps:
    """Decode steps, up to the first limit of a sequence. `samplers` and `rooms` (how many tokens
    each may still get) are by row."""

    def __init__(
        self, loop: Any, session: Session, samplers: Mapping[int, Sampler], rooms: Mapping[int, int]
    ) -> None:
        self.loop, self.session, self.samplers = loop, session, samplers
        self.left, self.started = min(rooms.values()), 0
        tokens, self.active, draws = rows_of(session, samplers)
        self.draws = any(s.params.way != GREEDY for s in samplers.values())
        loop.start(tokens, session.length, self.active, draws)

    @property
    def over(self) -> bool:
        return self.started == self.left and not self.loop.unread

    def step(self) -> Tokens:
        while self.loop.unread < AHEAD and self.started < self.left:
            self.loop.advance(self._uniforms() if self.draws else None)
            self.loop.fetch()
            self.started += 1
        return self._read()

    def _uniforms(self) -> torch.Tensor:
        numbers = [0.0] * self.session.batch
        for row, sampler in self.samplers.items():
            numbers[row] = sampler.uniform(self.loop.unread)
        return torch.tensor(numbers, dtype=torch.float64)

    def _read(self) -> Tokens:
        tokens, finite = self.loop.read()
        return {row: [tokens[row] if finite[row] else None] for row in self.samplers}

    def close(self) -> list[Tokens]:
        rest = [self._read() for _ in range(self.loop.unread)]
        self.session.extend(self.active.long() * self.started)
        return rest


class DraftRounds:
    """Rounds of speculative decoding by the draft model. All rows draft equally many tokens: as
    many as the one with the most accepted."""

    def __init__(
        self,
        loop: Any,
        session: Session,
        samplers: Mapping[int, Sampler],
        rooms: Mapping[int, int],
        drafters: Mapping[int, RowDrafts],
    ) -> None:
        self.loop, self.session, self.samplers = loop, session, samplers
        self.rooms, self.drafters = dict(rooms), drafters
        tokens, active, draws = rows_of(session, samplers)
        limits = session.length.clone()
        for row, room in rooms.items():
            limits[row] += room
        self._limits = limits
        self._taken, self._most = torch.zeros_like(limits), torch.zeros_like(limits)
        loop.start(
            tokens, session.length, limits, active, session.hidden.rows, draws, self._uniforms()
        )

    def _uniforms(self) -> torch.Tensor | None:
        if all(s.params.way == GREEDY for s in self.samplers.values()):
            return None
        numbers = torch.zeros(NUMBERS, self.session.batch, dtype=torch.float64)
        for row, sampler in self.samplers.items():
            numbers[:, row] = torch.tensor([sampler.uniform(i) for i in range(NUMBERS)])
        return numbers

    @property
    def over(self) -> bool:
        most = max(d.pace.most for d in self.drafters.values())
        return int(self._taken.max()) + most + 1 > NUMBERS

    def step(self) -> Tokens:
        count = max(d.count(self.rooms[row] - 1) for row, d in self.drafters.items())
        made = self.loop.run(count)
        before = self.session.length + self._taken
        kept = torch.tensor([len(tokens) for tokens in made.tokens])
        fed = (self._limits - before).clamp(max=count + 1) * (kept > 0)
        self._most = torch.maximum(self._most, self._taken + fed)
        self._taken += kept
        out: dict[int, Sequence[int | None]] = {}
        for row, drafter in self.drafters.items():
            tokens = made.tokens[row]
            self.rooms[row] -= len(tokens)
            drafter.told(count, len(tokens))
            out[row] = tokens if made.finite[row] else [None]
        return out

    def close(self) -> list[Tokens]:
        self.session.extend(self._taken, self.loop.hidden.clone(), self._most)
        return []


def rows_of(
    session: Session, samplers: Mapping[int, Sampler]
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return for each row its newest token, whether it is active, and the settings of its draws."""
    tokens = torch.zeros(session.batch, dtype=torch.int64)
    active = torch.zeros(session.batch, dtype=torch.bool)
    draws = torch.ones(session.batch, 4, dtype=torch.float64)
    for row, sampler in samplers.items():
        tokens[row], active[row] = sampler.generated[-1], True
        draws[row] = torch.tensor(sampler.params.draw, dtype=torch.float64)
    return tokens, active, draws


def open_loop(
    engine: EngineParts,
    session: Session,
    samplers: Mapping[int, Sampler],
    rooms: Mapping[int, int],
    suppress: tuple[int, ...],
    drafters: Mapping[int, RowDrafts],
) -> DeviceLoop | None:
    """Return a loop for these rows, with rounds if they have `drafters`; None if the host has to
    choose: the runtime has no such step, a table lies elsewhere, or a sequence's settings need it.
    """
    plain = all(s.plain and s.params.suppress == suppress for s in samplers.values())
    if not plain or not engine.chooses_on_device:
        return None
    ways = {s.params.way for s in samplers.values()}
    choice = DeviceChoice(tuple(way for way in WAYS if way in ways), suppress)
    where = engine.embed, session.state, session.batch, choice
    if not drafters:
        loop = engine.runtime.token_loop(*where)
        return loop and TokenSteps(loop, session, samplers, rooms)
    known = session.hidden.is_of(session.length)[[*samplers]]
    if any(d.source != MTP for d in drafters.values()) or not bool(known.all()):
        return None
    assert engine.drafter and engine.drafter.drafter
    last = engine.drafter.drafter.position == "last"
    loop = engine.runtime.round_loop(*where, last)
    return loop and DraftRounds(loop, session, samplers, rooms, drafters)
