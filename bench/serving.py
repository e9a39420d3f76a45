"""Servers in separate processes, and a client that streams answers."""

from __future__ import annotations

import asyncio
import json
import re
import socket
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any
from urllib.parse import urlsplit

import httpx
from common import process

#: matches the last event of a stream, which has a finish reason; llama-server sends `null` in the
#: others
FINISHED = re.compile(rb'"finish_reason": ?"')
#: seconds until a server is ready
READY_S = 600
#: command line that serves an engine, whose path follows
G4IR = (sys.executable, "-m", "g4ir", "serve", "--trust", "--set", "page=off")


@contextmanager
def served(*words: str) -> Iterator[tuple[str, int]]:
    """Context with a server, started by a command with a free --port; yields its URL and process id
    once it is ready."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    url = f"http://127.0.0.1:{port}"
    with process(*words, "--port", str(port)) as made:
        until = time.monotonic() + READY_S
        while not _is_ready(url):
            if made.poll() is not None or time.monotonic() > until:
                raise SystemExit(f"{words[0]}: ended, or is not ready after {READY_S} s")
            time.sleep(0.2)
        yield url, made.pid


def _is_ready(url: str) -> bool:
    with suppress(httpx.HTTPError):
        return httpx.get(f"{url}/health").status_code == 200
    return False


async def ask(url: str, body: dict[str, Any], seconds: float = READY_S) -> list[float]:
    """Stream a completion, for at most so many seconds after its first text; return when it was
    sent, and when each event with text came, the finish chunk excluded. It only scans lines, which
    leaves the processor to the servers."""
    at, raw = urlsplit(url), json.dumps({**body, "temperature": 0, "stream": True}).encode()
    reader, writer = await asyncio.open_connection(at.hostname, at.port)
    head = (
        f"POST /v1/completions HTTP/1.1\r\nHost: {at.netloc}\r\nContent-Type: application/json\r\n"
    )
    times = [time.perf_counter()]
    writer.write(f"{head}Content-Length: {len(raw)}\r\nConnection: close\r\n\r\n".encode() + raw)
    first = await reader.readline()
    if b" 200 " not in first:
        raise SystemExit(f"{url}: {first.decode()}{(await reader.read()).decode()}")
    while times[-1] < times[:2][-1] + seconds and (line := await reader.readline()):
        if line.startswith(b"data: {") and b'"text"' in line and not FINISHED.search(line):
            times.append(time.perf_counter())
    writer.close()
    return times
