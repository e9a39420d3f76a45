"""`g4ir serve`: an engine behind the paths of OpenAI's protocol."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from g4ir.errors import InputError, MissingError
from g4ir.plan.gpus import parse_bytes
from g4ir.ui import console

from .common import ENGINE_HELP, add_load, add_verb, load_to_generate
from .drafting import add_draft, check_draft, given_draft

if TYPE_CHECKING:
    from g4ir.engine.engine import Engine


def add_serve(verbs: Any) -> None:
    p = add_verb(verbs, "serve", _serve, "OpenAI-compatible HTTP server", json=False)
    p.add_argument("engine", metavar="ENGINE", help=ENGINE_HELP)
    p.add_argument(
        "--host", metavar="NAME", default="127.0.0.1", help="bind address (default 127.0.0.1)"
    )
    p.add_argument(
        "--port", metavar="N", type=int, default=8000, help="port (default 8000; 0: any free port)"
    )
    p.add_argument(
        "--api-key-file",
        metavar="FILE",
        help="file of accepted API keys, one per line",
    )
    p.add_argument(
        "--served-name",
        metavar="NAME",
        help="model name in the API (default: the name of the engine's directory)",
    )
    p.add_argument(
        "--allow-host",
        metavar="NAME",
        action="append",
        default=[],
        help="additional Host header to accept on a loopback address (repeat)",
    )
    p.add_argument(
        "--queue",
        metavar="N",
        type=int,
        default=64,
        help="maximum number of waiting requests (default 64)",
    )
    p.add_argument(
        "--chunk-tokens",
        metavar="N",
        type=int,
        help="prefill tokens between two decode steps (default: the engine's --prefill-chunk);\n"
        "fewer: lower inter-token latency, higher time to first token",
    )
    p.add_argument(
        "--prefix-memory",
        metavar="BYTES",
        help="size of the prefix cache, such as 4GiB; 0: none (default: a quarter of the free\n"
        "memory, at most 8 GiB, and at least four prompts of 8192 tokens)",
    )
    p.add_argument(
        "--max-body",
        metavar="MIB",
        type=int,
        default=32,
        help="maximum size of a request body in MiB (default 32)",
    )
    p.add_argument(
        "--media-hosts",
        metavar="NAME",
        action="append",
        default=[],
        help="host from which media URLs may be fetched, NAME or NAME:PORT (repeat)",
    )
    p.add_argument("--media-dir", metavar="DIR", help="directory that file:// media URLs may read")
    p.add_argument(
        "--drain",
        metavar="S",
        type=float,
        default=60.0,
        help="shutdown grace period for running requests in seconds (default 60)",
    )
    p.add_argument("--no-page", action="store_true", help="disable the web page at /")
    add_draft(p, "sequences")
    add_load(p)


def _prefix_bytes(text: str | None) -> int | None:
    if text is None or text.strip() == "0":
        return None if text is None else 0
    return parse_bytes(text, "--prefix-memory")


def _serve(args: argparse.Namespace) -> int:
    try:
        from g4ir.serve.app import Server
        from g4ir.serve.auth import Auth, is_loopback, known_hosts, read_keys
        from g4ir.serve.media_fetch import Sources
        from g4ir.serve.server import Address, check_engine, serve
    except ImportError as e:
        if (e.name or "").startswith("g4ir"):
            raise
        raise MissingError(f"serving needs {e.name}: pip install 'g4ir[serve]'") from e
    from g4ir.engine.async_engine import AsyncEngineConfig
    from g4ir.engine.scheduler import SchedulerConfig

    check_draft(args)
    if args.max_body < 1:
        raise InputError(f"--max-body {args.max_body}: expected at least 1 MiB")
    keys = read_keys(args.api_key_file) if args.api_key_file else ()
    hosts = known_hosts(args.host, args.allow_host)
    gate = Auth(keys, hosts, args.max_body << 20)
    name = args.served_name or Path(args.engine).resolve().name
    sources = Sources.named(args.media_hosts, args.media_dir, args.max_body << 20)
    waiting = AsyncEngineConfig(waiting=args.queue)
    config = SchedulerConfig(
        chunk_tokens=args.chunk_tokens,
        prefix_bytes=_prefix_bytes(args.prefix_memory),
        **given_draft(args),
    )
    server = Server(name, gate, waiting, config, sources, page=not args.no_page)
    check_engine(args.engine, args.trust)
    if not (keys or is_loopback(args.host)):
        console.say(f"warning: {args.host} is open to others, and no --api-key-file is given")

    def loader() -> Engine:
        with console.Progress() as progress:
            return load_to_generate(args, progress)

    if serve(server, Address(args.host, args.port, args.drain), loader, console.say):
        console.say("ended while the engine was being loaded")
        # A library still works in a thread: what Python takes down behind it would end in a crash.
        console.leave(0)
    return 0
