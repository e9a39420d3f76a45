"""Tools of the benchmark scripts beyond g4ir.bench: their arguments, a stopwatch, and the summary
of a run."""

from __future__ import annotations

import argparse
import shlex
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from g4ir.backends.torch_compile import pyops
from g4ir.backends.torch_compile.compile import compile_kernels
from g4ir.bench.measure import interleave
from g4ir.bench.stats import Stat, around, median
from g4ir.bench.system import environment
from g4ir.bench.text import machine

RESULTS = Path(__file__).resolve().parent / "results"


def arguments(doc: str | None, *names: str, words: Any = None, **flags: Any) -> argparse.Namespace:
    """Return what the command line says: positional `names`, flags with these defaults, --save. A
    default of a tuple of numbers is given as 1,2,4; False is a switch."""
    parser = argparse.ArgumentParser(description=(doc or "").splitlines()[0])
    for name in names:
        parser.add_argument(name)
    for name, default in {**flags, "save": False}.items():
        flag, kind = f"--{name.replace('_', '-')}", type(default)
        if default is False:
            parser.add_argument(flag, action="store_true")
        elif kind is tuple:
            inner = partial(_list, type(default[0]))
            parser.add_argument(flag, type=inner, default=default)
        else:
            parser.add_argument(flag, type=str if default is None else kind, default=default)
    return parser.parse_args(words)


def _list(kind: Callable[[str], Any], text: str) -> tuple[Any, ...]:
    return tuple(map(kind, text.split(",")))


def seconds(f: Callable[[], Any]) -> float:
    start = time.perf_counter()
    f()
    return time.perf_counter() - start


def medians(rounds: int, runs: dict[str, Callable[[], float]]) -> dict[str, float]:
    """Return each run's median seconds over A-B-A-B rounds: every round calls every run once."""
    _, times = interleave(rounds, lambda: None, runs)
    return {name: median(values) for name, values in times.items()}


def middle(many: list[float], factor: float = 1.0) -> Stat:
    """Return the median of one value a round, with its spread."""
    return around(median(many) * factor, [x * factor for x in many])


def load_kernels() -> None:
    """Compile the CPU kernels of this checkout, and load them."""
    with tempfile.TemporaryDirectory() as folder:
        compile_kernels(path := Path(folder) / "kernels.so")
        pyops.load_kernels(path)


def finish(args: argparse.Namespace, name: str, text: str, device: str = "cpu") -> None:
    """Print a summary; with --save write it to bench/results, under the command and the machine
    that it is of."""
    print(text.rstrip())
    if args.save:
        command = f"$ python bench/{Path(sys.argv[0]).name} {shlex.join(sys.argv[1:])}"
        path = RESULTS / f"{name}.txt"
        path.write_text(f"{command}\n{machine(environment(device))}\n\n{text.rstrip()}\n")
        print(f"written: {path.relative_to(RESULTS.parents[1])}")
