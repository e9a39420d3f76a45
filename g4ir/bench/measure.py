"""Timed requests in interleaved rounds, and the statistics that are read off them.

A statistic is taken over the samples of all rounds. Its spread says where 95 % of further rounds
would lie: the standard deviation of the statistic from round to round times Student's t for so few
rounds, and no less than the largest distance of a round or FLOOR of the value: what differs from
process to process (where memory lies, clocks) is the same in every round of a run.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from statistics import fmean as mean
from statistics import median
from typing import TypeVar

import numpy as np
import torch

from .roof import Rates, middle
from .runners import BenchRunner, Workload, pieces

#: a runner's share of a round lasts at least this long, or takes this many requests
ROUND_S = 0.5
MOST_REQUESTS = 20
#: least relative spread that is claimed
FLOOR = 0.02
#: relative spread of a value that says little: something else ran
WIDE = 0.3
#: Student's t, 97.5 %, for 1, 2, ... degrees of freedom; more are as the last
STUDENT_T = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262)
Samples = Sequence[float]
T = TypeVar("T")


@dataclass(frozen=True)
class Stat:
    """A value; each round's lies within value - spread and value + spread."""

    value: float
    spread: float

    @property
    def wide(self) -> bool:
        """Whether rounds differ by so much that the value says little."""
        return self.spread > WIDE * abs(self.value)

    def differs(self, other: Stat) -> bool:
        """Whether the two lie further apart than both spreads explain."""
        return abs(self.value - other.value) > self.spread + other.spread


def percentile(samples: Samples, percent: float) -> float:
    """Interpolate linearly between the two nearest samples."""
    return float(np.percentile(samples, percent))


#: name -> statistic of a list of samples
STATISTICS: dict[str, Callable[[Samples], float]] = {
    "mean": mean,
    "p50": median,
    "p90": partial(percentile, percent=90),
    "p99": partial(percentile, percent=99),
    "min": min,
}


def stat(rounds: Sequence[Sequence[T]], statistic: Callable[[Sequence[T]], float]) -> Stat:
    """Return one statistic of the samples of several rounds."""
    value = statistic([x for samples in rounds for x in samples])
    return around(value, [statistic(samples) for samples in rounds])


def around(value: float, rounds: Samples) -> Stat:
    """Return a value and what it was in each round."""
    largest = max(abs(x - value) for x in rounds)
    return Stat(value, max(largest, _interval(rounds), FLOOR * abs(value)))


def _interval(rounds: Samples) -> float:
    """Return half of the interval that holds 95 % of rounds; 0 for one, which says nothing."""
    if len(rounds) < 2:
        return 0.0
    t = STUDENT_T[min(len(rounds) - 1, len(STUDENT_T)) - 1]
    return t * statistics.stdev(rounds)


@dataclass(frozen=True)
class RequestTiming:
    """Seconds to the first token, and between each token and the one before it."""

    ttft: float
    itl: tuple[float, ...]

    @property
    def e2e(self) -> float:
        return self.ttft + math.fsum(self.itl)

    @property
    def tpot(self) -> float:
        """Time per output token after the first: (E2E - TTFT) / (n - 1)."""
        return (self.e2e - self.ttft) / len(self.itl)


Rounds = Sequence[Sequence[RequestTiming]]


def timed_request(runner: BenchRunner, w: Workload, tokens: torch.Tensor) -> RequestTiming:
    """Time a request. Each step ends with the chosen tokens on the host; going back to the depth is
    not timed."""
    runner.rewind()
    marks = [time.perf_counter()]
    for piece in pieces(w, tokens):
        runner.step(piece).argmax(-1).tolist()
        marks.append(time.perf_counter())
    first, *rest = (b - a for a, b in pairwise(marks))
    return RequestTiming(first, tuple(rest))


def requests_per_round(seconds: float) -> int:
    """Return how many requests a round takes, from the time of one."""
    return max(1, min(MOST_REQUESTS, math.ceil(ROUND_S / max(seconds, 1e-6))))


Take = Callable[[RequestTiming], Sequence[float]]
#: latency -> its samples in a request
TAKE: dict[str, Take] = {
    "ttft": lambda r: (r.ttft,),
    "itl": lambda r: r.itl,
    "tpot": lambda r: (r.tpot,),
    "e2el": lambda r: (r.e2e,),
}


def latencies(rounds: Rounds) -> dict[str, dict[str, Stat]]:
    """Return every statistic of ttft, itl, tpot and e2el, in milliseconds."""
    found = {}
    for key, take in TAKE.items():
        samples = [[x * 1e3 for r in many for x in take(r)] for many in rounds]
        found[f"{key}_ms"] = {name: stat(samples, f) for name, f in STATISTICS.items()}
    return found


def speeds(w: Workload, rounds: Rounds) -> dict[str, Stat]:
    """Return tokens a second: of prefill (all rows), of decode a row and in all, of whole requests.

    Decode is tokens over the time of decode steps; prefill is never part of it.
    """

    def rate(tokens: int, seconds: Callable[[RequestTiming], float]) -> Stat:
        return stat(rounds, lambda many: tokens / mean([seconds(r) for r in many]))

    steps = w.output_len - 1
    return {
        "prefill": rate(w.batch * w.input_len, lambda r: r.ttft),
        "decode_per_user": rate(steps, lambda r: math.fsum(r.itl)),
        "decode": rate(w.batch * steps, lambda r: math.fsum(r.itl)),
        "output": rate(w.batch * w.output_len, lambda r: r.e2e),
        "total": rate(w.batch * (w.input_len + w.output_len), lambda r: r.e2e),
        "request": rate(w.batch, lambda r: r.e2e),
    }


def shares(
    rounds: Rounds, rates: Sequence[Rates], take: Take, seconds_at: Callable[[Rates], float]
) -> Stat:
    """Return least time at the measured rates over median time; each round by its own rates."""
    return _quotient([seconds_at(r) for r in (middle(rates), *rates)], _medians(rounds, take))


def over(a: Rounds, b: Rounds, take: Take) -> Stat:
    """Return the median time of one over that of the other, by round and over all."""
    return _quotient(_medians(a, take), _medians(b, take))


def _medians(rounds: Rounds, take: Take) -> list[float]:
    """Return the median over all rounds, then that of each."""
    every = [r for many in rounds for r in many]
    return [median([x for r in many for x in take(r)]) for many in (every, *rounds)]


def _quotient(a: Sequence[float], b: Sequence[float]) -> Stat:
    """Return one over the other, each over all rounds and then by round."""
    whole, *by_round = (x / y for x, y in zip(a, b, strict=True))
    return around(whole, by_round)
