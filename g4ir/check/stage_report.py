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
    """The largest error of an op, or of several consecutive ones, its tolerance (`budget`), and the
    name of the value that has it."""

    ops: str
    error: float
    budget: float
    value: str

    @property
    def share(self) -> float:
        """The error divided by the tolerance; infinity for NaN, and for an error without a
        tolerance."""
        if math.isnan(self.error) or (self.error and not self.budget):
            return math.inf
        return self.error / self.budget if self.budget else 0.0


@dataclass(frozen=True)
class Difference(OpError):
    """A value out of tolerance, in graph `phase` on the chunk from token `at`: the nodes that
    compute it from values of both stages, in the earlier stage (`before`) and in this one
    (`after`)."""

    phase: str
    at: int
    before: tuple[str, ...]
    after: tuple[str, ...]

    def line(self) -> str:
        """Return the value, its error and its ops in one line."""
        error = f"error {self.error:.1e}, tolerance {self.budget:.1e}"
        return f"{describe_value(self.value, self.at)}: {error} ({self.ops})"

    def text(self) -> str:
        """Return the value, its error, and the nodes that compute it in either stage."""
        where = f"%{self.value} ({self.ops}), in {self.phase} at token {self.at}"
        lines = [f"{where}: error {self.error:.1e}, tolerance {self.budget:.1e}"]
        lines += [f"  - {line}" for line in self.before] + [f"  + {line}" for line in self.after]
        return "\n".join(lines)


@dataclass
class StageReport:
    """One pass, or the backend: the number of compared tensors (`values`), and the largest error of
    each op (`worst`). A pass that changes values by design (`meant`) is not compared; later passes
    are compared with its output.
    `excused`: rows out of tolerance after a near tie of a router. `phases`: graph that ran in a
    session -> whether the backend exposed its intermediate values."""

    name: str
    values: int = 0
    worst: list[OpError] = field(default_factory=list)
    first: Difference | None = None
    excused: int = 0
    meant: bool = False
    phases: dict[str, bool] = field(default_factory=dict)

    def add(self, result: OpError) -> None:
        """Count a value, and store it if it is the worst of its op."""
        self.values += 1
        same = [i for i, w in enumerate(self.worst) if w.ops == result.ops]
        if not same:
            self.worst.append(result)
        elif result.share > self.worst[same[0]].share:
            self.worst[same[0]] = result

    @property
    def ok(self) -> bool:
        return self.first is None

    def text(self) -> str:
        moved = [w for w in self.worst if w.error != 0]
        result = f"{self.values} values" if self.values else "no value to compare"
        result = "rounds values by design: not compared" if self.meant else result
        result += "" if moved or not self.values else ", bit for bit"
        more = f", {self.excused} rows excused by near ties of a router" if self.excused else ""
        lines = [f"  {self.name:20} {'ok' if self.ok else 'FAILED'}, {result}{more}"]
        lines += [f"    {w.ops:32} {w.error:8.1e} of {w.budget:.1e}  %{w.value}" for w in moved]
        return "\n".join(lines)


@dataclass(frozen=True)
class StagesReport:
    """All stages up to the first that fails. `chunks`: tokens of each chunk, or of each text of an
    encoder; `rounds`: tokens of each verification step; `media`: graphs for media that ran;
    `unknown`: towers whose unpacked weights cannot be recovered; `left_out`: other graphs that did
    not run."""

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
        """The first stage with a value out of its op's tolerance."""
        return next((s for s in self.stages if not s.ok), None)

    def to_dict(self) -> dict[str, Any]:
        """Return JSON values."""
        out = {**asdict(self), "ok": self.ok, "failed": self.culprit and self.culprit.name}
        for row, s in zip(out["stages"], self.stages, strict=True):
            row["ok"] = s.ok
        return out

    def text(self) -> str:
        """Return a few lines per stage."""
        sizes = " + ".join(map(str, self.chunks))
        lines = [f"{self.engine}, pass by pass on {sizes} tokens"]
        for label, names in (
            ("also in verification steps of", self.rounds),
            ("also", self.media),
            ("not checked:", self.left_out),
            ("not checked without --checkpoint DIR:", self.unknown),
        ):
            lines += [f"  {label} {', '.join(map(str, names))}"] if names else []
        lines += [s.text() for s in self.stages]
        if self.culprit and self.culprit.first:
            lines.append(f"{self.culprit.name} moves {self.culprit.first.text()}")
        return "\n".join([*lines, "ok" if self.ok else "FAILED"])


def describe_value(name: str, at: int) -> str:
    """Describe a value for a message: its name, its layer and its chunk. `name` may have the prefix
    of a rank; `at`: first token of the chunk."""
    layer = layer_of(split_name(name)[1])
    where = "outside the layers" if layer is None else f"layer {layer}"
    return f"%{name} ({where}) in the chunk at token {at}"


def engine_name(engine: Engine) -> str:
    """Return variant, backend, device and dtype: the title of a report."""
    return f"{engine.spec.name} ({engine.config.backend}, {engine.device}, {engine.dtype})"
