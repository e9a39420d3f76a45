"""Load on a server of OpenAI's protocol: how long people wait, how much comes out, how full it is.

    python bench/load.py URL [--requests 64] [--rate 2] [--input 16-256] [--output 16-64] [--seed 0]
                         [--key-file FILE] [--save]

Requests come as a Poisson process of so many a second (0: all at once), with lengths drawn between
two bounds, evenly in their logarithm, and tokens drawn at random: the same for the same seed. Each
is a stream of /v1/completions without an end but its length. Refusals with 429 are counted, not
sent again.

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
import socket
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
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
#: bytes of a body that are sent at once
PART = 1 << 16


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


async def ask(client: httpx.AsyncClient, asked: Asked) -> None:
    """Send a request when its time has come, and note when its text comes."""
    await asyncio.sleep(asked.at)
    body = {"prompt": asked.tokens, "max_tokens": asked.new, "ignore_eos": True, "stream": True}
    body |= {"stream_options": {"include_usage": True}, "temperature": 0}
    begun = time.perf_counter()
    async with client.stream("POST", "/v1/completions", json=body) as response:
        asked.status = response.status_code
        async for line in response.aiter_lines():
            if asked.status == 200 and line.startswith("data: {"):
                note(asked, json.loads(line[6:]), time.perf_counter() - begun)
    asked.took = time.perf_counter() - begun


def note(asked: Asked, event: dict[str, Any], now: float) -> None:
    if "error" in event:
        asked.status = 500
    if event.get("usage"):
        asked.made = event["usage"]["completion_tokens"]
    if any(choice.get("text") for choice in event.get("choices", ())):
        asked.pieces.append(now)


async def run(args: Any, requests: list[Asked]) -> tuple[float, dict[str, float]]:
    """Send all of them; return the seconds that took and what the server counted meanwhile."""
    key = Path(args.key_file).read_text().split()[0] if args.key_file else ""
    held = {"Authorization": f"Bearer {key}"} if key else {}
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(
        base_url=args.url, headers=held, timeout=None, limits=limits
    ) as client:
        before = await counts(client)
        begun = time.perf_counter()
        await asyncio.gather(*(ask(client, r) for r in requests))
        took = time.perf_counter() - begun
        return took, {k: n - before.get(k, 0) for k, n in (await counts(client)).items()}


async def counts(client: httpx.AsyncClient) -> dict[str, float]:
    """Return the server's counts of steps by active rows, where it has such."""
    lines = (await client.get("/metrics")).text.splitlines()
    found = (line.rpartition(" ") for line in lines if line.startswith("g4ir_slot_steps_total{"))
    return {name.partition('"')[2].rstrip('"}'): float(value) for name, _, value in found}


def quantiles(name: str, values: list[float], unit: float = 1e3) -> list[str]:
    """Return a line of a table, in ms."""
    ordered = sorted(values)
    at = (ordered[min(len(ordered) - 1, int(s * len(ordered)))] for s in SHARES)
    return [name, *((f"{x * unit:.0f}" for x in at) if values else ("-",) * len(SHARES))]


def report(took: float, requests: list[Asked], steps: dict[str, float]) -> str:
    """Return what a run was like."""
    good = [r for r in requests if r.status == 200]
    gaps = [b - a for r in good for a, b in zip(r.pieces, r.pieces[1:], strict=False)]
    table = [
        ["ms", *(f"p{round(s * 100)}" for s in SHARES)],
        quantiles("first text", [r.pieces[0] for r in good if r.pieces]),
        quantiles("between texts", gaps),
        quantiles("whole answer", [r.took for r in good]),
    ]
    ends = ", ".join(f"{n} x {s}" for s, n in sorted(Counter(r.status for r in requests).items()))
    made, read = sum(r.made for r in good), sum(len(r.tokens) for r in good)
    facts = [
        f"{len(requests)} requests in {took:.1f} s ({ends})",
        f"{made / took:.1f} tokens/s made, {read / took:.1f} tokens/s of prompts",
    ]
    if total := sum(steps.values()):
        full = sum(int(rows) * n for rows, n in steps.items()) / total
        facts.append(f"{full:.2f} rows decoded at a time ({total:.0f} steps)")
    return "\n".join([*facts, "", aligned(table, indent=0)])


# --- what holds up a stream -----------------------------------------------------------------


def tail(url: str, tokens: int, ended: Event, sent: Connection) -> None:
    """Read one stream after the other until `ended`, and send when its pieces came: in a process of
    its own, so that gaps are the server's and not those of the load."""
    body = {"prompt": [LOW] * 4, "max_tokens": tokens, "ignore_eos": True, "stream": True}
    times: list[float | None] = []
    with httpx.Client(base_url=url, timeout=600) as client:
        while not ended.is_set():
            times.append(None)  # the time between two streams is no gap
            with client.stream("POST", "/v1/completions", json=body) as response:
                for line in response.iter_lines():
                    if line.startswith("data: {"):
                        times.append(time.monotonic())
                        if len(times) == 4:
                            sent.send("begun")
                    if ended.is_set():
                        break
    sent.send(times)


def longest_gap(times: list[float | None], begun: float, ended: float) -> float:
    """Return the longest time without a piece that overlaps a span."""
    spans = [(a, b) for a, b in pairwise(times) if a is not None and b is not None]
    return max((b - a for a, b in spans if b >= begun and a <= ended), default=0.0)


def large_bodies(size: int) -> dict[str, tuple[str, bytes]]:
    """Return name -> (path, body) of about `size` bytes each."""
    text = json.dumps("some words, " * (size // 12)).encode()
    said = b'{"messages": [{"role": "user", "content": %s}]}' % text
    many = b", ".join([b'{"role": "user", "content": "%s"}' % (b"a b " * (size // 16384))] * 4096)
    return {
        "one text": ("/v1/chat/completions", said),
        "4096 messages": ("/v1/chat/completions", b'{"messages": [%s]}' % many),
        "a prompt": ("/v1/completions", b'{"prompt": %s}' % text),
        "texts": ("/v1/completions", b'{"prompt": ["a", %s]}' % text),
        "tokenize": ("/tokenize", b'{"prompt": %s}' % text),
        "ids": ("/v1/completions", b'{"prompt": [%s5]}' % (b"5," * (size // 2))),
        "detokenize": ("/detokenize", b'{"tokens": [%s5]}' % (b"305," * (size // 4))),
        "brackets": ("/v1/chat/completions", b'{"messages": [%s[]]}' % (b"[]," * (size // 3))),
        "stop": ("/v1/completions", b'{"prompt": "a", "stop": %s}' % text),
    }


def beside(args: Any) -> str:
    """Return a table: the longest gap of a stream beside each kind of load."""
    spawn = multiprocessing.get_context("spawn")
    ended, (times, sent) = spawn.Event(), spawn.Pipe(duplex=False)
    with httpx.Client(base_url=args.url, timeout=600) as client:
        room = client.get("/v1/models").json()["data"][0]["max_model_len"]
        reader = spawn.Process(target=tail, args=(args.url, min(room - 8, 4096), ended, sent))
        reader.start()
        sent.close()  # the other end tells of a reader that failed
        table, rows = [["load", "answer", "s", "longest gap ms"]], []
        try:
            times.recv()
            for name, act in loads(client, args):
                begun = time.monotonic()
                answer = act()
                rows.append((name, answer, begun, time.monotonic()))
                time.sleep(0.5)
        finally:
            ended.set()
        found = times.recv()
        reader.join()
    for name, answer, begun, over in rows:
        gap = 1e3 * longest_gap(found, begun, over)
        table.append([name, answer, f"{over - begun:.2f}", f"{gap:.0f}"])
    peak = f"\nmost memory of the server: {peak_mib(args.pid)} MiB" if args.pid else ""
    return aligned(table, indent=0) + peak


def loads(client: httpx.Client, args: Any) -> Iterator[tuple[str, Callable[[], str]]]:
    def post(path: str, body: bytes) -> Callable[[], str]:
        kind = {"Content-Type": "application/json", "Content-Length": str(len(body))}

        def act() -> str:  # in parts: the client copies what is left of a part with each write
            parts = (body[i : i + PART] for i in range(0, len(body), PART))
            return str(client.post(path, content=parts, headers=kind).status_code)

        return act

    yield "nothing", lambda: time.sleep(2) or "-"
    form = b'{"prompt": "a", "max_tokens": 4, "response_format": {"type": "json_object"}}'
    chat = form.replace(b'"prompt": "a"', b'"messages": [{"role": "user", "content": "a"}]')
    yield "first JSON", post("/v1/chat/completions", chat)
    for size in args.bodies:
        for name, (path, body) in large_bodies(size).items():
            yield f"{name}, {size / 1e6:g} MB", post(path, body)
    yield f"{args.half} half heads", lambda: half_heads(args.url, args.half)


def half_heads(url: str, count: int) -> str:
    """Open connections that send half a head each, and ask as somebody else after them."""
    found, held = httpx.URL(url), []
    for _ in range(count):
        with contextlib.suppress(OSError):
            held.append(socket.create_connection((found.host, found.port or 80), 5))
            held[-1].sendall(b"POST /v1/chat/completions HTTP/1.1\r\nHost: loc")
    answer = httpx.get(f"{url}/health", timeout=60).status_code
    for s in held:
        s.close()
    return str(answer)


def peak_mib(pid: int) -> int:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) >> 10 for line in lines if line.startswith("VmHWM:"))


def bounds(text: str) -> tuple[int, int]:
    low, _, high = text.partition("-")
    found = int(low), int(high or low)
    if not 1 <= found[0] <= found[1]:
        raise SystemExit(f"{text!r}: expected two numbers from 1 on, low-high")
    return found


def main() -> None:
    flags: dict[str, Any] = {"requests": 64, "rate": 2.0, "seed": 0, "key_file": None}
    flags |= {"input": "16-256", "output": "16-64"}
    flags |= {"beside": False, "bodies": (2_000_000, 30_000_000), "half": 5000, "pid": 0}
    args = arguments(__doc__, "url", **flags)
    if args.beside:
        finish(args, "load-beside", beside(args))
        return
    requests = drawn(args)
    took, steps = asyncio.run(run(args, requests))
    finish(args, "load", report(took, requests, steps))


if __name__ == "__main__":
    main()
