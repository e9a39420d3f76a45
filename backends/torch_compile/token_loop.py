"""Decode steps that choose their own next token: on a GPU one graph launch each.

A step reads and writes tensors of the loop (tokens, lengths, which rows still run, random numbers),
so the same recorded step serves every length. Rows end on the device, at their stop tokens, so that
the host may look at a token while the next step is running.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

Embed = Callable[[torch.Tensor], dict[str, torch.Tensor]]
Step = Callable[[dict[str, torch.Tensor]], torch.Tensor]
#: (logits [B,1,vocab], random numbers f64[B]) -> tokens i64[B]
Choose = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
#: (operands of `end_by_torch`) -> None
End = Callable[[list[torch.Tensor]], Any]
#: stop tokens that a chain of the step's end looks at
STOPS = 32
#: steps that may have been started before the host has read the first of them
AHEAD = 2


def end_by_torch(operands: list[torch.Tensor]) -> None:
    """End a step; write tokens, lengths and active i64[B] and flaws f32[B] in place.

    Operands: sums f32[B] of a row's logits, which make its flaw NaN if they are not finite; its
    chosen token i64[B], which a row that runs takes; tokens, lengths, active, flaws; and the stop
    tokens i64[N] at which a row ends.
    """
    sums, chosen, tokens, lengths, active, flaws, stops = operands
    flaws += (sums * 0).where(active > 0, 0.0)
    lengths += active
    tokens.copy_(torch.where(active > 0, chosen, tokens))
    active *= (tokens[:, None] != stops).all(-1)


class TokenLoop:
    """A step over its own tensors. Not safe for use from several threads at once.

    `record` makes of the step what replays it: a CUDA graph, or the step itself.
    """

    def __init__(
        self,
        embed: Embed,
        step: Step,
        choose: Choose,
        batch: int,
        stops: Sequence[int],
        device: str,
        record: Callable[[Callable[[], None]], Callable[[], None]],
        end: End = end_by_torch,
    ) -> None:
        def zeros() -> torch.Tensor:
            return torch.zeros(batch, dtype=torch.int64, device=device)

        self.embed, self.step, self.choose, self.end = embed, step, choose, end
        #: i64[B]: to be fed next; tokens that each row holds; 1 where the row takes the token
        self.tokens, self.lengths, self.active = zeros(), zeros(), zeros()
        self.uniforms = torch.zeros(batch, dtype=torch.float64, device=device)
        #: f32[B]: 0, or NaN once a row that runs has had logits that are not finite
        self.flaws = torch.zeros(batch, device=device)
        rest = [-1] * (-len(stops) % STOPS or STOPS * (not stops))
        #: no token, behind those that end a row
        self.stops = torch.tensor([*stops, *rest], dtype=torch.int64, device=device)
        self._record = record
        self._replay: Callable[[], None] | None = None

    def start(self, tokens: torch.Tensor, lengths: torch.Tensor, active: torch.Tensor) -> None:
        """Set the rows: tokens to feed, tokens held, bool of the rows that run."""
        state = (self.tokens, self.lengths, self.active)
        given = (tokens, lengths, active)
        for own, t in zip(state, given, strict=True):
            own.copy_(t)
        if self._replay is None:
            # Recording runs the step. It writes to the cache slots that the first true step
            # writes again, with the same values.
            self._replay = self._record(self._once)
            for own, t in zip(state, given, strict=True):
                own.copy_(t)
        self.flaws.zero_()

    def _once(self) -> None:
        """Run one step, in place. A row at rest keeps its token and its caches; it is at position
        0, so that its attention has nothing to read."""
        feeds = self.embed(self.tokens[:, None])
        positions = (self.lengths * self.active)[:, None]
        feeds |= {"positions": positions, "lengths": self.active}
        logits = self.step(feeds)
        # One pass: the sum is finite where all of them are.
        sums = logits.sum((1, 2), dtype=torch.float32)
        chosen = self.choose(logits, self.uniforms)
        rows = (self.tokens, self.lengths, self.active, self.flaws)
        self.end([sums, chosen, *rows, self.stops])

    def _set_uniforms(self, numbers: torch.Tensor) -> None:
        pinned = numbers.pin_memory() if self.uniforms.is_cuda else numbers
        self.uniforms.copy_(pinned, non_blocking=True)

    def advance(self) -> None:
        """Start one step, after `start`."""
        assert self._replay, "start comes first"
        self._replay()

    def run(
        self, steps: int, uniforms: Callable[[], torch.Tensor] | None
    ) -> Iterator[tuple[list[int], list[bool], bool]]:
        """Run up to `steps` steps, until no row runs: the tokens after each, which rows go on, and
        whether all logits were finite so far.

        `uniforms` makes the random numbers of a step. The host reads a step's tokens after it has
        started the next one; what that one did to rows that had ended is nothing.
        """
        waiting: list[_Result] = []
        for i in range(steps):
            if uniforms:
                self._set_uniforms(uniforms())
            self.advance()
            waiting.append(_Result(self.tokens, self.active, self.flaws))
            if len(waiting) < AHEAD and i + 1 < steps:
                continue
            yield waiting[0].read()
            if not any(waiting.pop(0).running):
                return
        for result in waiting:
            yield result.read()


class _Result:
    """Tokens of a step on their way to the host."""

    def __init__(self, tokens: torch.Tensor, active: torch.Tensor, flaws: torch.Tensor) -> None:
        self._all = torch.stack((tokens, active, flaws.isnan()))
        self._there: torch.cuda.Event | None = None
        if self._all.is_cuda:
            host = torch.empty(self._all.shape, dtype=self._all.dtype, pin_memory=True)
            self._all = host.copy_(self._all, non_blocking=True)
            self._there = torch.cuda.Event()
            self._there.record()

    def read(self) -> tuple[list[int], list[bool], bool]:
        if self._there:
            self._there.synchronize()
        tokens, active, flaws = self._all.tolist()
        self.running = [a > 0 for a in active]
        return tokens, self.running, not any(flaws)
