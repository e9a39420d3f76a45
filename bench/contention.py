"""Speed of an engine alone, beside one busy process and beside two.

    python bench/contention.py ENGINE [--baseline PYTHON ENGINE] [--threads N] [--rounds 5]
                               [--seconds 2] [--prompt-len 256] [--serve] [--save]

Measures prefill (--prompt-len tokens) and decode with the default threads and wait policy. Each
engine runs in a process of its own, and the conditions take turns, so that all see the same
minutes. Prints medians over the rounds in tokens/s, and their ratio to the same engine alone.
`--baseline` adds an engine of another checkout, run by its interpreter; `--serve` one stream of
`g4ir serve`, whose event loop and client need the cores too. --save writes
bench/results/contention.txt.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from statistics import median

from common import save

from g4ir.ui.table import aligned

#: condition -> busy processes beside the engine
CONDITIONS = {"alone": 0, "beside one": 1, "beside two": 2}
#: a process that reads what to measure for how many seconds, and answers with tokens/s
MEASURED = """
import sys, time
import g4ir
import torch

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


class Process:
    """An engine in a process of its own."""

    def __init__(self, python: str, engine: str, threads: int, length: int) -> None:
        self._process = subprocess.Popen(
            [python, "-c", MEASURED, engine, str(threads), str(length)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self._line()

    def _line(self) -> str:
        assert self._process.stdout
        if line := self._process.stdout.readline():
            return line
        raise SystemExit("the process of an engine ended: see above")

    def rate(self, what: str, seconds: float) -> float:
        """Return tokens/s of prompts or of decode steps."""
        assert self._process.stdin
        print(what, seconds, file=self._process.stdin, flush=True)
        return float(self._line())

    def close(self) -> None:
        self._process.kill()
        self._process.wait()


class Server:
    """`g4ir serve` and one client at a time."""

    def __init__(self, engine: str) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "g4ir", "serve", engine, "--port", "0"],
            stderr=subprocess.PIPE,
            text=True,
        )
        assert self._process.stderr
        for line in self._process.stderr:
            if found := re.search(r"(http://\S+:\d+)", line):
                self._url = found[1]
            if "ready" in line:
                return
        raise SystemExit("g4ir serve ended: see above")

    def rate(self, seconds: float) -> float:
        """Return tokens/s of one stream, from its first token to its last."""
        body = {"prompt": [2, 5, 7, 9], "max_tokens": 900, "stream": True, "ignore_eos": True}
        request = urllib.request.Request(
            f"{self._url}/v1/completions",
            json.dumps(body).encode(),
            {"Content-Type": "application/json"},
        )
        marks: list[float] = []
        with urllib.request.urlopen(request) as answer:
            for line in answer:
                if line.startswith(b"data: {"):
                    marks.append(time.perf_counter())
                if marks and marks[-1] > marks[0] + seconds:
                    break
        return (len(marks) - 1) / (marks[-1] - marks[0])

    def close(self) -> None:
        self._process.kill()
        self._process.wait()


@contextmanager
def busy(count: int) -> Iterator[None]:
    """A context beside which so many processes compute."""
    many = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(count)]
    try:
        time.sleep(0.3 if many else 0)
        yield
    finally:
        for process in many:
            process.kill()
            process.wait()


Rates = dict[str, dict[str, list[float]]]


def measure(runs: dict[str, Callable[[], float]], rounds: int) -> Rates:
    """Return run -> condition -> its rates by round."""
    found: Rates = {name: {condition: [] for condition in CONDITIONS} for name in runs}
    for _ in range(rounds):
        for condition, count in CONDITIONS.items():
            for name, run in runs.items():
                with busy(count):
                    found[name][condition].append(run())
    return found


def table(found: Rates) -> list[list[str]]:
    """Return the rows of the summary."""
    beside = [c for c, count in CONDITIONS.items() if count]
    rows = [["", *CONDITIONS, *(f"share {c}" for c in beside)]]
    for name, rates in found.items():
        middle = {c: median(many) for c, many in rates.items()}
        shares = [f"{middle[c] / middle['alone']:.2f}" for c in beside]
        rows.append([name, *(f"{middle[c]:.1f}" for c in CONDITIONS), *shares])
    return rows


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("engine", metavar="ENGINE")
    parser.add_argument("--baseline", nargs=2, metavar=("PYTHON", "ENGINE"))
    parser.add_argument("--threads", type=int, default=0)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=2.0)
    parser.add_argument("--prompt-len", type=int, default=256)
    parser.add_argument("--serve", action="store_true")
    parser.add_argument("--save", action="store_true")
    args = parser.parse_args(words)
    with ExitStack() as stack:
        runs: dict[str, Callable[[], float]] = {}
        engines = {"": (sys.executable, args.engine)}
        if args.baseline:
            engines["baseline, "] = tuple(args.baseline)
        for name, (python, engine) in engines.items():
            process = Process(python, engine, args.threads, args.prompt_len)
            stack.callback(process.close)
            for what in ("decode", "prompt"):
                runs[name + what] = lambda p=process, w=what: p.rate(w, args.seconds)  # type: ignore[misc]
        if args.serve:
            server = Server(args.engine)
            stack.callback(server.close)
            runs["serve, one stream"] = lambda: server.rate(args.seconds)
        found = measure(runs, args.rounds)
    text = aligned(table(found))
    print(text)
    if args.save:
        save("contention", f"tokens/s\n\n{text}")


if __name__ == "__main__":
    main()
