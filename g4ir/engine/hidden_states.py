"""The last hidden states of a batch: the draft model's input."""

from __future__ import annotations

from typing import Any

import torch


class HiddenStates:
    """Hidden states [batch, S, hidden] of each row's newest tokens, for the draft model."""

    def __init__(self, batch: int) -> None:
        self.states: torch.Tensor | None = None
        #: int64 [batch]: tokens that a row held before the first of its states, and at the last
        self._before, self._after = torch.zeros(2, batch, dtype=torch.int64)

    def known(self, length: torch.Tensor) -> torch.Tensor:
        """Return bool [batch]: whether the state of a row's newest token is known."""
        return (self._before < length) & (length <= self._after) & (length > 0)

    def of(self, length: torch.Tensor) -> torch.Tensor | None:
        """Return the states [batch, 1, hidden] of the newest tokens, where they are known."""
        if self.states is None or self.states.shape[1] == 1:
            return self.states
        at = (length - self._before - 1).clamp(0, self.states.shape[1] - 1)
        rows = torch.arange(len(at), device=self.states.device)
        return self.states[rows, at.to(rows.device)][:, None]

    def take(self, made: torch.Tensor | None, before: torch.Tensor, after: torch.Tensor) -> None:
        """Keep the states of a step, of every token or of the last; None: it returned none. Rows
        without a new token keep theirs."""
        if made is None and self.states is None:
            return
        old, kept, new = self.of(before), self.known(before) & (after == before), after > before
        if made is not None:
            self.states = made.clone()
            first = before if made.shape[1] > 1 else after - 1
            if old is not None and bool(kept.any()):
                rows = kept.to(made.device)[:, None, None]
                self.states[:, :1] = torch.where(rows, old, self.states[:, :1])
                first = torch.where(kept, before - 1, first)
            self._before = first
        self._after = torch.where(kept | new if made is not None else kept, after, 0)

    def copy_row(self, source: HiddenStates, start: int, row: int, length: torch.Tensor) -> None:
        """Have in a row what row `start` of another has, whose rows hold `length` tokens."""
        found = source.of(length)
        if found is not None:
            if self.states is None:
                self.states = found.new_zeros(len(self._after), *found.shape[1:])
            self.states[row, 0] = found[start, 0]
        self._before[row] = length[start] - 1
        self._after[row] = length[start] * source.known(length)[start]

    def copy(self, length: torch.Tensor) -> HiddenStates:
        """Return a copy for a snapshot."""
        made = HiddenStates(len(length))
        for row in range(len(length)):
            made.copy_row(self, row, row, length)
        return made

    def forget(self, rows: Any = slice(None)) -> None:
        """Forget the states of some rows, or of all."""
        self._after[rows] = 0
