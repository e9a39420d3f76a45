"""Find the fastest settings of each kernel of a model on the GPU at hand: `g4ir tune`.

Settings are timed as a CUDA graph of many launches over operands that together do not fit the L2
cache, so that weights come from memory as in a decode step; what is faster counts once it was
checked against the op's reference.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from itertools import product
from math import isfinite
from statistics import median
from typing import Any, TypeVar

import torch

from g4ir.backends.inductor.target import Target
from g4ir.errors import G4Error
from g4ir.ir.graph import Program

from .graph import recorded
from .kernel_cases import (
    Case,
    bytes_of_case,
    errors_of_case,
    find_cases,
    operands,
    run_case,
)
from .tunings import add_measured

T = TypeVar("T")
#: new tokens of a sequence in prefill
CHUNK = 1024
#: setting -> values tried; those that a kernel does not have are left out
VALUES: dict[str, tuple[int, ...]] = {
    "block_m": (1, 16, 32, 64, 128),
    "block_n": (1, 2, 4, 8, 16, 32, 64, 128),
    "block_k": (64, 128, 256, 512, 1024),
    "split": (1, 2, 4, 8),
    "splits": (1, 2, 4, 8, 16, 32, 64, 128),
    "merges": (1, 2, 4, 8, 16),
    "parts": (1, 2),
    "programs": (132, 264, 396, 528, 660),
    "warps": (1, 2, 4, 8, 16),
    "stages": (1, 2, 3, 4, 5),
}
#: a search goes through one setting after the other, this often
SWEEPS = 2
#: bytes of operands that are gone through, several times the L2 cache
SPREAD = 512 << 20
#: most copies of the operands, and least launches that are timed together
COPIES, LAUNCHES = 1024, 64
#: bytes of the device that copies may take
ROOM = 8 << 30
TRIES = 5


@dataclass(frozen=True)
class Tuned:
    """The best settings that were found for a case, beside those of the table."""

    case: Case
    kernel: str
    use: Mapping[str, int]
    us: float
    before_us: float
    floor_us: float
    tried: int


def tune(
    p: Program,
    phase: str,
    target: Target,
    tokens: int,
    bandwidth: float,
    keep: Callable[[Tuned], None],
    progress: Callable[[str], None],
) -> None:
    """Tune every case of a phase; `keep` gets each result, except where no settings run."""
    cases = find_cases(p, phase, target, tokens, CHUNK)
    for i, case in enumerate(cases):
        for kernel in case.choice.tunings:
            progress(f"{i + 1}/{len(cases)} {case.name}: {kernel}")
            found = tune_case(case, kernel, bandwidth)
            if isfinite(found.us):
                keep(found)


def keep_in_table(t: Tuned) -> None:
    """Write a result to the table of tunings."""
    c = t.case
    add_measured(t.kernel, c.target.gpu, c.choice.shape, t.use, t.us)


def tune_case(case: Case, kernel: str, bandwidth: float) -> Tuned:
    """Try one setting after the other, from the table's; wrong and failing ones are skipped."""
    times: dict[tuple[int, ...], float] = {}
    start = dict(case.choice.tunings[kernel].use)

    def time_of(use: Mapping[str, int]) -> float:
        key = tuple(use.values())
        if key not in times:
            times[key] = _or_fail(case, kernel, use, time_case, float("inf"))
        return times[key]

    def right(use: Mapping[str, int]) -> bool:
        return _or_fail(case, kernel, use, lambda c: errors_of_case(c, "cuda").ok, False)

    before, best = time_of(start), start
    for _, name in product(range(SWEEPS), start):
        for value in VALUES.get(name, ()):
            use = {**best, name: value}
            if time_of(use) < time_of(best) and right(use):
                best = use
    floor = bytes_of_case(case) / bandwidth * 1e6
    return Tuned(case, kernel, best, time_of(best), before, floor, len(times))


def _or_fail(
    case: Case, kernel: str, use: Mapping[str, int], run: Callable[[Case], T], failed: T
) -> T:
    """Run a case with these settings and return the result, or `failed` where they do not run."""
    from triton.errors import TritonError

    try:
        return run(case.using(kernel, use))
    except (TritonError, G4Error, ArithmeticError, RuntimeError, ValueError, AssertionError):
        torch.cuda.synchronize()
        return failed


def time_case(case: Case) -> float:
    """Measure the microseconds of one run, operands not in the cache."""
    from .kernels.launch import directly

    first = operands(case, "cuda")
    count = copies(bytes_of_case(case), sum(t.nbytes for t in first.values()))
    given = [first, *(operands(case, "cuda", seed) for seed in range(1, count))]
    turns = [given[i % len(given)] for i in range(max(LAUNCHES, len(given)))]

    def work() -> None:
        for one in turns:
            run_case(case, one)

    with directly():
        replay = recorded(work)
    return median([_elapsed(replay) for _ in range(TRIES)]) / len(turns)


def copies(touched: int, held: int) -> int:
    """Return how many sets of operands, of which a run touches so many bytes, do not fit the cache
    together: at most `COPIES`, and no more than `ROOM` holds. A cache is held whole and touched at
    one slot."""
    return max(2, min(COPIES, SPREAD // max(touched, 1), ROOM // max(held, 1)))


def _elapsed(run: Callable[[], None]) -> float:
    """Measure the microseconds on the device."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    run()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) * 1e3


def report(results: Iterable[Tuned]) -> list[dict[str, Any]]:
    """Return the results as JSON."""
    return [
        {
            "kernel": t.kernel,
            "shape": dict(t.case.choice.shape),
            "use": dict(t.use),
            "us": t.us,
            "before_us": t.before_us,
            "floor_us": t.floor_us,
            "share_of_bandwidth": t.floor_us / t.us,
            "tried": t.tried,
        }
        for t in results
    ]
