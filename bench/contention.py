"""Speed of an engine while other processes keep cores busy.

    python bench/contention.py ENGINE [--baseline PYTHON:ENGINE] [--threads N] [--rounds 5]
                               [--seconds 2] [--prompt-len 256] [--serve] [--save]

Measures prefill (--prompt-len tokens) and decode with the default threads and wait policy. Each
engine runs in a process of its own, and the conditions take turns, so that all see the same
minutes. Prints medians over the rounds in tokens/s, and their ratio to the same engine alone.
`--baseline` adds an engine of another checkout, run by its interpreter; `--serve` one stream of
`g4ir serve`, whose event loop and client need the cores too. --save writes
bench/results/contention.txt.
"""

from __future__ import annotations

import asyncio
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from statistics import median
from typing import Any

from common import arguments, finish, process
from serving import G4IR, ask, served

from g4ir.ui.table import aligned

#: condition -> busy processes beside the engine
CONDITIONS = {"alone": 0, "beside one": 1, "beside two": 2}
#: program of an engine's process: reads lines `decode SECONDS` or `prompt SECONDS`, answers each
#: with tokens/s
MEASURED = """
import sys, time
del sys.path[0]  # this folder, which may be another checkout than the interpreter's
import g4ir, torch

engine, threads, length = g4ir.load_engine(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
if threads:
    torch.set_num_threads(threads)
session = engine.session()
prompt = torch.arange(2, 2 + length)[None] % engine.spec.text.vocab_size

def prefill():
    session.reset()
    return session.prefill(prompt).argmax(-1)

def decode():
    global token
    token = session.decode(token).argmax(-1)
    token.tolist()
    if int(session.length[0]) + 1 >= engine.limits.max_seq:
        token = prefill()

token = prefill()
decode()
print("ready", flush=True)
for line in sys.stdin:
    what, seconds = line.split()
    step, tokens, count = (prefill, length, 0) if what == "prompt" else (decode, 1, 0)
    token = prefill()
    start = time.perf_counter()
    while count < 3 or time.perf_counter() < start + float(seconds):
        step()
        count += tokens
    print(count / (time.perf_counter() - start), flush=True)
"""


def read(stream: Any) -> str:
    """Return the next line of a stream; SystemExit at its end."""
    if line := stream.readline():
        return str(line)
    raise SystemExit("the process of an engine ended: see above")


def engine_rate(made: subprocess.Popen[str], what: str, seconds: float) -> float:
    """Return tokens/s of prompts or of decode steps, as the engine's process measures them."""
    print(what, seconds, file=made.stdin, flush=True)
    return float(read(made.stdout))


def served_rate(url: str, seconds: float) -> float:
    """Return tokens/s of one stream, from its first token to its last."""
    body = {"prompt": [2, 5, 7, 9], "max_tokens": 900, "ignore_eos": True}
    _, *marks = asyncio.run(ask(url, body, seconds))
    return (len(marks) - 1) / (marks[-1] - marks[0])


def measured(runs: dict[str, Callable[[], float]], rounds: int) -> list[list[str]]:
    """Return the rows of the summary: each run in each condition, in turn."""
    found: dict[tuple[str, str], list[float]] = {(n, c): [] for n in runs for c in CONDITIONS}
    for _ in range(rounds):
        for (name, condition), rates in found.items():
            with ExitStack() as busy:
                for _ in range(CONDITIONS[condition]):
                    busy.enter_context(process(sys.executable, "-c", "while True: pass"))
                time.sleep(0.3 * bool(CONDITIONS[condition]))
                rates.append(runs[name]())
    alone, *beside = CONDITIONS
    rows = [["", *CONDITIONS, *(f"share {c}" for c in beside)]]
    for name in runs:
        middle = {c: median(found[name, c]) for c in CONDITIONS}
        shares = [f"{middle[c] / middle[alone]:.2f}" for c in beside]
        rows.append([name, *(f"{middle[c]:.1f}" for c in CONDITIONS), *shares])
    return rows


def main() -> None:
    flags: dict[str, Any] = {"baseline": None, "threads": 0, "rounds": 5, "seconds": 2.0}
    args = arguments(__doc__, "engine", **flags, prompt_len=256, serve=False)
    engines = {"": (sys.executable, args.engine)}
    if args.baseline:
        engines["baseline, "] = tuple(args.baseline.split(":", 1))
    pipe = subprocess.PIPE
    with ExitStack() as stack:
        runs: dict[str, Callable[[], float]] = {}
        for name, (python, engine) in engines.items():
            words = (python, "-c", MEASURED, engine, str(args.threads), str(args.prompt_len))
            made = stack.enter_context(process(*words, stdin=pipe, stdout=pipe))
            read(made.stdout)
            for what in ("decode", "prompt"):
                runs[name + what] = partial(engine_rate, made, what, args.seconds)
        if args.serve:
            url, _ = stack.enter_context(served(*G4IR, args.engine))
            runs["serve, one stream"] = partial(served_rate, url, args.seconds)
        finish(args, "contention", f"tokens/s\n\n{aligned(measured(runs, args.rounds))}")


if __name__ == "__main__":
    main()
