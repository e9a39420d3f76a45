"""Media of requests: data URLs, http from hosts that were named, and files below one folder.

A request says what is fetched, so that nothing may be reached through a server that whoever started
it did not mean: a name must lead to public addresses, the connection goes to the very address that
was looked at, and where an answer leads elsewhere nobody follows.
"""

from __future__ import annotations

import contextlib
import http.client
import ipaddress
import os
import socket
import ssl
import stat
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import SplitResult, unquote, urlsplit

from g4ir.chat.messages import Medium
from g4ir.engine.engine import Engine
from g4ir.engine.multimodal import source_of
from g4ir.errors import InputError
from g4ir.model.media import encode_options

from .http_errors import bad, missing

#: media of one request
MOST_MEDIA = 32
#: detail of an image_url -> which of the engine's image budgets; "auto": the default one
DETAILS = {"low": 0, "high": -1, "original": -1}
PORTS = {"http": 80, "https": 443}
#: characters of an address
LONGEST_URL = 8192
_PIECE = 1 << 16
#: IPv6 networks whose addresses stand for ones of IPv4
_CARRIERS = [*map(ipaddress.IPv6Network, ("64:ff9b::/96", "64:ff9b:1::/48", "2002::/16"))]


@dataclass(frozen=True)
class Sources:
    """Names what may be fetched beside data URLs. `hosts` are (name, port or None: that of the
    scheme); `most` bytes and `seconds` are those of all media of one request."""

    hosts: frozenset[tuple[str, int | None]] = frozenset()
    folder: Path | None = None
    most: int = 32 << 20
    seconds: float = 10.0

    @classmethod
    def named(cls, hosts: Iterable[str], folder: str | Path | None, most: int) -> Sources:
        """Return sources of named hosts, each NAME, ADDRESS, or either with :PORT, and a folder.
        InputError for what is none."""
        if folder is not None and not Path(folder).is_dir():
            raise InputError(f"--media-dir {folder}: is no folder")
        resolved = None if folder is None else Path(folder).resolve()
        return cls(frozenset(map(_host, hosts)), resolved, most)


def _host(text: str) -> tuple[str, int | None]:
    try:
        found = urlsplit(f"//{text if text.count(':') < 2 or '[' in text else f'[{text}]'}")
        name, port = found.hostname, found.port
    except ValueError:
        name, port = None, None
    if not name or found.path or found.query or "@" in text or "*" in text:
        what = "expected the name or the address of a host, or NAME:PORT"
        raise InputError(f"--media-hosts {text}: {what}")
    return name, port


class Fetching:
    """The media of one request: bytes and seconds that are left."""

    def __init__(self, sources: Sources) -> None:
        self.sources, self.left = sources, sources.most
        self.end = time.monotonic() + sources.seconds

    def read(self, url: str, where: str) -> bytes:
        """Return the bytes at an address. InputError where it may not be asked, or fails."""
        found = port = None
        with contextlib.suppress(ValueError):
            if len(url) <= LONGEST_URL and url.isprintable():
                parts = urlsplit(url)
                found, port = parts, parts.port
        if found is None or found.scheme not in (*PORTS, "file"):
            raise InputError(
                f"{where}: must be a data URL in base64, such as data:image/png;base64,..., or an "
                f"address of http, https or file that this server may read"
            )
        raw = self._file(found, where) if found.scheme == "file" else self._get(found, port, where)
        self.left -= len(raw)
        return raw

    def _check_size(self, size: int, where: str) -> None:
        if size > self.left:
            most = self.sources.most
            raise InputError(f"{where}: the media have more than {most} bytes together")

    def _file(self, url: SplitResult, where: str) -> bytes:
        folder = self.sources.folder
        if folder is None:
            raise InputError(f"{where}: no file is read here; see --media-dir, or give a data URL")
        # One text for all that is wrong: nobody learns what there is elsewhere.
        refused = InputError(f"{where}: is no file that lies below --media-dir")
        path = Path(unquote(url.path))
        if url.netloc not in ("", "localhost") or ".." in path.parts or "\0" in str(path):
            raise refused
        try:
            real = path.resolve(strict=True)
            if not real.is_relative_to(folder):
                raise refused
            with open(real, "rb", opener=_opened) as file:
                if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                    raise refused
                raw = file.read(self.left + 1)
        except (OSError, RuntimeError):
            raise refused from None
        self._check_size(len(raw), where)
        return raw

    def _get(self, url: SplitResult, port: int | None, where: str) -> bytes:
        name = url.hostname or ""
        usual, hosts = PORTS[url.scheme], self.sources.hosts
        port = port or usual
        named = (name, port) in hosts or (port == usual and (name, None) in hosts)
        if not named or url.username is not None:
            raise InputError(
                f"{where}: {name[:80] or 'no host'} is not one of this server's --media-hosts; "
                f"give a data URL in base64, such as data:image/png;base64,..."
            )
        try:
            return self._answer(url, name, self._address(name, port, where), port, where)
        except (OSError, http.client.HTTPException, ValueError):
            slow = time.monotonic() >= self.end
            why = f"took longer than {self.sources.seconds:g} s" if slow else "gave no answer"
            raise InputError(f"{where}: {name} {why}") from None

    def _address(self, name: str, port: int, where: str) -> str:
        """Return the address to connect to: a public one, unless the name is an address."""
        with contextlib.suppress(ValueError):
            return str(ipaddress.ip_address(name))
        found = socket.getaddrinfo(name, port, type=socket.SOCK_STREAM)
        public = [str(at[4][0]) for at in found if is_public(str(at[4][0]))]
        if not public:
            raise InputError(f"{where}: {name} has no public address; name its address instead")
        return public[0]

    def _answer(self, url: SplitResult, name: str, address: str, port: int, where: str) -> bytes:
        path = (url.path or "/") + (f"?{url.query}" if url.query else "")
        headers = {"Accept-Encoding": "identity", "User-Agent": "g4ir", "Connection": "close"}
        with self._connected(url.scheme == "https", name, address, port) as connection:
            connection.request("GET", path, headers=headers)
            answer = connection.getresponse()
            if answer.status != 200:
                moved = "; give the address that it leads to" if answer.status // 100 == 3 else ""
                raise InputError(f"{where}: {name} answered {answer.status}{moved}")
            if answer.getheader("Content-Encoding", "identity") != "identity":
                raise InputError(f"{where}: {name} answered in an encoding that was not asked for")
            self._check_size(answer.length or 0, where)
            out = bytearray()
            while part := answer.read(_PIECE):
                out += part
                self._check_size(len(out), where)
        if answer.length or time.monotonic() >= self.end:
            raise OSError("the answer was cut")
        return bytes(out)

    @contextlib.contextmanager
    def _connected(self, secure: bool, name: str, address: str, port: int) -> Iterator[Any]:
        """A context with a connection, which ends with the time that is left whatever it does."""
        left = self.end - time.monotonic()
        if left <= 0:
            raise TimeoutError
        made = http.client.HTTPSConnection if secure else http.client.HTTPConnection
        connection = made(name, port)
        connection.sock = plain = socket.create_connection((address, port), left)
        twin = plain.dup()  # TLS takes the other one
        timer = threading.Timer(max(self.end - time.monotonic(), 0), _cut, [twin])
        timer.daemon = True
        timer.start()
        try:
            if secure:
                context = ssl.create_default_context()
                connection.sock = context.wrap_socket(plain, server_hostname=name)
            yield connection
        finally:
            timer.cancel()
            timer.join()
            twin.close()
            connection.close()


def _cut(end: socket.socket) -> None:
    """End what waits for a connection."""
    with contextlib.suppress(OSError):
        end.shutdown(socket.SHUT_RDWR)


def _opened(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK)


def is_public(address: str) -> bool:
    """Whether an address is one of the public network."""
    ip = ipaddress.ip_address(address.partition("%")[0])
    if isinstance(ip, ipaddress.IPv6Address) and ip.ipv4_mapped:
        ip = ip.ipv4_mapped
    return ip.is_global and not ip.is_multicast and not any(ip in n for n in _CARRIERS)


def read_bytes(
    engine: Engine, media: Sequence[Medium], sources: Sources
) -> list[tuple[Medium, bytes]]:
    """Return media with their bytes, in their order. Refused are kinds that the engine does not
    take, and what is neither a data URL nor one of the sources'."""
    if len(media) > MOST_MEDIA:
        raise InputError(f"messages: have {len(media)} media, at most {MOST_MEDIA} are read")
    for medium in media:
        if medium.kind not in engine.media.kinds:
            raise missing("messages", f"this engine takes no {medium.kind} ({medium.place})")
    fetching, out = Fetching(sources), []
    for medium in media:
        found = source_of(medium)
        raw = fetching.read(found.text, found.where) if found.raw is None else found.raw
        out.append((medium, raw))
    return out


def setting(engine: Engine, medium: Medium, fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return how `Engine.encode` reads a medium: as the request's fields say, or an image as its
    own `detail` does."""
    outer = medium.part.get("image_url")
    detail = outer.get("detail") if isinstance(outer, dict) else None
    if detail not in (None, "auto", *DETAILS):
        raise bad(f"{medium.place}.image_url.detail", f"must be auto, {', '.join(DETAILS)}")
    options = encode_options(medium.kind, fields)
    if detail in DETAILS:
        options.setdefault("budget", engine.media.budgets[DETAILS[detail]])
    return options
