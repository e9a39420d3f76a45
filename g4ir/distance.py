"""How far rows of logits lie apart, and how far they may.

In fp32 a fixed budget does, relative to the row's rms. In 16 bits rounding depends on the model
and its weights, so the peer says how much is normal: its own distance to the same model in
float64 on the same tokens (each weight rounded to 16 bits, then computed wide), measured in two
of its modes. A right engine lies as far from float64 as the peer does; not nearer to the peer,
since the two round on different sides. The median row may lie `TYPICAL` times as far as the
peer's, and any row `WORST` times as far as the peer's worst: near ties of a router turn over in
16 bits, on one side at one token, on the other at another, and such rows are far from float64 on
either side.

Where float64 does not fit, distances are taken from the peer itself: the engine's, and that of
the peer's other mode.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from .budgets import UNIT
from .fit import device_memory
from .wide import BLOCK

if TYPE_CHECKING:
    from .engine import Engine
    from .spec import Spec

Tensor = torch.Tensor
#: dtypes whose rounding is measured
ROUNDED = ("bf16", "f16")
#: times the peer's median and worst distance: medians of right computations of one model lie up
#: to 2.6 apart where a router's near ties turn over, and within 1.1 elsewhere
TYPICAL, WORST = 2.0, 4.0


@dataclass(frozen=True)
class Rounding:
    """How far a peer's rows lie from `anchor`, as root mean squares relative to that of the
    anchor's row; the larger of its modes. `unit` is half a step of the dtype, the least that is
    allowed. `reason` says why the anchor is not float64."""

    anchor: str
    median: float
    worst: float
    unit: float
    reason: str | None = None

    @property
    def median_limit(self) -> float:
        """What the engine's median row may be away."""
        return TYPICAL * max(self.median, self.unit)

    @property
    def row_limit(self) -> float:
        """What each of the engine's rows may be away."""
        return WORST * max(self.worst, self.unit)

    def __str__(self) -> str:
        return f"{TYPICAL:g} and {WORST:g} times the peer's distance to {self.anchor}"


@dataclass(frozen=True)
class Budget:
    """What a row of logits may differ by: its largest difference relative to the peer row's
    rms, the cosine of the two rows, or the distance that the peer's own rounding allows."""

    relative: float | None = None
    cosine: float | None = None
    rounding: Rounding | None = None

    def holds(self, errors: Errors) -> Tensor:
        """bool [rows]; a value that is not a number never holds."""
        if self.rounding is not None:
            return errors.distance <= self.rounding.row_limit
        if self.relative is not None:
            return errors.relative <= self.relative
        assert self.cosine is not None
        return errors.cosine > self.cosine

    def typical(self, errors: Errors) -> bool:
        """Whether the rows as a whole hold: their median, where rounding is measured."""
        if self.rounding is None:
            return True
        return bool(errors.distance.median() <= self.rounding.median_limit)

    def all_hold(self, errors: Errors) -> bool:
        """Each row, and the rows as a whole."""
        return bool(self.holds(errors).all()) and self.typical(errors)

    @property
    def inside(self) -> Budget:
        """Of values inside, beside those of a peer of the same dtype."""
        if self.rounding is None:
            return self
        away = TYPICAL * max(self.rounding.median, self.rounding.unit)
        return Budget(cosine=max(1 - away * away / 2, BUDGETS["bf16", "reference"].cosine or 0.0))

    @property
    def gap(self) -> float:
        """Two logits closer than this (relative to the row's rms) may change places."""
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
    ("f32", "reference"): Budget(relative=1e-4),
    ("f32", "hf"): Budget(relative=4e-4),
    ("bf16", "reference"): Budget(cosine=0.999),
    ("bf16", "hf"): Budget(cosine=0.999),
    ("f16", "reference"): Budget(cosine=0.999),
    ("f16", "hf"): Budget(cosine=0.999),
}


@dataclass(frozen=True)
class Errors:
    """By row: largest difference, the same relative to the wanted row's rms, the cosine, and the
    rms of the difference relative to that of the wanted row."""

    absolute: Tensor
    relative: Tensor
    cosine: Tensor
    distance: Tensor = field(default_factory=lambda: torch.zeros(0))


def row_errors(got: Tensor, want: Tensor) -> Errors:
    """[..., n] -> errors of each row. Rows of next to no size count relative to the whole. What is
    not a number stays so."""
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
    """What distances are measured from, in 16 bits: rows [N, n] of `name`, and rows of the peer
    in its other modes. With a `reason` the rows are the peer's own."""

    name: str
    rows: Tensor
    others: Sequence[Tensor]
    #: why it is not float64
    reason: str | None = None

    def rounding(self, want: Tensor, dtype: str) -> Rounding:
        """Of a peer whose rows are `want`."""
        modes = self.others if self.reason else [want, *self.others]
        found = [row_errors(t, self.rows).distance for t in modes]
        return Rounding(
            self.name, max(float(d.median()) for d in found), max(float(d.max()) for d in found),
            UNIT[dtype] / 2, self.reason,
        )  # fmt: skip

    def errors(self, got: Tensor, want: Tensor) -> Errors:
        """Of the engine against the peer; the distance is that to the anchor."""
        beside = row_errors(got, want)
        return Errors(
            beside.absolute, beside.relative, beside.cosine, row_errors(got, self.rows).distance
        )


# ---- each layer alone -------------------------------------------------------------------------


#: times the peer's distance that a layer may add, in the median and at its worst row: rounding
#: of one layer on its own inputs is the same on both sides within a few percent
LAYER_TYPICAL, LAYER_WORST = 1.5, 2.5
#: units of the dtype by which the first expert left out lies behind the last one taken, relative
#: to it, where either may be taken
CLOSE_UNITS = 8


@dataclass(frozen=True)
class LocalError:
    """What a layer (the head after the last) adds to the distance to float64: in the median and at
    its worst row without a near tie of its router, of the engine and of the peer."""

    layer: str
    median: float
    worst: float
    peer_median: float
    peer_worst: float
    ok: bool

    @property
    def ratios(self) -> tuple[float, float]:
        """Of the medians and of the worst rows."""
        return self.median / self.peer_median, self.worst / self.peer_worst


def local_text(errors: Sequence[LocalError]) -> str:
    """The layers that lie farthest from float64, in the median and at a row."""
    far = []
    for i in range(2):
        e = max(errors, key=lambda e: math.inf if math.isnan(e.ratios[i]) else e.ratios[i])
        far.append(f"{e.ratios[i]:.2f} ({e.layer})")
    return (
        f"median {far[0]} and worst row {far[1]} times the peer's; up to {LAYER_TYPICAL:g} and "
        f"{LAYER_WORST:g}"
    )


#: value -> index of a token -> row
Rows = Mapping[str, Mapping[int, Tensor]]
#: logits and layers of a run in 16 bits; the same in float64 on its own inputs; router margins
Side = tuple[Tensor, Rows, Tensor, Rows, Mapping[int, Tensor]]


def local_errors(
    count: int, where: Sequence[int], own: Side, peer: Side, *, dtype: str
) -> tuple[LocalError, ...]:
    """By layer, then the head; `where` are the tokens of the rows of logits. A layer that one side
    does not show counts as part of the next."""
    out, skipped = [], [0]
    for i in range(count + 1):
        name = f"L{i}.out"
        shown = name in own[1] and name in peer[1]
        if i < count and not shown:
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
    """Distance of each row, and whether a router among `parts` was near a tie there."""
    logits, rows, wide_logits, wide_rows, margins = side
    if layer == count:
        at, distance = [*where], row_errors(logits, wide_logits).distance
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


def _local_error(
    layer: str, own: tuple[Tensor, Tensor], peer: tuple[Tensor, Tensor], unit: float
) -> LocalError:
    """A quarter of a unit is the least that is allowed: half a unit is the most of one rounding."""
    median, peer_median = (max_or(d.median(), unit / 4 * i) for i, (d, _) in enumerate((own, peer)))
    worst, peer_worst = (
        max_or(d[~tied].max() if bool((~tied).any()) else d.median(), unit / 4 * i)
        for i, (d, tied) in enumerate((own, peer))
    )
    ok = median <= LAYER_TYPICAL * peer_median and worst <= LAYER_WORST * peer_worst
    return LocalError(layer, median, worst, peer_median, peer_worst, ok)


def max_or(value: Tensor, least: float) -> float:
    """The larger; what is not a number stays so."""
    found = float(value)
    return found if math.isnan(found) else max(found, least)


def median_of(values: Sequence[float]) -> float:
    """As torch has it: the lower of two; not a number where one is not."""
    return float(torch.tensor(values, dtype=torch.float64).median()) if values else 0.0


def worst_of(values: Sequence[float]) -> float:
    """The largest; not a number where one is not."""
    return float(torch.tensor(values, dtype=torch.float64).max()) if values else 0.0


# ---- memory -----------------------------------------------------------------------------------


def float64_refusal(engine: Engine, tokens: int, rows: int, device: str) -> str | None:
    """Why a pass in float64 over so many tokens, with so many rows of logits, has no room on a
    device beside the weights of engine and peer, or None. By sizes that are known before a peer
    is loaded."""
    params = sum(v.type.nbytes() for v in engine.program.params().values())
    free = device_memory(device) - 2 * params
    needed = wide_bytes(engine.spec, tokens, rows)
    if needed <= free:
        return None
    return (
        f"float64 takes {needed / 2**30:.1f} GiB beside the weights, and "
        f"{max(free, 0) / 2**30:.1f} GiB are free"
    )


def wide_bytes(spec: Spec, tokens: int, rows: int) -> int:
    """Of a pass in float64 without a cache: one block of a weight, scores of one layer (raw,
    masked, weights, and those rounded), a layer's activations, and every layer's output."""
    text = spec.text
    heads = text.num_attention_heads
    widest = max(2 * text.intermediate_size * 2, text.hidden_size)
    scores = 4 * heads * tokens * tokens
    activations = tokens * (3 * widest + (text.num_hidden_layers + 8) * text.hidden_size)
    return 8 * (BLOCK + scores + activations + 3 * rows * text.vocab_size)
