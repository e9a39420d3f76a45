"""`g4ir serve`: OpenAI- and Anthropic-compatible HTTP server."""

from __future__ import annotations

import gc
import signal
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Literal
from urllib.parse import urlsplit

from g4ir.errors import InputError, MissingError
from g4ir.ui import console
from g4ir.weights.origin import AbsentWeights

from . import USUAL
from .common import Draft, Load, OnDisk, OnEngine
from .models import named_model
from .verb import Size, flag, setting

if TYPE_CHECKING:
    from g4ir.engine.engine import Engine
    from g4ir.serve.app import Server
    from g4ir.serve.server import Address


LogFormat = Literal["text", "json"]
http, access = partial(flag, title="HTTP"), partial(flag, title="access")
scheduler = partial(flag, title="scheduler")


class Serve(OnEngine):
    """Answer HTTP requests until a signal."""

    from_environment = True
    config: str | None = http("YAML file of flags; flags and G4IR_FLAG variables win", None, "FILE")
    host: str = http("bind address (default 127.0.0.1)", "127.0.0.1", "NAME")
    port: int = http("port (default 8000; 0: any free port)", 8000, "N")
    served_name: list[str] = http("model name in the API (default: the name of MODEL)", (), "NAME")
    root_path: str = http("URL prefix under a proxy, such as /llm", "", "PATH")
    media_dir: str | None = http("directory that file:// media URLs may read", None, "DIR")
    log_requests: bool = http("log a line per request, without texts", False)
    log_format: LogFormat | None = http("log lines with time and level", None)
    api_key_file: str | None = access("file of accepted API keys, one per line", None, "FILE")
    allow_host: list[str] = access("extra Host header on a loopback address", (), "NAME")
    allow_origin: list[str] = access("origin whose web pages may call the API; *: any", (), "URL")
    tls_cert: str | None = access("TLS certificate chain (PEM)", None, "FILE")
    tls_key: str | None = access("private key of the certificate (PEM)", None, "FILE")
    queue: int = scheduler("maximum number of waiting requests (default 64)", 64, "N")
    max_gap: float = scheduler("inter-token latency bound in prefill (default 100)", 100.0, "MS")
    prefix_memory: Size | None = scheduler("prefix cache size in memory; 0: none", None, "BYTES")
    chunk_tokens: int | None = setting("prefill tokens between two decode steps")
    max_body: int = setting("maximum size of a request body in MiB", 32)
    drain: float = setting("shutdown grace period for running requests in seconds", 60.0)
    page: bool = setting("off: no web page at /", True)
    load: Load
    draft: Draft
    disk: OnDisk

    def __call__(self) -> int:
        console.use_format(self.log_format)
        app, address = self._server()
        from g4ir.serve import server
        from g4ir.serve.auth import is_loopback

        self._check_model()
        if not (app.gate.keys or is_loopback(self.host)):
            console.say(f"{self.host} is open to others, and no --api-key-file is given", "warning")

        def loader() -> Engine:
            with console.Progress() as progress:

                def report(message: str) -> None:
                    app.progress = message
                    progress(message)
                    if app.draining:  # ends a build, which removes its files
                        raise console.Ended(signal.SIGTERM)

                engine = self.with_engine(self.draft, progress=report).engine
                server.check_engine(engine, self.load.trust)
                loaded = self.load.to_generate(engine, report)
            gc.set_threshold(*USUAL)
            return loaded

        if server.serve(app, address, loader, console.say):
            console.say("ended while the engine was being loaded")
            # A library still works in a thread: what Python takes down behind it would end in a
            # crash.
            console.leave(0)
        return 0

    def _check_model(self) -> None:
        """Raise for what is no model, or an engine that cannot be served, before the port is open:
        a build takes minutes, in which health checks are answered."""
        from g4ir.serve.server import check_engine

        try:
            model = named_model(self.engine)
        except AbsentWeights:  # may be downloaded
            return
        if model.engine:
            check_engine(self.engine, self.load.trust)

    def _server(self) -> tuple[Server, Address]:
        """Create the server from the flags."""
        try:
            from g4ir.serve.app import Server
            from g4ir.serve.auth import Auth, allowed_hosts, read_keys
            from g4ir.serve.media_sources import MediaFolder
            from g4ir.serve.server import Address
        except ImportError as e:
            if (e.name or "").startswith("g4ir"):
                raise
            raise MissingError(f"serving needs {e.name}: pip install 'g4ir[serve]'") from e
        from g4ir.engine.async_engine import AsyncEngineConfig
        from g4ir.engine.scheduler import SchedulerConfig

        if self.max_body < 1:
            raise InputError(f"--max-body {self.max_body}: expected at least 1 MiB")
        max_bytes = self.max_body << 20
        keys = read_keys(self.api_key_file) if self.api_key_file else ()
        default = Path(self.engine).resolve().name.removesuffix(".gguf")
        name, *aliases = self.served_name or [default]
        if not self.max_gap > 0:
            raise InputError(f"--max-gap {self.max_gap:g}: expected more than 0 milliseconds")
        config = SchedulerConfig(
            chunk_tokens=self.chunk_tokens,
            max_gap_ms=self.max_gap,
            prefix_bytes=self.prefix_memory,
            prefix_disk=self.disk.prefix_disk,
            **self.draft.scheduler(),
        )
        app = Server(
            name,
            Auth(keys, allowed_hosts(self.host, self.allow_host), max_bytes),
            AsyncEngineConfig(waiting=self.queue),
            config,
            MediaFolder.named(self.media_dir, max_bytes),
            page=self.page,
            aliases=(*aliases,),
            origins=_origins(self.allow_origin),
            root_path=_root_path(self.root_path),
            log=console.say if self.log_requests else None,
        )
        tls = self.tls_cert, self.tls_key
        return app, Address(self.host, self.port, self.drain, tls)


def _origins(origins: Sequence[str]) -> tuple[str, ...]:
    """Return origins of pages as browsers write them."""
    for origin in origins:
        parts = urlsplit(origin)
        web = parts.scheme in ("http", "https") and parts.netloc and not parts.path
        if origin != "*" and not web:
            raise InputError(f"--allow-origin {origin}: expected https://NAME without a path, or *")
    return (*origins,)


def _root_path(prefix: str) -> str:
    """Return the prefix of paths, without a slash at its end."""
    path = prefix.rstrip("/")
    if path and (not path.startswith("/") or set(path) & set("?#{} ")):
        raise InputError(f"--root-path {prefix}: expected a path that begins with a slash")
    return path
