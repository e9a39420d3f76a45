"""Prefill chunk size that bounds the time between two tokens of running sequences.

The size follows measurements: prompt tokens computed since the host last read a result, and the
seconds until it read the next. The target is a chunk and its decode step that take a little less
than the bound. So nothing is assumed about the device, which may still be computing when a call
returns, the context length, or the number of sequences that decode.
"""

from __future__ import annotations

#: initial and minimum chunk size in tokens
FIRST_TOKENS, FEWEST_TOKENS = 32, 16
#: while requests wait, the bound is multiplied by QUEUED_FACTOR * `queued_rows`, at least by 1 and
#: at most by MAX_QUEUED_FACTOR: large chunks take less time in total, steps of few sequences use
#: the bandwidth poorly, and steps of many are long anyway
QUEUED_FACTOR, MAX_QUEUED_FACTOR = 0.25, 4.0
#: fraction of the bound to aim for: steps vary
AIM = 0.8
#: number of steps with a chunk after which a step without a chunk is measured again
STEPS_TO_PROBE = 32
#: maximum factor by which one measurement changes the size
MAX_CHANGE = 2.0


class ChunkSize:
    """Adapts the size of prefill chunks to measured times. `gap_s`: bound on the seconds between
    two tokens of a running sequence, infinity for none; `max_tokens`: maximum size of a chunk."""

    def __init__(self, gap_s: float, max_tokens: int) -> None:
        self.gap_s, self.max_tokens, self.bounded = gap_s, max_tokens, gap_s < float("inf")
        self._fewest = min(FEWEST_TOKENS, max_tokens)
        self._size = float(min(FIRST_TOKENS, max_tokens) if self.bounded else max_tokens)
        #: when the host last read a result, and the prompt tokens computed since
        self._since, self.computed = 0.0, 0
        #: seconds of the last two decode steps without a chunk, 0 until measured; number of steps
        #: with a chunk since then
        self._steps_s, self._mixed_steps = (0.0, 0.0), 0
        #: if requests wait behind this chunk's prompt: number of sequences that decode plus
        #: requests that wait, at most max_batch; else 0
        self.queued_rows = 0

    @property
    def tokens(self) -> int:
        """The number of prompt tokens to prefill between two decode steps."""
        return int(self._size)

    @property
    def remaining(self) -> int:
        """Tokens of the chunk that are not computed yet; 0 if they are fewer than half the chunk or
        than the minimum: a short chunk takes almost as long, since each reads all weights."""
        remaining = self.tokens - self.computed
        return remaining if remaining >= max(self._fewest, self._size / 2) else 0

    @property
    def probes(self) -> bool:
        """Whether the next decode step should run without a chunk, so that it is measured alone."""
        return self.bounded and self._mixed_steps >= STEPS_TO_PROBE

    def start(self, now: float) -> None:
        """Start a measurement, for example when a prompt starts on an idle device."""
        self._since, self.computed = now, 0

    def record(self, now: float) -> None:
        """Record that the host has read sampled tokens. If prompt tokens were computed since it
        last did, adapt the size to the time since then; else that is the time of a plain decode
        step. A short chunk (the end of a prompt) counts only if the time exceeded the bound."""
        seconds, computed, full = now - self._since, self.computed, not self.remaining
        self.start(now)
        if not computed:
            self._steps_s, self._mixed_steps = (self._steps_s[1], seconds), 0
            return
        self._mixed_steps += 1
        gap_s = self.gap_s * min(max(self.queued_rows * QUEUED_FACTOR, 1.0), MAX_QUEUED_FACTOR)
        bound = max(gap_s, 2 * min(self._steps_s) / AIM)  # min: one may be an outlier
        if seconds > 0 and (full or seconds > bound):
            change = computed * AIM * bound / seconds / self._size
            if seconds < AIM * bound:
                change = max(change, 1.0) ** 0.5
            change = min(max(change, 1 / MAX_CHANGE), MAX_CHANGE)
            self._size = min(max(self._size * change, self._fewest), self.max_tokens)
