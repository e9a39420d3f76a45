"""Numbers with a spread. Torch-free.

A statistic is taken over the samples of all rounds. Its spread says where 95 % of further rounds
would lie: the standard deviation of the statistic from round to round times Student's t for so few
rounds, and no less than the largest distance of a round or FLOOR of the value: what differs from
process to process (where memory lies, clocks) is the same in every round of a run.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import fmean as mean
from statistics import median
from typing import Annotated, TypeVar

from g4ir.spec.reader import Range

#: least relative spread that is claimed
FLOOR = 0.02
#: Student's t, 97.5 %, for 1, 2, ... degrees of freedom; more are as the last
STUDENT_T = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262)
Samples = Sequence[float]
T = TypeVar("T")
Amount = Annotated[int, Range(0)]
#: null where there is none, or where it is no number
Number = float | None


@dataclass(frozen=True)
class Stat:
    """A value; each round's lies within value - spread and value + spread."""

    value: float
    spread: Annotated[float, Range(0)]

    def differs(self, other: Stat) -> bool:
        """Whether the two lie further apart than both spreads explain."""
        return abs(self.value - other.value) > self.spread + other.spread


def percentile(samples: Samples, percent: float) -> float:
    """Interpolate linearly between the two nearest samples (numpy's default)."""
    ordered = sorted(samples)
    at = (len(ordered) - 1) * percent / 100
    below = math.floor(at)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (at - below)


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


def stats(rounds: Sequence[Samples]) -> dict[str, Stat]:
    """Return every statistic of STATISTICS."""
    return {name: stat(rounds, f) for name, f in STATISTICS.items()}
