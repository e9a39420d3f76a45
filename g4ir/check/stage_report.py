"""Reports of comparisons value by value."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, field
from typing import Any

from g4ir.engine.engine import Engine
from g4ir.ir.names import layer_of
from g4ir.parallel.shard import split_name


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

    def place(self) -> str:
        """Describe what moved in one line, and how far."""
        error = f"error {self.error:.1e}, tolerance {self.budget:.1e}"
        return f"{placed(self.value, self.at)}: {error} ({self.ops})"

    def text(self) -> str:
        """Describe what moved, how far, and the nodes that make it in either stage."""
        lines = [
            f"%{self.value} ({self.ops}), in {self.phase} at token {self.at}: error "
            f"{self.error:.1e}, tolerance {self.budget:.1e}",
            *(f"  - {line}" for line in self.before),
            *(f"  + {line}" for line in self.after),
        ]
        return "\n".join(lines)


@dataclass
class StageReport:
    """One pass, or the backend: tensors compared, and the worst of each op. Nothing is compared of
    a pass that is `meant` to change what is computed: those after it are, with it."""

    name: str
    values: int = 0
    worst: list[OpError] = field(default_factory=list)
    first: Difference | None = None
    excused: int = 0
    meant: bool = False

    def keep(self, found: OpError) -> None:
        """Count a value, and keep it if it is the worst of its op."""
        self.values += 1
        same = [i for i, w in enumerate(self.worst) if w.ops == found.ops]
        if not same:
            self.worst.append(found)
        elif found.share > self.worst[same[0]].share:
            self.worst[same[0]] = found

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


def placed(name: str, at: int) -> str:
    """Return a value, of a rank's too, its layer and its chunk."""
    layer = layer_of(split_name(name)[1])
    where = "outside the layers" if layer is None else f"layer {layer}"
    return f"%{name} ({where}) in the chunk at token {at}"


def engine_name(engine: Engine) -> str:
    """Return the head of a report."""
    return f"{engine.spec.name} ({engine.config.backend}, {engine.device}, {engine.dtype})"
