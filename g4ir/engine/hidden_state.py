"""Last hidden state of each row of a session, the draft model's input."""

from __future__ import annotations

import torch


class Hidden:
    """For each row the state behind its newest token, with the number of tokens it is of. The
    tokens that may still be taken back have theirs too."""

    def __init__(self, batch: int) -> None:
        #: [batch,1,hidden] where the engine runs; None: there was none yet
        self.rows: torch.Tensor | None = None
        #: int64 [batch]: tokens that a row held when its state was made; -1: it has none
        self._at = torch.full((batch,), -1)
        #: states of several tokens [batch,S,hidden], and how many each row held before and after
        self._several: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None = None

    def is_of(self, length: torch.Tensor) -> torch.Tensor:
        """Return bool [batch]: whether a row's state is that of its newest token."""
        return (self._at == length) & (length > 0)

    def take(self, made: torch.Tensor | None, before: torch.Tensor, after: torch.Tensor) -> None:
        """Keep the states of a step, [batch,S,hidden] of every token or [batch,1,hidden] of the
        last; None: the step returned none. Rows without a new token keep theirs."""
        if made is None and self.rows is None:
            return
        self._several = None
        new = after > before
        self._at = torch.where(new, -1, self._at)
        if made is None:
            return
        self._put(made, new, (after - before - 1).clamp(min=0), after)
        if made.shape[1] > 1:
            self._several = made.clone(), before, after

    def cut(self, length: torch.Tensor) -> None:
        """Follow rows that are cut, where the states of their last step are known."""
        if self._several is not None:
            made, before, after = self._several
            known = (before < length) & (length <= after)
            self._put(made, known, (length - before - 1).clamp(min=0), length)

    def stand(self, rows: torch.Tensor, length: torch.Tensor) -> None:
        """Take in the states [batch,1,hidden] of rows that hold so many tokens."""
        self._several, self.rows, self._at = None, rows, length.clone()

    def forget(self, rows: torch.Tensor | None = None) -> None:
        """Forget the states of some rows, or of all."""
        self._several = None
        self._at[torch.arange(len(self._at)) if rows is None else rows] = -1

    def copy_row(self, source: Hidden, start: int, row: int) -> None:
        """Have in a row what another has."""
        self._several = None
        self._at[row] = source._at[start]
        if source.rows is None:
            return
        if self.rows is None:
            self.rows = source.rows.new_zeros(len(self._at), *source.rows.shape[1:])
        self.rows[row] = source.rows[start]

    def copy(self) -> Hidden:
        """Return a copy, for a snapshot."""
        made = Hidden(len(self._at))
        made.rows, made._at = None if self.rows is None else self.rows.clone(), self._at.clone()
        return made

    def _put(
        self, made: torch.Tensor, rows: torch.Tensor, place: torch.Tensor, at: torch.Tensor
    ) -> None:
        """Set the states of some rows to those at a place of their own."""
        one = made
        if made.shape[1] > 1:
            index = place.to(made.device).clamp(max=made.shape[1] - 1)
            one = made[torch.arange(len(made), device=made.device), index][:, None]
        old = torch.zeros_like(one) if self.rows is None else self.rows
        self.rows = torch.where(rows.to(made.device)[:, None, None], one, old)
        self._at = torch.where(rows, at, self._at)
