"""Error compensation: columns of a weight are quantised one after another, and the error of each
is made up for by the columns that follow, as far as the inputs of a calibration text correlate
(GPTQ, Frantar et al., arXiv:2210.17323, with columns in descending order of their second moment).
Then each column once more gets the values of least error given all others (coordinate descent).

Scales are chosen first, by squared errors weighted with the columns' second moments, and stay.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from g4ir.ops.codecs import FORMATS, dequantize_codes, nearest_values, steps_of, with_values
from g4ir.ops.quant import quantize

from .recipe import Scheme

#: added to the diagonal, relative to its mean: less would follow the calibration text too closely
DAMPING = 0.1
#: minimum second moment of a column, relative to the mean: other texts may use columns that this
#: one does not
FLOOR = 1e-3
#: columns whose errors are passed on to the remaining ones at a time
COLUMNS = 128
#: largest matrix that is factored in float64
DOUBLE_MAX = 4096
#: elements of a weight that are compensated at a time
ELEMENTS = 1 << 24

Tensor = torch.Tensor
Codes = tuple[Tensor, Tensor]
#: `quantize.reference`, or a kernel of the same results
Quantize = Callable[..., tuple[Any, ...]]


def is_compensated(form: str) -> bool:
    """Whether errors are compensated in a format: of integers or levels, without minima."""
    return FORMATS[form].scales == 1 and form not in ("fp8", "fp4")


@dataclass(frozen=True)
class Inputs:
    """Sum of outer products of a matmul's inputs on a calibration text, f32 [K, K]."""

    products: Tensor

    @cached_property
    def moments(self) -> Tensor:
        """Second moments of the columns relative to their mean, f32 [1, K]."""
        moments = self.products.diagonal()[None]
        mean = moments.mean()
        return (moments / mean.where(mean > 0, 1.0)).clamp(min=FLOOR)

    @cached_property
    def damped(self) -> Tensor:
        """The products relative to their mean diagonal, damped."""
        h = self.products.to(torch.float64 if len(self.products) <= DOUBLE_MAX else torch.float32)
        mean = h.diagonal().mean()
        h = h / mean.where(mean > 0, 1.0)
        h.diagonal().add_(DAMPING)
        return h

    @cached_property
    def order(self) -> Tensor:
        """Columns in the order in which they are quantised."""
        return self.damped.diagonal().argsort(descending=True, stable=True)

    @cached_property
    def ordered(self) -> Tensor:
        """`damped` in that order."""
        return self.damped[self.order][:, self.order]

    @cached_property
    def factor(self) -> Tensor:
        """Upper Cholesky factor of the inverse of `ordered`, f32."""
        lower = torch.linalg.cholesky(self.ordered)
        return torch.linalg.cholesky(torch.cholesky_inverse(lower), upper=True).float()

    def errors(self, off: Tensor) -> Tensor:
        """Return e H e^T [N], damped, for rows e [N, K] of errors."""
        return ((off @ self.damped.float()) * off).sum(-1)


def calibrated(
    w: Tensor, inputs: Inputs, scheme: Scheme, dtype: str, nearest: Quantize = quantize.reference
) -> Codes:
    """Return codes and scales of a weight [N, K] in an engine of this dtype that minimise the error
    of its product with the inputs. A row keeps the nearest values where these have less error, and
    all rows do in formats with minima."""
    parts = w.split(max(1, ELEMENTS // w.shape[1]))
    packed, scales = zip(
        *(_calibrated(x, inputs, scheme, dtype, nearest) for x in parts), strict=True
    )
    whole = torch.cat([p.view(torch.uint8) for p in packed])
    return whole.view(packed[0].dtype), torch.cat(scales)


def _calibrated(w: Tensor, inputs: Inputs, scheme: Scheme, dtype: str, nearest: Quantize) -> Codes:
    codes, scales = nearest(w, **scheme.attrs(dtype), moments=inputs.moments)
    if not is_compensated(scheme.form):
        return codes, scales
    values = _compensate(w.float(), inputs, *steps_of(codes, scales), scheme.form)
    better = with_values(codes, values)
    off = [dequantize_codes(c, scales, torch.float32) - w.float() for c in (better, codes)]
    improved = inputs.errors(off[0]) <= inputs.errors(off[1])
    chosen = torch.where(improved[:, None], better.view(torch.uint8), codes.view(torch.uint8))
    return chosen.view(codes.dtype), scales


def _compensate(w: Tensor, inputs: Inputs, step: Tensor, shift: Tensor, form: str) -> Tensor:
    """Return values [N, K] of a format for w, steps and shifts [N, G] of its groups."""
    order, h = inputs.order, inputs.ordered.float()
    group = order // (w.shape[1] // step.shape[1])
    # Column by column: rows of the transposed weight are contiguous.
    w, step, shift = (t.T.contiguous() for t in (w[:, order], step[:, group], shift[:, group]))
    values, dequantized = _pass_on(w.clone(), inputs.factor, step, shift, form)
    _descend(values, dequantized, h @ (dequantized - w), h, step, shift, form)
    return values[order.argsort()].T.contiguous()


def _pass_on(
    x: Tensor, factor: Tensor, step: Tensor, shift: Tensor, form: str
) -> tuple[Tensor, Tensor]:
    """Return values [K, N] for x, whose columns that follow make up for each error, and what they
    mean. x is overwritten."""
    values, dequantized = torch.empty_like(x), torch.empty_like(x)
    for first in range(0, len(x), COLUMNS):
        last = min(first + COLUMNS, len(x))
        errors = torch.empty_like(x[first:last])
        for j in range(first, last):
            values[j], dequantized[j] = nearest_values(x[j], step[j], shift[j], form)
            errors[j - first] = error = (x[j] - dequantized[j]) / factor[j, j]
            x[j + 1 : last].addr_(factor[j, j + 1 : last], error, alpha=-1)
        x[last:].addmm_(factor[first:last, last:].T, errors, alpha=-1)
    return values, dequantized


def _descend(
    values: Tensor,
    dequantized: Tensor,
    slope: Tensor,
    h: Tensor,
    step: Tensor,
    shift: Tensor,
    form: str,
) -> None:
    """Replace values [K, N] by those of least error given all others, a column after another.
    `slope` is half the derivative of the error by what they mean; all three are overwritten."""
    for first in range(0, len(values), COLUMNS):
        last = min(first + COLUMNS, len(values))
        before = dequantized[first:last].clone()
        for j in range(first, last):
            best = dequantized[j] - slope[j] / h[j, j]
            values[j], dequantized[j] = nearest_values(best, step[j], shift[j], form)
            slope[j + 1 : last].addr_(h[j, j + 1 : last], dequantized[j] - before[j - first])
        slope[last:].addmm_(h[last:, first:last], dequantized[first:last] - before)
