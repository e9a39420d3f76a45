"""How many tokens of prompts are computed between two tokens of running sequences.

The size follows what was measured: the tokens computed since the host last read a result, and the
seconds until it read the next. A size is right if those seconds, of the chunk and of the decode
step behind it, are a little less than the bound. So nothing is assumed of a device, which may
still be computing when a call returns, of the context, or of how many sequences decode.
"""

from __future__ import annotations

#: tokens between two steps before anything is measured, and the fewest, however long they take
FIRST_TOKENS, FEWEST_TOKENS = 32, 16
#: share of the bound that a chunk and a step should take: they differ from one another
AIM = 0.8
#: factor by which a measurement changes the size, at most
MOST_CHANGE = 2.0


class ChunkSize:
    """`gap_s`: the bound in seconds, infinity for none; `most`: tokens of a chunk."""

    def __init__(self, gap_s: float, most: int) -> None:
        self.gap_s, self.most, self.bounded = gap_s, most, gap_s < float("inf")
        self._fewest = min(FEWEST_TOKENS, most)
        self._size = float(min(FIRST_TOKENS, most) if self.bounded else most)
        #: when the host last read a result, and the tokens that were computed since
        self._since, self.computed = 0.0, 0

    @property
    def tokens(self) -> int:
        """Tokens between two decode steps."""
        return int(self._size)

    @property
    def left(self) -> int:
        """Those that are not computed yet; 0 where they are too few to begin with."""
        left = self.tokens - self.computed
        return left if left >= self._fewest else 0

    def begin(self, now: float) -> None:
        """Begin to measure: a prompt begins while nothing runs, say."""
        self._since, self.computed = now, 0

    def read(self, now: float) -> None:
        """The host reads tokens that were chosen behind what was computed. A short chunk, the last
        of a prompt, says nothing of longer ones, unless it took too long."""
        took, computed, whole = now - self._since, self.computed, not self.left
        self.begin(now)
        if took > 0 and computed and (whole or took > self.gap_s):
            change = computed * AIM * self.gap_s / took / self._size
            change = min(max(change if change < 1 else change**0.5, 1 / MOST_CHANGE), MOST_CHANGE)
            self._size = min(max(self._size * change, self._fewest), self.most)
