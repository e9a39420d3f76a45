"""The report of `verify`."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, ClassVar

from g4ir.ir.distance import GROUP, Agreement, Rounding, Tolerance, largest, lower_median

from .media import MediaReport


@dataclass(frozen=True)
class Position:
    """Errors of the logits after token `at`: maximum absolute error, the same relative to the row's
    RMS, and cosine; `ok`: within the tolerance."""

    at: int
    absolute: float
    relative: float
    cosine: float
    ok: bool
    #: distance to the anchor of the tolerance (peers.find_anchor), or None
    distance: float | None = None


@dataclass(frozen=True)
class Greedy:
    """`count` greedy tokens, of which the first `equal` are equal; `differs`: index of the first
    that differs; None if none does, or if the reference's logits of the two tokens there differ by
    at most the tolerance's `gap`."""

    count: int
    equal: int
    differs: int | None

    def text(self) -> str:
        close = self.differs is None and self.equal < self.count
        return f"{self.equal} of {self.count} equal{', then a close call' if close else ''}"


@dataclass(frozen=True)
class VerifyReport:
    """An engine against a reference: errors of logits, and greedy tokens."""

    #: words in the report for: the compared values, the index of one, several of them
    ROWS: ClassVar = ("logits", "position", "positions")
    engine: str
    against: str
    budget: Tolerance
    turns: tuple[int, ...]
    positions: tuple[Position, ...] = field(repr=False)
    #: None for an encoder
    greedy: Greedy | None = None
    #: the single steps again, computed by verification steps; () without speculative decoding
    rounds: tuple[Position, ...] = field(default=(), repr=False)
    #: in 16 bits against transformers: the largest relative error between the engine's graphs and
    #: transformers, both in float64, and the tolerance
    float64: tuple[float, float] | None = None
    #: whether rows out of tolerance are excused by a router's near ties, since no intermediate
    #: value differs
    near_ties: bool = False
    first_difference: str | None = None
    #: None for an engine without media
    media: MediaReport | None = None

    @property
    def text_ok(self) -> bool:
        """Whether all positions (`rows_ok`) are within the tolerance or excused, the graphs in
        float64 and all intermediate values too, and greedy tokens are equal up to a close call."""
        inside = self.graphs_ok and self.first_difference is None
        greedy_ok = self.greedy is None or self.greedy.differs is None
        return (self.rows_ok or self.near_ties) and inside and greedy_ok

    @property
    def rows_ok(self) -> bool:
        """Whether every position, and the positions as a whole (`typical`), are within the
        tolerance."""
        return self.typical and all(p.ok for p in (*self.positions, *self.rounds))

    @property
    def graphs_ok(self) -> bool:
        """Whether the graphs agree with transformers in float64, within a tolerance; True if not
        measured."""
        return self.float64 is None or self.float64[0] <= self.float64[1]

    @property
    def typical(self) -> bool:
        """Whether the distances of positions are within a measured tolerance as a whole: of all
        positions, and separately of single tokens and of verification steps, which run other
        graphs. True if the tolerance was not measured."""
        rounding = self.budget.rounding
        if rounding is None:
            return True
        single = {sum(self.turns[:i]) for i, n in enumerate(self.turns) if n == 1}
        steps = distances([p for p in self.positions if p.at in single])
        parts = [part for part in (steps, distances(self.rounds)) if len(part) >= GROUP]
        return all(map(rounding.fits, (distances(self.positions), *parts)))

    @property
    def median_distance(self) -> float:
        """Median distance of the positions to the anchor; NaN if one is NaN."""
        return lower_median(distances(self.positions))

    @property
    def ok(self) -> bool:
        """Whether text and media are within their tolerances."""
        return self.text_ok and (self.media is None or self.media.ok)

    def to_dict(self) -> dict[str, Any]:
        """Return JSON values."""
        out = {**asdict(self), "ok": self.ok}
        if self.media:
            out["media"] = self.media.to_dict()
        return out

    def text(self) -> str:
        """Return a short table."""
        long = [str(n) for n in self.turns if n > 1 or not self.greedy]
        steps = len(self.turns) - len(long)
        turns = " + ".join([*long, f"{steps} single steps"] if steps else long)
        lines = [f"{self.engine} against {self.against}, {sum(self.turns)} tokens in {turns}"]
        lines += [f"  {label:10}{row}" for label, row in self._rows()]
        lines += self.media.lines() if self.media else []
        if self.first_difference:
            lines.append(f"  first value out of tolerance: {self.first_difference}")
        return "\n".join([*lines, "ok" if self.ok else "FAILED"])

    def _rows(self) -> Iterator[tuple[str, str]]:
        rows, number, several = self.ROWS
        yield rows, f"{'worst':>12}{number:>10}"
        for label, field_name in (("max abs", "absolute"), ("relative", "relative")):
            yield label, _worst(self.positions, [getattr(p, field_name) for p in self.positions])
        yield "1 - cosine", _worst(self.positions, [1 - p.cosine for p in self.positions])
        within = f"{sum(p.ok for p in self.positions):>12} of {len(self.positions)}"
        yield several, f"{within} within tolerance: {self.budget}"
        if self.rounds:
            within = f"{sum(p.ok for p in self.rounds):>12} of {len(self.rounds)}"
            yield "rounds", f"{within} within tolerance in verification steps"
        if self.budget.rounding:
            yield from self._rounding_rows(self.budget.rounding)
        if self.greedy:
            yield "greedy", self.greedy.text()

    def _rounding_rows(self, rounding: Rounding) -> Iterator[tuple[str, str]]:
        worst = largest(distances(self.positions))
        engine = f"{self.median_distance:>12.2e} in the median, worst {worst:.2e}"
        reference = f"the reference's {rounding.median:.2e} and {rounding.worst:.2e}"
        yield "distance", f"{engine}; {reference}"
        if self.near_ties:
            yield "experts", "rows differ by near ties of a router: no intermediate value differs"
        elif not self.typical:
            yield "", "the positions as a whole are out of tolerance"
        if rounding.reason:
            yield "", rounding.reason
        if self.float64:
            error, limit = self.float64
            verdict = "ok" if self.graphs_ok else "out of tolerance"
            yield "float64", f"{error:>12.2e} of {limit:.1e}, the graphs in float64: {verdict}"


def positions_of(where: Sequence[int], agreement: Agreement) -> tuple[Position, ...]:
    """Return a Position with the errors of each row of logits; `where`: token indices."""
    errors, tolerance = agreement.errors, agreement.tolerance
    columns = [errors.absolute, errors.relative, errors.cosine, tolerance.holds(errors)]
    columns += [errors.distance] * (tolerance.rounding is not None)
    return tuple(Position(*row) for row in zip(where, *(t.tolist() for t in columns), strict=True))


def distances(positions: Sequence[Position]) -> list[float]:
    """Return the distances to the anchor of the rows that have one."""
    return [p.distance for p in positions if p.distance is not None]


def _worst(positions: Sequence[Position], errors: Sequence[float]) -> str:
    worst = max(range(len(errors)), key=lambda i: (math.isnan(errors[i]), errors[i]))
    return f"{errors[worst]:>12.2e}{positions[worst].at:>10}"
