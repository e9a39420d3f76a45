"""Tools of the benchmark scripts beyond g4ir.bench: a stopwatch, and the summary of a run."""

from __future__ import annotations

import shlex
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from g4ir.backends.torch_compile import pyops
from g4ir.backends.torch_compile.compile import compile_kernels
from g4ir.bench.measure import interleave
from g4ir.bench.stats import median
from g4ir.bench.system import environment
from g4ir.bench.text import machine

RESULTS = Path(__file__).resolve().parent / "results"


def seconds(f: Callable[[], Any]) -> float:
    start = time.perf_counter()
    f()
    return time.perf_counter() - start


def medians(rounds: int, **runs: Callable[[], float]) -> dict[str, float]:
    """Return each run's median seconds over A-B-A-B rounds: every round calls every run once."""
    _, times = interleave(rounds, lambda: None, runs)
    return {name: median(values) for name, values in times.items()}


def load_kernels() -> None:
    """Compile the CPU kernels of this checkout, and load them."""
    with tempfile.TemporaryDirectory() as folder:
        compile_kernels(path := Path(folder) / "kernels.so")
        pyops.load_kernels(path)


def save(name: str, text: str, device: str = "cpu") -> None:
    """Write a summary to bench/results, under the command and the machine that it is of."""
    command = f"$ python bench/{Path(sys.argv[0]).name} {shlex.join(sys.argv[1:])}"
    path = RESULTS / f"{name}.txt"
    path.write_text(f"{command}\n{machine(environment(device))}\n\n{text.rstrip()}\n")
    print(f"written: {path.relative_to(RESULTS.parents[1])}")
