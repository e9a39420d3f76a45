"""Several models in one server: loaded on demand, unloaded least recently used first.

Requests queue, and those for one model are served in order. A model that is not loaded is loaded if
it fits; otherwise other models are unloaded until it does: idle ones before busy ones, which finish
their requests first. No new request starts on these meanwhile, so the queue always progresses. If
busy models block the first request for a model that is not loaded for `wait_s` seconds, it fails
with an error that names the models that would fit.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from g4ir.errors import G4Error
from g4ir.ui.units import size_text

from .http_errors import Refused, later

if TYPE_CHECKING:
    from .worker import WorkerHandle

UNLOADED, LOADING, READY, UNLOADING = "unloaded", "loading", "ready", "unloading"


@dataclass(eq=False)
class PooledModel:
    """A model: the directory of its engine, the bytes of memory that it needs, and its keys in
    /v1/models (`facts`) and /api/tags (`tag`). `active`: running requests; `used`: monotonic time
    at which the last one began, or the model was loaded; `advice`: why it can never fit, else
    ""."""

    name: str
    path: Path
    need: int
    facts: Mapping[str, Any] = field(default_factory=dict)
    tag: Mapping[str, Any] = field(default_factory=dict)
    advice: str = ""
    state: str = UNLOADED
    worker: WorkerHandle | None = None
    active: int = 0
    used: float = 0.0

    @property
    def resident(self) -> bool:
        return self.state != UNLOADED


@dataclass(eq=False)
class Ticket:
    """A queued request. `blocked`: monotonic time since which only busy models prevent its model
    from loading, if it is the first request that needs a model to be unloaded."""

    model: PooledModel
    granted: asyncio.Future[None]
    blocked: float | None = None


@dataclass
class ModelPool:
    """The models of a server, the first one the default. `start`: returns a new worker for a model;
    `capacity`: bytes for all loaded models; `max_loaded`: their maximum number (None: no limit);
    `max_waiting`: queued requests per model; `wait_s`: maximum seconds that busy models block the
    first request that needs a model to be unloaded. Its methods run in the event loop."""

    models: Sequence[PooledModel]
    start: Callable[[PooledModel], WorkerHandle]
    capacity: int
    max_loaded: int | None = None
    max_waiting: int = 64
    wait_s: float = 20.0

    def __post_init__(self) -> None:
        self.line: list[Ticket] = []
        self._tasks = set[asyncio.Task[None]]()

    def find(self, name: str) -> PooledModel | None:
        return next((m for m in self.models if m.name == name), None)

    @asynccontextmanager
    async def lease(self, model: PooledModel) -> AsyncIterator[WorkerHandle]:
        """Context in which a model stays loaded; loads it first. Refused if it cannot be loaded, if
        busy models block it for too long (`wait_s`), or if too many requests are queued."""
        if model.advice:
            raise later(503, "does_not_fit", f"model: {model.advice}; {self._loaded()}", 60)
        if sum(t.model is model for t in self.line) >= self.max_waiting:
            message = f"{self.max_waiting} requests wait for model {model.name!r}; try again later"
            raise later(429, "queue_full", message)
        ticket = Ticket(model, asyncio.get_running_loop().create_future())
        self.line.append(ticket)
        try:
            self._serve_line()
            while not ticket.granted.done():  # woken regularly to check `blocked`
                await asyncio.wait({ticket.granted}, timeout=max(self.wait_s / 20, 0.05))
                self._serve_line()
            ticket.granted.result()
        except BaseException:
            if ticket.granted.done() and not ticket.granted.cancelled():
                self._release(model if not ticket.granted.exception() else None)
            raise
        finally:
            if ticket in self.line:
                self.line.remove(ticket)
        try:
            assert model.worker
            yield model.worker
        finally:
            self._release(model)

    def _release(self, model: PooledModel | None) -> None:
        if model:
            model.active -= 1
        self._serve_line()

    def _serve_line(self) -> None:
        """Grant the tickets of models that stay loaded, in order, and start to load and unload
        models."""
        for m in self.models:
            if m.state == READY and m.worker and not m.worker.alive and not m.active:
                m.state, m.worker = UNLOADED, None
        leaving, reserved = set[PooledModel](), False
        for ticket in [*self.line]:
            model = ticket.model
            if model.state == READY and model not in leaving:
                self._grant(ticket)
            elif model.state == UNLOADED and not reserved:
                leaving |= {*(victims := self._victims(model))}
                if not victims:
                    self._begin(model, LOADING, self._load(model))
                    continue
                reserved = True  # freed memory is reserved for this model
                for victim in victims:
                    if victim.state == READY and not victim.active:
                        self._begin(victim, UNLOADING, self._unload(victim))
                self._note_blocked(ticket, victims)

    def _grant(self, ticket: Ticket) -> None:
        self.line.remove(ticket)
        if not ticket.granted.done():
            ticket.model.active += 1
            ticket.model.used = time.monotonic()
            ticket.granted.set_result(None)

    def _victims(self, model: PooledModel) -> list[PooledModel]:
        """Return the models to unload before `model` is loaded: those that are being unloaded, then
        idle ones, then busy ones, then those being loaded; least recently used first. Empty if it
        fits."""
        resident = [m for m in self.models if m.resident]
        resident.sort(
            key=lambda m: (m.state != UNLOADING, m.state == LOADING, m.active > 0, m.used)
        )
        victims = list[PooledModel]()
        while resident and not self._fits(model, resident):
            victims.append(resident.pop(0))
        return victims

    def _fits(self, model: PooledModel, resident: Sequence[PooledModel]) -> bool:
        count = self.max_loaded is None or len(resident) < self.max_loaded
        return count and model.need + sum(m.need for m in resident) <= self.capacity

    def _note_blocked(self, ticket: Ticket, victims: Sequence[PooledModel]) -> None:
        """Note since when busy models block a ticket; refuse it after `wait_s` seconds."""
        if any(m.state in (LOADING, UNLOADING) for m in victims):
            ticket.blocked = None
            return
        now = time.monotonic()
        ticket.blocked = ticket.blocked or now
        if now - ticket.blocked >= self.wait_s and not ticket.granted.done():
            model = ticket.model
            busy = ", ".join(f"{m.name!r}" for m in victims)
            why = f"running requests keep {busy} loaded"
            message = f"model: {model.name!r} needs {size_text(model.need)}, and {why}"
            message += f"; {self._loaded()}"
            ticket.granted.set_exception(later(503, "does_not_fit", message))

    def _loaded(self) -> str:
        """Describe, for an error, which models are loaded and which would fit in addition."""
        resident = [m for m in self.models if m.resident]
        free = [m.name for m in self.models if not m.resident and self._fits(m, resident)]
        names = ", ".join(f"{m.name!r}" for m in resident) or "nothing"
        fits = ", ".join(map(repr, free)) or "no other model"
        limit = f" and {self.max_loaded} at a time" if self.max_loaded else ""
        limit = f"limit: {size_text(self.capacity)}{limit}"
        return f"loaded: {names} ({limit}); {fits} would fit in addition"

    def _begin(self, model: PooledModel, state: str, work: Any) -> None:
        model.state = state
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _load(self, model: PooledModel) -> None:
        model.worker = worker = self.start(model)
        try:
            await worker.load()
            model.state, model.used = READY, time.monotonic()
        except Exception as e:
            await worker.stop()
            model.state, model.worker = UNLOADED, None
            text = str(e) if isinstance(e, G4Error) else "its process ended"
            error = Refused(
                503, f"model: {model.name!r} cannot be loaded: {text}", code="not_loaded"
            )
            for ticket in [t for t in self.line if t.model is model and not t.granted.done()]:
                ticket.granted.set_exception(error)
        self._serve_line()

    async def _unload(self, model: PooledModel) -> None:
        try:
            if model.worker:
                await model.worker.stop()
        finally:
            model.state, model.worker = UNLOADED, None
            self._serve_line()

    async def close(self) -> None:
        """End all workers."""
        workers = [m.worker for m in self.models if m.worker]
        await asyncio.gather(*(w.stop() for w in workers), return_exceptions=True)
