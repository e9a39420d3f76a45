"""Compares logits or embeddings with a reference's: distances and tolerances, for positions,
verification steps and greedy tokens of `verify`. A row is the logits of one position, or one
embedding.

fp32 has a fixed tolerance, relative to the row's RMS; if a row exceeds it, four times the model's
own rounding error is allowed too. In 16 bits, rounding depends on the model and its weights, so
the tolerance follows from the reference's own distance to the same model in float64 on the same
tokens (weights rounded to 16 bits), measured in two of its modes (which sum in different orders). A
correct engine is as far from float64 as the reference is. Its distance to the
reference is no smaller, since the two round differently. The median row may be `TYPICAL` times as
far as the reference's median, and any row `WORST` times as far as its worst: in 16 bits near ties
of a router flip, at other tokens in the engine than in the reference. A row that a fault changed is
farther, and only few rows of a reference flip: hence `MAX_DISTANCE`, and the limit on the number of
far rows. If float64 does not fit into memory, distances are measured from transformers itself, and
the distance of its other mode sets the tolerance; for the interpreter the tolerance is a cosine.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import torch

from g4ir.ops.budgets import UNIT

Tensor = torch.Tensor
#: dtypes whose tolerance is measured
ROUNDED = ("bf16", "f16")
#: factors on the reference's median and worst distance. The medians of two correct computations of
#: one model differ by a factor of up to 2.6 if a router's near ties flip (`verify` then checks
#: intermediate values too), by up to 1.1 otherwise
TYPICAL, WORST = 2.0, 4.0
#: cap on any row's distance, relative to the RMS (a row of zeros has 1, another token's row 1.4):
#: MAX_DISTANCE, or BEYOND times the reference's worst row if that is more
MAX_DISTANCE, BEYOND = 0.5, 1.5
#: a row is far if its distance exceeds FAR times the limit of the median; allowed far rows:
#: FAR_TIMES the reference's share of them plus FAR_SHARE of all rows, plus FAR_ROWS
FAR, FAR_TIMES, FAR_SHARE, FAR_ROWS = 2.0, 2.0, 0.05, 2
#: elements that are compared at once, in float64
BLOCK = 1 << 24
#: min rows for a meaningful median
GROUP = 8


@dataclass(frozen=True)
class Rounding:
    """Median and worst distance of a reference's rows to `anchor`: RMS of the difference relative
    to the RMS of the anchor's row; the largest of the reference's modes. `unit`: half a unit in the
    last place of the dtype, which replaces smaller distances in the limits; `far`: share of the
    reference's rows that are far; `reason`: why the anchor is not float64."""

    anchor: str
    median: float
    worst: float
    unit: float
    reason: str | None = None
    far: float = 0.0

    @property
    def median_limit(self) -> float:
        """Max distance of the engine's median row."""
        return TYPICAL * max(self.median, self.unit)

    @property
    def row_limit(self) -> float:
        """Max distance of each of the engine's rows."""
        return min(WORST * max(self.worst, self.unit), max(MAX_DISTANCE, BEYOND * self.worst))

    def fits(self, distances: Sequence[float]) -> bool:
        """Return whether the engine's rows have an allowed median and number of far rows; False if
        one is NaN."""
        far = sum(not d <= FAR * self.median_limit for d in distances)
        max_far = (FAR_TIMES * self.far + FAR_SHARE) * len(distances) + FAR_ROWS
        return lower_median(distances) <= self.median_limit and far <= max_far

    def __str__(self) -> str:
        return f"{TYPICAL:g} and {WORST:g} times the reference's distance to {self.anchor}"


@dataclass(frozen=True)
class Tolerance:
    """Tolerance of rows; one field is set: max absolute error relative to the RMS of the
    reference's row, cosine similarity that must be exceeded, or the reference's own rounding, from
    which the allowed distances follow."""

    relative: float | None = None
    cosine: float | None = None
    rounding: Rounding | None = None

    def holds(self, errors: Errors) -> Tensor:
        """Return bool [rows]: whether each row is within tolerance; False for NaN."""
        if self.rounding is not None:
            return errors.distance <= self.rounding.row_limit
        if self.relative is not None:
            return errors.relative <= self.relative
        assert self.cosine is not None
        return errors.cosine > self.cosine

    def typical(self, errors: Errors) -> bool:
        """Return whether the rows' median and number of far rows are within a measured tolerance;
        True for the fixed ones, which have no limit on them."""
        return self.rounding is None or self.rounding.fits(errors.distance.tolist())

    def all_hold(self, errors: Errors) -> bool:
        """Return whether each row (`holds`) and the rows as a whole (`typical`) are within
        tolerance."""
        return bool(self.holds(errors).all()) and self.typical(errors)

    @property
    def gap(self) -> float:
        """Difference of two logits, relative to the row's RMS, up to which another order of them
        is accepted."""
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


#: (dtype of the engine, reference: the interpreter or transformers) -> tolerance. fp32: rounding,
#: and the difference between transformers' own modes. The cosine in 16 bits is for logits without a
#: measured tolerance (`compare_rows`)
TOLERANCES = {
    ("f32", "reference"): Tolerance(relative=1e-4),
    ("f32", "hf"): Tolerance(relative=4e-4),
    **{(d, against): Tolerance(cosine=0.999) for d in ROUNDED for against in ("reference", "hf")},
}
#: dtype of a quantised KV cache, or format of quantised activations -> allowed error in an fp32
#: model, relative to the row's RMS. A value near the middle between two grid points may be rounded
#: to either, and all later tokens depend on it. Allowed: half a step of e4m3 at the RMS, one of
#: bfloat16, about two of int8 (a group has several such values).
#: `verify --each-pass` compares nodes on equal inputs, and does not need this
QUANT_ERRORS = {"bf16": 2.0**-7, "i8": 2.0**-5, "f8e4m3": 2.0**-4, "int8": 2.0**-5, "fp8": 2.0**-4}


def tolerance_of(dtype: str, against: str, *coarse: str) -> Tolerance:
    """Return the tolerance of an engine of a dtype against the "reference" or "hf". `coarse`: keys
    of QUANT_ERRORS by which KV cache or activations are quantised; they widen fp32's only."""
    tolerance = TOLERANCES[dtype, against]
    if tolerance.relative is None or not coarse:
        return tolerance
    return Tolerance(relative=max(tolerance.relative, *(QUANT_ERRORS[grid] for grid in coarse)))


@dataclass(frozen=True)
class Errors:
    """Errors per row: max absolute difference, the same relative to the reference row's RMS, cosine
    similarity, and distance: RMS of the difference relative to the RMS of the reference's row, or
    of the anchor's (`Anchor.errors`)."""

    absolute: Tensor
    relative: Tensor
    cosine: Tensor
    distance: Tensor = field(default_factory=lambda: torch.zeros(0))


def row_errors(got: Tensor, want: Tensor) -> Errors:
    """Return the errors of each row of [..., n], flattened to [rows]. The RMS that errors are
    relative to is at least 1e-3 of that of all rows, for rows near zero; the cosine of two such
    rows is 1. NaN propagates."""
    size = max(1, BLOCK // want.shape[-1])
    got, want = (t.detach().cpu().reshape(-1, t.shape[-1]) for t in (got, want))
    squares = [rows.double().pow(2).mean(-1) for rows in want.split(size)]
    floor = 1e-3 * torch.cat(squares).mean().sqrt() + 1e-30
    blocks = [
        _block_errors(a.double(), b.double(), square.sqrt(), floor)
        for a, b, square in zip(got.split(size), want.split(size), squares, strict=True)
    ]
    return Errors(*map(torch.cat, zip(*blocks, strict=True)))


def _block_errors(got: Tensor, want: Tensor, rms: Tensor, floor: Tensor) -> tuple[Tensor, ...]:
    absolute = (got - want).abs().amax(-1)
    cosine = torch.nn.functional.cosine_similarity(got, want, dim=-1, eps=1e-30)
    cosine = cosine.masked_fill((rms <= floor) & (absolute <= floor), 1.0)
    size = rms.maximum(floor)
    distance = (got - want).pow(2).mean(-1).sqrt() / size
    return absolute, absolute / size, cosine, distance


@dataclass(frozen=True, eq=False)
class Anchor:
    """Rows [N, n] from which distances in 16 bits are measured: the model's in float64 or, with a
    `reason`, the reference's own; and the reference's rows in its other modes. `name`: in reports,
    the other end of the reference's own distance."""

    name: str
    rows: Tensor
    other_modes: Sequence[Tensor]
    #: why the anchor is not float64; None if it is
    reason: str | None = None

    def rounding(self, want: Tensor, dtype: str) -> Rounding:
        """Return the rounding of a reference with rows `want`."""
        modes = self.other_modes if self.reason else [want, *self.other_modes]
        distances = [row_errors(t, self.rows).distance for t in modes]
        median = max(float(d.median()) for d in distances)
        worst = max(float(d.max()) for d in distances)
        rounding = Rounding(self.name, median, worst, UNIT[dtype] / 2, self.reason)
        far = [float((d > FAR * rounding.median_limit).double().mean()) for d in distances]
        return replace(rounding, far=max(far))

    def errors(self, got: Tensor, want: Tensor) -> Errors:
        """Return the engine's errors against the reference, with the distance to the anchor."""
        return replace(row_errors(got, want), distance=row_errors(got, self.rows).distance)


def rounding_margin(rounding: float) -> float:
    """Return the tolerance between two correct computations, relative to a row's RMS, if one of
    them has this rounding error."""
    return 4 * rounding


def widen_tolerance(budget: Tolerance, rounding: float) -> Tolerance:
    """Return a relative tolerance that also admits this rounding error, relative to the RMS."""
    assert budget.relative is not None
    return Tolerance(relative=max(budget.relative, rounding_margin(rounding)))


@dataclass(frozen=True, eq=False)
class Agreement:
    """Errors of an engine's rows [N, n] against the reference's, and their tolerance."""

    errors: Errors
    tolerance: Tolerance

    @property
    def ok(self) -> bool:
        """Whether each row is within the tolerance, and the rows as a whole."""
        return self.tolerance.all_hold(self.errors)


def compare_rows(
    tolerance: Tolerance,
    dtype: str,
    sides: Sequence[Tensor],
    want: Tensor,
    *,
    anchor: Callable[[], Anchor | None],
    rounding: Callable[[], float],
) -> list[Agreement]:
    """Compare the rows [N, n] of each side (the engine's in one of its modes) with the reference's
    `want`, all within one tolerance. In 16 bits it is measured from `anchor()`, unless that is
    None; else it is `tolerance`, and if a row exceeds a relative one, that is widened by the
    model's own relative `rounding()`. Both functions run the model, only if needed."""
    if dtype in ROUNDED and (origin := anchor()):
        tolerance = Tolerance(rounding=origin.rounding(want, dtype))
        return [Agreement(origin.errors(rows, want), tolerance) for rows in sides]
    errors = [row_errors(rows, want) for rows in sides]
    if tolerance.relative is not None and not all(map(tolerance.all_hold, errors)):
        tolerance = widen_tolerance(tolerance, rounding())
    return [Agreement(e, tolerance) for e in errors]


def compare_choices(tokens: Tensor, want: Tensor, tolerance: Tolerance) -> tuple[Tensor, Tensor]:
    """Compare chosen tokens i64[N] with the argmax of the reference's logits [N, vocab]. Return
    bool[N] equal, and bool[N] close: differs, but the reference's logits of the two tokens differ
    by at most the tolerance's `gap`."""
    best, chosen = want.argmax(-1, keepdim=True), tokens[:, None]
    gap = (want.gather(1, best) - want.gather(1, chosen))[:, 0]
    equal = (chosen == best)[:, 0]
    return equal, ~equal & (gap <= tolerance.gap * want.pow(2).mean(-1).sqrt())


def lower_median(values: Sequence[float]) -> float:
    """Return torch's median, the lower of two middle values; 0 for no values. NaN propagates."""
    return float(torch.tensor(values, dtype=torch.float64).median()) if values else 0.0


def largest(values: Sequence[float]) -> float:
    """Return the largest value; 0 for no values. NaN propagates."""
    return float(torch.tensor(values, dtype=torch.float64).max()) if values else 0.0
