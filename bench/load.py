"""Load on a server of OpenAI's protocol: how long people wait, how much comes out, how full it is.

    python bench/load.py URL [--requests 64] [--rate 2] [--input 16-256] [--output 16-64] [--seed 0]
                         [--key-file FILE] [--save]

Requests come as a Poisson process of so many a second (0: all at once), with lengths drawn between
two bounds, evenly in their logarithm, and tokens drawn at random: the same for the same seed. Each
is a stream of /v1/completions without an end but its length. Refusals with 429 are counted, not
sent again.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import random
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
from common import save

from g4ir.ui.table import aligned

#: shares of requests, or of gaps between tokens, that are below what is printed
SHARES = (0.5, 0.95, 0.99)
#: ids that are tokens of text in all vocabularies of the family, the tiny ones included
LOW, HIGH = 300, 480


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


def drawn(args: argparse.Namespace) -> list[Asked]:
    """Draw the requests of a run."""
    r, at, found = random.Random(args.seed), 0.0, []
    for _ in range(args.requests):
        lengths = [round(math.exp(r.uniform(*map(math.log, b)))) for b in (args.input, args.output)]
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


async def run(args: argparse.Namespace, requests: list[Asked]) -> tuple[float, dict[str, float]]:
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


def bounds(text: str) -> tuple[int, int]:
    low, _, high = text.partition("-")
    found = int(low), int(high or low)
    if not 1 <= found[0] <= found[1]:
        raise argparse.ArgumentTypeError(f"{text!r}: expected two numbers from 1 on, low-high")
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("url")
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--rate", type=float, default=2.0, help="a second; 0: all at once")
    parser.add_argument("--input", type=bounds, default=(16, 256), help="tokens, low-high")
    parser.add_argument("--output", type=bounds, default=(16, 64), help="tokens, low-high")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--key-file")
    parser.add_argument("--save", action="store_true")
    args = parser.parse_args()
    requests = drawn(args)
    took, steps = asyncio.run(run(args, requests))
    text = report(took, requests, steps)
    print(text)
    if args.save:
        save("load", text)


if __name__ == "__main__":
    main()
