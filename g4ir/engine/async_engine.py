"""The scheduler for many threads: one thread runs it, others submit requests and read events.

    with AsyncEngine(engine) as service:
        stream = service.submit(Request((2, 5, 7)))     # BusyError if the queue is full
        for event in stream:
            ...

A slow reader delays nobody: its own slots are paused, and it is cancelled after a time. The number
of unread events is bounded.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass

from g4ir.errors import BusyError, EngineError, InputError

from .engine import Engine
from .requests import FAILED, Event, Request, RequestHandle, Totals
from .scheduler import Scheduler, SchedulerConfig

log = logging.getLogger(__name__)

#: why a stream was cancelled
BY_READER, BY_SLOWNESS, BY_FAULT, BY_CLOSE = "cancelled", "not read", "reader failed", "closed"
#: seconds between two looks at readers that are slow
LOOK_S = 0.05


@dataclass(frozen=True)
class AsyncEngineConfig:
    """At most `waiting` requests of together `waiting_tokens` prompt tokens have no slot yet. A
    stream holds `unread` events, then its slots pause; after `slow_s` seconds it is cancelled."""

    waiting: int = 64
    waiting_tokens: int = 1 << 20
    unread: int = 256
    slow_s: float = 30.0

    def __post_init__(self) -> None:
        for name in ("waiting", "waiting_tokens", "unread"):
            if getattr(self, name) < 1:
                raise InputError(f"{name} {getattr(self, name)}: expected at least 1")
        if not self.slow_s >= 0:
            raise InputError(f"slow_s {self.slow_s}: expected 0 or more seconds")


class Stream:
    """The events of one request, for one reader. It ends after the last event of each answer.

    `cancel` may be called by any thread; what is unread can still be read. `reason` says why it was
    cancelled, if it was.
    """

    def __init__(self, service: AsyncEngine, handle: RequestHandle) -> None:
        self.handle = handle
        self.reason: str | None = None
        self._service = service
        self._events: deque[Event] = deque()
        self._some = threading.Condition()
        #: answers that have not ended
        self._open = {a.index for a in handle.answers}
        #: since when its reader has been too slow
        self._full_since: float | None = None

    def __iter__(self) -> Iterator[Event]:
        while (event := self.get()) is not None:
            yield event

    def get(self, timeout: float | None = None) -> Event | None:
        """Return the next event, None after the last; TimeoutError after so many seconds."""
        with self._some:
            if not self._some.wait_for(lambda: self._events or not self._open, timeout):
                raise TimeoutError(f"no event within {timeout} seconds")
            event = self._events.popleft() if self._events else None
            few = len(self._events) <= self._service.settings.unread // 2
        if few and self.handle.paused:
            self._service._wake()
        return event

    def cancel(self, reason: str = BY_READER) -> None:
        """Free its slots before the next step."""
        self.reason = self.reason or reason
        self.handle.cancel()
        self._service._wake()

    def stop(self, index: int) -> None:
        """Free the slot of one answer before the next step; the others go on."""
        self.handle.stop(index)
        self._service._wake()

    def _put(self, event: Event) -> None:
        with self._some:
            self._events.append(event)

    def _end(self, event: Event) -> bool:
        """Note which answer has ended, and wake the reader; whether all have."""
        with self._some:
            if event.finish:
                self._open.discard(event.index)
            self._some.notify_all()
            return not self._open

    @property
    def unread(self) -> int:
        """Number of events that wait to be read."""
        return len(self._events)


#: sees each event of a request in the service's thread, and must not wait for anything
Told = Callable[[Event], None]


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
        self.rejected = 0
        #: steps that failed one after another
        self.failures = 0
        #: what ended the thread, if anything did
        self.error: BaseException | None = None
        self._inbox: deque[RequestHandle] = deque()
        self._streams: dict[RequestHandle, tuple[Stream, Told | None]] = {}
        self._lock = threading.Condition()
        self._draining = self._closing = False
        self._thread = threading.Thread(target=self._run, name="g4ir-scheduler", daemon=True)
        self._thread.start()

    def __enter__(self) -> AsyncEngine:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    # --- for other threads --------------------------------------------------------------------

    def submit(self, request: Request, told: Told | None = None) -> Stream:
        """Check a request, put it in the queue and return its stream; `told` is called with the
        events instead, in the service's thread. InputError for a request that no slot could answer;
        BusyError if the queue is full, while draining and after closing."""
        handle = self.scheduler.handle(request)
        with self._lock:
            self._check_open()
            self._check_room(request)
            stream = Stream(self, handle)
            self._streams[handle] = stream, told
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
            return sum(not t.started for t in self._streams)

    def wait_s(self) -> float:
        """Return about how many seconds pass until those who wait now have slots."""
        return self.waiting * self.totals.row_s / self.scheduler.max_batch

    @property
    def active(self) -> int:
        """Number of sequences that decode."""
        return self.scheduler.active

    @property
    def totals(self) -> Totals:
        return self.scheduler.totals

    def drain(self, timeout: float | None = None) -> bool:
        """Take no more requests, and wait until all have ended; whether they did in time."""
        with self._lock:
            self._draining = True
            self._lock.notify_all()
            ended = self._lock.wait_for(lambda: not self._streams, timeout)
        return ended and self.error is None

    def close(self, timeout: float | None = None) -> None:
        """Cancel what runs, end the thread, and free the caches. TimeoutError where a step takes
        longer than so many seconds."""
        with self._lock:
            self._draining = self._closing = True
            for stream, _ in self._streams.values():
                stream.reason = stream.reason or BY_CLOSE
                stream.handle.cancel()
            self._lock.notify_all()
        if threading.current_thread() is not self._thread:
            self._thread.join(timeout)
            if self._thread.is_alive():
                raise TimeoutError(f"the service did not end within {timeout} seconds")

    def _check_open(self) -> None:
        if self.error is not None:
            raise EngineError(f"{self.engine.path}: the service ended: {self.error}; start another")
        if self._draining or self._closing:
            self.rejected += 1
            raise BusyError("the service is ending and takes no more requests; ask another one")

    def _check_room(self, request: Request) -> None:
        """Raise BusyError where the queue is full. One request may always wait, however long."""
        waiting = [t for t in self._streams if not t.started]
        tokens = sum(t.counts.prompt for t in waiting)
        s = self.settings
        full = len(waiting) >= s.waiting or tokens + len(request.tokens) > s.waiting_tokens
        if waiting and full:
            self.rejected += 1
            raise BusyError(
                f"{len(waiting)} requests of {tokens} prompt tokens wait already, of {s.waiting} "
                f"and {s.waiting_tokens}; try again later"
            )

    def _wake(self) -> None:
        with self._lock:
            self._lock.notify_all()

    # --- the thread ---------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while self._wait():
                self._look_at_readers()
                events = self.scheduler.step()
                self._count_failures(events)
                for event in events:
                    self._deliver(event)
        except BaseException as e:
            self.error = e
            log.exception("the scheduler's thread ended")
        finally:
            self._end_all()
            with suppress(Exception):
                self.scheduler.close()

    def _wait(self) -> bool:
        """Admit what came, and wait until there is something to do; False where all is over."""
        while True:
            with self._lock:
                while self._inbox:
                    self.scheduler.admit(self._inbox.popleft())
                if self.scheduler.busy and not self.scheduler.stalled:
                    return True
                if self._closing and not self.scheduler.busy:
                    return False
                self._lock.wait(LOOK_S if self.scheduler.busy else None)
            self._look_at_readers()

    def _look_at_readers(self) -> None:
        """Pause requests that are not read, and resume them once they are."""
        now = time.monotonic()
        with self._lock:
            readers = [*self._streams.values()]
        for stream, told in readers:
            unread, handle = stream.unread, stream.handle
            if told is None and unread >= self.settings.unread:
                handle.paused = True
                since = stream._full_since = stream._full_since or now
                if now - since >= self.settings.slow_s and not handle.cancelled:
                    stream.reason = stream.reason or BY_SLOWNESS
                    handle.cancel()
            elif unread <= self.settings.unread // 2:
                handle.paused, stream._full_since = False, None

    def _count_failures(self, events: list[Event]) -> None:
        broken = any(e.finish == FAILED for e in events)
        went = any(e.token is not None for e in events)
        self.failures = 0 if went else self.failures + broken

    def _deliver(self, event: Event) -> None:
        """Hand an event to its reader. One that raises an exception is cancelled."""
        stream, told = self._streams[event.handle]
        try:
            (told or stream._put)(event)
        except Exception:
            log.exception("a reader of events failed; its request is cancelled")
            stream.reason = stream.reason or BY_FAULT
            event.handle.cancel()
        if stream._end(event):
            with self._lock:
                del self._streams[event.handle]
                self._lock.notify_all()

    def _end_all(self) -> None:
        """Tell who still waits that the thread has ended."""
        with self._lock:
            left, self._streams = [*self._streams.values()], {}
            self._lock.notify_all()
        error = EngineError(f"{self.engine.path}: the service ended: {self.error or 'closed'}")
        for stream, told in left:
            for index in sorted(stream._open):
                event = Event(stream.handle, index, finish=FAILED, error=error)
                with suppress(Exception):
                    (told or stream._put)(event)
                stream._end(event)
