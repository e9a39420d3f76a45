"""An engine served by g4ir beside the GGUF file that it was built from served by llama.cpp, on the
CPU, with as many threads.

    python bench/serve_peers.py ENGINE FILE PROGRAM [--clients 1,8,32] [--requests 2] [--rounds 2]
                                [--input-len 128] [--output-len 64] [--threads 2] [--save]

PROGRAM is llama.cpp's `llama-server`, with as many slots as there are clients at most. Clients are
a closed loop: each sends a request (prompts of random tokens, which no cache knows; greedy) when
its last one has been answered, `--requests` of them a round. The servers take turns. TTFT is until
the first event with a token, ITL between two of them.
"""

from __future__ import annotations

import asyncio
import json
import random
import socket
import sys
import time
from itertools import pairwise
from pathlib import Path
from statistics import quantiles
from typing import Any
from urllib.parse import urlsplit

import httpx
from common import arguments, finish
from contention import process
from load import HIGH, LOW

from g4ir.ui.table import aligned

HEAD = [
    "clients",
    "server",
    "tokens/s",
    "TTFT p50",
    "p99",
    "ITL p50",
    "p99 ms",
    "tokens/s, ours is",
]
OURS, PEER = "g4ir", "llama-server"


async def ask(url: str, body: dict[str, Any]) -> list[float]:
    """Stream an answer; return when it was sent, and when each event with a token came. It reads
    lines and no more, so that the servers have the processor."""
    at, raw = urlsplit(url), json.dumps(body).encode()
    reader, writer = await asyncio.open_connection(at.hostname, at.port)
    head = (
        f"POST /v1/completions HTTP/1.1\r\nHost: {at.netloc}\r\nContent-Type: application/json\r\n"
    )
    times = [time.perf_counter()]
    writer.write(f"{head}Content-Length: {len(raw)}\r\nConnection: close\r\n\r\n".encode() + raw)
    first = await reader.readline()
    if b" 200 " not in first:
        raise SystemExit(f"{url}: {first.decode()}{(await reader.read()).decode()}")
    while line := await reader.readline():
        if line.startswith(b"data: {") and b'"text"' in line:
            times.append(time.perf_counter())
    writer.close()
    return times


async def closed_loop(url: str, clients: int, args: Any, drawn: random.Random) -> list[list[float]]:
    """Let so many clients ask again and again; return the times of all answers."""

    async def client(prompts: list[list[int]]) -> list[list[float]]:
        body = {"max_tokens": args.output_len, "temperature": 0, "stream": True}
        body |= {"ignore_eos": True, "cache_prompt": False}
        return [await ask(url, {**body, "prompt": tokens}) for tokens in prompts]

    prompts = [
        [drawn.choices(range(LOW, HIGH), k=args.input_len) for _ in range(args.requests)]
        for _ in range(clients)
    ]
    return [times for found in await asyncio.gather(*map(client, prompts)) for times in found]


def wait_for(url: str, made: Any) -> None:
    """Wait until a server is ready."""
    while made.poll() is None:
        try:
            if httpx.get(f"{url}/health").status_code == 200:
                return
        except httpx.HTTPError:
            pass
        time.sleep(0.2)
    raise SystemExit(f"{url}: the server ended")


def row(clients: int, name: str, rounds: list[tuple[float, list[list[float]]]]) -> list[str]:
    answers = [times for _, found in rounds for times in found]
    rate = sum(len(times) - 1 for times in answers) / sum(took for took, _ in rounds)
    gaps = [b - a for times in answers for a, b in pairwise(times[1:])]
    cells = [str(clients), name, f"{rate:.1f}"]
    for seconds in ([times[1] - times[0] for times in answers], gaps):
        cut = quantiles(seconds, n=100, method="inclusive")
        cells += [f"{1e3 * cut[49]:.1f}", f"{1e3 * cut[98]:.1f}"]
    return cells


def main() -> None:
    flags: dict[str, Any] = {"clients": (1, 8, 32), "requests": 2, "rounds": 2, "threads": 2}
    flags |= {"input_len": 128, "output_len": 64}
    args = arguments(__doc__, "engine", "file", "program", **flags)
    most, room, drawn = max(args.clients), args.input_len + args.output_len, random.Random(0)
    threads, ports = str(args.threads), dict[str, str]()
    for name in (OURS, PEER):
        with socket.create_server(("127.0.0.1", 0)) as free:
            ports[name] = str(free.getsockname()[1])
    ours = [sys.executable, "-m", "g4ir", "serve", args.engine, "--trust", "--no-page"]
    ours += ["--port", ports[OURS], "--threads", threads]
    peer = [args.program, "-m", args.file, "--port", ports[PEER], "--threads", threads]
    peer += ["--parallel", str(most), "--ctx-size", str(most * (room + 8)), "--log-disable"]
    with process(*ours) as a, process(*peer) as b:
        urls = {name: f"http://127.0.0.1:{port}" for name, port in ports.items()}
        wait_for(urls[OURS], a)
        wait_for(urls[PEER], b)
        table = [HEAD]
        for clients in args.clients:
            found: dict[str, Any] = {name: [] for name in urls}
            for _ in range(args.rounds):
                for name, url in urls.items():
                    begun = time.perf_counter()
                    answers = asyncio.run(closed_loop(url, clients, args, drawn))
                    found[name].append((time.perf_counter() - begun, answers))
                    print(*row(clients, name, found[name][-1:]), file=sys.stderr)
            cells = [row(clients, name, rounds) for name, rounds in found.items()]
            cells[0].append(f"{float(cells[0][2]) / float(cells[1][2]):.2f}")
            table += [cells[0], [*cells[1], ""]]
    label = f"{Path(args.file).name}, prompts of {args.input_len}, answers of {args.output_len}"
    finish(args, "serve_peers", f"{label}\n\n{aligned(table, indent=0)}")


if __name__ == "__main__":
    main()
