"""The comparator of logits: how far rows lie from those of a reference, and how far they may.

`verify` judges positions, verification steps, greedy tokens and media by it, `bench` its outputs.

In fp32 a fixed tolerance does, relative to the row's rms. In 16 bits rounding depends on the model
and its weights, so the reference says how much is normal: its own distance to the same model in
float64 on the same tokens (weights rounded to 16 bits), measured in two of its modes. A right
engine lies as far from float64 as the reference does; not nearer to the reference, since the two
round on different sides. The median row may lie `TYPICAL` times as far as the reference's, and any
row `WORST` times as far as its worst: near ties of a router turn over in 16 bits, at one token on
one side, at another on the other. A row of something else is no such row, and a reference has only
so many of them: hence `MOST`, and the share of far rows. If float64 does not fit, distances are
taken from the reference itself: the engine's, and that of the reference's other mode.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from g4ir.ops.budgets import UNIT

Tensor = torch.Tensor
#: dtypes whose rounding is measured
ROUNDED = ("bf16", "f16")
#: times the reference's median and worst distance: medians of right computations of one model lie
#: up to 2.6 apart where a router's near ties turn over, and within 1.1 elsewhere
TYPICAL, WORST = 2.0, 4.0
#: of the row's rms: what a row may be away unless the reference's own are (zeros are 1 away,
#: another token's row 1.4); and then times the reference's worst
MOST, BEYOND = 0.5, 1.5
#: far is beyond so many times the limit of the median. There may be twice the reference's share of
#: far rows, a twentieth of all, and two
FAR, FAR_TIMES, FAR_SHARE, FAR_ROWS = 2.0, 2.0, 0.05, 2
#: fewest rows whose median says anything
GROUP = 8


@dataclass(frozen=True)
class Rounding:
    """How far a reference's rows lie from `anchor`, as root mean squares relative to that of the
    anchor's row; the larger of its modes. `unit` is half a step of the dtype, the least that is
    allowed; `far` the share of the reference's rows that are far. `reason` says why the anchor is
    not float64."""

    anchor: str
    median: float
    worst: float
    unit: float
    reason: str | None = None
    far: float = 0.0

    @property
    def median_limit(self) -> float:
        """The most that the engine's median row may be away."""
        return TYPICAL * max(self.median, self.unit)

    @property
    def row_limit(self) -> float:
        """The most that each of the engine's rows may be away."""
        return min(WORST * max(self.worst, self.unit), max(MOST, BEYOND * self.worst))

    def fits(self, distances: Sequence[float]) -> bool:
        """Whether rows of the engine as a whole are as near as the reference's: their median,
        and how many are far. False where one is not a number."""
        far = sum(not d <= FAR * self.median_limit for d in distances)
        room = (FAR_TIMES * self.far + FAR_SHARE) * len(distances) + FAR_ROWS
        return median_of(distances) <= self.median_limit and far <= room

    def __str__(self) -> str:
        return f"{TYPICAL:g} and {WORST:g} times the reference's distance to {self.anchor}"


@dataclass(frozen=True)
class Tolerance:
    """Limit for a row of logits: its largest difference relative to the rms of the reference's row,
    the cosine of the two rows, or the distance that the reference's own rounding allows."""

    relative: float | None = None
    cosine: float | None = None
    rounding: Rounding | None = None

    def holds(self, errors: Errors) -> Tensor:
        """Return bool [rows]; a value that is not a number never holds."""
        if self.rounding is not None:
            return errors.distance <= self.rounding.row_limit
        if self.relative is not None:
            return errors.relative <= self.relative
        assert self.cosine is not None
        return errors.cosine > self.cosine

    def typical(self, errors: Errors) -> bool:
        """Whether the rows as a whole hold, where rounding is measured."""
        return self.rounding is None or self.rounding.fits(errors.distance.tolist())

    def all_hold(self, errors: Errors) -> bool:
        """Whether each row holds, and the rows as a whole."""
        return bool(self.holds(errors).all()) and self.typical(errors)

    @property
    def gap(self) -> float:
        """The gap of two logits (relative to the row's rms) below which they may change places."""
        if self.rounding is not None:
            return 2 * self.rounding.row_limit
        if self.relative is not None:
            return 2 * self.relative
        assert self.cosine is not None
        return 2 * math.sqrt(2 * (1 - self.cosine))

    def __str__(self) -> str:
        if self.rounding is not None:
            return str(self.rounding)
        if self.relative is not None:
            return f"relative error at most {self.relative:.1e}"
        return f"cosine above {self.cosine}"


#: fp32: rounding only, and room for how far transformers' own modes lie apart. A cosine for 16
#: bits is what is asked of values inside, and of two engines in two dtypes.
BUDGETS = {
    ("f32", "reference"): Tolerance(relative=1e-4),
    ("f32", "hf"): Tolerance(relative=4e-4),
    **{(d, against): Tolerance(cosine=0.999) for d in ROUNDED for against in ("reference", "hf")},
}
#: dtype of narrowed caches, or form of rounded rows -> relative error where the model computes in
#: fp32. A number next to the middle between two of the coarse grid falls to either side, by the
#: last bit of what made it, and all tokens after it see that: half a step of the grid, but for
#: int8, whose groups have several. `verify --each-pass` compares without that, on the same rows
HELD = {"bf16": 2.0**-7, "i8": 2.0**-5, "f8e4m3": 2.0**-4, "int8": 2.0**-5, "fp8": 2.0**-4}


def budget_of(dtype: str, against: str, *coarse: str) -> Tolerance:
    """Return the budget of an engine of a dtype that was asked to round to coarse grids, if any."""
    found = BUDGETS[dtype, against]
    if found.relative is None or not coarse:
        return found
    return Tolerance(relative=max(found.relative, *(HELD[grid] for grid in coarse)))


@dataclass(frozen=True)
class Errors:
    """Errors of each row: largest difference, the same relative to the wanted row's rms, the
    cosine, and the rms of the difference relative to that of the wanted row."""

    absolute: Tensor
    relative: Tensor
    cosine: Tensor
    distance: Tensor = field(default_factory=lambda: torch.zeros(0))


def row_errors(got: Tensor, want: Tensor) -> Errors:
    """[..., n] -> errors of each row. Rows of next to no size count relative to the whole. A value
    that is not a number stays so."""
    got, want = (t.detach().cpu().double().reshape(-1, t.shape[-1]) for t in (got, want))
    absolute = (got - want).abs().amax(-1)
    rms = want.pow(2).mean(-1).sqrt()
    floor = 1e-3 * want.pow(2).mean().sqrt() + 1e-30
    cosine = torch.nn.functional.cosine_similarity(got, want, dim=-1, eps=1e-30)
    cosine = cosine.masked_fill((rms <= floor) & (absolute <= floor), 1.0)
    size = rms.maximum(floor)
    distance = (got - want).pow(2).mean(-1).sqrt() / size
    return Errors(absolute, absolute / size, cosine, distance)


@dataclass(frozen=True, eq=False)
class Anchor:
    """The origin of distances, in 16 bits: rows [N, n] of `name`, and rows of the reference in its
    other modes. With a `reason` the rows are the reference's own."""

    name: str
    rows: Tensor
    others: Sequence[Tensor]
    #: why it is not float64
    reason: str | None = None

    def rounding(self, want: Tensor, dtype: str) -> Rounding:
        """Return the rounding of a reference whose rows are `want`."""
        modes = self.others if self.reason else [want, *self.others]
        found = [row_errors(t, self.rows).distance for t in modes]
        median, worst = max(float(d.median()) for d in found), max(float(d.max()) for d in found)
        made = Rounding(self.name, median, worst, UNIT[dtype] / 2, self.reason)
        far = [float((d > FAR * made.median_limit).double().mean()) for d in found]
        return replace(made, far=max(far))

    def errors(self, got: Tensor, want: Tensor) -> Errors:
        """Return errors of the engine against the reference; the distance is that to the anchor."""
        return replace(row_errors(got, want), distance=row_errors(got, self.rows).distance)


def rounding_room(rounding: float) -> float:
    """Return how far two right computations may lie apart if one has this rounding error."""
    return 4 * rounding


def widened(budget: Tolerance, rounding: float) -> Tolerance:
    """Return a tolerance with room for the rounding error."""
    assert budget.relative is not None
    return Tolerance(relative=max(budget.relative, rounding_room(rounding)))


@dataclass(frozen=True, eq=False)
class Agreement:
    """Errors of rows [N, n] of one side against the reference's, and their tolerance."""

    errors: Errors
    tolerance: Tolerance

    @property
    def ok(self) -> bool:
        """Whether each row is within the tolerance, and the rows as a whole."""
        return self.tolerance.all_hold(self.errors)

    def worst(self) -> dict[str, Any]:
        """Return `relative` and `cosine` of the worst rows, the tolerance as `budget`, and `ok`."""
        relative, cosine = float(self.errors.relative.max()), float(self.errors.cosine.min())
        return {"relative": relative, "cosine": cosine, "budget": self.tolerance, "ok": self.ok}


def compare_rows(
    tolerance: Tolerance,
    dtype: str,
    sides: Sequence[Tensor],
    want: Tensor,
    *,
    anchor: Callable[[], Anchor | None],
    rounding: Callable[[], float],
) -> list[Agreement]:
    """Compare each side's rows [N, n] with the reference's `want`, all within one tolerance. In 16
    bits it is measured from an anchor, if there is one; else it is the given one, if need be
    widened by what the model's own relative `rounding` allows."""
    if dtype in ROUNDED and (origin := anchor()):
        tolerance = Tolerance(rounding=origin.rounding(want, dtype))
        return [Agreement(origin.errors(rows, want), tolerance) for rows in sides]
    errors = [row_errors(rows, want) for rows in sides]
    if tolerance.relative is not None and not all(map(tolerance.all_hold, errors)):
        tolerance = widened(tolerance, rounding())
    return [Agreement(e, tolerance) for e in errors]


def compare_choices(tokens: Tensor, want: Tensor, tolerance: Tolerance) -> tuple[Tensor, Tensor]:
    """Compare chosen tokens i64[N] with the best ones of the reference's logits [N, vocab]. Return
    bool[N] equal, and bool[N] close: differs, but the reference's logits of the two tokens lie
    within the tolerance of each other."""
    best, chosen = want.argmax(-1, keepdim=True), tokens[:, None]
    gap = (want.gather(1, best) - want.gather(1, chosen))[:, 0]
    equal = (chosen == best)[:, 0]
    return equal, ~equal & (gap <= tolerance.gap * want.pow(2).mean(-1).sqrt())


def median_of(values: Sequence[float]) -> float:
    """Return the median as torch has it: the lower of two; not a number where one is not."""
    return float(torch.tensor(values, dtype=torch.float64).median()) if values else 0.0


def worst_of(values: Sequence[float]) -> float:
    """Return the largest; not a number where one is not."""
    return float(torch.tensor(values, dtype=torch.float64).max()) if values else 0.0
