"""Access checks of requests: Host header, API keys, and size and type of bodies."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import ipaddress
import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

from starlette.requests import ClientDisconnect, Request

from g4ir.errors import InputError

from .http_errors import Refused
from .rate_limits import KeyLimits

JSON = "application/json"
#: host names of this machine
LOCAL = ("localhost",)
#: prefixes of paths that also accept Anthropic's key header
KEYED = ("/v1/messages", "/v1/models")
#: prefixes of the paths that need a key
GUARDED = ("/v1/", "/api/", "/metrics", "/tokenize", "/detokenize", "/render", "/server_info")


@dataclass(frozen=True)
class Auth:
    """Access rules. `keys`: allowed API keys, (): none is needed; `hosts`: Host names allowed in
    addition to loopback addresses, None: any; `max_body`: maximum bytes of a body; `body_s`:
    maximum seconds to receive it."""

    keys: Collection[bytes] = ()
    hosts: tuple[str, ...] | None = None
    max_body: int = 32 << 20
    body_s: float = 30.0

    def check(self, request: Request, path: str) -> str:
        """Refuse a request that is not allowed. Return the prefix-cache salt of its key, "" if the
        path or the server needs no key."""
        self._check_host(request)
        guarded = path.startswith(GUARDED)
        if not self.keys or not guarded:
            return ""
        scheme, _, bearer = request.headers.get("authorization", "").partition(" ")
        keys = {bearer.strip()} if scheme.lower() == "bearer" else set()
        fix = "send Authorization: Bearer KEY"
        if path.startswith(KEYED):
            keys |= {k.strip() for k in request.headers.getlist("x-api-key") if k.strip()}
            fix += ", or x-api-key: KEY"
        raw = keys.pop().encode() if len(keys) == 1 else b""
        matches = [hmac.compare_digest(raw, key) for key in self.keys]  # no early exit
        if not any(matches):
            why = "different keys were sent" if keys else "the API key is missing or wrong"
            headers = {"WWW-Authenticate": "Bearer"}
            raise Refused(401, f"{why}: {fix}", code="invalid_api_key", headers=headers)
        return salt_of(raw)

    def _check_host(self, request: Request) -> None:
        """Protect against DNS rebinding: a website may reach a local server through its own domain
        name, which browsers send as Host. A local HTTP/1.0 health check may omit the header."""
        host = request.headers.get("host")
        old = host is None and request.scope["http_version"] == "1.0"
        if self.hosts is None or (old and request.client and is_loopback(request.client.host)):
            return
        host = (host or "").lower()
        name = host[1:].partition("]")[0] if host.startswith("[") else host.partition(":")[0]
        if name not in self.hosts and not is_loopback(name):
            why = "the Host header does not name this server; --allow-host NAME accepts another"
            raise Refused(403, why, code="wrong_host")

    async def body(self, request: Request, content_type: str | None = JSON) -> bytes:
        """Read a request's body; Refused if it is too large, too slow or not of `content_type`
        (None: any), or if the client disconnects."""
        kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        if content_type is not None and kind != content_type:
            raise Refused(415, f"the Content-Type must be {content_type}")
        size = request.headers.get("content-length", "")
        self._check_size(int(size) if size.isdigit() else 0)
        try:
            return await asyncio.wait_for(self._read(request), self.body_s)
        except asyncio.TimeoutError:
            raise Refused(408, f"the body took longer than {self.body_s:g} seconds") from None
        except ClientDisconnect:
            raise Refused(499, "the client went away") from None

    async def _read(self, request: Request) -> bytes:
        out = bytearray()
        async for part in request.stream():
            out += part
            self._check_size(len(out))
        return bytes(out)

    def _check_size(self, size: int) -> None:
        if size > self.max_body:
            raise Refused(413, f"the body has more than {self.max_body} bytes")


def is_loopback(name: str) -> bool:
    """Whether a name is `localhost` or a loopback address."""
    try:
        return name in LOCAL or ipaddress.ip_address(name).is_loopback
    except ValueError:
        return False


def salt_of(key: bytes) -> str:
    """Return the prefix-cache salt of a key: a digest that identifies the key and does not reveal
    it."""
    return hashlib.sha256(key).hexdigest()


def read_keys(path: str | Path) -> dict[bytes, KeyLimits]:
    """Read API keys and their limits per minute from a file, one per line: KEY [requests=N]
    [tokens=N]. InputError if the file is wrong; it numbers the lines without the empty ones."""
    path, keys = Path(path), dict[bytes, KeyLimits]()
    try:
        lines = [line.split() for line in path.read_text().split("\n") if line.strip()]
    except UnicodeDecodeError:
        raise InputError(f"{path}: not UTF-8; write one key a line") from None
    for number, (key, *words) in enumerate(lines, 1):
        if not (key.isascii() and key.isprintable()) or not all("=" in word for word in words):
            raise InputError(
                f"{path}: key {number}: expected printable ASCII without spaces, then limits NAME=N"
            )
        limits = dict[str, int]()
        for word in words:
            match = re.fullmatch(r"(requests|tokens)=([1-9][0-9]{0,11})", word)
            if not match or match[1] in limits:
                fix = "expected requests=N or tokens=N after the key, N above 0, each once"
                raise InputError(f"{path}: key {number}: {fix}")
            limits[match[1]] = int(match[2])
        keys[key.encode()] = KeyLimits(**limits)
    if not keys:
        raise InputError(f"{path}: has no key; write one a line")
    return keys


def allowed_hosts(host: str, names: Sequence[str] = ()) -> tuple[str, ...] | None:
    """Return the names that a Host header may have (`names`, and those of this machine); None (any)
    unless the server is bound to a loopback address."""
    return tuple(n.lower() for n in (*LOCAL, *names)) if is_loopback(host) else None
