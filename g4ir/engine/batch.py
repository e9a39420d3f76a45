"""The rows that decode together, in a session of the smallest bucket that holds them.

Every row of a session is computed in every step, whether it is active or not, and a step of one row
costs less than one of eight. So there is a session for each bucket (1, 2, 4, ... rows), made when
it is first needed, and rows are copied from one to the other: upwards when one more has to fit,
downwards when a smaller one would have done for a number of steps.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Generic, Protocol, TypeVar

from g4ir.errors import InputError

from .parts import EngineParts
from .session import Session


class Placed(Protocol):
    """A holder of a row; -1: it has none."""

    row: int


T = TypeVar("T", bound=Placed)


def powers(most: int) -> tuple[int, ...]:
    """Return 1, 2, 4, ... and `most`."""
    return (*(1 << i for i in range((most - 1).bit_length())), most)


def checked_buckets(buckets: Sequence[int] | None, most: int) -> tuple[int, ...]:
    """Return sizes in order, the last of which is `most`; InputError for others."""
    sizes = powers(most) if buckets is None else tuple(sorted({*buckets}))
    if not sizes or sizes[0] < 1 or sizes[-1] != most:
        raise InputError(
            f"buckets {list(sizes)}: expected numbers of rows from 1 on, the largest of which is "
            f"the engine's --max-batch {most}"
        )
    return sizes


class Batch(Generic[T]):
    """Sessions by bucket, and who holds which row of the one that is in use."""

    def __init__(self, engine: EngineParts, sizes: Sequence[int], patience: int) -> None:
        self.engine, self.sizes, self.patience = engine, sizes, patience
        self.sessions: dict[int, Session] = {}
        self.held: list[T | None] = []
        #: steps since a smaller bucket would have done
        self._spare = 0
        #: copies of rows between buckets
        self.moved = 0

    @property
    def holders(self) -> list[T]:
        return [h for h in self.held if h is not None]

    @property
    def session(self) -> Session:
        """The session in use."""
        return self.sessions[len(self.held)]

    def put(self, source: Session, holders: Sequence[T]) -> None:
        """Give each a row, which holds what the one row of `source` holds."""
        count = len(self.holders)
        size = self._fitting(count + len(holders))
        if not count or size > len(self.held):
            self._move(size)
        for holder in holders:
            row = self.held.index(None)
            self.session.copy_row(source, 0, row)
            self.held[row], holder.row = holder, row

    def drop(self, holder: T, clear: bool = False) -> None:
        """Take a row away; `clear` it where it may hold NaN."""
        if holder.row >= 0:
            (self.session.clear if clear else self.session.reset)([holder.row])
            self.held[holder.row] = None
            holder.row = -1

    def settle(self, coming: int = 0) -> None:
        """Move down, where a smaller bucket has long been enough for who is there and who comes."""
        size = self._fitting(len(self.holders) + coming)
        self._spare = self._spare + 1 if size < len(self.held) else 0
        if self._spare > self.patience:
            self._move(size)

    def forget(self) -> None:
        """Drop all rows, and the sessions too: what a broken step left in them is not known."""
        for holder in self.holders:
            holder.row = -1
        self.held = []
        self.sessions.clear()

    def _fitting(self, count: int) -> int:
        return next(size for size in self.sizes if size >= count)

    def _move(self, size: int) -> None:
        """Go on in a session of another size, or in the same one."""
        self._spare = 0
        if size == len(self.held):
            return
        if size not in self.sessions:
            self.sessions[size] = Session(self.engine, size)
        target, holders = self.sessions[size], self.holders
        for row, holder in enumerate(holders):
            target.copy_row(self.session, holder.row, row)
        if self.held:
            self.session.reset()
        self.moved += len(holders)
        self.held = [*holders, *[None] * (size - len(holders))]
        for row, holder in enumerate(holders):
            holder.row = row
