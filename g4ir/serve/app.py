"""The HTTP application: the coroutines of all paths, and streaming of answers."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import time
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Mount, Route
from starlette.types import Receive, Scope, Send

from g4ir import __version__
from g4ir.chat import Event as Said
from g4ir.chat import Prompt, Reader
from g4ir.engine.async_engine import AsyncEngine, AsyncEngineConfig
from g4ir.engine.engine import Engine
from g4ir.engine.output import AnswerStream
from g4ir.engine.requests import CANCELLED, FAILED, Event, RequestHandle
from g4ir.engine.scheduler import SchedulerConfig
from g4ir.errors import BusyError
from g4ir.media.limits import Limit
from g4ir.media.soft import Soft

from . import request_schema as schema
from .adapters import Action, adapters_of, load, unload
from .answers import ResponseFormat, usage_of
from .auth import JSON, Auth, read_keys, salt_of
from .embedding_model import EmbeddingModel, media_of
from .http_errors import Refused, bad, ending, later, refusal
from .media_queue import MediaQueue, wait_for_leaving
from .media_sources import MediaFolder, encode_media
from .metrics import Metrics
from .page import read_assets
from .prompts import Prompts, Requests, reasoning_on
from .protocols import embeddings, messages, ollama, responses, transcriptions
from .protocols.embeddings import EmbeddingRequest
from .protocols.parts import AnswerFormat
from .protocols.translation import Body, Translation
from .rate_limits import KeyLimits, RateLimits
from .request_log import HEADERS, RequestLog
from .request_schema import Fields

log = logging.getLogger(__name__)

#: a stream gets a keepalive after ALIVE_S seconds without chunks, checked every LOOK_S seconds
ALIVE_S, LOOK_S = 10.0, 1.0
#: alias that accepts any model name
ANY_NAME = "*"
#: prompts and inputs in bodies of more than this many bytes are parsed one at a time, to bound
#: memory
LARGE = 1 << 18
Handler = Callable[[Request], Awaitable[Response]]
#: returns a context manager that renames fields in errors to the client's protocol
Named = Callable[[], AbstractContextManager[None]]


@dataclass(frozen=True)
class Api:
    """A protocol. `read`: translation of its bodies to OpenAI's, None if it needs none; `fields`:
    translated body -> readers of its fields; `make`: constructor of engine requests; `format`:
    format of answers."""

    fields: Callable[[Body], Mapping[str, schema.Read]]
    make: Callable[..., Requests] = Prompts.requests
    format: Callable[[Fields, Requests, Body], AnswerFormat] = ResponseFormat
    read: Callable[[Body], Translation] | None = None
    #: required Content-Type, without its parameters; None: any
    content_type: str | None = JSON
    #: (raw body, its Content-Type) -> body
    parse: Callable[[bytes, str], Body] = lambda raw, content_type: schema.parsed(raw)


@dataclass(frozen=True)
class EmbeddingApi:
    """A protocol of embeddings. `read`: body -> request; `body`: (request, vectors float32 [N, D],
    number of tokens, model name) -> body of the answer; `content_type`: required, None: any."""

    read: Callable[[Body], EmbeddingRequest]
    body: Callable[[EmbeddingRequest, Any, int, str], Body]
    content_type: str | None = JSON


EMBEDDINGS = EmbeddingApi(embeddings.read_embeddings, embeddings.embeddings_body)
RERANK = EmbeddingApi(embeddings.read_rerank, embeddings.rerank_body)
EMBED_OLLAMA = EmbeddingApi(embeddings.read_ollama, embeddings.ollama_body, None)
CHATS = Api(lambda body: schema.CHAT)
COMPLETIONS = Api(lambda body: schema.COMPLETIONS)
RESPONSES = replace(CHATS, format=responses.ResponsesFormat, read=responses.read)
MESSAGES = replace(CHATS, format=messages.MessageFormat, read=messages.read)
TRANSCRIPTIONS = replace(
    CHATS,
    format=transcriptions.TranscriptFormat,
    read=transcriptions.read,
    content_type=transcriptions.MULTIPART,
    parse=transcriptions.parse_multipart,
)
#: content_type None: any, since ollama's clients omit it; the Origin header is checked instead
OLLAMA_CHAT = replace(CHATS, format=ollama.OllamaFormat, read=ollama.chat, content_type=None)
OLLAMA_GENERATE = replace(
    OLLAMA_CHAT,
    fields=lambda body: schema.COMPLETIONS if "prompt" in body else schema.CHAT,
    read=ollama.generate,
)
#: endpoints without generation: they count, return or decode tokens
COUNTED = replace(CHATS, make=Prompts.tokens, read=messages.count)
TOKENIZED = Api(
    lambda body: schema.TOKENIZE if "prompt" in body else schema.TOKENIZE_CHAT, Prompts.tokens
)
RENDERED = Api(lambda body: schema.TOKENIZE_CHAT, Prompts.tokens)
DETOKENIZED = Api(lambda body: schema.DETOKENIZE, Prompts.tokens)
#: prefix of paths with another error format than OpenAI's -> function that makes an error's body
ERRORS = {"/v1/messages": messages.error_body, "/api/": ollama.error_body}


@dataclass
class Server:
    """State that all endpoints share. Until `start` sets the engine, requests that need it are
    refused with 503 (code `loading`)."""

    name: str
    gate: Auth = field(default_factory=Auth)
    settings: AsyncEngineConfig = field(default_factory=AsyncEngineConfig)
    scheduler_config: SchedulerConfig = field(default_factory=SchedulerConfig)
    folder: MediaFolder = field(default_factory=MediaFolder)
    #: whether to serve the chat page at /
    page: bool = True
    #: other names of the model; `*`: any
    aliases: tuple[str, ...] = ()
    #: allowed CORS origins; `*`: all
    origins: tuple[str, ...] = ()
    #: path prefix of a reverse proxy, which may strip it or not
    root_path: str = ""
    #: file of API keys; None: no key is needed
    key_file: str | None = None
    #: limits of the keys for which the file has none
    key_limits: KeyLimits = field(default_factory=KeyLimits)
    #: folders below which clients may load adapters
    adapter_folders: tuple[Path, ...] = ()
    #: callback with the values of a log line (see RequestLog)
    log: Callable[..., None] | None = None
    #: name of the embedding model, if there is one: an additional model, or the served model itself
    embedder: str | None = None

    def __post_init__(self) -> None:
        self.metrics, self.created = Metrics(self.name), int(time.time())
        self.prompts: Prompts | None = None
        self.service: AsyncEngine | None = None
        self.embeddings: EmbeddingModel | None = None
        #: whether the server is shutting down and refuses new requests
        self.draining = False
        #: progress message while the engine is built or loaded
        self.progress = "the engine is being loaded"
        self.limits = RateLimits({})
        #: callback with a key's salt and the tokens of each of its requests
        self.charge = self.limits.charge
        self._large = asyncio.Semaphore(1)
        self._media = MediaQueue(self.settings.waiting)

    def start(self, engine: Engine) -> list[str]:
        """Serve this engine from now on: answers if it generates, embeddings if it is an encoder.
        Return lines for the log. EngineError for an engine without a tokenizer."""
        if engine.spec.embedding:
            self.embedder, self.embeddings = self.name, EmbeddingModel(self.name, engine)
            return []
        prompts = Prompts(engine)
        prompts.vocabulary.longest  # noqa: B018  # raises for an engine without a tokenizer
        prompts.grammars.prepare()
        prompts.warm_up()
        if prompts.template.note:
            log.warning(prompts.template.note)
        self.prompts = prompts
        service = AsyncEngine(engine, self.settings, self.scheduler_config)
        self.service = self.metrics.service = service
        return [service.scheduler.prefiller.capacity()]

    def read_keys(self) -> int:
        """Read the key file (again), if there is one; return the number of keys. InputError if it
        is wrong, OSError if it cannot be read; then the keys stay as they were."""
        keys = read_keys(self.key_file) if self.key_file else {}
        default = self.key_limits
        both = (
            (k, (n.requests or default.requests, n.tokens or default.tokens))
            for k, n in keys.items()
        )
        self.limits.replace({salt_of(key): KeyLimits(*limits) for key, limits in both})
        self.gate = replace(self.gate, keys=keys)
        return len(keys)

    @property
    def ready(self) -> bool:
        """Whether the engine, of a generating or an embedding model, has been loaded."""
        return self.service is not None or self.embedder == self.name

    @property
    def embedders(self) -> list[str]:
        """Names of the embedding model; empty if there is none."""
        return self.names if self.embedder == self.name else [n for n in [self.embedder] if n]

    def stop(self) -> None:
        """Cancel all requests for answers and end the scheduler."""
        if self.service:
            self.service.close()

    def close(self) -> None:
        """Cancel all requests and free the engines."""
        self.stop()
        if self.service:
            self.service.engine.close()
        if self.embeddings:
            self.embeddings.close()

    def handlers(self) -> dict[str, tuple[str, Handler]]:
        """Return URL path -> (HTTP method, handler)."""
        return {
            "/livez": ("GET", self.live),
            "/readyz": ("GET", self.health),
            "/health": ("GET", self.health),
            "/version": ("GET", self.version),
            "/metrics": ("GET", self.get_metrics),
            "/v1/models": ("GET", self.models),
            "/v1/models/{name:path}": ("GET", self.models),
            "/v1/chat/completions": ("POST", partial(self.answer, api=CHATS)),
            "/v1/completions": ("POST", partial(self.answer, api=COMPLETIONS)),
            "/v1/responses": ("POST", partial(self.answer, api=RESPONSES)),
            "/v1/messages": ("POST", partial(self.answer, api=MESSAGES)),
            "/v1/audio/transcriptions": ("POST", partial(self.answer, api=TRANSCRIPTIONS)),
            "/v1/messages/count_tokens": ("POST", self.count_tokens),
            "/v1/load_lora_adapter": ("POST", partial(self.change_adapters, action=load)),
            "/v1/unload_lora_adapter": ("POST", partial(self.change_adapters, action=unload)),
            "/tokenize": ("POST", self.tokenize),
            "/detokenize": ("POST", self.detokenize),
            "/render": ("POST", self.render),
            "/tokenizer_info": ("GET", self.tokenizer_info),
            "/server_info": ("GET", self.server_info),
            "/api/version": ("GET", self.version),
            "/api/tags": ("GET", self.tags),
            "/api/ps": ("GET", self.tags),
            "/api/show": ("POST", self.show),
            "/api/chat": ("POST", partial(self.answer, api=OLLAMA_CHAT)),
            "/api/generate": ("POST", partial(self.answer, api=OLLAMA_GENERATE)),
            "/api/embed": ("POST", partial(self.embed, api=EMBED_OLLAMA)),
            "/v1/embeddings": ("POST", partial(self.embed, api=EMBEDDINGS)),
            "/v1/rerank": ("POST", partial(self.embed, api=RERANK)),
        }

    def app(self) -> Starlette:
        """Return the ASGI application."""
        paths = self.handlers()
        self._paths, routes = [*paths], []
        for path, (method, handler) in paths.items():
            ends = (path, f"{path}/")  # a slash at the end is accepted, without a redirect
            handle = self._route(handler, path)
            routes += [Route(end, handle, methods=[method]) for end in ends]
        assets = read_assets() if self.page else {}
        routes += [Route(path, self._route(asset, path)) for path, asset in assets.items()]
        mounted = [Mount(self.root_path, routes=routes)] if self.root_path else []
        handlers: Any = {HTTPException: self._unknown}
        cors: Any = {"allow_methods": ["*"], "allow_headers": ["*"], "expose_headers": HEADERS}
        around = [Middleware(RequestLog, log=self.log, count=self._count)]
        if self.origins:
            around.append(Middleware(CORSMiddleware, allow_origins=self.origins, **cors))
        return Starlette(routes=[*mounted, *routes], exception_handlers=handlers, middleware=around)

    def _count(self, path: str, status: int) -> None:
        """Count a response by its path ("other" if that is no key of `handlers`) and its status
        (499 if there was no response)."""
        path = path.removeprefix(self.root_path)
        label = path if path in self._paths else "other"
        self.metrics.responses.labels(label, str(status or 499)).inc()

    def _route(self, handler: Handler, path: str) -> Handler:
        """Wrap a handler with authentication, the limits of the key, and JSON errors."""

        async def handle(request: Request) -> Response:
            try:
                request.state.salt = salt = self.gate.check(request, path)
                if salt and request.method == "POST":
                    self._check_ready()  # first: a request that gets 503 does not count
                    self.limits.check(salt)
                return await handler(request)
            except Exception as e:
                return self._refused(e, request, path)

        return handle

    @property
    def hidden(self) -> tuple[str, ...]:
        """Paths of the engine and its model, which are replaced in errors for clients."""
        engine = self.prompts and self.prompts.engine
        names = (str(engine.path), engine.label) if engine else ()
        return tuple(name for name in names if "/" in name or "\\" in name)

    def _refused(self, error: Exception, request: Request, path: str) -> Response:
        if isinstance(error, BusyError) and self.draining:
            error = ending()
        wait_s = self.service.wait_s() if self.service else 0.0
        refused = refusal(error, {*schema.CHAT, *schema.COMPLETIONS}, self.hidden, wait_s)
        self.metrics.rejected.labels(refused.code or str(refused.status)).inc()
        request.state.said |= {"end": refused.code} if refused.code else {}
        protocol = next((p for p in ERRORS if path.startswith(p)), None)
        body = ERRORS[protocol](refused) if protocol else refused.body()
        return json_response(body, refused.status, refused.headers)

    async def _unknown(self, request: Request, error: Exception) -> Response:
        """Return the error response for an unknown path or method, after the access checks."""
        assert isinstance(error, HTTPException)
        path = request.url.path.removeprefix(self.root_path)
        messages = {404: "no such path", 405: "this path has no such method"}
        message = messages.get(error.status_code, error.detail)
        try:
            self.gate.check(request, path)
            raise Refused(error.status_code, message, headers=error.headers or {})
        except Refused as e:
            return self._refused(e, request, path)

    async def health(self, request: Request) -> Response:
        """Health check: 200 if requests are accepted."""
        self._check_ready()
        return json_response({"status": "ok"})

    async def live(self, request: Request) -> Response:
        """Liveness check: 200 as long as the process answers."""
        return json_response({"status": "ok"})

    async def version(self, request: Request) -> Response:
        return json_response({"version": __version__})

    async def get_metrics(self, request: Request) -> Response:
        return Response(self.metrics.text(), media_type="text/plain; version=0.0.4")

    async def models(self, request: Request) -> Response:
        """Return the list of model names, or one model by name."""
        plain: Body = {"object": "model", "created": self.created, "owned_by": "g4ir"}
        model = dict(plain)
        if self.prompts:
            engine = self.prompts.engine
            model |= {"max_model_len": engine.limits.max_seq, "media": sorted(engine.media.kinds)}
            if note := self.prompts.template.note:
                model["note"] = note
        if self.embeddings:
            plain |= self.embeddings.facts
        data = [{"id": n, **model} for n in self.names if n not in self.embedders]
        data += [{"id": n, **plain} for n in self.embedders]
        if (name := request.path_params.get("name")) is None:
            adapted = {**model, "parent": self.name}
            data += [{"id": name, **adapted} for name in self._adapted]
            return json_response({"object": "list", "data": data})
        if (name := name.rstrip("/")) in self.embedders:
            return json_response({"id": name, **plain})
        self._check_model(name)
        return json_response({"id": name, **model})

    async def change_adapters(self, request: Request, action: Action) -> Response:
        """Load or remove a LoRA adapter: `action` is `load` or `unload`."""
        engine, raw = self._ready()[0].engine, await self.gate.body(request)
        fields = schema.parsed(raw)
        if (name := fields.get("lora_name")) in (*self.names, *self.embedders):
            raise bad("lora_name", f"{name!r} is a model of this server; give another name")
        how = adapters_of(engine), fields, self.adapter_folders
        return json_response({"status": "ok", "message": await run_in_threadpool(action, *how)})

    async def server_info(self, request: Request) -> Response:
        """Return the model, its limits, the queue, the prefix cache and the build."""
        prompts, service = self._ready()
        engine, scheduler = prompts.engine, service.scheduler
        quant = engine.config.quant
        build = {"g4ir": __version__, "backend": engine.config.backend, "device": engine.device}
        build |= {"dtype": engine.dtype, "quant": quant.name if quant else "none"}
        prefixes = scheduler.prefixes
        return json_response(
            {
                "model": self.name,
                "names": self.names,
                "variant": engine.spec.name,
                "weight_bytes": sum(v.type.nbytes() for v in engine.program.params().values()),
                "media": sorted(engine.media.kinds),
                "limits": vars(engine.limits),
                "waiting": {"most": self.settings.waiting, "now": service.waiting},
                "prefix_cache": {"most_bytes": prefixes.max_bytes, "bytes": prefixes.nbytes},
                "adapters": sorted(self._adapters),
                "build": build,
            }
        )

    async def tags(self, request: Request) -> Response:
        """Return the models under each of their names, as ollama lists models."""
        self._check_ready()
        served: Any = dict.fromkeys(self.names, self.prompts)
        served |= dict.fromkeys(self.embedders, self.embeddings)
        return json_response({"models": [ollama.tag(n, m.engine) for n, m in served.items()]})

    async def show(self, request: Request) -> Response:
        """Return the description of a model in ollama's format."""
        self._check_ready()
        self._check_origin(request)
        body = await run_in_threadpool(schema.parsed, await self.gate.body(request, None))
        name = ollama.model_of(body) or self.name
        if name not in self.embedders:
            self._check_model(name)
        if self.embeddings and (name in self.embedders or not self.prompts):
            return json_response(ollama.show(self.embeddings.engine))
        prompts, _ = self._ready()
        return json_response(ollama.show(prompts.engine, prompts.template))

    async def embed(self, request: Request, api: EmbeddingApi) -> Response:
        """Return the embeddings of the inputs, or documents ranked by similarity to a query."""
        self._check_ready()
        if not (model := self.embeddings):
            fix = "name an embedding model, or serve one too (--embed MODEL, or another MODEL)"
            raise _other_kind(f"{self.name!r} generates text and embeds none; {fix}")
        if api.content_type != JSON:
            self._check_origin(request)
        raw = await self.gate.body(request, api.content_type)

        def parse() -> tuple[str, EmbeddingRequest]:
            body = schema.parsed(raw)
            name = ollama.model_of(body) or model.name
            if name not in self.embedders:
                if name in self.names:
                    raise _other_kind(f"{name!r} generates text; to embed give {model.name!r}")
                if ANY_NAME not in self.aliases:
                    raise self._no_model(name)
            return name, api.read(body)

        async with self._large if len(raw) > LARGE else contextlib.nullcontext():
            name, asked = await run_in_threadpool(parse)
        if media := media_of(asked):
            with_soft = partial(model.with_soft, asked, media, self.folder)
            asked = await self._media.run(request, media, with_soft)
        vectors, tokens = await model.embed(request, asked)
        request.state.said |= {"prompt": tokens}
        self.charge(request.state.salt, tokens)
        body = partial(api.body, asked, vectors, tokens, name)
        return await run_in_threadpool(lambda: json_response(body()))

    async def tokenizer_info(self, request: Request) -> Response:
        """Return the tokenizer's settings, for clients that tokenise themselves."""
        return json_response(self._ready()[0].tokenizer_info())

    @property
    def names(self) -> list[str]:
        return [n for n in (self.name, *self.aliases) if n != ANY_NAME]

    @property
    def _adapters(self) -> list[str]:
        """Names of the loaded adapters."""
        adapters = self.prompts and self.prompts.engine.adapters
        return sorted(adapters.loaded) if adapters else []

    @property
    def _adapted(self) -> list[str]:
        """MODEL:ADAPTER of each name of the model."""
        return [f"{name}:{adapter}" for name in self.names for adapter in self._adapters]

    def _check_model(self, name: str | None) -> str:
        """Return the adapter in a request's model name, MODEL:ADAPTER or ADAPTER; "" if it has
        none. Refused for an unknown name, and for that of a separate embedding model."""
        if name is None or name in self.names:
            return ""
        if name in self.embedders:
            raise _other_kind(f"{name!r} embeds texts and generates none; give {self.name!r}")
        model, _, adapter = name.rpartition(":")
        is_model = not model or model in self.names or ANY_NAME in self.aliases
        if is_model and adapter in self._adapters:
            return adapter
        if ANY_NAME in self.aliases and model not in self.names:
            return ""
        raise self._no_model(name)

    def _no_model(self, name: str) -> Refused:
        listed = dict.fromkeys((*self.names, *self._adapted, self.embedder))
        names = " and ".join(repr(n) for n in listed if n)
        message = f"model: there is no {name[:80]!r} here; this server has {names}"
        return Refused(404, message, param="model", code="model_not_found")

    def _check_ready(self) -> None:
        if self.draining:
            raise ending()
        if not self.ready:
            raise later(503, "loading", self.progress)
        if self.service and not self.service.alive:
            raise later(503, "engine_ended", "the engine has ended; start the server again")

    def _ready(self) -> tuple[Prompts, AsyncEngine]:
        self._check_ready()
        if self.prompts is None or self.service is None:
            raise _other_kind(f"{self.name!r} embeds texts and generates none; serve one that does")
        return self.prompts, self.service

    async def tokenize(self, request: Request) -> Response:
        """Return the token ids of a prompt or a conversation."""
        tokens = await self._tokens(request, TOKENIZED)
        size = {"max_model_len": self._ready()[0].engine.limits.max_seq}
        count = {"count": len(tokens), **size}
        return json_response({**count, "tokens": tokens, "token_strs": None})

    async def render(self, request: Request) -> Response:
        """Return the token ids and the text of a conversation's prompt."""
        tokens = await self._tokens(request, RENDERED)
        text = await run_in_threadpool(self._ready()[0].text, tokens)
        return json_response({"prompt": text, "token_ids": tokens})

    async def count_tokens(self, request: Request) -> Response:
        """Return the number of tokens of a conversation's prompt."""
        tokens = await self._tokens(request, COUNTED)
        return json_response({"input_tokens": len(tokens)})

    async def detokenize(self, request: Request) -> Response:
        """Return the text of token ids."""
        tokens = await self._tokens(request, DETOKENIZED)
        return json_response({"prompt": await run_in_threadpool(self._ready()[0].text, tokens)})

    async def _tokens(self, request: Request, api: Api) -> tuple[int, ...]:
        """Return the token ids of a body's prompt or conversation."""
        *_, (one,) = await self._requests(request, api)
        return one.tokens

    async def _requests(
        self, request: Request, api: Api
    ) -> tuple[Body, Fields, Prompt | None, Requests]:
        """Read a body; return it, its fields, its conversation, if it has one, and the requests to
        the engine. The body is parsed in a thread (large bodies one at a time, to bound memory and
        time), media are encoded in the threads of MediaQueue."""
        prompts, _ = self._ready()
        if api.content_type != JSON:
            self._check_origin(request)
        raw = await self.gate.body(request, api.content_type)
        kind, salt = request.headers.get("content-type", ""), request.state.salt
        named: Named = contextlib.nullcontext

        def parse() -> tuple[Body, Fields, Prompt | None, Callable[..., Requests], Requests]:
            nonlocal named
            body = original = api.parse(raw, kind)
            if api.read:
                translation = api.read(original)
                body, named = translation.body, translation.named
            with named():
                fields = schema.read_fields(body, api.fields(body))
                adapter = self._check_model(fields.get("model"))
                prompt = prompts.render(fields)
                make = partial(api.make, prompts, fields, prompt, salt=salt, adapter=adapter)
                return original, fields, prompt, make, () if prompt and prompt.media else make()

        async with self._large if len(raw) > LARGE else contextlib.nullcontext():
            original, fields, prompt, make, requests = await run_in_threadpool(parse)
        if prompt and prompt.media:

            def encoded(limit: Limit) -> tuple[Soft, ...]:
                with named():
                    return encode_media(prompts.engine, prompt.media, self.folder, fields, limit)

            def made() -> Requests:
                with named():
                    return make(soft=soft)

            soft = await self._media.run(request, prompt.media, encoded)
            requests = await run_in_threadpool(made)
        return original, fields, prompt, requests

    def _check_origin(self, request: Request) -> None:
        """Refuse cross-site form posts: browsers send forms without a CORS preflight."""
        origin = request.headers.get("origin")
        is_local = origin is None or origin.partition("://")[2] == request.headers.get("host")
        if not is_local and not {"*", origin} & {*self.origins}:
            message = f"cross-origin request of {str(origin)[:80]}; --allow-origin permits it"
            raise Refused(403, message, code="wrong_origin")

    async def answer(self, request: Request, api: Api) -> Response:
        """Generate answers to a conversation, or to prompts."""
        _, service = self._ready()
        try:
            original, fields, prompt, requests = await self._requests(request, api)
        except ollama.NothingAsked as e:
            self._check_model(ollama.model_of(e.body) or None)
            return json_response(e.body)
        fields = {"model": self.name, **fields}
        format = api.format(fields, requests, original)
        running = Running(self, request, fields, prompt, requests, format)
        await run_in_threadpool(running.submit, service)
        running.format.submitted(running.handles)
        if running.fields.get("stream"):
            return Streamed(running)
        try:
            return await running.complete()
        finally:
            running.end()


class Running:
    """An HTTP request that is being answered: its engine requests, their handles, and one
    AnswerStream for each of its n answers per prompt."""

    def __init__(
        self,
        server: Server,
        request: Request,
        fields: Fields,
        prompt: Prompt | None,
        requests: Requests,
        format: AnswerFormat,
    ) -> None:
        assert server.prompts
        self.server, self.request, self.fields = server, request, fields
        self.requests, self.n, self.format = requests, requests[0].n, format
        self.answers = [
            AnswerStream(
                server.prompts.vocabulary,
                _reader(fields, prompt) if prompt else None,
                index=i,
                stop=fields.get("stop", ()),
                single=fields.get("parallel_tool_calls") is False,
                silent=schema.max_new_tokens(fields) == 0,
            )
            for i in range(self.n * len(requests))
        ]
        self.handles: list[RequestHandle] = []
        #: queued (index of the answer, event); `_notified`: whether the event loop was woken
        self._come: deque[tuple[int, Event]] = deque()
        self._notified, self._loop = False, asyncio.get_running_loop()
        #: `_arrived`: set for new events, a disconnected client (`_gone`), and every LOOK_S seconds
        self._arrived, self._gone = asyncio.Event(), False

    def submit(self, service: AsyncEngine) -> None:
        """Submit its requests to the scheduler: all of them, or none."""
        try:
            for i, request in enumerate(self.requests):
                self.handles.append(service.submit(request, self._forwarder(i * self.n)))
        except Exception:
            self.end()
            raise

    def _forwarder(self, first: int) -> Callable[[Event], None]:
        """Return a thread-safe callback that forwards a handle's events to the event loop, and
        measures the time between its tokens. `first`: index of the handle's first answer."""
        last: dict[int, float] = {}

        def forward(event: Event) -> None:
            now = time.monotonic()
            if event.token is not None:
                if event.index in last:
                    self.server.metrics.tokens.observe(now - last[event.index])
                last[event.index] = now
            self._come.append((first + event.index, event))
            if not self._notified:  # once for all events until the loop wakes up
                self._notified = True
                self._loop.call_soon_threadsafe(self._arrived.set)

        return forward

    def end(self) -> None:
        """Cancel unfinished engine requests; update metrics, rate limits and the log values."""
        if self.handles and not all(a.over for a in self.answers):
            failed = any(handle.state == FAILED for handle in self.handles)
            self.server.metrics.cancelled.inc(not failed)
        for handle in self.handles:
            if not handle.done:
                handle.cancel()
            self.server.metrics.took(handle.counts)
            used = handle.counts.prompt + handle.counts.generated
            self.server.charge(self.request.state.salt, used)
        self.request.state.said |= self._log_values()
        self.handles = []

    def _log_values(self) -> Body:
        """Return the values for the log: token counts, seconds and finish reasons."""
        counts = [handle.counts for handle in self.handles]
        if not counts:
            return {}
        total = {k: sum(getattr(c, k) for c in counts) for k in ("prompt", "cached", "generated")}
        times = {"queued_s": counts[0].queued_s, "first_token_s": counts[0].first_token_s}
        ends = ",".join(str(a.finish or "cancelled") for a in self.answers)
        return total | {k: v and round(v, 4) for k, v in times.items()} | {"end": ends}

    async def _events(self) -> AsyncIterator[Iterator[tuple[AnswerStream, Event]]]:
        """Yield batches of events until every answer is over; an empty batch every LOOK_S seconds
        without events. Refused if the client disconnects."""
        watcher = self._loop.create_task(self._wait_for_leaving())
        self._look()
        try:
            while not all(a.over for a in self.answers):
                await self._arrived.wait()
                self._arrived.clear()
                self._notified = False  # first: later events notify again
                if self._gone:
                    raise Refused(499, "the client went away")
                yield self._new()
        finally:
            watcher.cancel()
            self._clock.cancel()

    async def _wait_for_leaving(self) -> None:
        await wait_for_leaving(self.request)
        self._gone = True
        self._arrived.set()

    def _look(self) -> None:
        self._arrived.set()
        self._clock = self._loop.call_later(LOOK_S, self._look)

    def _new(self) -> Iterator[tuple[AnswerStream, Event]]:
        """Yield the queued events with their answers; Refused if an answer was cancelled."""
        for _ in range(len(self._come)):
            index, event = self._come.popleft()
            answer = self.answers[index]
            if event.finish == CANCELLED and not answer.over:
                cancelled = later(503, "cancelled", "the answer was cancelled")
                raise ending() if self.server.draining else cancelled
            yield answer, event

    def _take(self, answer: AnswerStream, event: Event) -> list[Said]:
        """Convert a scheduler event to chat events; stop the sequence if its answer has ended."""
        new = answer.take(event)
        if answer.over and not event.finish:
            job, index = divmod(answer.index, self.n)
            self.handles[job].stop(index)
        return new

    def _usage(self) -> dict[str, Any]:
        drafts = bool(self.server.scheduler_config.draft)
        media = [soft for request in self.requests for soft in request.soft]
        return usage_of(self.handles, self.answers, drafts, media)

    async def complete(self) -> Response:
        """Wait for the end of all answers; return the response with the complete body."""
        async for events in self._events():
            for answer, event in events:
                self._take(answer, event)
        usage = self._usage()
        if any(a.prompt for a in self.answers):  # log-probabilities of a prompt are large: a thread
            return await run_in_threadpool(
                lambda: json_response(self.format.complete(self.answers, usage))
            )
        body = self.format.complete(self.answers, usage)
        return (
            Response(body, media_type="text/plain")
            if isinstance(body, str)
            else json_response(body)
        )

    async def stream(self) -> AsyncIterator[str]:
        """Yield the answer as text, for each batch of events its frames (server-sent events or
        lines of JSON); an error is the last frame."""
        format = self.format
        try:
            async for values in self._pieces():
                if values is None:
                    yield format.alive
                elif values:
                    yield "".join(format.frame(v, _text(v)) for v in values)
            yield format.end
        except Exception as e:
            for value in format.failed(refusal(e, self.fields, self.server.hidden)):
                yield format.frame(value, _text(value))

    async def _pieces(self) -> AsyncIterator[list[Body] | None]:
        """Yield lists of chunks: before the first token, of each batch of events, and after the
        last one; or None (a keepalive) after ALIVE_S seconds without chunks."""
        yield self.format.first(len(self.answers))
        spoke = time.monotonic()
        async for events in self._events():
            chunks, error = list[Body](), None
            try:
                for answer, event in events:
                    chunks += self.format.chunks(answer, self._take(answer, event))
            except Exception as e:  # raised below, after the chunks before it were sent
                error = e
            if chunks or time.monotonic() - spoke >= ALIVE_S:
                yield chunks or None
                spoke = time.monotonic()
            if error:
                raise error
        yield self.format.last(self.answers, self._usage())


class Streamed(StreamingResponse):
    """A streamed answer. It ends the engine requests in `__call__`, not in the generator, which
    never runs if the client disconnects before the first event."""

    def __init__(self, running: Running) -> None:
        headers = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
        super().__init__(running.stream(), 200, headers, running.format.content_type)
        self.running = running

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await self.stream_response(send)
        finally:
            self.running.end()


def _reader(fields: Fields, prompt: Prompt) -> Reader:
    """Return the parser of an answer: its reasoning, content and tool calls."""
    tools, calls = fields.get("tools") or None, schema.chosen(fields).mode != "none"
    stop = fields.get("stop", ())
    return Reader(tools, prompt.tail, stop, calls=calls, thinking=reasoning_on(fields))


def _other_kind(message: str) -> Refused:
    return Refused(400, f"model: {message}", param="model", code="not_supported")


_encode = json.JSONEncoder(allow_nan=False, check_circular=False).encode


def _text(value: Any) -> str:
    """Return ASCII JSON: lone surrogates in model output are escaped. The items of long lists are
    encoded one by one, since the encoder holds the GIL during a call (seconds for a whole list)."""
    if isinstance(value, list) and len(value) > 64:
        return f"[{', '.join(map(_encode, value))}]"
    if isinstance(value, dict) and any(isinstance(v, list) for v in value.values()):
        return f"{{{', '.join(f'{_encode(k)}: {_text(v)}' for k, v in value.items())}}}"
    return _encode(value)


def json_response(
    value: Any, status: int = 200, headers: Mapping[str, str] | None = None
) -> Response:
    return Response(_text(value), status, headers, "application/json")
