"""Decode loop that samples on the device: a step is one CUDA graph launch, if it can be captured.

A step reads and writes static tensors of the loop (tokens, lengths, active sequences, random
numbers, sampling settings), so one captured step serves every length and every sequence. The host
reads the tokens of a step while the next one is running.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

import torch

Tensor = torch.Tensor

Embed = Callable[[Tensor], dict[str, Tensor]]
Step = Callable[[dict[str, Tensor]], Tensor]
#: (logits [B,1,vocab], random numbers f64[B], settings f64[B,4]) -> tokens i64[B]
Choose = Callable[[Tensor, Tensor, Tensor], Tensor]


class TokenLoop:
    """Runs decode steps over static tensors. Not safe for use from several threads at once.

    `record` captures the step as a CUDA graph, or returns it unchanged. Sequences do not end on the
    device: the host drops tokens after a sequence's end.
    """

    #: exclusive: whether no prefill chunk should run at the same time as a step. steps_per_call:
    #: steps that one `advance` runs
    exclusive, steps_per_call = False, 1

    def __init__(
        self,
        embed: Embed,
        step: Step,
        choose: Choose,
        batch: int,
        device: str,
        record: Callable[[Callable[[], None]], Callable[[], None]],
    ) -> None:
        def zeros() -> Tensor:
            return torch.zeros(batch, dtype=torch.int64, device=device)

        self.embed, self.step, self.choose = embed, step, choose
        #: i64[B]: next input tokens; sequence lengths; 1 for active sequences
        self.tokens, self.lengths, self.active = zeros(), zeros(), zeros()
        self.uniforms = torch.zeros(batch, dtype=torch.float64, device=device)
        #: settings of the draws (sampling.py), f64[B,4]
        self.draws = torch.ones(batch, 4, dtype=torch.float64, device=device)
        #: f32[B]: 0, or NaN once an active sequence has had logits that are not finite
        self.flaws = torch.zeros(batch, device=device)
        self._record = record
        self._replay: Callable[[], None] | None = None
        self._unread: deque[_Result] = deque()

    def start(
        self,
        tokens: Tensor,
        lengths: Tensor,
        active: Tensor,
        draws: Tensor | None = None,
        stops: Sequence[Sequence[int]] = (),
    ) -> None:
        """Set the batch: input tokens, lengths and active sequences (bool), [B]; sampling settings
        f64[B, 4], None to keep them. `stops` is ignored: the host checks for stop tokens."""
        state = (self.tokens, self.lengths, self.active)
        values = (tokens, lengths, active)
        if draws is not None:
            self.draws.copy_(draws)
        for target, t in zip(state, values, strict=True):
            target.copy_(t)
        if self._replay is None:
            # The warm-up before the capture runs the step. It writes to the cache slots that the
            # first real step writes again, with the same values.
            self._replay = self._record(self._once)
            for target, t in zip(state, values, strict=True):
                target.copy_(t)
        self.flaws.zero_()
        self._unread.clear()

    def _once(self) -> None:
        """Run one step in place. An inactive sequence keeps its token and caches; it is at position
        0, so that its attention reads nothing."""
        feeds = self.embed(self.tokens[:, None])
        positions = (self.lengths * self.active)[:, None]
        feeds |= {"positions": positions, "lengths": self.active}
        logits = self.step(feeds)
        # One NaN or infinite logit makes the sequence's sum NaN or infinite.
        sums = logits.sum((1, 2), dtype=torch.float32)
        chosen = self.choose(logits, self.uniforms, self.draws)
        runs = self.active > 0
        self.flaws += (sums * 0).where(runs, 0.0)
        self.lengths += self.active
        self.tokens.copy_(chosen.where(runs, self.tokens))

    def advance(self, count: int = 1, uniforms: Tensor | None = None) -> None:
        """Start one step, after `start`, and the copy of its tokens to the host; `uniforms`
        f64[1, B] are its random numbers, None if all sequences are greedy."""
        assert self._replay and count == 1, "expected `start` before `advance`, and a count of 1"
        if uniforms is not None:
            pinned = uniforms[0].pin_memory() if self.uniforms.is_cuda else uniforms[0]
            self.uniforms.copy_(pinned, non_blocking=True)
        self._replay()
        self._unread.append(_Result(self.tokens, self.flaws))

    @property
    def unread(self) -> int:
        """Number of steps whose tokens are not read yet."""
        return len(self._unread)

    def read(self) -> list[list[int | None]]:
        """Wait for the oldest unread step; return each sequence's token in a list, None once its
        logits have been NaN or infinite."""
        tokens, finite = self._unread.popleft().read()
        return [[token if good else None] for token, good in zip(tokens, finite, strict=True)]


class _Result:
    """Asynchronous copy of a step's tokens i64[B] and flaws f32[B] to the host."""

    def __init__(self, tokens: Tensor, flaws: Tensor) -> None:
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
