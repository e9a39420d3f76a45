"""The kernel that each node of a step becomes: what `g4ir show --kernels` prints; no torch."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from g4ir.ops.base import nothing

from .kernels.base import Schedule

#: a node that the compiler turns into kernels of its own, or hands to the library
OTHER = "compiler"
SHOWN = 3
Pairs = tuple[tuple[str, int], ...]


@dataclass(frozen=True)
class Row:
    """Nodes of one op that start the same kernel; an op of several kernels has a row for each."""

    op: str
    kernel: str
    shape: Pairs
    use: Pairs
    measured: bool
    nodes: int
    starts: int  # kernels of ours that a step starts for them


def kernel_rows(s: Schedule) -> list[Row]:
    """Return every node that computes, counted, in order of appearance."""
    counted: Counter[tuple[str, str, Pairs, Pairs, bool, int]] = Counter()
    for n in s.graph.nodes:
        if n.definition.traffic is nothing:
            continue  # a view
        choice = s.find(n)
        if not choice:
            counted[n.op, OTHER, (), (), False, 0] += 1
            continue
        shape: Pairs = tuple(choice.shape.items())
        for name, t in choice.tunings.items():
            use, starts = tuple(t.use.items()), choice.kernel.starts[name]
            counted[n.op, name, shape, use, t.measured, starts] += 1
    return [Row(*k[:-1], nodes=n, starts=n * k[-1]) for k, n in counted.items()]


def unmeasured(s: Schedule) -> str | None:
    """Return one sentence on kernels whose settings are estimates, or None."""
    rows = [r for r in kernel_rows(s) if r.kernel != OTHER and not r.measured]
    if not rows:
        return None
    names = list(dict.fromkeys(r.kernel for r in rows))
    shown = ", ".join(names[:SHOWN]) + (", ..." if len(names) > SHOWN else "")
    return (
        f"{len(rows)} kernels of {s.graph.name} ({shown}) have estimated settings on "
        f"{s.target.gpu}; `g4ir tune` measures them"
    )
