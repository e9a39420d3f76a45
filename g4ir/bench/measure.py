"""Timed requests in interleaved rounds, and their statistics.

A statistic is taken over the samples of all rounds; 95 % of further rounds are expected within its
spread: the standard deviation of the statistic from round to round times Student's t for so few
rounds, and at least the fraction FLOOR of the value, since what differs from process to process
(memory addresses, clocks) is the same in every round of a run.
"""

from __future__ import annotations

import gc
import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import fmean as mean
from statistics import median
from typing import TypeVar

import numpy as np
import torch

from g4ir.ui.progress import Progress, no_progress

from .roof import synchronize
from .runners import BenchRunner, RequestTiming, Rounds, Workload, request_steps

#: requests of each runner in a round: as many as take the first runner ROUND_S seconds, at most
#: MAX_REQUESTS
ROUND_S = 0.5
MAX_REQUESTS = 20
#: minimum relative spread that is reported
FLOOR = 0.02
#: Student's t, 97.5 %, for 1, 2, ... degrees of freedom; the last entry serves all larger ones
STUDENT_T = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262)
Samples = Sequence[float]
T = TypeVar("T")


@dataclass(frozen=True)
class Stat:
    """A statistic and its spread: 95 % of further rounds are expected within value ± spread."""

    value: float
    spread: float

    def differs(self, other: Stat) -> bool:
        """Whether the values differ by more than the sum of both spreads."""
        return abs(self.value - other.value) > self.spread + other.spread


#: name -> statistic of a list of samples
STATISTICS: dict[str, Callable[[Samples], float]] = {
    "mean": mean,
    "p50": median,
    "p90": lambda samples: float(np.percentile(samples, 90)),
    "p99": lambda samples: float(np.percentile(samples, 99)),
    "min": min,
}


def stat(rounds: Sequence[Sequence[T]], statistic: Callable[[Sequence[T]], float]) -> Stat:
    """Return one statistic of the samples of all rounds, with its spread."""
    value = statistic([x for samples in rounds for x in samples])
    return around(value, [*map(statistic, rounds)])


def around(value: float, rounds: Samples) -> Stat:
    """Return a value with its spread, from its values in each round."""
    t = STUDENT_T[min(len(rounds) - 1, len(STUDENT_T)) - 1]
    return Stat(value, max(t * statistics.stdev(rounds), FLOOR * abs(value)))


def timed_request(runner: BenchRunner, w: Workload, tokens: torch.Tensor) -> RequestTiming:
    """Time a request. A step includes the argmax and its copy to the host. Resetting the KV cache
    to the context, before the first step, is not timed."""
    runner.rewind()
    synchronize(runner.device)
    marks = [time.perf_counter()]
    for step in request_steps(w, tokens):
        runner.step(step).argmax(-1).tolist()
        marks.append(time.perf_counter())
    ttft, *itl = (b - a for a, b in pairwise(marks))
    return RequestTiming(ttft, tuple(itl))


def measure_rounds(
    runners: Sequence[BenchRunner],
    w: Workload,
    tokens: torch.Tensor,
    rounds: int,
    warmup: int = 1,
    progress: Progress = no_progress,
    before: Callable[[], object] = lambda: None,
) -> None:
    """Time requests in rounds, in each of which every runner has a turn, and append the times to
    the runners' `rounds`; the number of requests in a turn follows from the first runner's time.
    `warmup`: requests of each runner before the rounds; `before`: called as each round starts."""
    progress("warming up")
    for runner in runners:
        for _ in range(warmup):
            timed_request(runner, w, tokens)
    seconds = timed_request(runners[0], w, tokens).e2e
    count = max(1, min(MAX_REQUESTS, math.ceil(ROUND_S / max(seconds, 1e-6))))
    for number in range(1, rounds + 1):
        progress(f"round {number} of {rounds}")
        before()
        for runner in runners:
            gc.collect()
            runner.rounds.append([timed_request(runner, w, tokens) for _ in range(count)])


#: latency -> function of a request's times that returns its samples, in seconds
LATENCIES: dict[str, Callable[[RequestTiming], Samples]] = {
    "ttft": lambda r: (r.ttft,),
    "itl": lambda r: r.itl,
    "tpot": lambda r: (r.decode / len(r.itl),),
    "e2el": lambda r: (r.e2e,),
}


def latencies(rounds: Rounds) -> dict[str, Stat]:
    """Return every statistic of ttft, itl, tpot and e2el in milliseconds; a key: `ttft_p50`."""
    stats: dict[str, Stat] = {}
    for key, samples_of in LATENCIES.items():
        samples = [[x * 1e3 for r in requests for x in samples_of(r)] for requests in rounds]
        stats |= {f"{key}_{name}": stat(samples, f) for name, f in STATISTICS.items()}
    return stats


def speeds(w: Workload, rounds: Rounds) -> dict[str, Stat]:
    """Return tokens per second of prefill (whole batch), of decode (per sequence, and whole batch),
    and of requests (output, and all tokens); and sequences per second (`request_throughput`).
    Decode is tokens over the time of decode steps; prefill is never part of it."""

    def rate(count: int, seconds: str) -> Stat:
        return stat(rounds, lambda part: count / mean(getattr(r, seconds) for r in part))

    steps = w.output_len - 1
    return {
        "prefill_throughput": rate(w.batch * w.input_len, "ttft"),
        "decode_per_user_throughput": rate(steps, "decode"),
        "decode_throughput": rate(w.batch * steps, "decode"),
        "output_throughput": rate(w.batch * w.output_len, "e2e"),
        "total_throughput": rate(w.batch * (w.input_len + w.output_len), "e2e"),
        "request_throughput": rate(w.batch, "e2e"),
    }


def medians(rounds: Rounds, latency: str) -> list[float]:
    """Return the median of a latency in seconds: over all rounds, then of each round."""
    every, samples_of = [r for requests in rounds for r in requests], LATENCIES[latency]
    return [median([x for r in part for x in samples_of(r)]) for part in (every, *rounds)]


def ratio(a: Samples, b: Samples) -> Stat:
    """Return the ratio a / b of two results of `medians`: over all rounds, with the spread of the
    rounds' ratios."""
    value, *by_round = (x / y for x, y in zip(a, b, strict=True))
    return around(value, by_round)
