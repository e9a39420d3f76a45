"""Engines in turn with a read of the memory: what each takes, and its share of the read's rate.

    python bench/shares.py ENGINE... [--input-len 512] [--output-len 25] [--rounds 5] [--save]

For engines of one variant whose weights are held in different ways. A round is one read, then one
request of each engine; times are medians over the rounds. `prefill` is the median ratio of a round
to the first engine's; `share` the bytes that a step needs by the median rate of the read and the
median step. Memory may be faster in one minute than in the next: rates of all rounds stand below.
--save writes bench/results/shares.txt.
"""

from __future__ import annotations

import argparse
from functools import partial

import torch
from common import save

import g4ir
from g4ir.bench.measure import interleave, timed_request, turn
from g4ir.bench.roof import Meter, middle
from g4ir.bench.runners import EngineRunner
from g4ir.bench.stats import median
from g4ir.bench.work import find_work
from g4ir.bench.workload import draw_tokens, plan_workload
from g4ir.ui.table import aligned

HEAD = ("engine", "bytes of a step", "prefill ms", "prefill", "decode ms", "GB/s", "share")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("engines", nargs="+", metavar="ENGINE")
    parser.add_argument("--input-len", type=int, default=512)
    parser.add_argument("--output-len", type=int, default=25)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--save", action="store_true")
    args = parser.parse_args()
    engines = {path: g4ir.load_engine(path) for path in args.engines}
    w = plan_workload(list(engines.values()), args.input_len, args.output_len)
    runners = {path: EngineRunner(engine, 1) for path, engine in engines.items()}
    tokens = {path: draw_tokens(w, engine) for path, engine in engines.items()}
    for path, runner in runners.items():
        timed_request(runner, w, tokens[path])
    turns = {path: partial(turn, runners[path], w, tokens[path], 1) for path in engines}
    rates, found = interleave(args.rounds, Meter("cpu", torch.bfloat16).measure, turns)
    first = [many[0].ttft for many in found[args.engines[0]]]
    lines = []
    for path, engine in engines.items():
        prefill = [many[0].ttft for many in found[path]]
        step = median([x for many in found[path] for x in many[0].itl])
        needed = find_work(engine, w, tokens[path]).decode_cost().needed_bytes
        lines.append(
            [
                path.rstrip("/").rpartition("/")[2],
                f"{needed / 1e9:.2f} GB",
                f"{median(prefill) * 1e3:.0f}",
                f"{median([a / b for a, b in zip(prefill, first, strict=True)]):.2f}",
                f"{step * 1e3:.1f}",
                f"{needed / step / 1e9:.0f}",
                f"{needed / middle(rates).read / step:.2f}",
            ]
        )
    reads = ", ".join(f"{r.read / 1e9:.0f}" for r in rates)
    text = f"{aligned([HEAD, *lines], indent=0)}read, GB/s, by rounds: {reads}\n"
    print(text, end="")
    if args.save:
        save("shares", text)


if __name__ == "__main__":
    main()
