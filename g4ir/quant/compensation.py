"""Error compensation: columns of a weight are quantised one after another, and the error of each is
compensated by the later columns, as far as the inputs of a calibration text correlate (GPTQ,
Frantar et al., arXiv:2210.17323, with columns in descending order of their second moment). Then
each column is rounded again to minimise the error given all others (coordinate descent).

The inputs are those of the model with all earlier weights quantised. Before a weight is quantised,
it is corrected for their differences from the unquantised model's inputs, by least squares
(asymmetric calibration: Li et al., GPTAQ, arXiv:2504.02692).

Scales are chosen first, in int4, nl4, nl3 and nl2 by squared errors weighted with the columns'
second moments, and stay.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import torch

from g4ir.ops.codecs import FORMATS, dequantize_codes, round_to_grid, steps_of, with_values
from g4ir.ops.quant import quantize

from .recipe import Scheme

#: damping: added to the diagonal, relative to its mean; less would overfit the calibration text
DAMPING = 0.1
#: damping of corrections, relative in the same way: they overfit sooner
CORRECTION_DAMPING = 0.5
#: minimum second moment of a column, relative to the mean: other texts may use columns that the
#: calibration text does not
FLOOR = 1e-3
#: columns whose errors are passed on to later columns in one matrix product
BLOCK = 128
#: maximum columns whose errors are compensated together: longer rows are cut into equal parts
COLUMNS = 2048
#: columns per block of `add_products`
PRODUCTS = 512
#: elements of a weight that are compensated at a time
ELEMENTS = 1 << 24

Tensor = torch.Tensor
Codes = tuple[Tensor, Tensor]


def is_compensated(form: str) -> bool:
    """Whether a format supports error compensation: all but fp8, fp4 and those with minima."""
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
        """Return the values that `round` chose, from its result `rounded`, which may have rounding
        errors."""
        return (rounded / self.step - self.shift).round_()


def quantize_columns(x: Tensor, by: Tensor, grid: Grid, start: Tensor) -> None:
    """Round columns x [K, N] to a grid, one after another, and replace each by its difference from
    `start`. Before column i is rounded, `by` [i, j] times the difference of each column j < i is
    added to it."""
    for j in range(len(x)):
        x[j].addmv_(x[:j].T, by[j, :j])
        x[j] = grid.part(slice(j, j + 1)).round(x[j]) - start[j]


def add_products(total: Tensor, x: Tensor) -> None:
    """Add x^T x of inputs x [T, K] to the upper triangle of a total f32 [K, K], in blocks."""
    x = x.float()
    for i in range(0, len(total), PRODUCTS):
        total[i : i + PRODUCTS, i:].addmm_(x[:, i : i + PRODUCTS].T, x[:, i:])


@dataclass(frozen=True)
class Kernels:
    """Implementations of `quantize`, `quantize_columns` and `add_products`."""

    quantize: Callable[..., tuple[Any, ...]] = quantize.reference
    columns: Callable[[Tensor, Tensor, Grid, Tensor], None] = quantize_columns
    products: Callable[[Tensor, Tensor], None] = add_products


@dataclass(frozen=True)
class Inputs:
    """Sums over a calibration text for a matmul, f32 [P, K/P, K/P], one for each of P parts of the
    columns (`column_parts`): `products` y^T y of its inputs y, and `drift` (x - y)^T y, where x are
    the unquantised model's inputs; None if y are these."""

    products: Tensor
    drift: Tensor | None = None

    @cached_property
    def moments(self) -> Tensor:
        """Second moments of the columns relative to their mean, at least FLOOR: f32 [1, K]."""
        moments = self.products.diagonal(dim1=1, dim2=2).reshape(1, -1)
        return (moments / self._mean).clamp(min=FLOOR)

    @cached_property
    def damped(self) -> Tensor:
        """The products divided by the mean of their diagonal, with DAMPING added to the
        diagonal."""
        return self._damped(DAMPING)

    def _damped(self, damping: float) -> Tensor:
        h = self.products / self._mean
        h.diagonal(dim1=1, dim2=2).add_(damping)
        return h

    @cached_property
    def _mean(self) -> Tensor:
        mean = self.products.diagonal(dim1=1, dim2=2).mean()
        return mean.where(mean > 0, 1.0)

    @cached_property
    def _factor(self) -> Tensor:
        return torch.linalg.cholesky(self._damped(CORRECTION_DAMPING))

    def corrected(self, w: Tensor) -> Tensor:
        """Return the weight f32 [N, K] whose products with the inputs y are nearest to those of w
        with the inputs x, with damping."""
        assert self.drift is not None
        products = self._parts(w.float()) @ (self.drift / self._mean)
        change = torch.cholesky_solve(products.mT, self._factor).mT
        return w + change.transpose(0, 1).flatten(1)

    @cached_property
    def order(self) -> Tensor:
        """Columns [P, K/P] of each part in the order in which they are quantised."""
        return self.damped.diagonal(dim1=1, dim2=2).argsort(dim=-1, descending=True, stable=True)

    @cached_property
    def updates(self) -> tuple[tuple[Tensor, Tensor], ...]:
        """For each part: the matrices `by` of `quantize_columns`, for compensation and for
        coordinate descent."""
        # columns of a symmetric matrix: rows of its transpose, which are faster to gather
        return tuple(_updates(h[i].T.contiguous()[i]) for h, i in zip(self.damped, self.order))

    def errors(self, off: Tensor) -> Tensor:
        """Return the squared errors [N] of the products of rows of `off` [N, K], damped."""
        off = self._parts(off)
        return ((off @ self.damped) * off).sum((0, 2))

    def _parts(self, w: Tensor) -> Tensor:
        return w.unflatten(-1, self.products.shape[:2]).transpose(0, 1)


def column_parts(x: Tensor) -> Tensor:
    """Return x [T, K] as [P, T, K/P], parts of at most COLUMNS columns."""
    size = x.shape[-1]
    parts = next(p for p in range(-(-size // COLUMNS), size + 1) if size % p == 0)
    return x.unflatten(-1, (parts, -1)).transpose(0, 1)


def _updates(h: Tensor) -> tuple[Tensor, Tensor]:
    # With h = m m^T, m upper triangular, e h e^T is the sum over j of (e m)_j^2, which depends on
    # columns up to j.
    m = torch.linalg.cholesky(h.double().flip(0, 1))
    return (m / -m.diagonal()).float().flip(0, 1).T, h / -h.diagonal()[:, None]


def calibrated(
    w: Tensor, inputs: Inputs, scheme: Scheme, dtype: str, kernels: Kernels = Kernels()
) -> Codes:
    """Return codes and scales of a weight [N, K] in an engine of this dtype, with a small error of
    its product with the inputs. Rows on a grid of the format, as trained, keep their values."""
    parts = w.split(max(1, ELEMENTS // w.shape[1]))
    packed, scales = zip(*(_calibrated(x, inputs, scheme, dtype, kernels) for x in parts))
    return torch.cat([p.view(torch.uint8) for p in packed]).view(packed[0].dtype), torch.cat(scales)


def _calibrated(w: Tensor, inputs: Inputs, scheme: Scheme, dtype: str, kernels: Kernels) -> Codes:
    quantized = partial(kernels.quantize, **scheme.attrs(dtype), moments=inputs.moments)
    codes, scales = quantized(w)
    if inputs.drift is not None:
        lossless = (dequantize_codes(codes, scales, w.dtype) == w).all(-1, keepdim=True)
        w = w.float().where(lossless, inputs.corrected(w))
        codes, scales = quantized(w)
    return with_values(codes, _compensate(w, inputs, codes, scales, scheme.form, kernels)), scales


def _compensate(
    w: Tensor, inputs: Inputs, codes: Tensor, scales: Tensor, form: str, kernels: Kernels
) -> Tensor:
    """Return values [N, K] of a format for w; steps and shifts are those of the codes."""
    step, shift = (t.T.contiguous() for t in steps_of(codes, scales))
    columns, values = w.float().T.contiguous(), torch.empty(w.T.shape)
    size, group = len(columns) // len(inputs.order), len(columns) // len(step)
    for part, (order, updates) in enumerate(zip(inputs.order, inputs.updates, strict=True)):
        chosen = order + part * size
        x, grid = columns[chosen], Grid(step[chosen // group], shift[chosen // group], form)
        errors = torch.zeros_like(x)
        for by, triangular in zip(updates, (True, False), strict=True):
            _pass_over(x, by, triangular, grid, errors, kernels)
        values[chosen] = grid.values(x + errors)
    return values.T


def _pass_over(
    x: Tensor, by: Tensor, triangular: bool, grid: Grid, errors: Tensor, kernels: Kernels
) -> None:
    """Compute `quantize_columns` by blocks of columns; errors [K, N] are relative to x. A column
    gets those of all columns, or of earlier ones alone if `by` is triangular."""
    for first in range(0, len(x), BLOCK):
        block, columns = slice(first, first + BLOCK), slice(first if triangular else None)
        start = x[block] + errors[block]
        y = start.addmm(by[block, columns], errors[columns])
        kernels.columns(y, by[block, block], grid.part(block), start)
        errors[block] += y
