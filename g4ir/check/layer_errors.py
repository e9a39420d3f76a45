"""Errors of each layer alone: it runs on its own inputs, in 16 bits and in float64."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from g4ir.ir.distance import max_or, row_errors
from g4ir.ops.budgets import UNIT

Tensor = torch.Tensor
#: times the peer's distance that a layer may add, in the median and at its worst row: rounding
#: of one layer on its own inputs is the same on both sides within a few percent
LAYER_TYPICAL, LAYER_WORST = 1.5, 2.5
#: units of the dtype by which the first expert left out lies behind the last one taken, relative
#: to it, where either may be taken
CLOSE_UNITS = 8


@dataclass(frozen=True)
class LocalError:
    """The error that a layer (the head after the last) adds to the distance to float64: in the
    median and at its worst row without a near tie of its router, of the engine and of the peer."""

    layer: str
    median: float
    worst: float
    peer_median: float
    peer_worst: float
    ok: bool

    @property
    def ratios(self) -> tuple[float, float]:
        """Ratios to the peer, of the medians and of the worst rows."""
        return self.median / self.peer_median, self.worst / self.peer_worst


def local_text(errors: Sequence[LocalError]) -> str:
    """Name the layers that lie farthest from float64, in the median and at a row."""
    far = []
    for i in range(2):
        e = max(errors, key=lambda e: math.inf if math.isnan(e.ratios[i]) else e.ratios[i])
        far.append(f"{e.ratios[i]:.2f} ({e.layer})")
    return (
        f"median {far[0]} and worst row {far[1]} x the reference's; up to "
        f"{LAYER_TYPICAL:g} and {LAYER_WORST:g}"
    )


#: value -> index of a token -> row
Rows = Mapping[str, Mapping[int, Tensor]]
#: logits and layers of a run in 16 bits; the same in float64 on its own inputs; router margins
Side = tuple[Tensor, Rows, Tensor, Rows, Mapping[int, Tensor]]


def local_errors(
    count: int, where: Sequence[int], own: Side, peer: Side, *, dtype: str
) -> tuple[LocalError, ...]:
    """Return the error of each layer, then of the head; `where` are the tokens of the rows of
    logits. Both sides show the same rows. A layer of which there are none counts as part of the
    next; the head counts where what goes into it is shown, or it would stand for all layers."""
    out, skipped = [], [0]
    for i in range(count + 1):
        shown = f"L{i}.out" in own[1] if i < count else bool(_ends(own[1], count, where))
        if not shown:
            skipped.append(i + 1)
            continue
        ours, theirs = (_local(side, i, count, where, skipped, dtype) for side in (own, peer))
        label = "the head" if i == count else f"layer {i}"
        out.append(_local_error(label, ours, theirs, UNIT[dtype]))
        skipped = [i + 1]
    return tuple(out)


def _local(
    side: Side, layer: int, count: int, where: Sequence[int], parts: Sequence[int], dtype: str
) -> tuple[Tensor, Tensor]:
    """Return the distance of each row, and whether a router of `parts` was near a tie there."""
    logits, rows, wide_logits, wide_rows, margins = side
    if layer == count:
        ends = _ends(rows, count, where)
        at = [where[i] for i in ends]
        distance = row_errors(logits[ends], wide_logits[ends]).distance
    else:
        held, wide = rows[f"L{layer}.out"], wide_rows[f"L{layer}.out"]
        at = sorted(held)
        pair = (torch.stack([t[i] for i in at]) for t in (held, wide))
        distance = row_errors(*pair).distance
    tied = torch.zeros(len(at), dtype=torch.bool)
    for part in parts:
        if part in margins:
            tied |= margins[part][at] < CLOSE_UNITS * UNIT[dtype]
    return distance, tied


def _ends(rows: Rows, count: int, where: Sequence[int]) -> list[int]:
    """Return which of the rows of logits are at tokens whose last layer is shown."""
    last = rows.get(f"L{count - 1}.out", {})
    return [i for i, at in enumerate(where) if at in last]


def _local_error(
    layer: str, own: tuple[Tensor, Tensor], peer: tuple[Tensor, Tensor], unit: float
) -> LocalError:
    """Compare; a quarter of a unit is the least allowed: rounding once moves by up to half."""
    median, peer_median = (max_or(d.median(), unit / 4 * i) for i, (d, _) in enumerate((own, peer)))
    worst, peer_worst = (
        max_or(d[~tied].max() if bool((~tied).any()) else d.median(), unit / 4 * i)
        for i, (d, tied) in enumerate((own, peer))
    )
    ok = median <= LAYER_TYPICAL * peer_median and worst <= LAYER_WORST * peer_worst
    return LocalError(layer, median, worst, peer_median, peer_worst, ok)
