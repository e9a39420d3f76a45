"""Reports of comparisons: what was compared, and how far apart it was."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from g4ir.engine.engine import Engine
from g4ir.ir.distance import GROUP, Rounding, Tolerance, median_of, worst_of

from .media import MediaReport

#: a row is at the softcap where its largest logit is beyond this share of the cap
SATURATED = 0.99
#: share of rows at the softcap from which on there is an alarm: a sound model is seldom as sure
SATURATED_ROWS = 0.1
#: times the peer's distance that a layer may add, in the median and at its worst row: rounding
#: of one layer on its own inputs is the same on both sides within a few percent
LAYER_TYPICAL, LAYER_WORST = 1.5, 2.5
#: columns and levels of the curve
CURVE_WIDTH = 60
LEVELS = "_.:-=+*#@"


@dataclass(frozen=True)
class Position:
    """The logits after one token."""

    at: int
    absolute: float
    relative: float
    cosine: float
    ok: bool
    #: to what the budget's rounding is measured from, or None
    distance: float | None = None


@dataclass(frozen=True)
class Greedy:
    """Greedy tokens; `differs`: the first that differs without a close call of the reference, or
    None."""

    count: int
    equal: int
    differs: int | None

    def text(self) -> str:
        close = self.differs is None and self.equal < self.count
        return f"{self.equal} of {self.count} equal{', then a close call' if close else ''}"


@dataclass(frozen=True)
class LayerError:
    """The output of a layer at the ends of the chunks: worst relative error and worst cosine.
    `value` is the output's name, or the final norm's where a backend shows only that of the last
    layer."""

    layer: int
    value: str
    relative: float
    cosine: float


@dataclass(frozen=True)
class Saturation:
    """Shares of rows, of the engine and of the reference, at the softcap."""

    cap: float
    engine: float
    peer: float

    @property
    def alarm(self) -> bool:
        """Whether there are too many: then the model or its weights are probably damaged."""
        return max(self.engine, self.peer) > SATURATED_ROWS

    def text(self) -> str:
        return (
            f"  ALARM: {self.engine:.0%} of the engine's rows and {self.peer:.0%} of the "
            f"reference's are at the softcap\n  (a logit beyond {SATURATED:.0%} of {self.cap:g}; "
            f"up to {SATURATED_ROWS:.0%} is normal): there, agreement says little"
        )


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


@dataclass(frozen=True)
class Quality:
    """The distance of the engine's next tokens to those of the weights as they were: the mean
    Kullback-Leibler divergence of theirs from the engine's (nats), the share of positions with the
    same best token, and the mean negative log likelihood of the given text, the engine's first.
    Without numbers, the `reason` why there are none."""

    positions: int = 0
    divergence: float | None = None
    same_top: float | None = None
    nll: tuple[float, float] | None = None
    reason: str | None = None

    def rows(self) -> Iterator[tuple[str, str]]:
        """Yield the labels and texts of a report."""
        if self.divergence is None or self.same_top is None:
            yield "quality", f"  not measured: {self.reason}"
            return
        far = f"{self.divergence:>12.2e} of KL divergence from the weights as they were"
        yield "quality", f"{far}, same top token {self.same_top:.1%} of {self.positions}"
        if self.nll:
            yield "", "{:>12.6f} of NLL, and {:.6f} of those".format(*self.nll)


@dataclass(frozen=True)
class VerifyReport:
    """A report of what was compared, and how far apart it was."""

    engine: str
    against: str
    budget: Tolerance
    turns: tuple[int, ...]
    positions: tuple[Position, ...] = field(repr=False)
    greedy: Greedy
    nll: tuple[float, float] | None
    first_difference: str | None
    layers: tuple[LayerError, ...]
    saturation: Saturation | None
    #: None for an engine that takes text alone
    media: MediaReport | None = None
    #: each layer on what the engine itself gave it; () where nothing was measured
    local: tuple[LocalError, ...] = ()
    #: the single steps once more, verified in rounds; () where the engine verifies nothing
    rounds: tuple[Position, ...] = field(default=(), repr=False)
    #: of a quantised engine, beside its weights as they were; nothing passes or fails by it
    quality: Quality | None = None
    #: the tokens were drawn: they compare implementations, and are no text
    random_ids: bool = False

    @property
    def text_ok(self) -> bool:
        """Whether every position is within the tolerance, their median and each layer too, and the
        greedy tokens are the same."""
        whole = self.typical and all(e.ok for e in self.local)
        return whole and self.plain_ok and all(p.ok for p in self.rounds)

    @property
    def plain_ok(self) -> bool:
        """Whether every position but those of verification steps is within the tolerance, and the
        greedy tokens are the same."""
        return all(p.ok for p in self.positions) and self.greedy.differs is None

    @property
    def typical(self) -> bool:
        """Whether the positions as a whole are within a measured tolerance: all of them, and those
        of single tokens and of verification steps alone, whose graphs are others."""
        rounding = self.budget.rounding
        if rounding is None:
            return True
        single = {sum(self.turns[:i]) for i, n in enumerate(self.turns) if n == 1}
        steps = distances([p for p in self.positions if p.at in single])
        parts = [part for part in (steps, distances(self.rounds)) if len(part) >= GROUP]
        return all(map(rounding.fits, (distances(self.positions), *parts)))

    @property
    def median_distance(self) -> float:
        """Median distance of the positions to the anchor; not a number where one is not."""
        return median_of(distances(self.positions))

    @property
    def ok(self) -> bool:
        """Whether the text and what was checked of media are within their budgets."""
        return self.text_ok and (self.media is None or self.media.ok)

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        out = {**asdict(self), "ok": self.ok}
        if self.saturation:
            out["saturation"]["alarm"] = self.saturation.alarm
        if self.media:
            out["media"] = self.media.to_dict()
        return out

    def text(self) -> str:
        """Return a short table."""
        long = [str(n) for n in self.turns if n > 1]
        steps = len(self.turns) - len(long)
        turns = " + ".join([*long, f"{steps} single steps"] if steps else long)
        lines = [f"{self.engine} against {self.against}, {sum(self.turns)} tokens in {turns}"]
        lines += [f"  {label:10}{said}" for label, said in self._rows()]
        lines += self.media.lines() if self.media else []
        if self.saturation and self.saturation.alarm:
            lines.append(self.saturation.text())
        if self.first_difference:
            lines.append(f"  first value out of tolerance: {self.first_difference}")
        return "\n".join([*lines, "ok" if self.ok else "FAILED"])

    def _rows(self) -> Iterator[tuple[str, str]]:
        yield "logits", f"{'worst':>12}{'position':>10}"
        for label, away in (("max abs", "absolute"), ("relative", "relative")):
            yield label, _worst(self.positions, [getattr(p, away) for p in self.positions])
        yield "1 - cosine", _worst(self.positions, [1 - p.cosine for p in self.positions])
        fine = sum(p.ok for p in self.positions)
        held = f"{fine:>12} of {len(self.positions)} within tolerance"
        yield "positions", f"{held}: {self.budget}"
        if self.rounds:
            fine = sum(p.ok for p in self.rounds)
            yield "rounds", f"{fine:>12} of {len(self.rounds)} within it, verified as drafts"
        if self.budget.rounding:
            yield from self._rounding_rows(self.budget.rounding)
        yield "greedy", self.greedy.text()
        if self.nll:
            yield "NLL", "{:>12.6f} and {:.6f} of the reference".format(*self.nll)
        if self.quality:
            yield from self.quality.rows()
            if self.random_ids:
                yield "", "  of random token ids, which say nothing of a text: --text FILE does"
        if self.layers:
            yield "layers", curve([e.relative for e in self.layers])

    def _rounding_rows(self, rounding: Rounding) -> Iterator[tuple[str, str]]:
        worst = worst_of(distances(self.positions))
        own = f"{self.median_distance:>12.2e} in the median, worst {worst:.2e}"
        usual = f"the reference's {rounding.median:.2e} and {rounding.worst:.2e}"
        yield "distance", f"{own}; {usual}"
        if not self.typical:
            yield "", "the positions as a whole are out of tolerance"
        if rounding.reason:
            yield "", rounding.reason
        if self.local:
            yield "one layer", local_text(self.local)
        if bad := [e.layer for e in self.local if not e.ok]:
            yield "", f"out of tolerance: {', '.join(bad)}"


def distances(positions: Sequence[Position]) -> list[float]:
    """Return how far rows lie from the anchor; nothing of those that were not measured."""
    return [p.distance for p in positions if p.distance is not None]


def _worst(positions: Sequence[Position], errors: Sequence[float]) -> str:
    worst = max(range(len(errors)), key=lambda i: (math.isnan(errors[i]), errors[i]))
    return f"{errors[worst]:>12.2e}{positions[worst].at:>10}"


def curve(errors: Sequence[float]) -> str:
    """Return `_.:-=+@`: one column per layer (the worst of several where they do not fit), its
    height by the logarithm; `_` is no error, `!` not a number. Then the first and the last
    error."""
    step = -(-len(errors) // CURVE_WIDTH)
    columns = [worst_of(errors[i : i + step]) for i in range(0, len(errors), step)]
    sizes = sorted(e for e in columns if 0 < e < math.inf)
    if not sizes and not any(columns):
        return f"{len(errors)} layers, bit for bit"
    low, high = (sizes[0], sizes[-1]) if sizes else (1.0, 1.0)

    def level(error: float) -> str:
        if error == 0 or not error < math.inf:
            return LEVELS[0] if error == 0 else "!"
        height = math.log(error / low) / math.log(high / low) if high > low else 0.0
        return LEVELS[1 + round(height * (len(LEVELS) - 2))]

    text = "".join(map(level, columns))
    return f"{text}  relative {errors[0]:.1e} at the first, {errors[-1]:.1e} at the last"


@dataclass(frozen=True)
class OpError:
    """The largest error of an op (or of several in a row), at `value`, and what is allowed."""

    ops: str
    error: float
    budget: float
    value: str

    @property
    def share(self) -> float:
        """The error as a share of the budget; infinity where it is not a number."""
        if math.isnan(self.error) or (self.error and not self.budget):
            return math.inf
        return self.error / self.budget if self.budget else 0.0


@dataclass(frozen=True)
class Difference(OpError):
    """A value out of tolerance: the nodes that made it in the earlier stage and those that make it
    now, from values that both stages have."""

    phase: str
    at: int
    before: tuple[str, ...]
    after: tuple[str, ...]

    def text(self) -> str:
        """Describe what moved, how far, and the nodes that make it in either stage."""
        lines = [
            f"%{self.value} ({self.ops}), in {self.phase} at token {self.at}: error "
            f"{self.error:.1e}, tolerance {self.budget:.1e}",
            *(f"  - {line}" for line in self.before),
            *(f"  + {line}" for line in self.after),
        ]
        return "\n".join(lines)


@dataclass(frozen=True)
class StageReport:
    """One pass, or the backend: tensors compared, and the worst of each op. Nothing is compared of
    a pass that is `meant` to change what is computed: those after it are, with it."""

    name: str
    values: int = 0
    worst: tuple[OpError, ...] = ()
    first: Difference | None = None
    excused: int = 0
    meant: bool = False

    @property
    def ok(self) -> bool:
        return self.first is None

    def text(self) -> str:
        moved = [w for w in self.worst if w.error != 0]
        what = f"{self.values} values" if self.values else "changes nothing"
        what = "rounds what caches hold, as asked: not compared" if self.meant else what
        what += "" if moved or not self.values else ", bit for bit"
        more = f", {self.excused} rows left to close calls of a router" if self.excused else ""
        lines = [f"  {self.name:20} {'ok' if self.ok else 'FAILED'}, {what}{more}"]
        lines += [f"    {w.ops:32} {w.error:8.1e} of {w.budget:.1e}  %{w.value}" for w in moved]
        return "\n".join(lines)


@dataclass(frozen=True)
class StagesReport:
    """All stages up to the first that fails. `rounds` are tokens that were verified at once.
    `media` are graphs for media that were run too, `left_out` those that were not, `unknown` those
    whose weights before packing are lost."""

    engine: str
    tokens: int
    chunks: tuple[int, ...]
    stages: tuple[StageReport, ...]
    media: tuple[str, ...]
    rounds: tuple[int, ...]
    unknown: tuple[str, ...]
    left_out: tuple[str, ...]

    @property
    def ok(self) -> bool:
        return self.culprit is None

    @property
    def culprit(self) -> StageReport | None:
        """The first stage that moves a value by more than its op's budget."""
        return next((s for s in self.stages if not s.ok), None)

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        out = {**asdict(self), "ok": self.ok, "failed": self.culprit and self.culprit.name}
        for row, s in zip(out["stages"], self.stages, strict=True):
            row["ok"] = s.ok
        return out

    def text(self) -> str:
        """Return a few lines per stage."""
        sizes = ", ".join(map(str, self.chunks))
        lines = [f"{self.engine}, pass by pass on {self.tokens} tokens in chunks of {sizes}"]
        for label, names in (
            ("also in rounds of", self.rounds),
            ("also", self.media),
            ("not checked:", self.left_out),
            ("not checked without --checkpoint DIR:", self.unknown),
        ):
            lines += [f"  {label} {', '.join(map(str, names))}"] if names else []
        lines += [s.text() for s in self.stages]
        if self.culprit and self.culprit.first:
            lines.append(f"{self.culprit.name} moves {self.culprit.first.text()}")
        return "\n".join([*lines, "ok" if self.ok else "FAILED"])


def engine_name(engine: Engine) -> str:
    """Return the head of a report."""
    return f"{engine.spec.name} ({engine.config.backend}, {engine.device}, {engine.dtype})"
