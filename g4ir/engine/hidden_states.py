"""The last hidden states of a batch: the draft model's input."""

from __future__ import annotations

from typing import Any

import torch


class HiddenStates:
    """Hidden states [batch, S, hidden] of each row's newest tokens, for the draft model."""

    def __init__(self, batch: int) -> None:
        self.states: torch.Tensor | None = None
        #: int64 [batch]: each row's length before its first state, and after its last
        self._before, self._after = torch.zeros(2, batch, dtype=torch.int64)

    @classmethod
    def single(cls, state: torch.Tensor | None, length: torch.Tensor) -> HiddenStates:
        """Return the hidden states of one sequence, whose newest token has this state [1, 1,
        hidden]."""
        hidden = cls(1)
        if state is not None:
            hidden.states, hidden._before, hidden._after = state, length - 1, length
        return hidden

    def available(self, length: torch.Tensor) -> torch.Tensor:
        """Return bool [batch]: whether the state of a row's newest token is available."""
        return (self._before < length) & (length <= self._after) & (length > 0)

    def of(self, length: torch.Tensor) -> torch.Tensor | None:
        """Return the states [batch, 1, hidden] of the newest tokens, undefined for rows that have
        none (`available`); None before the first step."""
        if self.states is None or self.states.shape[1] == 1:
            return self.states
        at = (length - self._before - 1).clamp(0, self.states.shape[1] - 1)
        rows = torch.arange(len(at), device=self.states.device)
        return self.states[rows, at.to(rows.device)][:, None]

    def take(self, states: torch.Tensor | None, before: torch.Tensor, after: torch.Tensor) -> None:
        """Store the hidden states of a step, [batch, S, hidden] of all tokens or [batch, 1, hidden]
        of the last; None: the step returned none. before, after: each row's length, int64 [batch],
        before and after the step. Rows without a new token keep their state."""
        if states is None and self.states is None:
            return
        unchanged = self.available(before) & (after == before)
        old, new = self.of(before), after > before
        if states is not None:
            self.states = states.clone()
            first = before if states.shape[1] > 1 else after - 1
            if old is not None and bool(unchanged.any()):
                rows = unchanged.to(states.device)[:, None, None]
                self.states[:, :1] = torch.where(rows, old, self.states[:, :1])
                first = torch.where(unchanged, before - 1, first)
            self._before = first
        self._after = torch.where(unchanged | new if states is not None else unchanged, after, 0)

    def copy_row(self, source: HiddenStates, start: int, row: int, length: torch.Tensor) -> None:
        """Copy row `start` of another batch, whose rows have lengths `length`, to row `row`."""
        state = source.of(length)
        if state is not None:
            if self.states is None:
                self.states = state.new_zeros(len(self._after), *state.shape[1:])
            self.states[row, 0] = state[start, 0]
        self._before[row] = length[start] - 1
        self._after[row] = length[start] * source.available(length)[start]

    def copy(self, length: torch.Tensor) -> HiddenStates:
        """Return a copy of each row's newest state, for a snapshot; length: each row's length,
        int64 [batch]."""
        copy = HiddenStates(len(length))
        for row in range(len(length)):
            copy.copy_row(self, row, row, length)
        return copy

    def forget(self, rows: Any = slice(None)) -> None:
        """Drop the states of some rows, or of all."""
        self._after[rows] = 0
