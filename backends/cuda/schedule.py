"""Selection of our kernels for a graph's nodes on a GPU, with launch settings, and the table of
`g4ir kernels`. Needs no torch.

Other nodes go to libraries and torch's compiler, for example matmuls of large batches, all nodes of
fp32 engines, and ops without a kernel, such as norms.
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
from .target import has_large_blocks

#: executor of a node without a kernel of ours
OTHER = "compiler"
#: executor of a collective between compiled programs
MESSAGE = "message"
Pairs = tuple[tuple[str, int], ...]
_Key = tuple[str, str, Pairs, Pairs, int]


def schedule(g: Graph, target: Target) -> Schedule:
    """Choose kernels for the nodes of a graph on a target; none without a GPU."""
    choices: dict[str, Choice] = {}
    if target.gpu:
        _choose_all(g, g.nodes, target, choices)
    return Schedule(g, target, choices)


def same_kernels(rows: int) -> int:
    """Return a representative batch size for which the same kernels are chosen as for `rows`;
    launch settings may differ."""
    return next((limit for limit in (1, SKINNY) if rows <= limit), SKINNY + 1)


def any_length(s: Schedule) -> bool:
    """Whether all attention nodes have kernels of ours, which read only the slots in use: a step's
    cost depends on the tokens in the caches, not on the length of the cache views."""
    choices = [s.find(n) for n in s.graph.nodes if n.definition.cache_range]
    return bool(s.target.gpu) and all(choices)


def dense_bytes(s: Schedule) -> int:
    """Return the max bytes of weights that are dequantised for one node, since its kernel, or the
    library, takes only dense ones."""
    dense = {n.out.name: n.out.type.nbytes() for n in s.graph.find("dequantize")}

    def dequantized_bytes(n: Node) -> int:
        choice = s.find(n)
        return 0 if choice and choice.kernel.coded else sum(dense.get(v.name, 0) for v in n.inputs)

    return max(map(dequantized_bytes, s.graph.nodes), default=0)


def _choose_all(
    g: Graph, nodes: Iterable[Node], target: Target, choices: dict[str, Choice]
) -> None:
    """Add the choices of the nodes, and of the expansions of nodes without a kernel."""
    for n in nodes:
        choice = _choose(g, n, target)
        if choice:
            choices[n.outputs[0].name] = choice
        elif n.definition.expand and n.op not in COLLECTIVES:
            _choose_all(g, n.expanded[0], target, choices)


def _choose(g: Graph, n: Node, target: Target) -> Choice | None:
    if not n.inputs or "bf16" not in (v.type.dtype for v in (n.inputs[0], n.outputs[0])):
        return None
    large = has_large_blocks(target.gpu)
    for kernel in (k for k in KERNELS if k.op == n.op and (large or not k.large)):
        if (shape := kernel.rule(g, n, target)) is not None:
            uses = kernel.settings(shape)
            few = {name: {**use, "stages": 2} for name, use in uses.items() if "stages" in use}
            return Choice(kernel, shape, uses if large else uses | few)
    return None


@dataclass(frozen=True)
class Row:
    """Row of the table: the nodes of one op with the same kernel, shape and launch settings; an op
    with several kernels has a row for each."""

    op: str
    kernel: str
    shape: Pairs
    use: Pairs
    nodes: int
    starts: int  # launches of our kernels per step
    nbytes: int = 0  # of weights and KV cache that the nodes move; 0 for an op's later kernels


def _keys(n: Node, choice: Choice | None) -> list[_Key]:
    if not choice:
        return [(n.op, MESSAGE if n.op in COLLECTIVES else OTHER, (), (), 0)]
    shape, starts = tuple(choice.shape.items()), choice.kernel.starts
    return [(n.op, key, shape, tuple(use.items()), starts[key]) for key, use in choice.uses.items()]


def kernel_rows(s: Schedule, moved: Mapping[str, int] | None = None) -> list[Row]:
    """Return the table's rows for nodes that compute, in order of appearance; `moved`: name of a
    node's first output -> bytes of weights and KV cache that it moves."""
    counted: Counter[_Key] = Counter()
    nbytes: Counter[_Key] = Counter()
    for n in s.graph.nodes:
        choice = s.find(n)
        if not choice and n.definition.traffic is nothing:
            continue  # a view, or a quantised weight: its matmul has the bytes
        for key in _keys(n, choice):
            counted[key] += 1
            if not choice or key[1] == choice.name:
                nbytes[key] += (moved or {}).get(n.outputs[0].name, 0)
    return [Row(*k[:-1], nodes=n, starts=n * k[-1], nbytes=nbytes[k]) for k, n in counted.items()]
