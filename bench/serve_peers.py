"""Throughput and latency of `g4ir serve` and of llama.cpp's server on one GGUF file, on the CPU,
with the same number of threads.

    python bench/serve_peers.py ENGINE FILE PROGRAM [--clients 1,8,32] [--requests 2] [--rounds 2]
                                [--input-len 128] [--output-len 64] [--threads 2] [--save]

PROGRAM is `llama-server`, with a slot for each client of the highest level; the engine needs
as large a batch. Clients are a closed loop: each sends a request (random prompt tokens, so no
prefix cache hits; greedy; no end of sequence) when its last one has been answered, `--requests` of
them a round. The servers take turns with the same prompts, in alternating order, after one
discarded request each per level. tokens/s is answers x output length / seconds; TTFT is until the
first event with text, ITL between two of them, several tokens if one alone is no text.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import sys
import time
from itertools import pairwise
from pathlib import Path
from statistics import quantiles
from typing import Any

import httpx
from common import arguments, finish
from load import HIGH, LOW
from serving import G4IR, ask, served

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


async def closed_loop(url: str, clients: int, args: Any, drawn: random.Random) -> list[list[float]]:
    """Run a closed loop of clients; return of each answer the times of sending and of each
    event."""

    async def client(prompts: list[list[int]]) -> list[list[float]]:
        body = {"max_tokens": args.output_len, "ignore_eos": True, "cache_prompt": False}
        return [await ask(url, {**body, "prompt": tokens}) for tokens in prompts]

    prompts = [
        [drawn.choices(range(LOW, HIGH), k=args.input_len) for _ in range(args.requests)]
        for _ in range(clients)
    ]
    return [times for found in await asyncio.gather(*map(client, prompts)) for times in found]


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
    most, room = max(args.clients), args.input_len + args.output_len
    threads = ("--threads", str(args.threads))
    peer = [args.program, "-m", args.file, "--log-disable"]
    peer += ["--parallel", str(most), "--ctx-size", str(most * (room + 8))]
    with served(*G4IR, args.engine, *threads) as ours, served(*peer, *threads) as other:
        urls = {OURS: ours[0], PEER: other[0]}
        limits = httpx.get(f"{urls[OURS]}/server_info").json()["limits"]
        if (held := limits["max_batch"]) < most:
            raise SystemExit(f"{args.engine}: max_batch {held} is less than {most} clients")
        table = [HEAD]
        for clients in args.clients:
            found: dict[str, Any] = {name: [] for name in urls}
            one = argparse.Namespace(**{**vars(args), "requests": 1})
            for url in urls.values():
                asyncio.run(closed_loop(url, 1, one, random.Random(-1)))
            for i in range(args.rounds):
                for name, url in [*urls.items()][:: -1 if i % 2 else 1]:
                    begun = time.perf_counter()
                    answers = asyncio.run(closed_loop(url, clients, args, random.Random(i)))
                    found[name].append((time.perf_counter() - begun, answers))
                    print(*row(clients, name, args.output_len, found[name][-1:]), file=sys.stderr)
            cells = [row(clients, name, args.output_len, rounds) for name, rounds in found.items()]
            cells[0].append(f"{float(cells[0][2]) / float(cells[1][2]):.2f}")
            table += [cells[0], [*cells[1], ""]]
    label = f"{Path(args.file).name}, prompts of {args.input_len}, answers of {args.output_len}"
    finish(args, "serve_peers", f"{label}\n\n{aligned(table, indent=0)}")


if __name__ == "__main__":
    main()
