"""A process that serves one of several models at a local port, and the parent's handle of it.

On Linux and macOS a fork server that has imported the libraries starts it, so a start costs no
import. A process frees all its memory when it ends, and has a GIL of its own, so that loading does
not block other models. Over a pipe the child sends, in JSON, its log, the tokens of each request,
and its port or why loading failed; it ends when the parent asks it to, and when the parent has
ended. Requests need the parent's secret.
"""

from __future__ import annotations

import asyncio
import hmac
import json
import multiprocessing
import os
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache
from multiprocessing.connection import Connection
from typing import Any

from starlette.requests import Request

from g4ir.engine.engine import Engine
from g4ir.errors import EngineError

from .app import Server
from .auth import Auth
from .http_errors import Refused
from .server import Address, ServerProcess

#: headers between router and worker: the secret, and the prefix-cache salt of the client's key
SECRET, SALT = "x-g4ir-secret", "x-g4ir-salt"
#: modules that the fork server imports
PRELOAD = ["g4ir.cli.serve", "g4ir.builder.load", "g4ir.serve.worker"]
#: seconds for a worker to end before it is killed
STOP_S = 10.0


@dataclass(frozen=True)
class WorkerAuth(Auth):
    """Accepts requests with the router's secret only; the salt of the client's key is in a
    header."""

    secret: str = ""

    def check(self, request: Request, path: str) -> str:
        if not hmac.compare_digest(request.headers.get(SECRET, ""), self.secret):
            raise Refused(403, "only the router may send requests to this port", code="wrong_key")
        return request.headers.get(SALT, "")


class Parent:
    """The child's side of the pipe; when called, sends a log line."""

    def __init__(self, pipe: Connection) -> None:
        self._pipe, self._lock = pipe, threading.Lock()

    def __call__(self, message: str, level: str = "info", **values: Any) -> None:
        self.send(message=message, level=level, values=values)

    def send(self, **value: Any) -> None:
        with self._lock, suppress(OSError):
            self._pipe.send_bytes(json.dumps(value, default=str).encode())

    def wait(self) -> None:
        """Return when the parent asks to end, or has ended."""
        with suppress(EOFError, OSError):
            self._pipe.recv_bytes()


class WorkerProcess(ServerProcess):
    """A server on any free port. Once the engine is loaded it sends the port to its parent, or, if
    loading fails, the error."""

    def __init__(self, server: Server, parent: Parent, loader: Callable[[], Engine]) -> None:
        log = lambda message, **values: None  # noqa: E731  # the router logs starts and ends
        super().__init__(server, Address(port=0, drain_s=STOP_S / 2), log, loader)
        self.parent = parent

    def load(self, loader: Callable[[], Engine]) -> None:
        super().load(loader)
        if self.error:
            self.parent.send(error=str(self.error))
        else:
            self.parent.send(port=self.servers[0].sockets[0].getsockname()[1])

    def watch(self) -> None:
        """Wait until the parent asks to end or has ended, then shut down and cancel requests."""
        self.parent.wait()
        self.server.draining = True
        self.drain(0.0)


def serve_model(server: Server, parent: Parent, loader: Callable[[], Engine]) -> None:
    """Serve one model to the router until the parent or a signal ends it, or loading fails; then
    exit the process."""
    process = WorkerProcess(server, parent, loader)
    server.charge = lambda salt, tokens: parent.send(salt=salt, tokens=tokens)
    threading.Thread(target=process.watch, daemon=True).start()
    try:
        process.run()
    finally:
        os._exit(0)  # without waiting for threads of libraries


@cache
def _context() -> Any:
    method = "forkserver" if "forkserver" in multiprocessing.get_all_start_methods() else "spawn"
    context: Any = multiprocessing.get_context(method)
    if method == "forkserver":
        context.set_forkserver_preload(PRELOAD)
    return context


def warm_up() -> None:
    """Start the fork server, if there is one, so that the first model need not wait for it."""
    process = _context().Process(target=int, daemon=True)
    process.start()
    process.join()


@dataclass
class WorkerHandle:
    """The parent's handle of a worker process. `main(pipe, *args)`: module-level function that runs
    in the process; `log`: callback with the process's log lines; `charge`: callback with the salt
    of the key and the tokens of each request."""

    main: Callable[..., None]
    args: tuple[Any, ...]
    log: Callable[..., None]
    charge: Callable[[str, int], None]
    port: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        self._pipe, child = _context().Pipe()
        self._process = _context().Process(target=self.main, args=(child, *self.args), daemon=True)
        self._child = child

    @property
    def alive(self) -> bool:
        return bool(self._process.is_alive())

    async def load(self) -> None:
        """Start the process, and wait until its model is loaded. EngineError if that fails, with
        the child's error message if it sent one."""
        loop = asyncio.get_running_loop()
        ready: asyncio.Future[int] = loop.create_future()

        def settle(port: int | None, error: str) -> None:
            if not ready.done() and port:
                ready.set_result(port)
            elif not ready.done():
                ready.set_exception(EngineError(error))

        def listen() -> None:
            with suppress(EOFError, OSError, RuntimeError):  # RuntimeError: the loop has ended
                self._process.start()
                self._child.close()
                while True:
                    value = json.loads(self._pipe.recv_bytes())
                    if "message" in value:
                        self.log(value["message"], value["level"], **value["values"])
                    elif "tokens" in value:
                        self.charge(value["salt"], value["tokens"])
                    else:
                        port, error = value.get("port"), value.get("error", "")
                        loop.call_soon_threadsafe(settle, port, error)
            with suppress(RuntimeError):
                loop.call_soon_threadsafe(settle, None, "its process ended")

        threading.Thread(target=listen, daemon=True).start()
        self.port = await ready

    async def stop(self) -> None:
        """Ask the process to end, and kill it if it still runs after STOP_S seconds."""
        await asyncio.get_running_loop().run_in_executor(None, self._stop)

    def end(self) -> None:
        """Ask the process to end; its answers end with an error."""
        with suppress(OSError):
            self._pipe.send_bytes(b"end")

    def _stop(self) -> None:
        self.end()
        with suppress(AssertionError, ValueError):  # not started
            self._process.join(STOP_S)
            if self._process.is_alive():
                self._process.kill()
                self._process.join()
