"""The kernel that each node of a step becomes: what `g4ir kernels ` prints; no torch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from g4ir.ops.base import nothing
from g4ir.ops.collective import COLLECTIVES

from .kernels.base import Schedule

#: a node that the compiler turns into kernels of its own, or hands to the library
OTHER = "compiler"
#: an exchange with other ranks, between compiled programs
MESSAGE = "message"
SHOWN = 3
Pairs = tuple[tuple[str, int], ...]
_Key = tuple[str, str, Pairs, Pairs, bool, int]


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
    nbytes: int = 0  # that the nodes have to move, at the first of an op's kernels


def kernel_rows(s: Schedule, moved: Mapping[str, int] | None = None) -> list[Row]:
    """Return every node that computes, counted, in order of appearance; `moved`: bytes by a node's
    first result."""
    counted: Counter[_Key] = Counter()
    nbytes: Counter[_Key] = Counter()
    for n in s.graph.nodes:
        choice = s.find(n)
        if not choice and n.definition.traffic is nothing:
            continue  # a view, or codes that a kernel takes
        size = (moved or {}).get(n.outputs[0].name, 0)
        if not choice:
            key: _Key = (n.op, MESSAGE if n.op in COLLECTIVES else OTHER, (), (), False, 0)
            counted[key] += 1
            nbytes[key] += size
            continue
        shape: Pairs = tuple(choice.shape.items())
        for name, t in choice.tunings.items():
            use, starts = tuple(t.use.items()), choice.kernel.starts[name]
            key = n.op, name, shape, use, t.measured, starts
            counted[key] += 1
            nbytes[key] += size if name == choice.name else 0
    return [Row(*k[:-1], nodes=n, starts=n * k[-1], nbytes=nbytes[k]) for k, n in counted.items()]


def unmeasured(s: Schedule) -> str | None:
    """Return one sentence on kernels whose settings are estimates, or None."""
    rows = [r for r in kernel_rows(s) if r.use and not r.measured]
    if not rows:
        return None
    names = list(dict.fromkeys(r.kernel for r in rows))
    shown = ", ".join(names[:SHOWN]) + (", ..." if len(names) > SHOWN else "")
    return (
        f"{len(rows)} kernels of {s.graph.name} ({shown}) have estimated settings on "
        f"{s.target.gpu}; `g4ir tune` measures them"
    )
