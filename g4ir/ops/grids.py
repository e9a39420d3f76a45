"""Nonuniform grids: scales and level shifts of groups of weights, and the nearest levels.

A weight is integer * scale * (level + shift). The scale is the row's, or that of a part of the row.
A group of 32 weights shares the integer (signed, 7 bits) and the shift, which is 0 or a constant of
the format: one byte.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

from .types import torch

#: weights that share an integer and a shift bit; the largest integer
GROUP, INTEGER_MAX = 32, 63
#: levels that a group's extremum gets in the search for a scale, relative to the lowest level
_STARTS = (1.1, 1.0, 0.9, 0.8, 0.72)


#: steps per unit, and steps to either side of 0, of the table of nearest levels; no midpoint of two
#: levels is within a step, since midpoints are multiples of 1/2
_STEPS, _REACH = 4, 512


@lru_cache(maxsize=16)
def level_table(levels: tuple[int, ...]) -> Any:
    """Return f32 [1024]: the level nearest to each interval of width 1/4 from -128 to 128."""
    ends = torch.tensor(levels, dtype=torch.float64)
    steps = (torch.arange(-_REACH, _REACH, dtype=torch.float64) + 0.5) / _STEPS
    return ends[torch.bucketize(steps, (ends[1:] + ends[:-1]) / 2)].float()


def nearest_level(y: Any, levels: tuple[int, ...]) -> Any:
    """Return the level f32 nearest to each element of y; of two equally near, the upper one."""
    steps = (y * _STEPS).floor_().clamp_(-_REACH, _REACH - 1).nan_to_num_().to(torch.int32)
    table = level_table(levels).to(y.device)
    return table.index_select(0, steps.add_(_REACH).flatten()).view_as(y)


@lru_cache(maxsize=16)
def _index_table(levels: tuple[int, ...]) -> Any:
    return torch.bucketize(torch.arange(-128, 128), torch.tensor(levels)).to(torch.uint8)


def level_indices(values: Any, levels: tuple[int, ...]) -> Any:
    """Return the index u8 of each value in `levels`. The values are levels, which are integers in
    the range of int8, in any dtype."""
    entries = values.to(torch.int16).clamp_(-128, 127).to(torch.int32).add_(128)
    table = _index_table(levels).to(values.device)
    return table.index_select(0, entries.flatten()).view_as(entries)


def fit_groups(
    x: Any, levels: tuple[int, ...], shift_by: int, moments: Any = None
) -> tuple[Any, Any]:
    """Return a scale, of either sign, and the shift (0 or `shift_by`), [..] each, for groups x
    [.., 32]: of a few scales refined by least squares, the one of least squared error, weighted by
    `moments` [.., 32] if passed."""
    extreme = x.gather(-1, x.abs().argmax(-1, keepdim=True))
    weighed = x if moments is None else x * moments
    inverse = levels[0] / extreme.where(extreme != 0, 1.0)
    best = scale = shift = torch.zeros_like(extreme)
    for add in (0, shift_by):
        for start in _STARTS:
            values = nearest_level(x * (inverse * start) - add, levels) + add
            dot = (values * weighed).sum(-1, keepdim=True)
            square = values.square() if moments is None else values.square() * moments
            fitted = dot / square.sum(-1, keepdim=True).clamp(min=1e-30)
            gain = dot * fitted  # error = sum of x^2 - gain
            better = gain > best
            best, scale = torch.where(better, gain, best), torch.where(better, fitted, scale)
            shift = torch.where(better, add, shift)
    return scale.squeeze(-1), shift.squeeze(-1)


def integers_of(scales: Any, dtype: Any) -> tuple[Any, Any]:
    """Return integers [.., G] and a common scale [.., 1], rounded to `dtype`: their products
    approximate the scales [.., G] of groups of 32."""
    row = (scales.abs().amax(-1, keepdim=True) / INTEGER_MAX).to(dtype).to(scales.dtype)
    row = row.where(row != 0, 1.0)
    integers = (scales / row).round()
    # Not 0, which would make all weights of the group 0: with 1 or -1 the larger ones are kept.
    integers = integers.where(integers != 0, scales.sign())
    return integers.clamp(-INTEGER_MAX, INTEGER_MAX), row


def group_bytes(integers: Any, shift: Any) -> Any:
    """Pack integers, and whether the shifts [..] are not 0, into bytes u8 [..]."""
    return (integers.to(torch.int16) * 2 + (shift != 0)).to(torch.int8).view(torch.uint8)
