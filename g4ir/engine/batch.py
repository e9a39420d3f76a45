"""The sequences that decode together, in a session of the smallest bucket that holds them.

Every row of a session is computed in every step, active or not. So there is a session for each
bucket (1, 2, 4, ... rows), made when it is first needed, and sequences are copied to a larger one
at once, to a smaller one after `patience` steps in which it would have been enough.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Generic, Protocol, TypeVar

from g4ir.errors import InputError

from .parts import EngineParts
from .session import Session


class Placed(Protocol):
    #: number of its row; -1: none
    slot: int


T = TypeVar("T", bound=Placed)


def checked_buckets(buckets: Sequence[int] | None, most: int) -> tuple[int, ...]:
    """Return sizes in order, up to `most` (default: 1, 2, 4, ...); InputError for others."""
    powers = (1 << i for i in range((most - 1).bit_length()))
    sizes = (*powers, most) if buckets is None else tuple(sorted({*buckets}))
    if not sizes or sizes[0] < 1 or sizes[-1] != most:
        raise InputError(
            f"buckets {list(sizes)}: expected numbers of rows from 1 on, the largest of which is "
            f"the engine's --max-batch {most}"
        )
    return sizes


class Batch(Generic[T]):
    """Sessions by bucket, and the holder of each slot of the one in use."""

    def __init__(self, engine: EngineParts, sizes: Sequence[int], patience: int) -> None:
        self.engine, self.sizes, self.patience = engine, sizes, patience
        self.sessions: dict[int, Session] = {}
        self.held: list[T | None] = []
        #: calls since a smaller bucket would have been enough
        self._spare = 0

    @property
    def holders(self) -> list[T]:
        return [h for h in self.held if h is not None]

    @property
    def session(self) -> Session:
        return self.sessions[len(self.held)]

    def put(self, source: Session, holders: Sequence[T], coming: int = 0, row: int = 0) -> None:
        """Give each a slot and a copy of a row of `source`; `coming` more are expected."""
        count = len(self.holders) + len(holders)
        if count == len(holders) or count > len(self.held):
            self._move(self._fitting(count + coming))
        for holder in holders:
            slot = self.held.index(None)
            self.session.copy_row(source, row, slot)
            self.held[slot], holder.slot = holder, slot

    def lend(self, rows: int) -> Session:
        """Return an empty session of a bucket, for `take`: no slot is in it, and there are free
        slots for all its rows."""
        count = len(self.holders) + rows
        if count == rows:
            self.held = []
        elif count > len(self.held):
            self._move(self._fitting(count))
        if rows not in self.sessions:
            self.sessions[rows] = Session(self.engine, rows)
        self.sessions[rows].reset()
        return self.sessions[rows]

    def take(self, lent: Session, holders: Sequence[T | None]) -> None:
        """Give the holder of each row of a lent session a slot: a copy, or if there is nobody else
        the row itself."""
        alone = not self.holders
        if alone:
            self.held, self._spare = [*holders], 0
        for row, holder in enumerate(holders):
            if holder and alone:
                holder.slot = row
            elif holder:
                self.put(lent, [holder], row=row)
            else:
                lent.reset([row])

    def adopt(self, session: Session, holder: T) -> bool:
        """Take over a session of one row for the only holder, instead of a copy; whether it can."""
        if self.holders or 1 not in self.sizes or 1 in self.sessions:
            return False
        self.sessions[1], self.held, holder.slot = session, [holder], 0
        return True

    def release(self) -> Session | None:
        """Hand over the session of one row, if there is one and no slot is taken."""
        if self.holders:
            return None
        self.held = []
        return self.sessions.pop(1, None)

    def drop(self, holder: T, zero: bool = False) -> None:
        """Free its slot; with `zero` write over a row that may hold NaN."""
        if holder.slot >= 0:
            self.session.reset([holder.slot], zero)
            self.held[holder.slot] = None
            holder.slot = -1

    def shrinks(self, coming: int = 0) -> bool:
        """Count a call; whether a smaller bucket has long been enough, for `coming` more too."""
        size = self._fitting(len(self.holders) + coming)
        self._spare = self._spare + 1 if size < len(self.held) else 0
        return self._spare > self.patience

    def shrink(self, coming: int = 0) -> None:
        """Move to the smallest bucket that is enough."""
        self._move(self._fitting(len(self.holders) + coming))

    def forget(self) -> None:
        """Drop all sequences and sessions: a failed step leaves them undefined."""
        for holder in self.holders:
            holder.slot = -1
        self.held = []
        self.sessions.clear()

    def _fitting(self, count: int) -> int:
        return next(size for size in self.sizes if size >= count)

    def _move(self, size: int) -> None:
        self._spare, holders = 0, self.holders
        if size == len(self.held):
            return
        if size not in self.sessions:
            self.sessions[size] = Session(self.engine, size)
        before = self.session if self.held else None
        for slot, holder in enumerate(holders):
            self.sessions[size].copy_row(self.session, holder.slot, slot)
        self.held = [*holders, *[None] * (size - len(holders))]
        for slot, holder in enumerate(holders):
            holder.slot = slot
        if before:  # last: a failure before leaves the sequences where they were
            before.reset()
