"""Which kernel each node of a step becomes: what `g4ir show --kernels` prints. Needs no torch."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from g4ir.ir.graph import Graph
from g4ir.ops.base import nothing

from .select import choose
from .target import Target

#: kernels that are started under one name, where it is not one
STARTS = {"moe_down_sorted": 2, "block_argmax": 2, "top_candidates": 2}
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

    @property
    def starts(self) -> int:
        """Kernels of ours that a step starts for these nodes."""
        return 0 if self.kernel == OTHER else self.nodes * STARTS.get(self.kernel, 1)


def kernel_rows(g: Graph, target: Target) -> list[Row]:
    """Every node that computes, counted, in order of appearance."""
    counted: Counter[tuple[str, str, Pairs, Pairs, bool]] = Counter()
    for n in g.nodes:
        if n.definition.traffic is nothing:
            continue  # a view
        choice = choose(g, n, target)
        shape: Pairs = tuple(choice.shape.items()) if choice else ()
        for kernel, tuning in choice.tunings.items() if choice else ():
            counted[n.op, kernel, shape, tuple(tuning.use.items()), tuning.measured] += 1
        if not choice:
            counted[n.op, OTHER, (), (), False] += 1
    return [Row(*key, nodes=count) for key, count in counted.items()]


def unmeasured(g: Graph, target: Target) -> str | None:
    """One sentence on kernels whose settings are estimates, or None."""
    rows = [r for r in kernel_rows(g, target) if r.kernel != OTHER and not r.measured]
    if not rows:
        return None
    names = list(dict.fromkeys(r.kernel for r in rows))
    shown = ", ".join(names[:SHOWN]) + (", ..." if len(names) > SHOWN else "")
    return (
        f"{len(rows)} kernels of {g.name} ({shown}) have estimated settings on {target.gpu}; "
        f"`g4ir tune` measures them"
    )
