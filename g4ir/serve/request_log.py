"""An id for each request, in the response headers and in the log; a log line when it ends."""

from __future__ import annotations

import re
import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

#: pattern of a client's request ids that are used unchanged; others are replaced
_ID = re.compile(r"[\w.:-]{1,128}", re.ASCII)
#: headers of the id: OpenAI's clients and proxies read the first, Anthropic's the second
HEADERS = ("X-Request-Id", "request-id")


@dataclass
class RequestLog:
    """ASGI middleware. `log`: callback with the values of a log line, without texts of the request;
    None: no log. GET requests are not logged, nor are forwarded ones: the process that answers them
    logs them. `count`: callback with the path and status of each response; 0 if there was none."""

    app: ASGIApp
    log: Callable[..., None] | None = None
    count: Callable[[str, int], None] = lambda path, status: None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        client_id = Headers(scope=scope).get(HEADERS[0], "")
        number = client_id if _ID.fullmatch(client_id) else f"req_{secrets.token_hex(12)}"
        values: dict[str, Any] = {}
        scope.setdefault("state", {}).update(said=values, id=number)
        status, sent, began = 0, 0, time.monotonic()

        async def answered(message: Message) -> None:
            nonlocal status, sent
            if message["type"] == "http.response.start":
                status, headers = message["status"], MutableHeaders(scope=message)
                for name in HEADERS:
                    headers[name] = number
            sent += len(message.get("body", b""))
            await send(message)

        try:
            await self.app(scope, receive, answered)
        finally:
            self.count(scope["path"], status)
            if self.log and scope["method"] != "GET" and not values.get("forwarded"):
                values |= {"sent": sent, "seconds": round(time.monotonic() - began, 4)}
                path = ascii(scope["path"])[1:-1][:100]
                head = {"id": number, "method": scope["method"], "path": path, "status": status}
                self.log("request", **head, **{k: v for k, v in values.items() if v is not None})
