"""A server of several models: forwards requests to the processes that serve their models."""

from __future__ import annotations

import asyncio
import re
import secrets
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass, field
from functools import cached_property, partial
from types import SimpleNamespace
from typing import Any

import httpx
from prometheus_client import generate_latest
from prometheus_client.core import Metric
from prometheus_client.parser import text_string_to_metric_families
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from . import request_schema as schema
from .app import ANY_NAME, Handler, Server, json_response
from .auth import JSON
from .http_errors import Refused, ending, later
from .media_queue import until_disconnect
from .pool import READY, ModelPool, PooledModel
from .protocols import ollama, transcriptions
from .worker import SALT, SECRET

#: where workers listen
HOST = "http://127.0.0.1"
#: headers of a worker that are not forwarded
NOT_RETURNED = {"connection", "transfer-encoding", "date", "x-request-id", "request-id"}
#: metrics of a worker that are left out: the router's own cover them
OWN_METRICS = re.compile(r"g4ir_(http_responses|build)")


@dataclass
class Router(Server):
    """Server of several models. `pool` is None until their engines have been built and checked;
    `secret` authenticates requests to the workers."""

    pool: ModelPool | None = None
    secret: str = field(default_factory=lambda: secrets.token_hex(16))

    @cached_property
    def _client(self) -> httpx.AsyncClient:
        limits = httpx.Limits(max_keepalive_connections=0)
        return httpx.AsyncClient(timeout=None, limits=limits, trust_env=False, verify=False)

    @property
    def ready(self) -> bool:
        return self.pool is not None

    def start(self, engine: Any) -> list[str]:
        """Serve the models of a pool (`engine`) from now on; return lines for the log."""
        self.pool = engine
        return [f"models: {', '.join(m.name for m in engine.models)}"]

    def stop(self) -> None:
        """Ask all workers to end, which ends their requests with an error."""
        for model in self.pool.models if self.pool else ():
            if model.worker:
                model.worker.end()

    def close(self) -> None:
        """End all workers, and wait for that."""
        if self.pool:
            asyncio.run(self.pool.close())

    def handlers(self) -> dict[str, tuple[str, Handler]]:
        paths = {"/livez", "/readyz", "/health", "/version", "/metrics", "/v1/models"}
        paths |= {"/v1/models/{name:path}", "/api/version", "/api/tags", "/api/ps"}
        local = {p: h for p, h in super().handlers().items() if p in paths}
        forwarded = {
            path: (method, partial(self.forward, path=path))
            for path, (method, _) in super().handlers().items()
            if path not in paths
        }
        return {**local, **forwarded}

    def _pool(self) -> ModelPool:
        if self.draining:
            raise ending()
        if self.pool is None:
            raise later(503, "loading", self.progress)
        return self.pool

    async def health(self, request: Request) -> Response:
        self._pool()
        return json_response({"status": "ok"})

    async def models(self, request: Request) -> Response:
        """Return all models, or one by name, with whether it is loaded."""
        pool = self._pool()

        def entry(m: PooledModel) -> dict[str, Any]:
            head = {"id": m.name, "object": "model", "created": self.created, "owned_by": "g4ir"}
            return head | {"loaded": m.state == READY, **m.facts}

        if (name := request.path_params.get("name")) is None:
            return json_response({"object": "list", "data": [*map(entry, pool.models)]})
        return json_response(entry(self._named(name.rstrip("/"))))

    async def tags(self, request: Request) -> Response:
        """Return all models, or those loaded (/api/ps), as ollama lists them."""
        loaded = request.url.path.rstrip("/").endswith("/ps")
        models = [m for m in self._pool().models if m.state == READY or not loaded]
        return json_response({"models": [m.tag for m in models]})

    def _named(self, name: str | None) -> PooledModel:
        """Return the model with a request's model name; the first one if it is None. Refused (404)
        for an unknown name, unless the server accepts any."""
        models = self._pool().models
        if name is None:
            return models[0]
        if model := self._pool().find(name) or self._pool().find(name.removesuffix(ollama.LATEST)):
            return model
        if ANY_NAME in self.aliases:
            return models[0]
        names = ", ".join(repr(m.name) for m in models)
        message = f"model: there is no {str(name)[:80]!r} here; this server has {names}"
        raise Refused(404, message, param="model", code="model_not_found")

    async def forward(self, request: Request, path: str) -> Response:
        """Forward a request to its model's worker, which is loaded first if need be."""
        self._pool()
        raw, name = b"", request.query_params.get("model")
        if request.method == "POST":
            is_form = path == "/v1/audio/transcriptions"
            content_type = transcriptions.MULTIPART if is_form else JSON
            if is_form or path.startswith("/api/"):
                self._check_origin(request)
            raw = await self.gate.body(request, None if path.startswith("/api/") else content_type)
            kind = request.headers.get("content-type", "")
            parse = partial(transcriptions.parse_multipart, raw, kind)
            body = await run_in_threadpool(parse if is_form else partial(schema.parsed, raw))
            name = ollama.model_of(body)
        model, stack = self._named(name), AsyncExitStack()
        try:
            upstream = await until_disconnect(request, self._open(stack, model, request, path, raw))
        except BaseException:
            await stack.aclose()
            raise
        return Forwarded(stack, upstream)

    async def _open(
        self, stack: AsyncExitStack, model: PooledModel, request: Request, path: str, raw: bytes
    ) -> httpx.Response:
        """Send a request to the worker of a model, which stays loaded until `stack` closes; return
        the response once its headers are read."""
        worker = await stack.enter_async_context(self._pool().lease(model))
        headers = {SECRET: self.secret, SALT: request.state.salt, "x-request-id": request.state.id}
        headers |= {k: request.headers[k] for k in ("content-type",) if k in request.headers}
        url, build = f"{HOST}:{worker.port}{path}", self._client.build_request
        call = build(request.method, url, headers=headers, content=raw)
        request.state.said["forwarded"] = True
        try:
            upstream = await self._client.send(call, stream=True)
        except httpx.TransportError:
            request.state.said["forwarded"] = False
            message = f"the process of model {model.name!r} ended; retry: the model is loaded again"
            raise later(503, "worker_ended", message) from None
        stack.push_async_callback(upstream.aclose)
        return upstream

    async def get_metrics(self, request: Request) -> Response:
        """Return the router's metrics, and those of the loaded models with the label `model`."""
        texts: list[tuple[str | None, str]] = [(None, self.metrics.text().decode())]
        for m in self.pool.models if self.pool else ():
            if m.state == READY and m.worker:
                with suppress(httpx.TransportError):
                    url, headers = f"{HOST}:{m.worker.port}/metrics", {SECRET: self.secret}
                    texts.append((m.name, (await self._client.get(url, headers=headers)).text))
        return Response(merged_metrics(texts), media_type="text/plain; version=0.0.4")


class Forwarded(Response):
    """A worker's response, forwarded as it arrives; the model stays loaded until its end."""

    def __init__(self, stack: AsyncExitStack, upstream: httpx.Response) -> None:
        super().__init__(status_code=upstream.status_code)
        headers = upstream.headers.raw
        self.raw_headers = [h for h in headers if h[0].decode().lower() not in NOT_RETURNED]
        self._stack, self._upstream = stack, upstream

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        head = {"type": "http.response.start", "status": self.status_code}
        sending = self._send({**head, "headers": self.raw_headers}, send)
        try:
            with suppress(Refused):
                await until_disconnect(Request(scope, receive), sending)
        finally:
            await self._stack.aclose()

    async def _send(self, head: dict[str, Any], send: Send) -> None:
        await send(head)
        async for part in self._upstream.aiter_raw():
            await send({"type": "http.response.body", "body": part, "more_body": True})
        await send({"type": "http.response.body", "body": b""})


def merged_metrics(texts: list[tuple[str | None, str]]) -> bytes:
    """Join Prometheus texts of (model, text): each family once, with a label `model` on the samples
    of a model; None: the router's own, without that label. Models' OWN_METRICS are left out."""
    merged = dict[str, Metric]()
    for model, text in texts:
        for family in text_string_to_metric_families(text):
            if model is None or not OWN_METRICS.match(family.name):
                head = Metric(family.name, family.documentation, family.type)
                for s in family.samples:
                    labels = s.labels if model is None else {"model": model, **s.labels}
                    merged.setdefault(family.name, head).add_sample(s.name, labels, s.value)
    registry: Any = SimpleNamespace(collect=merged.values)
    return generate_latest(registry)
