"""CPU time limit of one request's media; decoders check it between frames."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field

from g4ir.errors import InputError

#: seconds of processor time to decode and encode the media of one request of a server
MAX_S = 30.0


@dataclass
class Limit:
    """`seconds`: maximum CPU time of the thread that decodes media; `name`: the medium being
    decoded; `abandoned`: set by any thread to cancel."""

    seconds: float = field(default_factory=lambda: MAX_S)
    name: str = "media"
    abandoned: bool = False


_CURRENT: ContextVar[tuple[Limit, float] | None] = ContextVar("media limit", default=None)


@contextmanager
def limited(limit: Limit) -> Iterator[None]:
    """Context that sets the limit for `check_limit` in this thread."""
    token = _CURRENT.set((limit, time.thread_time()))
    try:
        yield
    finally:
        _CURRENT.reset(token)


def check_limit() -> None:
    """Raise InputError, naming the medium, if this thread has a limit that is used up or abandoned.
    Decoders call it between two frames, or about as often."""
    if (current := _CURRENT.get()) is None:
        return
    limit, begin = current
    if limit.abandoned:
        raise InputError(f"{limit.name}: the client went away")
    if time.thread_time() - begin > limit.seconds:
        raise InputError(
            f"{limit.name}: takes more than {limit.seconds:g} seconds of processor time, together "
            f"with the media before it; make it shorter or smaller"
        )
