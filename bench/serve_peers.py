"""Throughput and latency of `g4ir serve` and of llama.cpp's server on one GGUF file, on the CPU,
with the same number of threads.

    python bench/serve_peers.py ENGINE FILE PROGRAM [--clients 1,8,32] [--requests 2] [--rounds 2]
                                [--input-len 128] [--output-len 64] [--threads 2] [--save]

PROGRAM is `llama-server`, with a slot for each client of the highest level; the engine needs
as large a batch. Clients are a closed loop: each sends a request (random prompt tokens, so no
prefix cache hits; greedy; no end of sequence) when its last one has been answered, `--requests` of
them a round. The servers take turns, in alternating order, after one discarded request each per
level. tokens/s is answers x output length / seconds; TTFT is until the first event with text, ITL
between two of them.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import re
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
#: in the last event: OpenAI's reason; llama-server leaves `null` in others
FINISHED = re.compile(rb'"finish_reason": ?"')
#: seconds until a server is ready
READY_S = 600
OURS, PEER = "g4ir", "llama-server"


async def ask(url: str, body: dict[str, Any]) -> list[float]:
    """Stream an answer; return when it was sent, and when each event with text came, the finish
    chunk excluded. It only scans lines, which leaves the processor to the servers."""
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
        if line.startswith(b"data: {") and b'"text"' in line and not FINISHED.search(line):
            times.append(time.perf_counter())
    writer.close()
    return times


async def closed_loop(url: str, clients: int, args: Any, drawn: random.Random) -> list[list[float]]:
    """Run a closed loop of clients; return the times of all answers."""

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
    """Wait until a server is ready, for at most READY_S."""
    until = time.monotonic() + READY_S
    while made.poll() is None and time.monotonic() < until:
        try:
            if httpx.get(f"{url}/health").status_code == 200:
                return
        except httpx.HTTPError:
            pass
        time.sleep(0.2)
    raise SystemExit(f"{url}: the server ended, or is not ready after {READY_S} s")


def row(clients: int, name: str, length: int, rounds: list[tuple[float, Any]]) -> list[str]:
    answers = [times for _, found in rounds for times in found]
    rate = len(answers) * length / sum(took for took, _ in rounds)
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
        limits = httpx.get(f"{urls[OURS]}/server_info").json()["limits"]
        if (held := limits["max_batch"]) < most:
            raise SystemExit(f"{args.engine}: max_batch {held} is less than {most} clients")
        table = [HEAD]
        for clients in args.clients:
            found: dict[str, Any] = {name: [] for name in urls}
            one = argparse.Namespace(**{**vars(args), "requests": 1})
            for url in urls.values():
                asyncio.run(closed_loop(url, 1, one, drawn))
            for i in range(args.rounds):
                for name, url in [*urls.items()][:: -1 if i % 2 else 1]:
                    begun = time.perf_counter()
                    answers = asyncio.run(closed_loop(url, clients, args, drawn))
                    found[name].append((time.perf_counter() - begun, answers))
                    print(*row(clients, name, args.output_len, found[name][-1:]), file=sys.stderr)
            cells = [row(clients, name, args.output_len, rounds) for name, rounds in found.items()]
            cells[0].append(f"{float(cells[0][2]) / float(cells[1][2]):.2f}")
            table += [cells[0], [*cells[1], ""]]
    label = f"{Path(args.file).name}, prompts of {args.input_len}, answers of {args.output_len}"
    finish(args, "serve_peers", f"{label}\n\n{aligned(table, indent=0)}")


if __name__ == "__main__":
    main()
