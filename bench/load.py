"""Load on a server of OpenAI's protocol: latencies, throughput, and sequences per decode step.

    python bench/load.py URL [--requests 64] [--rate 2] [--input 16-256] [--output 16-64] [--seed 0]
                         [--key-file FILE] [--save]

Requests arrive as a Poisson process of --rate per second (0: all at once), with random tokens;
lengths are drawn between two bounds, log-uniformly. Refused requests are counted, not sent again.
"""

from __future__ import annotations

import asyncio
import json
import math
import random
import re
import time
from collections import Counter
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import httpx
from common import arguments, finish

from g4ir.ui.table import aligned

#: printed percentiles, of requests or of gaps between tokens
SHARES = (0.5, 0.95, 0.99)
#: ids that are tokens of text in all vocabularies of the family, the tiny ones included
LOW, HIGH = 300, 480
TEXT = "/v1/completions"


@dataclass
class Asked:
    """A request, sent `at` seconds after the start, for `new` tokens; and its result: `pieces`, for
    each piece of text the seconds since sending, `made` output tokens, `took` seconds in all."""

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
    """Send a request at its time, and record when its text arrives."""
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
    """Send all requests; return the seconds until the last answer, and the server's decode steps by
    number of sequences."""
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
    """Return the report of a run."""
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
        facts.append(f"{full:.2f} sequences decoded at a time ({total} steps)")
    return "\n".join([*facts, "", aligned(table, indent=0)])


def main() -> None:
    flags: dict[str, Any] = {"requests": 64, "rate": 2.0, "seed": 0, "key_file": None}
    args = arguments(__doc__, "url", **flags, input="16-256", output="16-64")
    requests = drawn(args)
    took, decoded = asyncio.run(run(args, requests))
    finish(args, "load", report(took, requests, decoded))


if __name__ == "__main__":
    main()
