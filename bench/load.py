"""Load on a server of OpenAI's protocol: how long people wait, how much comes out, how full it is.

    python bench/load.py URL [--requests 64] [--rate 2] [--input 16-256] [--output 16-64] [--seed 0]
                         [--key-file FILE] [--save]

Requests come as a Poisson process of so many a second (0: all at once), with random tokens, in
lengths drawn between two bounds, evenly in their logarithm. Refusals are counted, not sent again.

    python bench/load.py URL --beside [--half 5000] [--pid SERVER]

measures how long one stream stands still while large bodies, the first request of JSON and half
heads of requests come, each against the stream alone. Start the server anew for it.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import multiprocessing
import random
import re
import socket
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from multiprocessing.connection import Connection
from multiprocessing.synchronize import Event
from pathlib import Path
from typing import Any

import httpx
from common import arguments, finish

from g4ir.ui.table import aligned

#: shares of requests, or of gaps between tokens, that are below what is printed
SHARES = (0.5, 0.95, 0.99)
#: ids that are tokens of text in all vocabularies of the family, the tiny ones included
LOW, HIGH = 300, 480
#: bytes of a body that are sent at once: the client copies what is left of a part with each write
PART = 1 << 16
CHAT, TEXT = "/v1/chat/completions", "/v1/completions"


@dataclass
class Asked:
    """A request, and what came of it: seconds from its sending, one for each piece of text."""

    at: float
    tokens: list[int]
    new: int
    status: int = 0
    pieces: list[float] = field(default_factory=list)
    made: int = 0
    took: float = 0.0


def drawn(args: Any) -> list[Asked]:
    """Draw the requests of a run."""
    r, at, found = random.Random(args.seed), 0.0, []
    sizes = bounds(args.input), bounds(args.output)
    for _ in range(args.requests):
        lengths = [round(math.exp(r.uniform(*map(math.log, b)))) for b in sizes]
        found.append(Asked(at, r.choices(range(LOW, HIGH), k=lengths[0]), lengths[1]))
        at += r.expovariate(args.rate) if args.rate else 0.0
    return found


def bounds(text: str) -> tuple[int, int]:
    low, _, high = text.partition("-")
    found = int(low), int(high or low)
    if not 1 <= found[0] <= found[1]:
        raise SystemExit(f"{text!r}: expected two numbers from 1 on, low-high")
    return found


async def ask(client: httpx.AsyncClient, asked: Asked) -> None:
    """Send a request when its time has come, and note when its text comes."""
    await asyncio.sleep(asked.at)
    body = {"prompt": asked.tokens, "max_tokens": asked.new, "ignore_eos": True, "stream": True}
    body |= {"stream_options": {"include_usage": True}, "temperature": 0}
    begun = time.perf_counter()
    async with client.stream("POST", TEXT, json=body) as response:
        asked.status = response.status_code
        async for line in response.aiter_lines():
            if asked.status != 200 or not line.startswith("data: {"):
                continue
            event = json.loads(line[6:])
            if "error" in event:
                asked.status = 500
            asked.made = (event.get("usage") or {}).get("completion_tokens", asked.made)
            if any(choice.get("text") for choice in event.get("choices", ())):
                asked.pieces.append(time.perf_counter() - begun)
    asked.took = time.perf_counter() - begun


async def run(args: Any, requests: list[Asked]) -> tuple[float, Counter[int]]:
    """Send all; return the seconds that took, and the server's steps by sequences decoded."""
    key = Path(args.key_file).read_text().split()[0] if args.key_file else ""
    client = httpx.AsyncClient(
        base_url=args.url,
        headers={"Authorization": f"Bearer {key}"} if key else {},
        timeout=None,
        limits=httpx.Limits(max_connections=None),
    )
    async with client:
        before, begun = await steps(client), time.perf_counter()
        await asyncio.gather(*(ask(client, r) for r in requests))
        took = time.perf_counter() - begun
        return took, await steps(client) - before


async def steps(client: httpx.AsyncClient) -> Counter[int]:
    lines = (await client.get("/metrics")).text
    found = re.findall(r'^g4ir_slot_steps_total\{.*"(\d+)"\} (\S+)', lines, re.M)
    return Counter({int(rows): int(float(count)) for rows, count in found})


def report(took: float, requests: list[Asked], decoded: Counter[int]) -> str:
    """Return what a run was like."""
    good = [r for r in requests if r.status == 200]
    times = {
        "first text": [r.pieces[0] for r in good if r.pieces],
        "between texts": [b - a for r in good for a, b in pairwise(r.pieces)],
        "whole answer": [r.took for r in good],
    }
    table = [["ms", *(f"p{round(s * 100)}" for s in SHARES)]]
    for name, values in times.items():
        at = [sorted(values)[int(s * len(values))] for s in SHARES] if values else []
        table.append([name, *([f"{x * 1e3:.0f}" for x in at] or ["-"] * len(SHARES))])
    ends = ", ".join(f"{n} x {s}" for s, n in sorted(Counter(r.status for r in requests).items()))
    made, read = sum(r.made for r in good), sum(len(r.tokens) for r in good)
    facts = [
        f"{len(requests)} requests in {took:.1f} s ({ends})",
        f"{made / took:.1f} tokens/s made, {read / took:.1f} tokens/s of prompts",
    ]
    if total := decoded.total():
        full = sum(rows * n for rows, n in decoded.items()) / total
        facts.append(f"{full:.2f} rows decoded at a time ({total} steps)")
    return "\n".join([*facts, "", aligned(table, indent=0)])


def tail(url: str, tokens: int, ended: Event, sent: Connection) -> None:
    """Read one stream after the other until `ended`, and send the gaps between pieces, as spans: in
    a process of its own, so that they are the server's and not those of the load."""
    body = {"prompt": [LOW] * 4, "max_tokens": tokens, "ignore_eos": True, "stream": True}
    spans: list[tuple[float, float]] = []
    with httpx.Client(base_url=url, timeout=600) as client:
        while not ended.is_set():
            times: list[float] = []
            with client.stream("POST", TEXT, json=body) as response:
                for line in response.iter_lines():
                    if line.startswith("data: {"):
                        times.append(time.monotonic())
                        if len(times) == 3 and not spans:
                            sent.send("begun")
                    if ended.is_set():
                        break
            spans += pairwise(times)
    sent.send(spans)


def large_bodies(size: int) -> dict[str, tuple[str, bytes]]:
    """Return name -> (path, body) of about `size` bytes each."""
    text = json.dumps("some words, " * (size // 12)).encode()
    said = b'{"messages": [{"role": "user", "content": %s}]}' % text
    many = b", ".join([b'{"role": "user", "content": "%s"}' % (b"a b " * (size // 16384))] * 4096)
    return {
        "one text": (CHAT, said),
        "4096 messages": (CHAT, b'{"messages": [%s]}' % many),
        "a prompt": (TEXT, b'{"prompt": %s}' % text),
        "texts": (TEXT, b'{"prompt": ["a", %s]}' % text),
        "tokenize": ("/tokenize", b'{"prompt": %s}' % text),
        "ids": (TEXT, b'{"prompt": [%s5]}' % (b"5," * (size // 2))),
        "detokenize": ("/detokenize", b'{"tokens": [%s5]}' % (b"305," * (size // 4))),
        "brackets": (CHAT, b'{"messages": [%s[]]}' % (b"[]," * (size // 3))),
        "stop": (TEXT, b'{"prompt": "a", "stop": %s}' % text),
    }


def loads(client: httpx.Client, args: Any) -> Iterator[tuple[str, partial[str]]]:
    """Yield name -> what makes a kind of load, and returns the status of the answer."""
    yield "nothing", partial(pause, args.pause)
    form = b'"max_tokens": 4, "response_format": {"type": "json_object"}}'
    body = b'{"messages": [{"role": "user", "content": "a"}], ' + form
    yield "first JSON", partial(post, client, CHAT, body)
    for size in args.bodies:
        for name, given in large_bodies(size).items():
            yield f"{name}, {size / 1e6:g} MB", partial(post, client, *given)
    yield f"{args.half} half heads", partial(half_heads, args.url, args.half)


def pause(duration: float) -> str:
    time.sleep(duration)
    return "-"


def post(client: httpx.Client, path: str, body: bytes) -> str:
    kind = {"Content-Type": "application/json", "Content-Length": str(len(body))}
    parts = (body[i : i + PART] for i in range(0, len(body), PART))
    return str(client.post(path, content=parts, headers=kind).status_code)


def half_heads(url: str, count: int) -> str:
    """Open connections that send half a head each, and ask as somebody else after them."""
    found = httpx.URL(url)
    with contextlib.ExitStack() as held:
        for _ in range(count):
            with contextlib.suppress(OSError):
                made = socket.create_connection((found.host, found.port or 80), 5)
                held.enter_context(made).sendall(b"POST /v1/chat/completions HTTP/1.1\r\nHost: loc")
        return str(httpx.get(f"{url}/health", timeout=60).status_code)


def beside(args: Any) -> str:
    """Return a table: the longest gap of a stream beside each kind of load."""
    spawn = multiprocessing.get_context("spawn")
    ended, (told, sent) = spawn.Event(), spawn.Pipe(duplex=False)
    rows: list[tuple[str, str, float, float]] = []
    with httpx.Client(base_url=args.url, timeout=600) as client:
        room = client.get("/v1/models").json()["data"][0]["max_model_len"]
        reader = spawn.Process(target=tail, args=(args.url, min(room - 8, 4096), ended, sent))
        reader.start()
        sent.close()  # the other end tells of a reader that failed
        try:
            told.recv()
            for name, act in loads(client, args):
                begun = time.monotonic()
                rows.append((name, act(), begun, time.monotonic()))
                time.sleep(args.pause / 4)
        finally:
            ended.set()
        spans = told.recv()
        reader.join()
    table = [["load", "answer", "s", "longest gap ms"]]
    for name, answer, begun, over in rows:
        gap = max((b - a for a, b in spans if b >= begun and a <= over), default=0.0)
        table.append([name, answer, f"{over - begun:.2f}", f"{gap * 1e3:.0f}"])
    text = aligned(table, indent=0)
    if args.pid:
        (peak,) = re.findall(r"VmHWM:\s+(\d+)", Path(f"/proc/{args.pid}/status").read_text())
        text += f"\nmost memory of the server: {int(peak) >> 10} MiB"
    return text


def main() -> None:
    flags: dict[str, Any] = {"requests": 64, "rate": 2.0, "seed": 0, "key_file": None}
    flags |= {"input": "16-256", "output": "16-64", "pause": 2.0}
    flags |= {"beside": False, "bodies": (2_000_000, 30_000_000), "half": 5000, "pid": 0}
    args = arguments(__doc__, "url", **flags)
    if args.beside:
        finish(args, "load-beside", beside(args))
        return
    requests = drawn(args)
    took, decoded = asyncio.run(run(args, requests))
    finish(args, "load", report(took, requests, decoded))


if __name__ == "__main__":
    main()
