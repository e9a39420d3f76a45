"""Threads that decode and encode media, with a bounded queue before them.

They have a low OS priority (on Linux), so that decode steps go first, and are separate from the
threads of other requests. If the client disconnects, its request leaves the queue, or stops at the
next `check_limit`.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from starlette.requests import Request

from g4ir.backends.background_mask import lower_priority
from g4ir.chat.messages import Medium
from g4ir.errors import BusyError
from g4ir.media.limits import Limit
from g4ir.model.media import VIDEO

from .http_errors import Refused

#: kind of work besides videos (images and audio); each kind has one thread
SMALL = "small"
T = TypeVar("T")


class MediaQueue:
    """Bounded queue: at most `limit` requests with media wait or are processed. Requests without
    videos do not wait for those with videos."""

    def __init__(self, limit: int) -> None:
        self.limit, self.count = limit, 0
        self._threads = {
            kind: ThreadPoolExecutor(1, f"g4ir-media-{kind}", lower_thread)
            for kind in (SMALL, VIDEO)
        }

    async def run(self, request: Request, media: Sequence[Medium], work: Callable[[Limit], T]) -> T:
        """Run a request's work on its media in the thread of their kind; return the result.
        BusyError if the queue is full; Refused if the client disconnects."""
        if self.count >= self.limit:
            raise BusyError(f"{self.count} requests with media are in the queue; try again later")
        self.count += 1
        limit, loop = Limit(), asyncio.get_running_loop()
        kind = VIDEO if any(m.kind == VIDEO for m in media) else SMALL
        try:
            return await until_disconnect(
                request, loop.run_in_executor(self._threads[kind], work, limit)
            )
        finally:
            limit.abandoned = True
            self.count -= 1


async def until_disconnect(request: Request, work: Awaitable[T]) -> T:
    """Return the result of `work`. If the request's client disconnects first, the work is cancelled
    and Refused raised."""
    done = asyncio.ensure_future(work)
    leaving = asyncio.ensure_future(wait_for_leaving(request))
    try:
        await asyncio.wait({done, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if not done.done():
            raise Refused(499, "the client went away")
        return done.result()
    finally:
        done.cancel()
        leaving.cancel()
        await asyncio.wait({done, leaving})


async def wait_for_leaving(request: Request) -> None:
    """Wait until a request's client disconnects."""
    while (await request.receive())["type"] != "http.disconnect":
        pass


def lower_thread() -> None:
    """Lower the OS priority of the calling thread (Linux only)."""
    lower_priority(threading.get_native_id())
