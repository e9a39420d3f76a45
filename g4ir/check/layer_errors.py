"""Errors of each layer alone: it runs on its own inputs, in 16 bits and in float64."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from g4ir.ir.distance import max_or, row_errors
from g4ir.ops.budgets import UNIT

Tensor = torch.Tensor
#: value -> index of a token -> the value's row there, f32[hidden]
Rows = dict[str, dict[int, Tensor]]
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


@dataclass(frozen=True, eq=False)
class Side:
    """A run in 16 bits: the logits after the tokens `where` and the outputs of `count` layers; the
    same in float64 on its own inputs; router margins by layer."""

    count: int
    where: Sequence[int]
    logits: Tensor
    rows: Rows
    wide_logits: Tensor
    wide_rows: Rows
    margins: Mapping[int, Tensor]

    def shown(self, layer: int) -> list[int]:
        """Return the tokens at which a layer's output is shown; for the head, its input."""
        rows = self.rows.get(f"L{min(layer, self.count - 1)}.out", {})
        return [t for t in self.where if t in rows] if layer == self.count else sorted(rows)

    def error(self, layer: int, parts: Sequence[int], unit: float) -> tuple[Tensor, Tensor]:
        """Return the median distance, and the worst without near ties of a router of `parts`."""
        at = self.shown(layer)
        if layer == self.count:
            found = [self.where.index(t) for t in at]
            made, wide = self.logits[found], self.wide_logits[found]
        else:
            name = f"L{layer}.out"
            made, wide = (
                torch.stack([rows[name][t] for t in at]) for rows in (self.rows, self.wide_rows)
            )
        distance = row_errors(made, wide).distance
        tied = torch.zeros(len(at), dtype=torch.bool)
        for part in self.margins.keys() & set(parts):
            tied |= self.margins[part][at] < CLOSE_UNITS * unit
        clear = distance[~tied]
        return distance.median(), clear.max() if len(clear) else distance.median()


def local_errors(own: Side, peer: Side, *, dtype: str) -> tuple[LocalError, ...]:
    """Return the error of each layer, then of the head. Both sides show the same rows. A layer of
    which there are none counts as part of the next; the head counts where its input is shown, or it
    would stand for all layers. A quarter of a unit is the least allowed: rounding once moves by up
    to half."""
    out, parts, unit = [], list[int](), UNIT[dtype]
    for i in range(own.count + 1):
        parts.append(i)
        if not own.shown(i):
            continue
        median, worst = (max_or(d, 0.0) for d in own.error(i, parts, unit))
        peer_median, peer_worst = (max_or(d, unit / 4) for d in peer.error(i, parts, unit))
        ok = median <= LAYER_TYPICAL * peer_median and worst <= LAYER_WORST * peer_worst
        label = "the head" if i == own.count else f"layer {i}"
        out.append(LocalError(label, median, worst, peer_median, peer_worst, ok))
        parts = []
    return tuple(out)
