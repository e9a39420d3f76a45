"""`g4ir serve`: an engine behind the OpenAI and Anthropic APIs."""

from __future__ import annotations

import argparse
import gc
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from g4ir.errors import InputError, MissingError
from g4ir.plan.gpus import parse_bytes
from g4ir.ui import console

from . import USUAL
from .common import find_engines, load_to_generate
from .talking import check_draft, given_draft

if TYPE_CHECKING:
    from g4ir.engine.engine import Engine
    from g4ir.serve.app import Server
    from g4ir.serve.server import Address


def serve(args: argparse.Namespace) -> int:
    """Answer HTTP requests until a signal."""
    app, address = _server(args)
    from g4ir.serve import server
    from g4ir.serve.auth import is_loopback

    find_engines(args)  # may build one: what is wrong with the flags was said before
    server.check_engine(args.engine, args.trust)
    if not (app.gate.keys or args.uds or is_loopback(args.host)):
        console.say(f"warning: {args.host} is open to others, and no --api-key-file is given")

    def loader() -> Engine:
        with console.Progress() as progress:
            engine = load_to_generate(args, progress)
        gc.set_threshold(*USUAL)
        return engine

    if server.serve(app, address, loader, console.say):
        console.say("ended while the engine was being loaded")
        # A library still works in a thread: what Python takes down behind it would end in a crash.
        console.leave(0)
    return 0


def _server(args: argparse.Namespace) -> tuple[Server, Address]:
    """Return what the flags say, checked."""
    try:
        from g4ir.serve.app import Server
        from g4ir.serve.auth import Auth, known_hosts, read_keys
        from g4ir.serve.media_fetch import Sources
        from g4ir.serve.server import Address
    except ImportError as e:
        if (e.name or "").startswith("g4ir"):
            raise
        raise MissingError(f"serving needs {e.name}: pip install 'g4ir[serve]'") from e
    from g4ir.engine.async_engine import AsyncEngineConfig
    from g4ir.engine.scheduler import SchedulerConfig

    check_draft(args)
    if args.max_body < 1:
        raise InputError(f"--max-body {args.max_body}: expected at least 1 MiB")
    most = args.max_body << 20
    keys = read_keys(args.api_key_file) if args.api_key_file else ()
    memory = args.prefix_memory
    if memory is not None:
        memory = 0 if memory.strip() == "0" else parse_bytes(memory, "--prefix-memory")
    name, *aliases = args.served_name or [Path(args.engine).resolve().name.removesuffix(".gguf")]
    app = Server(
        name,
        Auth(keys, known_hosts(args.host, args.allow_host), most),
        AsyncEngineConfig(waiting=args.queue),
        SchedulerConfig(chunk_tokens=args.chunk_tokens, prefix_bytes=memory, **given_draft(args)),
        Sources.named(args.media_hosts, args.media_dir, most),
        page=not args.no_page,
        aliases=(*aliases,),
        origins=_origins(args.allow_origin),
        root_path=_root_path(args.root_path),
        log=console.say if args.log_requests else None,
    )
    tls = args.tls_cert, args.tls_key
    return app, Address(args.host, args.port, args.drain, socket=args.uds, tls=tls)


def _origins(given: Sequence[str]) -> tuple[str, ...]:
    """Return origins of pages as browsers write them."""
    for origin in given:
        parts = urlsplit(origin)
        web = parts.scheme in ("http", "https") and parts.netloc and not parts.path
        if origin != "*" and not web:
            raise InputError(f"--allow-origin {origin}: expected https://NAME without a path, or *")
    return (*given,)


def _root_path(given: str) -> str:
    """Return the prefix of paths, without a slash at its end."""
    path = given.rstrip("/")
    if path and (not path.startswith("/") or set(path) & set("?#{} ")):
        raise InputError(f"--root-path {given}: expected a path that begins with a slash")
    return path
