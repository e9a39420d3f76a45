"""CPU time of the server per token, in addition to the engine's. These are CPU seconds, which a
busy machine changes little.

    python bench/serve_cost.py ENGINE [--rows 1,8,32] [--tokens 200] [--rounds 3] [--threads 1]

Each round streams `rows` answers at a time from the server, greedy; the engine alone runs as many
decode steps of a session with this batch size, with argmax. `beyond`: CPU time of a served step
minus that of the engine's.
"""

from __future__ import annotations

import asyncio
import os
import time
from pathlib import Path
from statistics import median

import torch
from common import arguments, finish
from serving import G4IR, ask, served

import g4ir  # before torch: it sets how OpenMP waits
from g4ir.ui.table import aligned

TICK = os.sysconf("SC_CLK_TCK")
PROMPT = [300, 301, 302, 303]


def cpu_s(pid: int) -> float:
    """Return the CPU seconds of a process."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / TICK


async def streams(url: str, rows: int, tokens: int) -> None:
    """Stream `rows` answers of `tokens` tokens concurrently."""
    body = {"prompt": PROMPT, "max_tokens": tokens, "ignore_eos": True}
    await asyncio.gather(*(ask(url, body) for _ in range(rows)))


def served_ms(url: str, pid: int, rows: int, tokens: int) -> float:
    """Return the server's CPU milliseconds per decode step of `rows` sequences."""
    before = cpu_s(pid)
    asyncio.run(streams(url, rows, tokens))
    return 1e3 * (cpu_s(pid) - before) / tokens


def alone(engine: g4ir.Engine, rows: int, tokens: int) -> float:
    """Return the CPU milliseconds per decode step of a session without scheduler and server."""
    session = engine.session(rows)
    chosen = session.prefill(torch.tensor([PROMPT] * rows)).argmax(-1)
    before = time.process_time()
    for _ in range(tokens):
        chosen = session.decode(chosen).argmax(-1)
    return 1e3 * (time.process_time() - before) / tokens


def main() -> None:
    args = arguments(__doc__, "engine", rows=(1, 8, 32), tokens=200, rounds=3, threads=1)
    torch.set_num_threads(args.threads)
    table = [["rows", "engine", "served", "beyond", "beyond a token"]]
    words = (*G4IR, args.engine, "--threads", str(args.threads))
    with served(*words) as (url, pid), g4ir.load_engine(args.engine, trust=True) as engine:
        for rows in args.rows:
            asyncio.run(streams(url, rows, 8))
            found = [
                (alone(engine, rows, args.tokens), served_ms(url, pid, rows, args.tokens))
                for _ in range(args.rounds)
            ]
            own, all_ = (median(column) for column in zip(*found))
            cost = all_ - own
            table.append([str(rows), *(f"{x:.3f}" for x in (own, all_, cost, cost / rows))])
    finish(args, "serve_cost", f"CPU ms a step\n\n{aligned(table, indent=0)}")


if __name__ == "__main__":
    main()
