"""Error compensation: columns of a weight are quantised one after another, and the error of each is
compensated by the later columns, as far as the inputs of a calibration text correlate (GPTQ,
Frantar et al., arXiv:2210.17323, with columns in descending order of their second moment). Then
each column is rounded again to minimise the error given all others (coordinate descent).

Scales are chosen first, by squared errors weighted with the columns' second moments, and stay.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from g4ir.ops.codecs import FORMATS, dequantize_codes, round_to_grid, steps_of, with_values
from g4ir.ops.quant import quantize

from .recipe import Scheme

#: added to the diagonal, relative to its mean: less would follow the calibration text too closely
DAMPING = 0.1
#: minimum second moment of a column, relative to the mean: other texts may use columns that this
#: one does not
FLOOR = 1e-3
#: columns whose errors are passed on to the remaining ones at a time
BLOCK = 128
#: maximum columns whose errors are compensated together: longer rows are cut into equal parts
COLUMNS = 2048
#: elements of a weight that are compensated at a time
ELEMENTS = 1 << 24

Tensor = torch.Tensor
Codes = tuple[Tensor, Tensor]


def is_compensated(form: str) -> bool:
    """Whether errors are compensated in a format: of integers or levels, without minima."""
    return FORMATS[form].scales == 1 and form not in ("fp8", "fp4")


@dataclass(frozen=True)
class Grid:
    """Steps and shifts f32 [K, N] of a format's values: w = step * (value + shift)."""

    step: Tensor
    shift: Tensor
    form: str

    def part(self, columns: slice) -> Grid:
        return Grid(self.step[columns], self.shift[columns], self.form)

    def round(self, x: Tensor) -> Tensor:
        return round_to_grid(x, self.step, self.shift, self.form)

    def values(self, rounded: Tensor) -> Tensor:
        """Return the values that `round` chose."""
        return (rounded / self.step - self.shift).round_()


def quantize_columns(
    x: Tensor, by: Tensor, grid: Grid, rounded: Tensor, start: Tensor | None
) -> None:
    """Round columns x [K, N] to a grid, one after another. `by` [i, j] times the error of column j,
    which is relative to `start` if passed, is added to column i > j. Errors replace x."""
    for j in range(len(x)):
        x[j].addmv_(x[:j].T, by[j, :j])
        rounded[j] = grid.part(slice(j, j + 1)).round(x[j])
        x[j] = rounded[j] - (x if start is None else start)[j]


@dataclass(frozen=True)
class Kernels:
    """Functions of `quantize` and of `quantize_columns`."""

    quantize: Callable[..., tuple[Any, ...]] = quantize.reference
    columns: Callable[[Tensor, Tensor, Grid, Tensor, Tensor | None], None] = quantize_columns


@dataclass(frozen=True)
class Inputs:
    """Sum of outer products of a matmul's inputs on a calibration text, f32 [P, K/P, K/P]: of P
    parts of the columns (`column_parts`)."""

    products: Tensor

    @cached_property
    def moments(self) -> Tensor:
        """Second moments of the columns relative to their mean, f32 [1, K]."""
        moments = self.products.diagonal(dim1=1, dim2=2).reshape(1, -1)
        mean = moments.mean()
        return (moments / mean.where(mean > 0, 1.0)).clamp(min=FLOOR)

    @cached_property
    def damped(self) -> Tensor:
        """The products relative to their mean diagonal, damped."""
        diagonal = self.products.diagonal(dim1=1, dim2=2)
        mean = diagonal.mean()
        h = self.products / mean.where(mean > 0, 1.0)
        h.diagonal(dim1=1, dim2=2).add_(DAMPING)
        return h

    @cached_property
    def order(self) -> Tensor:
        """Columns [P, K/P] of each part in the order in which they are quantised."""
        return self.damped.diagonal(dim1=1, dim2=2).argsort(dim=-1, descending=True, stable=True)

    @cached_property
    def updates(self) -> tuple[tuple[Tensor, Tensor], ...]:
        """For each part: the matrices `by` of `quantize_columns`, for compensation and for
        coordinate descent."""
        return tuple(_updates(h[i][:, i]) for h, i in zip(self.damped, self.order))

    def errors(self, off: Tensor) -> Tensor:
        """Return e H e^T [N], damped, for rows e [N, K] of errors."""
        off = off.unflatten(-1, self.products.shape[:2]).transpose(0, 1)
        return ((off @ self.damped) * off).sum((0, 2))


def column_parts(x: Tensor) -> Tensor:
    """Return x [T, K] as [P, T, K/P], parts of at most COLUMNS columns."""
    size = x.shape[-1]
    parts = next(p for p in range(-(-size // COLUMNS), size + 1) if size % p == 0)
    return x.unflatten(-1, (parts, -1)).transpose(0, 1)


def _updates(h: Tensor) -> tuple[Tensor, Tensor]:
    # The upper Cholesky factor of the inverse of h is the inverse of m, where h = m m^T.
    m = torch.linalg.cholesky(h.double().flip(0, 1)).flip(0, 1)
    factor = torch.linalg.solve_triangular(m, torch.eye(len(m), dtype=m.dtype), upper=True)
    return (factor.T / factor.diagonal()).float(), -h / h.diagonal()[:, None]


def calibrated(
    w: Tensor, inputs: Inputs, scheme: Scheme, dtype: str, kernels: Kernels = Kernels()
) -> Codes:
    """Return codes and scales of a weight [N, K] in an engine of this dtype that minimise the error
    of its product with the inputs. A row keeps the nearest values if these have less error."""
    parts = w.split(max(1, ELEMENTS // w.shape[1]))
    packed, scales = zip(
        *(_calibrated(x, inputs, scheme, dtype, kernels) for x in parts), strict=True
    )
    whole = torch.cat([p.view(torch.uint8) for p in packed])
    return whole.view(packed[0].dtype), torch.cat(scales)


def _calibrated(w: Tensor, inputs: Inputs, scheme: Scheme, dtype: str, kernels: Kernels) -> Codes:
    codes, scales = kernels.quantize(w, **scheme.attrs(dtype), moments=inputs.moments)
    better = with_values(codes, _compensate(w.float(), inputs, codes, scales, scheme.form, kernels))
    off = [dequantize_codes(c, scales, torch.float32) - w.float() for c in (better, codes)]
    improved = inputs.errors(off[0]) <= inputs.errors(off[1])
    chosen = torch.where(improved[:, None], better.view(torch.uint8), codes.view(torch.uint8))
    return chosen.view(codes.dtype), scales


def _compensate(
    w: Tensor, inputs: Inputs, codes: Tensor, scales: Tensor, form: str, kernels: Kernels
) -> Tensor:
    """Return values [N, K] of a format for w; steps and shifts are those of the codes."""
    step, shift = steps_of(codes, scales)
    values, size = torch.empty_like(w), w.shape[1] // len(inputs.order)
    for part, (order, updates) in enumerate(zip(inputs.order, inputs.updates, strict=True)):
        columns = order + part * size
        group = columns // (w.shape[1] // step.shape[1])
        # Column by column: rows of the transposed weight are contiguous.
        columnwise = (w[:, columns], step[:, group], shift[:, group])
        x, steps, shifts = (t.T.contiguous() for t in columnwise)
        to, rounded = Grid(steps, shifts, form), torch.empty_like(x)
        _pass_over(x.clone(), updates[0], to, rounded, None, kernels)
        start = rounded.clone()
        _pass_over(start + updates[1] @ (start - x), updates[1], to, rounded, start, kernels)
        values[:, columns] = to.values(rounded).T
    return values


def _pass_over(
    x: Tensor, by: Tensor, grid: Grid, rounded: Tensor, start: Tensor | None, kernels: Kernels
) -> None:
    """Compute `quantize_columns` by blocks of columns."""
    for first in range(0, len(x), BLOCK):
        block, after = slice(first, first + BLOCK), slice(first + BLOCK, None)
        begin = None if start is None else start[block]
        kernels.columns(x[block], by[block, block], grid.part(block), rounded[block], begin)
        x[after].addmm_(by[after, block], x[block])
