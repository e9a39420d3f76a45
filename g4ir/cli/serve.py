"""`g4ir serve`: HTTP server that is compatible with OpenAI, Anthropic and Ollama."""

from __future__ import annotations

import gc
import signal
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal
from urllib.parse import urlsplit

from g4ir.artefact.directory import is_engine, open_artefact
from g4ir.errors import InputError, MissingError
from g4ir.parallel.group import launched
from g4ir.plan.fit import device_memory, fitted
from g4ir.plan.footprint import Footprint, usable
from g4ir.ui import console
from g4ir.ui.units import size_text
from g4ir.weights.adapter import Adapter
from g4ir.weights.checkpoint import CONFIG, GGUF
from g4ir.weights.origin import AbsentWeights

from . import USUAL
from .common import Draft, FirstUse, Load, OnDisk, folder_drafts
from .models import named_model
from .verb import ANY_MODEL, Bytes, Size, Verb, argument, flag, parse_pairs, setting

if TYPE_CHECKING:
    from g4ir.serve.app import Server
    from g4ir.serve.pool import ModelPool, PooledModel
    from g4ir.serve.server import Address
    from g4ir.serve.worker import WorkerHandle


LogFormat = Literal["text", "json"]
http, access = partial(flag, title="HTTP"), partial(flag, title="access")
scheduler = partial(flag, title="scheduler")


class Serve(Verb):
    """Answer HTTP requests until a signal."""

    from_environment = True
    models: list[str] = argument(f"{ANY_MODEL}; several load on demand", "MODEL", "*")
    first_use: FirstUse
    embed: str | None = flag("embedding model in the same process", None, "MODEL")
    config: str | None = http("YAML file of flags; flags and G4IR_FLAG variables win", None, "FILE")
    host: str = http("bind address (default 127.0.0.1)", "127.0.0.1", "NAME")
    port: int = http("port (default 8000; 0: any free port)", 8000, "N")
    served_name: list[str] = http("model name in the API; *: any (default: MODEL's)", (), "NAME")
    max_loaded: int | None = http(
        "maximum models loaded at a time (default: as many as fit)", None, "N"
    )
    root_path: str = http("URL prefix under a proxy, such as /llm", "", "PATH")
    media_dir: str | None = http("directory that file:// media URLs may read", None, "DIR")
    log_requests: bool = http("log a line per request other than GET, without texts", False)
    log_format: LogFormat | None = http("log lines with time and level: text or json", None, "F")
    api_key_file: str | None = access("API keys, one per line; read again at SIGHUP", None, "FILE")
    allow_host: list[str] = access(
        "additional Host header to accept on a loopback address", (), "NAME"
    )
    allow_origin: list[str] = access("origin whose web pages may call the API; *: any", (), "URL")
    tls_cert: str | None = access("TLS certificate chain (PEM)", None, "FILE")
    tls_key: str | None = access("private key of the certificate (PEM)", None, "FILE")
    queue: int = scheduler("maximum number of waiting requests (default 64)", 64, "N")
    max_gap: float = scheduler(
        "maximum ITL during prefill (default 100); up to 4 x if requests wait", 100.0, "MS"
    )
    prefix_memory: Size | None = scheduler(
        "prefix cache in memory (default: by free memory); 0: none", None, "BYTES"
    )
    adapter: list[str] = flag(
        "LoRA adapter, for requests to model NAME or MODEL:NAME", (), "NAME=DIR", title="adapters"
    )
    adapter_dir: str | None = setting("directory of adapters that clients may load")
    adapter_slots: int | None = setting(
        "maximum adapters at a time (default: --adapter's, at least 4)"
    )
    adapter_rank: int | None = setting(
        "maximum rank of adapters (default: --adapter's; 16 without)"
    )
    chunk_tokens: int | None = setting("prefill tokens between decode steps (default: a chunk)")
    max_body: int = setting("maximum size of a request body in MiB", 32)
    key_requests: int | None = setting("requests a minute of keys without a limit in the key file")
    key_tokens: int | None = setting("tokens a minute of keys without a limit in the key file")
    models_memory: Bytes | None = setting("memory for several models (default: the device's)")
    load_wait: float = setting("maximum seconds that a request waits for busy models", 20.0)
    drain: float = setting("shutdown grace period for running requests in seconds", 60.0)
    page: bool = setting("off: no web page at /", True)
    load: Load
    draft: Draft
    disk: OnDisk

    def __post_init__(self) -> None:
        if self.max_body < 1:
            raise InputError(f"--max-body {self.max_body}: expected at least 1 MiB")
        if not self.max_gap > 0:
            raise InputError(f"--max-gap {self.max_gap:g}: expected more than 0 milliseconds")
        if (self.key_requests, self.key_tokens) != (None, None) and not self.api_key_file:
            raise InputError("--set key_requests and key_tokens are for keys: give --api-key-file")

    def __call__(self) -> int:
        console.use_format(self.log_format)
        named = named_models(self.models)
        if len(named) == 1:
            (model,) = named.values()
            draft = folder_drafts(model, self.draft)
            if draft != self.draft:
                return replace(self, draft=draft)()
        if self.embed and len(named) > 1:
            raise InputError(
                f"--embed {self.embed}: needs exactly one MODEL, and {len(named)} are given; give "
                f"{self.embed} as another MODEL instead"
            )
        app, address = self.make_server()
        from g4ir.serve import server
        from g4ir.serve.auth import is_loopback
        from g4ir.serve.embedding_model import EmbeddingModel

        for model in (*named.values(), *named_embedder(self.embed).values()):
            self._check_model(model)
        if any(self.slots().values()):
            self._check_backend(self.models[0])
        if not (app.gate.keys or is_loopback(self.host)):
            console.say(f"{self.host} is open to others, and no --api-key-file is given", "warning")

        def loader() -> Any:
            with console.Progress() as progress:

                def report(message: str) -> None:
                    app.progress = message
                    progress(message)
                    if app.draining:  # cancels the build, which removes its files
                        raise console.Ended(signal.SIGTERM)

                engines = self.first_use.engines(
                    [*named.values()], self.draft, progress=report, encoder=None
                )
                for name, model in named_embedder(self.embed).items():
                    (path,) = self.first_use.engines([model], progress=report, encoder=True)
                    app.embeddings = EmbeddingModel(name, self.load.engine(path, report))
                for engine in engines:
                    server.check_engine(engine, self.load.trust)
                if len(named) > 1:
                    return self._pool(app, dict(zip(named, engines, strict=True)))
                loaded = self.load.to_generate(engines[0], report, True, **self.slots())
            if self.embed and loaded.spec.embedding:
                raise InputError(
                    f"--embed {self.embed}: {loaded.label} is an encoder itself; leave out --embed"
                )
            gc.set_threshold(*USUAL)
            return loaded

        if server.serve(app, address, loader, console.say):
            console.say("ended while the engine was being loaded")
            # A library may still run in a thread, and would crash while Python shuts down.
            console.leave(0)
        return 0

    def slots(self) -> dict[str, Any]:
        """Return load_engine's arguments for adapters: its defaults if no flag for adapters is
        given."""
        adapters = self._adapters()
        slots, rank = self.adapter_slots, self.adapter_rank
        if self.adapter_dir and not (slots or rank):
            slots = max(len(adapters), 4)
        return {"adapters": adapters, "adapter_slots": slots, "adapter_rank": rank}

    def _check_backend(self, model: str) -> None:
        """Raise MissingError if the backend does not support LoRA adapters per request, before a
        build that takes minutes."""
        from g4ir.backends import find_backend
        from g4ir.plan.backend import checked_settings
        from g4ir.plan.resolve import device_of

        o = self.first_use.options
        backend = find_backend(o.backend)
        settings = checked_settings(backend, o.settings or {})
        backend.require_adapters(model, device_of(backend, o.device), settings)

    def _check_names(self, served: Sequence[str]) -> None:
        """Raise InputError if the encoder or an adapter has the name of another model."""
        names = [*{*served}, *named_embedder(self.embed), *self._adapters()]
        if both := next((name for name in names if names.count(name) > 1), None):
            raise InputError(
                f"{both!r} names two models: give --embed or --adapter another NAME=..."
            )

    def _adapters(self) -> dict[str, str]:
        """Return the name and the directory (`DIR` or `DIR=SCALE`) of each adapter."""
        return parse_pairs(self.adapter, "--adapter", "NAME=DIR")

    def _adapter_folders(self) -> tuple[Path, ...]:
        """Return the folders below which clients may load adapters; InputError for adapters with
        several models."""
        folders = [Adapter.of(path).path.parent for path in self._adapters().values()]
        if len(self.models) > 1 and any(self.slots().values()):
            raise InputError("adapters are for a server of one model; start one for each")
        return (*folders, *([Path(self.adapter_dir)] if self.adapter_dir else ()))

    def _pool(self, router: Any, engines: Mapping[str, str]) -> ModelPool:
        """Return the router's pool of models, from their engine directories by name; their
        processes get this verb's flags."""
        from g4ir.serve import worker
        from g4ir.serve.pool import ModelPool

        devices = {open_artefact(Path(e)).config.device for e in engines.values()}
        if len(devices) > 1:
            kinds = " and ".join(sorted(devices))
            raise InputError(f"the models run on {kinds}: start one server for each device")

        def start(model: PooledModel) -> WorkerHandle:
            console.say("loading", model=model.name, needs=size_text(model.need))
            one = replace(self, models=[f"{model.name}={model.path}"])
            log = partial(console.say, model=model.name)
            return worker.WorkerHandle(serve_one, (one, router.secret), log, router.charge)

        memory = self.models_memory or device_memory(*devices)
        prefixes = router.scheduler_config.prefix_bytes or 0
        models = [_pooled(n, Path(e), memory, prefixes) for n, e in engines.items()]
        worker.warm_up()
        limits = self.max_loaded, self.queue, self.load_wait
        return ModelPool(models, start, usable(memory), *limits)

    def _check_model(self, model: str) -> None:
        """Raise, before the port opens, if MODEL does not exist or cannot be served. (Builds, which
        take minutes, run while the server answers health checks.)"""
        from g4ir.serve.server import check_engine

        try:
            engine = named_model(model).engine
        except AbsentWeights:  # weights may be downloaded later
            return
        if engine:
            check_engine(model, self.load.trust)

    def make_server(self) -> tuple[Server, Address]:
        """Return the server (for several models a Router) and its address, from the flags."""
        try:
            from g4ir.serve.app import ANY_NAME, Server
            from g4ir.serve.auth import Auth, allowed_hosts
            from g4ir.serve.media_sources import MediaFolder
            from g4ir.serve.rate_limits import KeyLimits
            from g4ir.serve.server import Address
        except ImportError as e:
            if (e.name or "").startswith("g4ir"):
                raise
            raise MissingError(f"serving needs {e.name}: pip install 'g4ir[serve]'") from e
        from g4ir.engine.async_engine import AsyncEngineConfig
        from g4ir.engine.requests import check_minimums
        from g4ir.engine.scheduler import SchedulerConfig

        max_bytes = self.max_body << 20
        default, *others = named_models(self.models)
        own = [n for n in self.served_name if n != ANY_NAME]
        if others and own:
            raise InputError("--served-name is for one model; give several as NAME=MODEL")
        name, *aliases = own or [default]
        aliases += [ANY_NAME] if ANY_NAME in self.served_name else []
        self._check_names([name, *aliases])
        minimums = {"queue": 1, "max_loaded": 1, "load_wait": 0, "key_requests": 1, "key_tokens": 1}
        check_minimums(vars(self), **minimums)
        config = SchedulerConfig(
            chunk_tokens=self.chunk_tokens,
            max_gap_ms=self.max_gap,
            prefix_bytes=self.prefix_memory,
            prefix_disk=self.disk.prefix_disk,
            warm_up=True,
            **self.draft.scheduler(),
        )
        kind: type[Server] = Server
        if others:
            if launched() is not None:
                why = "torchrun started several processes, which serve one model: give one"
                raise InputError(why)
            from g4ir.serve.router import Router

            kind = Router
        app = kind(
            name,
            Auth((), allowed_hosts(self.host, self.allow_host), max_bytes),
            AsyncEngineConfig(waiting=self.queue),
            config,
            MediaFolder.named(self.media_dir, max_bytes),
            page=self.page,
            aliases=(*aliases,),
            origins=_origins(self.allow_origin),
            root_path=_root_path(self.root_path),
            key_file=self.api_key_file,
            key_limits=KeyLimits(self.key_requests, self.key_tokens),
            adapter_folders=self._adapter_folders(),
            log=console.say if self.log_requests else None,
            embedder=next(iter(named_embedder(self.embed)), None),
        )
        app.read_keys()
        tls = self.tls_cert, self.tls_key
        return app, Address(self.host, self.port, self.drain, tls)


def named_embedder(model: str | None) -> dict[str, str]:
    """Return name -> MODEL of --embed: NAME=MODEL, or MODEL."""
    return named_models([model]) if model else {}


def serve_one(pipe: Any, verb: Serve, secret: str) -> None:
    """Serve the one model of a verb to the router at the other end of a pipe."""
    from g4ir.serve.worker import Parent, WorkerAuth, serve_model

    with console.logs():
        console.use_format(verb.log_format)
        parent, quiet = Parent(pipe), lambda message: None
        server, _ = verb.make_server()
        server.key_file = None
        server.gate = WorkerAuth(max_body=server.gate.max_body, secret=secret)
        server.page, server.root_path, server.origins = False, "", ()
        server.log = parent if verb.log_requests else None
        (engine,) = named_models(verb.models).values()
        serve_model(server, parent, lambda: verb.load.to_generate(engine, quiet, True))


def _origins(origins: Sequence[str]) -> tuple[str, ...]:
    """Return the origins; InputError for one that browsers do not send: a scheme other than
    http(s), or a path."""
    for origin in origins:
        parts = urlsplit(origin)
        web = parts.scheme in ("http", "https") and parts.netloc and not parts.path
        if origin != "*" and not web:
            fix = "expected http(s)://NAME without a path, or *"
            raise InputError(f"--allow-origin {origin}: {fix}")
    return (*origins,)


def _root_path(prefix: str) -> str:
    """Return the URL path prefix without a slash at its end; InputError for an invalid one."""
    path = prefix.rstrip("/")
    if path and (not path.startswith("/") or set(path) & set("?#{} ")):
        raise InputError(f"--root-path {prefix}: expected /PATH without spaces and ?#{{}}")
    return path


# --- several models ---------------------------------------------------------------------------


def named_models(words: Sequence[str]) -> dict[str, str]:
    """Return name -> MODEL of a command line: NAME=MODEL, MODEL, or a folder of engines. InputError
    for two models of one name, two names of one model, and no model."""
    named = dict[str, str]()
    for name, model in (pair for word in words for pair in _pairs(word)):
        if name in named:
            fix = "give other names: NAME=MODEL"
            raise InputError(f"{named[name]} and {model} both have the name {name}; {fix}")
        if twice := next(
            (n for n, m in named.items() if Path(m).resolve() == Path(model).resolve()), ""
        ):
            raise InputError(f"{model} has two names, {twice} and {name}; give it one")
        named[name] = model
    if not named:
        raise InputError("give MODEL, the model to serve (see g4ir serve --help)")
    return named


def _pairs(word: str) -> list[tuple[str, str]]:
    folder = Path(word)
    if folder.is_dir() and not is_engine(folder) and not (folder / CONFIG).is_file():
        engines = sorted(p for p in folder.iterdir() if is_engine(p))
        if engines and not [*folder.glob(f"*{GGUF}")]:
            return [(p.name, str(p)) for p in engines]
    name, sign, model = word.partition("=")
    if sign and name and model and not folder.exists():
        return [(name, model)]
    return [(folder.resolve().name.removesuffix(GGUF), word)]


def _pooled(name: str, engine: Path, memory: int, prefixes: int) -> PooledModel:
    """Return the entry of a model for the pool; `memory`: bytes for all models; `prefixes`: bytes
    of its prefix cache, added to the planned bytes of the engine."""
    from g4ir.backends import find_backend
    from g4ir.builder.load import described
    from g4ir.chat import Template
    from g4ir.serve.pool import PooledModel
    from g4ir.serve.protocols.ollama import tag

    artefact = open_artefact(engine)
    footprint = Footprint(artefact.config, find_backend(artefact.config.backend), artefact.packing)
    _, short = fitted(footprint, memory)
    e = described(artefact)
    facts: dict[str, Any] = {"max_model_len": e.limits.max_seq, "media": sorted(e.media.kinds)}
    if note := Template.open(engine, e.spec.chat).note:
        facts["note"] = note
    return PooledModel(name, engine, footprint.need + prefixes, facts, tag(name, e), short)
