"""Threads that fetch, decode and encode media, with a bounded queue before them.

They have a low priority, so that decoding takes only what running answers leave, and no other
request waits for a thread of theirs. A request whose client has gone leaves the queue, or stops
between two frames.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any

from starlette.requests import Request

from g4ir.backends.background_mask import lower_priority
from g4ir.errors import BusyError
from g4ir.media.limits import Limit

from .http_errors import Refused

#: threads that wait for hosts
FETCHING = 8
#: kinds of work: what a thread of each does takes up to seconds, one medium, or a video
FETCH, SMALL, VIDEO = "fetch", "small", "video"


class MediaQueue:
    """At most `most` requests have media that are being read or wait for it. Images and audio do
    not wait for videos."""

    def __init__(self, most: int) -> None:
        self.most, self.count = most, 0
        sizes = {FETCH: FETCHING, SMALL: 1, VIDEO: 1}
        self._threads = {
            kind: ThreadPoolExecutor(size, f"g4ir-media-{kind}", _lower)
            for kind, size in sizes.items()
        }

    async def run(
        self, request: Request, steps: tuple[tuple[str, Callable[[Limit, object], object]], ...]
    ) -> object:
        """Run steps of one request, each in a thread of its kind on the limit and the result of the
        one before; return the last result. BusyError if too many requests have media; Refused if
        the client goes away."""
        if self.count >= self.most:
            raise BusyError(f"{self.count} requests with media wait already; try again later")
        self.count += 1
        limit, loop, value = Limit(), asyncio.get_running_loop(), None
        leaving = loop.create_task(wait_for_leaving(request))
        try:
            for kind, step in steps:
                work = loop.run_in_executor(self._threads[kind], step, limit, value)
                both: set[asyncio.Future[Any]] = {work, leaving}
                await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
                if not work.done():
                    work.cancel()
                    raise Refused(499, "the client went away")
                value = work.result()
            return value
        finally:
            limit.abandoned = True
            leaving.cancel()
            with suppress(asyncio.CancelledError):
                await asyncio.wait({leaving})
            self.count -= 1


async def wait_for_leaving(request: Request) -> None:
    """Return when the client of a request has gone."""
    while (await request.receive())["type"] != "http.disconnect":
        pass


def _lower() -> None:
    lower_priority(threading.get_native_id())
