"""Seconds from a command to its first byte of output, commands in turn.

    python bench/first_word.py [--rounds 5] "g4ir run ENGINE --prompt Hello --max-new-tokens 1" ...

Each command runs once before, so that files are in memory and records are written. Prints medians,
and the range, of the first byte, the end, and processor time.
"""

from __future__ import annotations

import argparse
import os
import shlex
import subprocess
import sys
import time
from statistics import median


def measure(command: str) -> tuple[float, float, float]:
    """Return seconds until the first byte of output, until the end, and of CPU time."""
    start = time.perf_counter()
    # Installed packages have bytecode; a checkout writes it only if the environment permits.
    env = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"}
    done = subprocess.Popen(shlex.split(command), stdout=subprocess.PIPE, env=env, bufsize=0)
    assert done.stdout
    got, first = done.stdout.read(1), time.perf_counter() - start
    done.stdout.read()
    _, status, used = os.wait4(done.pid, 0)
    if status or not got:
        sys.exit(f"{command}: failed, or wrote nothing")
    return first, time.perf_counter() - start, used.ru_utime + used.ru_stime


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("commands", nargs="+")
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    for command in args.commands:
        measure(command)
    rounds = [[measure(c) for c in args.commands] for _ in range(args.rounds)]
    print("load", *(f"{x:.1f}" for x in os.getloadavg()))
    for command, turns in zip(args.commands, zip(*rounds)):
        print(command)
        for label, values in zip(("first", "end", "processor"), zip(*turns)):
            print(f"  {label:9} {median(values):.2f} ({min(values):.2f} to {max(values):.2f})")


if __name__ == "__main__":
    main()
