"""Tools of the benchmark scripts: arguments, a stopwatch, and the summary of a run."""

from __future__ import annotations

import argparse
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from g4ir.bench.system import environment
from g4ir.bench.text import machine

RESULTS = Path(__file__).resolve().parent / "results"


def arguments(doc: str | None, *names: str, **flags: Any) -> argparse.Namespace:
    """Parse the command line: positional `names`, flags with these defaults, --save. A tuple of
    numbers is written as 1,2,4; a default of False is a switch."""
    parser = argparse.ArgumentParser(description=(doc or "").splitlines()[0])
    for name in names:
        parser.add_argument(name)
    for name, default in {**flags, "save": False}.items():
        flag, kind = f"--{name.replace('_', '-')}", type(default)
        if default is False:
            parser.add_argument(flag, action="store_true")
            continue
        if kind is tuple:
            read: Callable[[str], Any] = partial(_list, type(default[0]))
        else:
            read = str if default is None else kind
        parser.add_argument(flag, type=read, default=default)
    return parser.parse_args()


def _list(kind: Callable[[str], Any], text: str) -> tuple[Any, ...]:
    return tuple(map(kind, text.split(",")))


def seconds(f: Callable[[], Any]) -> float:
    start = time.perf_counter()
    f()
    return time.perf_counter() - start


@contextmanager
def process(*words: str, **pipes: Any) -> Iterator[subprocess.Popen[str]]:
    """Context with a process, which is ended at exit."""
    with subprocess.Popen([*words], text=True, **pipes) as made:
        try:
            yield made
        finally:
            made.kill()


def fill_with_noise(session: Any) -> None:
    """Fill a session's KV caches with random values, as if tokens had been computed; `.rms` tensors
    get positive ones."""
    for name, t in session.state.tensors.items():
        t.normal_()
        if name.endswith(".rms"):
            t.abs_()


def finish(args: argparse.Namespace, name: str, text: str, device: str = "cpu") -> None:
    """Print a summary; with --save also write it to bench/results, with its command and machine."""
    print(text.rstrip())
    if args.save:
        command = f"$ python bench/{Path(sys.argv[0]).name} {shlex.join(sys.argv[1:])}"
        path = RESULTS / f"{name}.txt"
        path.write_text(f"{command}\n{machine(environment(device))}\n\n{text.rstrip()}\n")
        print(f"written: {path.relative_to(RESULTS.parents[1])}")
