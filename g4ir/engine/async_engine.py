"""The scheduler for many threads: one thread runs it, others submit requests.

with AsyncEngine(engine) as service:
    handle = service.submit(Request((2, 5, 7)), callback)     # BusyError if the queue is full
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

from g4ir.errors import BusyError, EngineError

from .engine import Engine
from .requests import FAILED, Event, Request, RequestHandle, check_minimums
from .scheduler import Scheduler, SchedulerConfig

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class AsyncEngineConfig:
    """Bounds of the queue: requests whose prefill has not started, and the sum of their prompt
    tokens."""

    waiting: int = 64
    waiting_tokens: int = 1 << 20

    def __post_init__(self) -> None:
        check_minimums(vars(self), waiting=1, waiting_tokens=1)


class AsyncEngine:
    """A thread that runs a scheduler behind a bounded queue; a context manager."""

    def __init__(
        self,
        engine: Engine,
        settings: AsyncEngineConfig | None = None,
        config: SchedulerConfig | None = None,
    ) -> None:
        self.engine, self.settings = engine, settings or AsyncEngineConfig()
        self.scheduler = Scheduler(engine, config)
        self.totals = self.scheduler.totals
        #: exception that ended the thread, or None
        self.error: BaseException | None = None
        self._inbox: deque[RequestHandle] = deque()
        #: unfinished requests, in order of submission
        self._running: dict[RequestHandle, None] = {}
        self._lock = threading.Condition()
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="g4ir-scheduler", daemon=True)
        self._thread.start()

    def __enter__(self) -> AsyncEngine:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def submit(self, request: Request, callback: Callable[[Event], None]) -> RequestHandle:
        """Check a request and put it in the queue. The callback gets its events on the scheduler's
        thread and must not block; if it raises, the request is cancelled. InputError or
        MissingError for a request that this engine cannot serve; BusyError if the queue is full,
        and after closing; EngineError if the thread has failed."""
        handle = self.scheduler.handle(request)
        with self._lock:
            self._check_capacity(request)
            self._running[handle], handle.callback = None, callback
            self._inbox.append(handle)
            self._lock.notify_all()
        return handle

    @property
    def alive(self) -> bool:
        """Whether requests are accepted."""
        return self._thread.is_alive() and not (self.error or self._closing)

    @property
    def waiting(self) -> int:
        """Number of queued requests: their prefill has not started."""
        with self._lock:
            return sum(not handle.started for handle in self._running)

    def wait_s(self) -> float:
        """Return the estimated seconds until all waiting requests have slots."""
        return self.waiting * self.totals.row_s / self.scheduler.max_batch

    def close(self, timeout: float | None = None) -> None:
        """Cancel all requests, end the thread, and free the KV caches. TimeoutError if the current
        step takes longer than `timeout` seconds."""
        with self._lock:
            self._closing = True
            for handle in self._running:
                handle.cancel()
            self._lock.notify_all()
        if threading.current_thread() is not self._thread:
            self._thread.join(timeout)
            if self._thread.is_alive():
                raise TimeoutError(f"the current step takes longer than {timeout} seconds")

    def _check_capacity(self, request: Request) -> None:
        """Raise EngineError or BusyError if the request is refused; if no request waits, one of any
        length is accepted."""
        if self.error is not None:
            raise EngineError(
                f"{self.engine.label}: the service ended: {self.error}; start it again"
            )
        if self._closing:
            raise BusyError("the server is shutting down; send requests to another one")
        waiting = [handle for handle in self._running if not handle.started]
        tokens, s = sum(handle.counts.prompt for handle in waiting), self.settings
        full = len(waiting) >= s.waiting or tokens + len(request.tokens) > s.waiting_tokens
        if waiting and full:
            raise BusyError(
                f"the queue is full: {len(waiting)} of {s.waiting} requests, {tokens} of "
                f"{s.waiting_tokens} prompt tokens, and this request has {len(request.tokens)}; "
                "try again later"
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
            with suppress(Exception):
                for event in self.scheduler.take_events():  # of the step that raised
                    self._deliver(event)
            self._end_all()
            with suppress(Exception):
                self.scheduler.close()

    def _admit(self) -> bool:
        """Wait for work and admit new requests; return False to end the thread."""
        with self._lock:
            self._lock.wait_for(lambda: self._inbox or self._closing or self.scheduler.busy)
            while self._inbox:
                self.scheduler.admit(self._inbox.popleft())
            return self.scheduler.busy

    def _deliver(self, event: Event) -> None:
        try:
            event.handle.callback(event)
        except Exception:
            log.exception("a callback failed; its request is cancelled")
            event.handle.cancel()
        if event.handle.done:
            with self._lock:
                self._running.pop(event.handle, None)
                self._lock.notify_all()

    def _end_all(self) -> None:
        with self._lock:
            running, self._running = self._running, {}
            self._lock.notify_all()
        error = EngineError(f"{self.engine.label}: the service ended: {self.error or 'closed'}")
        for s in (s for handle in running for s in handle.answers if not s.finish):
            with suppress(Exception):
                s.handle.callback(Event(s.handle, s.index, finish=FAILED, error=error))
