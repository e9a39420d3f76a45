"""The server process: listens while the engine loads, and shuts down gracefully."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import ssl
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import uvicorn
from starlette.concurrency import run_in_threadpool
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from g4ir.artefact.directory import open_artefact, require_readable
from g4ir.builder.load import check_runnable
from g4ir.engine.engine import Engine
from g4ir.errors import InputError, RankError
from g4ir.ui import console

from .app import Server
from .prompts import require_tokenizer

log = logging.getLogger(__name__)

#: maximum seconds to wait at shutdown for an engine that is being loaded or built, in which it
#: removes its temporary files
LOADING_S = 5.0
#: maximum seconds of a connection until the headers of its next request are complete
HEAD_S = 10.0
#: bytes received of a request after which its headers must be complete
MAX_HEAD = 1 << 16
#: listen backlog of connections
BACKLOG = 128
#: soft limit of open files to set, if the hard limit allows it; each connection takes one
MAX_FILES = 1 << 16


def open_files() -> int:
    """Raise the process's soft limit of open files to MAX_FILES, or to the hard limit if that is
    lower, and return it. Windows has no such limit for connections: MAX_FILES."""
    if sys.platform == "win32":
        return MAX_FILES
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    limit = MAX_FILES if hard == resource.RLIM_INFINITY else min(hard, MAX_FILES)
    if 0 <= soft < limit:
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
    return max(limit, soft)


@dataclass(frozen=True)
class Address:
    """Listen address; port 0: any free port. `drain_s`: maximum seconds for running answers at
    shutdown. `tls`: files of certificate and key. InputError for a wrong value or pair of files."""

    host: str = "127.0.0.1"
    port: int = 8000
    drain_s: float = 60.0
    tls: tuple[str | None, str | None] = (None, None)

    def __post_init__(self) -> None:
        if not 0 <= self.port < 1 << 16:
            raise InputError(f"--port {self.port}: expected 0 to 65535")
        if not self.drain_s >= 0:
            raise InputError(f"--set drain={self.drain_s:g}: expected 0 or more seconds")
        certificate, key = self.tls
        if (certificate is None) != (key is None):
            raise InputError("--tls-cert and --tls-key belong together: give both")
        if certificate:
            try:
                ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(certificate, key)
            except OSError as e:
                raise InputError(f"--tls-cert {certificate}, --tls-key {key}: {e}") from None


class BoundedProtocol(HttpToolsProtocol):
    """Uvicorn's protocol with a limit on the size of headers: its parser buffers them without
    bound."""

    in_head, head_bytes = False, 0

    def on_message_begin(self) -> None:
        self.in_head, self.head_bytes = True, 0
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        self.in_head = False
        super().on_headers_complete()

    def data_received(self, data: bytes) -> None:
        """Receive bytes; close the connection if MAX_HEAD bytes do not complete the headers."""
        super().data_received(data)
        self.head_bytes += len(data)
        if self.in_head and self.head_bytes > MAX_HEAD:
            self.transport.close()


class ServerProcess(uvicorn.Server):
    """Uvicorn's server with graceful shutdown: a signal stops new requests and drains running ones;
    a second signal cancels them."""

    def __init__(
        self,
        server: Server,
        address: Address,
        log: Callable[..., None],
        loader: Callable[[], Engine],
    ) -> None:
        self.server, self.address, self.log = server, address, log
        #: started once the port is bound
        self.loading = threading.Thread(target=self.load, args=(loader,), daemon=True)
        config = uvicorn.Config(
            server.app(),
            host=address.host,
            port=address.port,
            http=BoundedProtocol,
            ssl_certfile=address.tls[0],
            ssl_keyfile=address.tls[1],
            lifespan="off",
            access_log=False,
            log_config=None,
            server_header=False,
            # asyncio accepts up to this many connections in one iteration
            backlog=BACKLOG,
            timeout_graceful_shutdown=5,
        )
        super().__init__(config)
        #: (idle connection, its last request) -> time since which it is idle
        self._idle: dict[tuple[Any, Any], float] = {}
        #: with more connections idle ones are closed; the other quarter of the files is for all
        #: else
        self.most_connections = open_files() * 3 // 4
        self.error: BaseException | None = None

    async def startup(self, sockets: Any = None) -> None:
        """Listen, log the address, and start to load the engine. InputError if the server cannot
        listen there."""
        logger = logging.getLogger("uvicorn.error")
        logger.disabled = True  # uvicorn would log the error that is raised here
        try:
            await super().startup(sockets)
        except (OSError, SystemExit) as e:
            raise self._not_listening(e if isinstance(e, OSError) else e.__context__) from None
        finally:
            logger.disabled = False
        if self.started:
            self.log(f"listening at {self.url}")
            await run_in_threadpool(int)  # the thread pool's first call imports modules
            self.loading.start()

    def _not_listening(self, error: BaseException | None) -> InputError:
        where, fix = f"{self.address.host} port {self.address.port}", "another --host or --port"
        reason = str(error)
        if isinstance(error, OSError) and error.errno:  # asyncio's message repeats the address
            reason = os.strerror(error.errno) if error.errno > 0 else str(error.strerror)
        return InputError(f"cannot listen at {where}: {reason}; give {fix}")

    async def on_tick(self, counter: int) -> bool:
        """Return whether to exit: once the drain after a signal is over, if the engine could not be
        loaded, or if another rank has ended or does not answer. Twice a second, close idle
        connections."""
        if counter % 5 == 0:
            self._close_idle(time.monotonic())
        service = self.server.service
        if service and isinstance(service.error, RankError):
            self.error = service.error
            return True
        return await super().on_tick(counter)

    def _close_idle(self, now: float) -> None:
        """Close connections that have been without a running request for HEAD_S seconds, and the
        longest idle ones if there are more than `most_connections`."""
        connections: list[Any] = [c for c in self.server_state.connections if "cycle" in vars(c)]
        free = [c for c in connections if c.cycle is None or c.cycle.response_complete]
        idle = {(c, c.cycle) for c in free}
        self._idle = {at: self._idle.get(at, now) for at in idle}
        oldest = sorted(self._idle.items(), key=lambda item: item[1])
        over = len(self.server_state.connections) - self.most_connections
        for i, ((connection, _), since) in enumerate(oldest):
            if i < over or now - since >= HEAD_S:
                connection.transport.close()

    @property
    def url(self) -> str:
        """The URL of the server."""
        name = self.servers[0].sockets[0].getsockname()
        host = f"[{name[0]}]" if ":" in name[0] else name[0]
        return f"http{'s' if self.address.tls[0] else ''}://{host}:{name[1]}"

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Context that handles shutdown signals (unlike uvicorn's, it does not raise them again)
        and, if there is a key file, SIGHUP, which reads it again."""
        handlers: dict[signal.Signals, Any]
        handlers = dict.fromkeys((signal.SIGINT, signal.SIGTERM), self.handle_exit)
        if self.server.key_file:
            handlers |= {s: self.handle_reload for s in signal.Signals if s.name == "SIGHUP"}
        with console.handled(handlers):
            yield

    def handle_reload(self, sig: int, frame: FrameType | None) -> None:
        """Read the key file again, in a thread: this one may be writing to the log."""
        threading.Thread(target=self.reload, daemon=True).start()

    def reload(self) -> None:
        try:
            self.log("keys read again", keys=self.server.read_keys())
        except (InputError, OSError) as e:
            self.log(f"{e}; the keys stay as they are", level="error")

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Begin the shutdown; a thread waits for the drain."""
        wait = 0.0 if self.server.draining else self.address.drain_s
        self.server.draining = True
        threading.Thread(target=self.drain, args=(wait,), daemon=True).start()

    def drain(self, seconds: float) -> None:
        """Wait at most `seconds` for running answers, cancel those left, and exit."""
        end, ready = time.monotonic() + seconds, self.server.ready
        if ready:
            self.log("draining", running=len(self.server_state.tasks), seconds=seconds)
        while self.server_state.tasks and time.monotonic() < end:
            time.sleep(0.01)
        if ready:
            self.log("ended", cancelled=len(self.server_state.tasks))
        self.server.stop()
        self.should_exit = True

    def load(self, loader: Callable[[], Engine]) -> None:
        """Load the engine (in a thread) and serve it; a failure ends the server and is stored in
        `error`."""
        try:
            engine = loader()
            if self.server.draining:
                engine.close()
                return
            for line in self.server.start(engine):
                self.log(line)
            self.log("ready", url=self.url)
        except BaseException as e:
            self.error = None if isinstance(e, console.Ended) else e
            self.should_exit = True


def check_engine(path: str | Path, trust: bool = False) -> None:
    """Raise for an engine that cannot be served: without a tokenizer, or by the checks of loading
    other than those of the weight files' digests and of the options of `load_engine`."""
    artefact = open_artefact(Path(path))
    require_readable(artefact.manifest)
    check_runnable(artefact, trust)
    require_tokenizer(artefact.path, artefact.label)


def serve(
    server: Server, address: Address, loader: Callable[[], Engine], log: Callable[..., None]
) -> bool:
    """Serve until a signal, or an error of listening, of loading or of another rank, which is
    raised. Return whether the engine was not loaded yet: a thread that loads cannot be stopped, so
    the process should exit without waiting for it."""
    process = ServerProcess(server, address, log, loader)
    try:
        process.run()
    finally:
        if process.loading.ident:
            process.loading.join(LOADING_S)
        server.close()
    if process.error:
        raise process.error
    return not server.ready
