"""The choice of nodes that run as a kernel of ours on a GPU, and of their settings. Needs no torch.

A node that is not chosen goes through the library and the compiler: matrix products of many rows,
anything in fp32, everything between the blocks.
"""

from __future__ import annotations

from collections.abc import Iterable

from g4ir.ir.graph import Graph, Node
from g4ir.ops.collective import COLLECTIVES

from .kernels import KERNELS
from .kernels.base import Choice, Schedule, both_in_codes
from .target import Target

HALF = frozenset({"bf16", "f16"})


def schedule(g: Graph, target: Target) -> Schedule:
    """Return the kernels of a graph on a target."""
    choices: dict[str, Choice] = {}
    if target.gpu:
        _choose_all(g, g.nodes, target, choices)
    return Schedule(g, target, choices)


def any_length(g: Graph, target: Target) -> bool:
    """Whether a step costs what the rows hold, however many slots of their caches it is given."""
    s = schedule(g, target)
    found = [s.find(n) for n in g.nodes if n.definition.held]
    return bool(target.gpu) and all(c and not c.kernel.every_slot for c in found)


def dense_bytes(s: Schedule) -> int:
    """Return the most bytes of weights that are made of their codes for one node."""
    made = {n.out.name: n.out.type.nbytes() for n in s.graph.find("dequantize")}

    def taken(n: Node) -> int:
        choice = s.find(n)
        coded = choice.kernel.coded if choice else both_in_codes(s.graph, n)
        return 0 if coded else sum(made.get(v.name, 0) for v in n.inputs)

    return max(map(taken, s.graph.nodes), default=0)


def _choose_all(
    g: Graph, nodes: Iterable[Node], target: Target, choices: dict[str, Choice]
) -> None:
    """Add the choices of the nodes, and of the parts of those that are not chosen whole."""
    for n in nodes:
        choice = _choose(g, n, target)
        if choice:
            choices[n.outputs[0].name] = choice
        elif n.definition.expand and n.op not in COLLECTIVES:
            _choose_all(g, n.expanded[0], target, choices)


def _choose(g: Graph, n: Node, target: Target) -> Choice | None:
    if not n.inputs or HALF.isdisjoint(v.type.dtype for v in (n.inputs[0], n.outputs[0])):
        return None
    for kernel in KERNELS:
        if kernel.op == n.op and (shape := kernel.rule(g, n, target)) is not None:
            return Choice(kernel, shape, kernel.settings(target.gpu, shape))
    return None
