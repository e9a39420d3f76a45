"""The sequences that decode together, in a session of the smallest bucket with enough slots.

Every row of a session is computed in every step, active or not. So there is one session per bucket
(1, 2, 4, 8, 16, 24, ... rows), created on first use; together their rows are at most 2 * max_batch.
Sequences are copied to a larger bucket at once, to a smaller one after more than `patience`
consecutive steps in which it would have been enough.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Generic, Protocol, TypeVar

from g4ir.errors import InputError

from .parts import EngineParts
from .session import Session


class HasSlot(Protocol):
    #: row in the session; -1: none
    slot: int


T = TypeVar("T", bound=HasSlot)


def checked_buckets(buckets: Sequence[int] | None, max_batch: int) -> tuple[int, ...]:
    """Return the sorted bucket sizes (default: 1, 2, 4, multiples of 8, max_batch); InputError
    unless all are positive and the largest is max_batch."""
    default = (n for n in (1, 2, 4, *range(8, max_batch, 8)) if n < max_batch)
    sizes = (*default, max_batch) if buckets is None else tuple(sorted({*buckets}))
    if not sizes or sizes[0] < 1 or sizes[-1] != max_batch:
        raise InputError(
            f"buckets {list(sizes)}: expected batch sizes of 1 or more, the largest of which is "
            f"the engine's --max-batch {max_batch}"
        )
    return sizes


class Batch(Generic[T]):
    """Sessions by bucket, and the sequence in each slot of the current one."""

    def __init__(self, engine: EngineParts, sizes: Sequence[int], patience: int) -> None:
        self.engine, self.sizes, self.patience = engine, sizes, patience
        #: batch size -> session
        self.sessions: dict[int, Session] = {}
        self.slots: list[T | None] = []
        #: consecutive steps in which a smaller bucket would have been enough
        self._oversized_calls = 0

    @property
    def sequences(self) -> list[T]:
        return [s for s in self.slots if s is not None]

    @property
    def session(self) -> Session:
        return self.sessions[len(self.slots)]

    def put(self, source: Session, sequences: Sequence[T], row: int = 0) -> None:
        """Copy row `row` of `source` to a free slot for each sequence; first move to a larger
        bucket if too few slots are free, or, if the batch is empty, to the smallest sufficient
        one."""
        count = len(self.sequences) + len(sequences)
        if count == len(sequences) or count > len(self.slots):
            self._move(self._bucket_for(count))
        for sequence in sequences:
            slot = self.slots.index(None)
            self.session.copy_row(source, row, slot)
            self.slots[slot], sequence.slot = sequence, slot

    def lend(self, rows: int) -> Session:
        """Return an empty session of `rows` rows (a bucket size), to prefill in and then pass to
        `take`; if the batch is not empty, make room in it for as many sequences."""
        count = len(self.sequences) + rows
        if count == rows:
            self.slots = []
        elif count > len(self.slots):
            self._move(self._bucket_for(count))
        session = self._session_of(rows)
        session.reset()
        return session

    def take(self, lent: Session, sequences: Sequence[T | None]) -> None:
        """Add the sequences of a lent session (by row; None: a row without one, which is emptied)
        to the batch: by copying rows, or, if the batch is empty, by using that session."""
        alone = not self.sequences
        if alone:
            self.slots, self._oversized_calls = [*sequences], 0
        for row, sequence in enumerate(sequences):
            if sequence and alone:
                sequence.slot = row
            elif sequence:
                self.put(lent, [sequence], row=row)
            else:
                lent.reset([row])

    def adopt(self, session: Session, sequence: T) -> bool:
        """Make a one-row session the batch, with its one sequence, without a copy; return False if
        the batch is not empty, or bucket 1 does not exist or has a session already."""
        if self.sequences or 1 not in self.sizes or 1 in self.sessions:
            return False
        self.sessions[1], self.slots, sequence.slot = session, [sequence], 0
        return True

    def release(self) -> Session | None:
        """Remove and return the one-row session; None if there is none or the batch is not
        empty."""
        if self.sequences:
            return None
        self.slots = []
        return self.sessions.pop(1, None)

    def drop(self, sequence: T, zero: bool = False) -> None:
        """Free a sequence's slot; `zero` overwrites its caches, which may contain NaN, with
        zeros."""
        if sequence.slot >= 0:
            self.session.reset([sequence.slot], zero)
            self.slots[sequence.slot] = None
            sequence.slot = -1

    def should_shrink(self) -> bool:
        """Count a step; return whether a smaller bucket would have been enough in more than
        `patience` consecutive steps."""
        size = self._bucket_for(len(self.sequences))
        self._oversized_calls = self._oversized_calls + 1 if size < len(self.slots) else 0
        return self._oversized_calls > self.patience

    def shrink(self) -> None:
        """Move to the smallest sufficient bucket."""
        self._move(self._bucket_for(len(self.sequences)))

    def clear(self) -> None:
        """Drop all sequences and sessions."""
        for sequence in self.sequences:
            sequence.slot = -1
        self.slots = []
        self.sessions.clear()

    def _session_of(self, rows: int) -> Session:
        """Return the session of a bucket. While the rows of all sessions exceed 2 * max_batch, drop
        the largest that is neither this one nor the current one: recording a new one takes about
        the same time for any size."""
        self.sessions[rows] = session = self.sessions.get(rows) or Session(self.engine, rows)
        for other in sorted({*self.sessions} - {rows, len(self.slots)}, reverse=True):
            if sum(self.sessions) > 2 * self.sizes[-1]:
                del self.sessions[other]
        return session

    def _bucket_for(self, count: int) -> int:
        return next(size for size in self.sizes if size >= count)

    def _move(self, size: int) -> None:
        self._oversized_calls, sequences = 0, self.sequences
        if size == len(self.slots):
            return
        before = self.session if self.slots else None
        session = self._session_of(size)
        for slot, sequence in enumerate(sequences):
            session.copy_row(self.session, sequence.slot, slot)
        self.slots = [*sequences, *[None] * (size - len(sequences))]
        for slot, sequence in enumerate(sequences):
            sequence.slot = slot
        if before:  # last: if a copy fails, the sequences stay where they were
            before.reset()
