"""Two reports side by side: the metrics that differ by more than both spreads."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from g4ir.ui.table import aligned

from .schema import BenchReport, RunReport
from .stats import Number, Stat
from .text import ROWS

#: part of the workload or the machine that numbers depend on
WORKLOAD = ("input_len", "output_len", "batch", "context", "seed", "text")
MACHINE = ("cpu", "gpu", "cores", "torch")


@dataclass(frozen=True)
class MetricPair:
    """A metric in both reports; `differs` if the distance exceeds the sum of the spreads."""

    role: str
    metric: str
    unit: str
    a: Stat
    b: Stat
    ratio: Number
    differs: bool
    void: bool


@dataclass(frozen=True)
class ReportComparison:
    """Differences of workload and machine, the metrics, and how many of them differ."""

    notes: tuple[str, ...]
    rows: tuple[MetricPair, ...]
    differ: int


def compare_reports(a: BenchReport, b: BenchReport, every: bool = False) -> ReportComparison:
    """Compare the runs that are in both reports, by `every` metric or those of the text."""
    others = {r.role: r for r in b.runs}
    pairs = [(r, others[r.role]) for r in a.runs if r.role in others]
    shown = {metric for _, metric in ROWS}
    rows = [row for pair in pairs for row in _rows(*pair) if every or row.metric in shown]
    return ReportComparison(tuple(_notes(a, b, pairs)), tuple(rows), sum(r.differs for r in rows))


def _rows(a: RunReport, b: RunReport) -> Iterator[MetricPair]:
    others = b.metrics()
    for name, (unit, one) in a.metrics().items():
        if name in others:
            two = others[name][1]
            ratio = two.value / one.value if one.value else None
            yield MetricPair(
                a.role, name, unit, one, two, ratio, one.differs(two), a.void or b.void
            )


def _notes(
    a: BenchReport, b: BenchReport, pairs: list[tuple[RunReport, RunReport]]
) -> Iterator[str]:
    if a.model_id != b.model_id:
        yield f"A is {a.model_id}, B is {b.model_id}"
    sides = [
        {f"workload {k}": getattr(r.workload, k) for k in WORKLOAD}
        | {f"env {k}": r.env.get(k) for k in MACHINE}
        for r in (a, b)
    ]
    for key, one in sides[0].items():
        if one != sides[1][key]:
            yield f"{key}: {one} in A, {sides[1][key]} in B"
    for role in sorted({r.role for r in a.runs} ^ {r.role for r in b.runs}):
        yield f"{role} is in one of them only"
    for pair in pairs:
        one, two = (r.engine and r.engine.manifest for r in pair)
        if one != two:
            yield f"{pair[0].role}: another engine (manifest {one} and {two})"


def compare_text(found: ReportComparison) -> str:
    """Return a table with a mark at every difference."""
    lines = [["", "A", "B", "B / A", ""]]
    for r in found.rows:
        mark = "VOID" if r.void else "differs" if r.differs else ""
        ratio = "-" if r.ratio is None else f"{r.ratio:.3f}"
        a, b = (f"{s.value:.4g} ± {s.spread:.2g}" for s in (r.a, r.b))
        lines.append([f"{r.role:10} {r.metric}", a, b, ratio, mark])
    notes = "".join(f"note: {n}\n" for n in found.notes)
    count = f"{found.differ} of {len(found.rows)} differ by more than their spreads"
    return notes + aligned(lines, indent=0) + count
