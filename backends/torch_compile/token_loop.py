"""Decode steps that choose their own next token: on a GPU one graph launch each.

A step reads and writes tensors of the loop (tokens, lengths, active rows, random numbers, settings
of the draws), so the same recorded step serves every length and every sequence. The host reads the
tokens of a step while the next one is running.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

import torch

Embed = Callable[[torch.Tensor], dict[str, torch.Tensor]]
Step = Callable[[dict[str, torch.Tensor]], torch.Tensor]
#: (logits [B,1,vocab], random numbers f64[B], settings f64[B,4]) -> tokens i64[B]
Choose = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
#: (operands of `end_by_torch`) -> None
End = Callable[[list[torch.Tensor]], Any]
#: stop tokens that a chain of the step's end looks at
STOPS = 32


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

    `record` makes of the step what replays it: a CUDA graph, or the step itself. No row ends on the
    device: what a step appends to a sequence that had ended is dropped with it.
    """

    def __init__(
        self,
        embed: Embed,
        step: Step,
        choose: Choose,
        batch: int,
        device: str,
        record: Callable[[Callable[[], None]], Callable[[], None]],
        end: End = end_by_torch,
    ) -> None:
        def zeros() -> torch.Tensor:
            return torch.zeros(batch, dtype=torch.int64, device=device)

        self.embed, self.step, self.choose, self.end = embed, step, choose, end
        #: i64[B]: to be fed next; tokens that each row holds; 1 if the row takes the token
        self.tokens, self.lengths, self.active = zeros(), zeros(), zeros()
        self.uniforms = torch.zeros(batch, dtype=torch.float64, device=device)
        #: settings of the draws (sampling.py), f64[B,4]
        self.draws = torch.ones(batch, 4, dtype=torch.float64, device=device)
        #: f32[B]: 0, or NaN once an active row has had logits that are not finite
        self.flaws = torch.zeros(batch, device=device)
        self._no_stops = torch.full((STOPS,), -1, device=device)
        self._record = record
        self._replay: Callable[[], None] | None = None
        self._unread: deque[_Result] = deque()

    def start(
        self,
        tokens: torch.Tensor,
        lengths: torch.Tensor,
        active: torch.Tensor,
        draws: torch.Tensor | None = None,
    ) -> None:
        """Set the rows: tokens to feed, tokens held, bool of the active ones, settings of draws."""
        state = (self.tokens, self.lengths, self.active)
        given = (tokens, lengths, active)
        if draws is not None:
            self.draws.copy_(draws)
        for own, t in zip(state, given, strict=True):
            own.copy_(t)
        if self._replay is None:
            # Recording runs the step. It writes to the cache slots that the first true step
            # writes again, with the same values.
            self._replay = self._record(self._once)
            for own, t in zip(state, given, strict=True):
                own.copy_(t)
        self.flaws.zero_()
        self._unread.clear()

    def _once(self) -> None:
        """Run one step, in place. An inactive row keeps its token and its caches; it is at position
        0, so that its attention has nothing to read."""
        feeds = self.embed(self.tokens[:, None])
        positions = (self.lengths * self.active)[:, None]
        feeds |= {"positions": positions, "lengths": self.active}
        logits = self.step(feeds)
        # One pass: the sum is finite if all of them are.
        sums = logits.sum((1, 2), dtype=torch.float32)
        chosen = self.choose(logits, self.uniforms, self.draws)
        rows = (self.tokens, self.lengths, self.active, self.flaws)
        self.end([sums, chosen, *rows, self._no_stops])

    def advance(self, uniforms: torch.Tensor | None = None) -> None:
        """Start one step, after `start`; `uniforms` f64[B] are its random numbers."""
        assert self._replay, "start comes first"
        if uniforms is not None:
            pinned = uniforms.pin_memory() if self.uniforms.is_cuda else uniforms
            self.uniforms.copy_(pinned, non_blocking=True)
        self._replay()

    def fetch(self) -> None:
        """Start copying the tokens of the newest step to the host."""
        self._unread.append(_Result(self.tokens, self.flaws))

    @property
    def unread(self) -> int:
        """Number of steps whose tokens are still to be read."""
        return len(self._unread)

    def read(self) -> tuple[list[int], list[bool]]:
        """Return the oldest unread tokens, and for each row whether its logits were finite."""
        return self._unread.popleft().read()


class _Result:
    """Tokens of a step on their way to the host."""

    def __init__(self, tokens: torch.Tensor, flaws: torch.Tensor) -> None:
        self._all = torch.stack((tokens, flaws.isnan()))
        self._there: torch.cuda.Event | None = None
        if self._all.is_cuda:
            host = torch.empty(self._all.shape, dtype=self._all.dtype, pin_memory=True)
            self._all = host.copy_(self._all, non_blocking=True)
            self._there = torch.cuda.Event()
            self._there.record()

    def read(self) -> tuple[list[int], list[bool]]:
        if self._there:
            self._there.synchronize()
        tokens, flaws = self._all.tolist()
        return tokens, [not flaw for flaw in flaws]
