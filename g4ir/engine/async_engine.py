"""The scheduler for many threads: one thread runs it, others submit requests and read events.

    with AsyncEngine(engine) as service:
        stream = service.submit(Request((2, 5, 7)))     # BusyError if the queue is full
        for event in stream:
            ...

A slow reader delays nobody: its events wait, and it is cancelled after a time.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from queue import Empty, SimpleQueue

from g4ir.errors import BusyError, EngineError

from .engine import Engine
from .requests import FAILED, Event, Request, RequestHandle, check_least
from .scheduler import Scheduler, SchedulerConfig

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class AsyncEngineConfig:
    """At most `waiting` requests of together `waiting_tokens` prompt tokens have no slot yet. A
    reader that has had `unread` events to read for `slow_s` seconds is cancelled."""

    waiting: int = 64
    waiting_tokens: int = 1 << 20
    unread: int = 256
    slow_s: float = 30.0

    def __post_init__(self) -> None:
        check_least(self, waiting=1, waiting_tokens=1, unread=1, slow_s=0)


class Stream:
    """The events of one request, for one reader. It ends after the last event of each answer.

    `cancel` and `stop` may be called by any thread; what is unread can still be read.
    """

    def __init__(self, handle: RequestHandle, settings: AsyncEngineConfig) -> None:
        self.handle = handle
        self._settings, self._events = settings, SimpleQueue[Event]()
        #: answers whose ends are still to be read, and still to be delivered
        self._left, self._open = len(handle.answers), {a.index for a in handle.answers}
        #: since when there is little to read
        self._since = time.monotonic()

    def __iter__(self) -> Iterator[Event]:
        while (event := self.get()) is not None:
            yield event

    def get(self, timeout: float | None = None) -> Event | None:
        """Return the next event, None after the last; TimeoutError after so many seconds."""
        if not self._left:
            return None
        try:
            event = self._events.get(timeout=timeout)
        except Empty:
            raise TimeoutError(f"no event within {timeout} seconds") from None
        self._left -= bool(event.finish)
        return event

    def cancel(self) -> None:
        """Free its slots before the next step."""
        self.handle.cancel()

    def stop(self, index: int) -> None:
        """Free the slot of one answer before the next step; the others go on."""
        self.handle.stop(index)

    def _put(self, event: Event) -> None:
        now = time.monotonic()
        if self._events.qsize() < self._settings.unread:
            self._since = now
        elif now - self._since >= self._settings.slow_s and not self.handle.done:
            self.cancel()
        self._events.put(event)


class AsyncEngine:
    """A thread that runs a scheduler, and a bounded queue before it. A context that closes it."""

    def __init__(
        self,
        engine: Engine,
        settings: AsyncEngineConfig | None = None,
        config: SchedulerConfig | None = None,
    ) -> None:
        self.engine, self.settings = engine, settings or AsyncEngineConfig()
        self.scheduler = Scheduler(engine, config)
        self.totals = self.scheduler.totals
        #: what ended the thread, if anything did
        self.error: BaseException | None = None
        self._inbox: deque[RequestHandle] = deque()
        self._streams: dict[RequestHandle, tuple[Stream, Callable[[Event], None]]] = {}
        self._lock = threading.Condition()
        self._draining = self._closing = False
        self._thread = threading.Thread(target=self._run, name="g4ir-scheduler", daemon=True)
        self._thread.start()

    def __enter__(self) -> AsyncEngine:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def submit(self, request: Request, told: Callable[[Event], None] | None = None) -> Stream:
        """Check a request, put it in the queue and return its stream; `told` is called with the
        events instead, in the service's thread, and must not wait for anything. InputError for a
        request that no slot could answer; BusyError if the queue is full, while draining and after
        closing."""
        handle = self.scheduler.handle(request)
        with self._lock:
            self._check_room(request)
            stream = Stream(handle, self.settings)
            self._streams[handle] = stream, told or stream._put
            self._inbox.append(handle)
            self._lock.notify_all()
        return stream

    @property
    def alive(self) -> bool:
        """Whether a request would be taken."""
        return self._thread.is_alive() and not (self.error or self._draining or self._closing)

    @property
    def waiting(self) -> int:
        """Number of requests that have no slot yet."""
        with self._lock:
            return sum(not handle.started for handle in self._streams)

    def wait_s(self) -> float:
        """Return about how many seconds pass until those who wait now have slots."""
        return self.waiting * self.totals.row_s / self.scheduler.max_batch

    @property
    def active(self) -> int:
        """Number of sequences that decode."""
        return self.scheduler.active

    def drain(self, timeout: float | None = None) -> bool:
        """Take no more requests, and wait until all have ended; whether they did in time."""
        with self._lock:
            self._draining = True
            ended = self._lock.wait_for(lambda: not self._streams, timeout)
        return ended and self.error is None

    def close(self, timeout: float | None = None) -> None:
        """Cancel what runs, end the thread, and free the caches. TimeoutError where a step takes
        longer than so many seconds."""
        with self._lock:
            self._draining = self._closing = True
            for stream, _ in self._streams.values():
                stream.cancel()
            self._lock.notify_all()
        if threading.current_thread() is not self._thread:
            self._thread.join(timeout)
            if self._thread.is_alive():
                raise TimeoutError(f"the service did not end within {timeout} seconds")

    def _check_room(self, request: Request) -> None:
        """Raise EngineError if the thread has ended, and BusyError while it ends or where the queue
        is full. One request may always wait, however long."""
        if self.error is not None:
            raise EngineError(f"{self.engine.path}: the service ended: {self.error}; start another")
        if self._draining or self._closing:
            raise BusyError("the service is ending and takes no more requests; ask another one")
        waiting = [handle for handle in self._streams if not handle.started]
        tokens, s = sum(handle.counts.prompt for handle in waiting), self.settings
        full = len(waiting) >= s.waiting or tokens + len(request.tokens) > s.waiting_tokens
        if waiting and full:
            raise BusyError(
                f"{len(waiting)} requests of {tokens} prompt tokens wait already, of {s.waiting} "
                f"and {s.waiting_tokens}; try again later"
            )

    def _run(self) -> None:
        try:
            while self._admit():
                for event in self.scheduler.step():
                    self._deliver(event)
        except BaseException as e:
            self.error = e
            log.exception("the scheduler's thread ended")
        finally:
            self._end_all()
            with suppress(Exception):
                self.scheduler.close()

    def _admit(self) -> bool:
        """Admit what came, and wait until there is something to do; False where all is over."""
        with self._lock:
            self._lock.wait_for(lambda: self._inbox or self._closing or self.scheduler.busy)
            while self._inbox:
                self.scheduler.admit(self._inbox.popleft())
            return self.scheduler.busy

    def _deliver(self, event: Event) -> None:
        """Hand an event to its reader. One that raises an exception is cancelled."""
        stream, put = self._streams[event.handle]
        if event.finish:
            stream._open.discard(event.index)
        try:
            put(event)
        except Exception:
            log.exception("a reader of events failed; its request is cancelled")
            stream.cancel()
        if not stream._open:
            with self._lock:
                del self._streams[event.handle]
                self._lock.notify_all()

    def _end_all(self) -> None:
        with self._lock:
            left, self._streams = [*self._streams.values()], {}
            self._lock.notify_all()
        error = EngineError(f"{self.engine.path}: the service ended: {self.error or 'closed'}")
        for stream, put in left:
            for index in sorted(stream._open):
                with suppress(Exception):
                    put(Event(stream.handle, index, finish=FAILED, error=error))
