"""The choice of nodes that run as a kernel of ours on a GPU, their settings, and the table of them
that `g4ir kernels` prints. Needs no torch.

A node that is not chosen goes through the library and the compiler: matrix products of many rows,
anything in fp32, everything between the blocks.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from g4ir.backends.inductor.target import Target
from g4ir.ir.graph import Graph, Node
from g4ir.ops.base import nothing
from g4ir.ops.collective import COLLECTIVES

from .kernels import KERNELS
from .kernels.base import SKINNY, Choice, Schedule

#: a node that the compiler turns into kernels of its own, or hands to the library
OTHER = "compiler"
#: an exchange with other ranks, between compiled programs
MESSAGE = "message"
Pairs = tuple[tuple[str, int], ...]
_Key = tuple[str, str, Pairs, Pairs, int]


def schedule(g: Graph, target: Target) -> Schedule:
    """Return the kernels of a graph on a target."""
    choices: dict[str, Choice] = {}
    if target.gpu:
        _choose_all(g, g.nodes, target, choices)
    return Schedule(g, target, choices)


def same_kernels(rows: int) -> int:
    """Return a batch size at which every node has the kernel that it has at `rows`, the same for
    all such batch sizes; the kernels' settings may be others."""
    return next((limit for limit in (1, SKINNY) if rows <= limit), SKINNY + 1)


def any_length(s: Schedule) -> bool:
    """Whether a step costs what the rows hold, however many slots of their caches it is given."""
    choices = [s.find(n) for n in s.graph.nodes if n.definition.cache_range]
    return bool(s.target.gpu) and all(choices)


def dense_bytes(s: Schedule) -> int:
    """Return the most bytes of weights that are made of their codes for one node."""
    dense = {n.out.name: n.out.type.nbytes() for n in s.graph.find("dequantize")}

    def dequantized_bytes(n: Node) -> int:
        choice = s.find(n)
        return 0 if choice and choice.kernel.coded else sum(dense.get(v.name, 0) for v in n.inputs)

    return max(map(dequantized_bytes, s.graph.nodes), default=0)


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
    if not n.inputs or "bf16" not in (v.type.dtype for v in (n.inputs[0], n.outputs[0])):
        return None
    for kernel in KERNELS:
        if kernel.op == n.op and (shape := kernel.rule(g, n, target)) is not None:
            return Choice(kernel, shape, kernel.settings(shape))
    return None


@dataclass(frozen=True)
class Row:
    """Nodes of one op that start the same kernel; an op of several kernels has a row for each."""

    op: str
    kernel: str
    shape: Pairs
    use: Pairs
    nodes: int
    starts: int  # kernels of ours that a step starts for them
    nbytes: int = 0  # that the nodes have to move, at the first of an op's kernels


def _keys(n: Node, choice: Choice | None) -> list[_Key]:
    if not choice:
        return [(n.op, MESSAGE if n.op in COLLECTIVES else OTHER, (), (), 0)]
    shape, starts = tuple(choice.shape.items()), choice.kernel.starts
    return [
        (n.op, name, shape, tuple(use.items()), starts[name]) for name, use in choice.uses.items()
    ]


def kernel_rows(s: Schedule, moved: Mapping[str, int] | None = None) -> list[Row]:
    """Return every node that computes, counted, in order of appearance; `moved`: bytes by a node's
    first result."""
    counted: Counter[_Key] = Counter()
    nbytes: Counter[_Key] = Counter()
    for n in s.graph.nodes:
        choice = s.find(n)
        if not choice and n.definition.traffic is nothing:
            continue  # a view, or codes that a kernel takes
        for key in _keys(n, choice):
            counted[key] += 1
            if not choice or key[1] == choice.name:
                nbytes[key] += (moved or {}).get(n.outputs[0].name, 0)
    return [Row(*k[:-1], nodes=n, starts=n * k[-1], nbytes=nbytes[k]) for k, n in counted.items()]
