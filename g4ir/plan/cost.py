"""Cost model of a graph: FLOPs and bytes of every node, and their minimum time.

FLOPs and bytes of a node are those of its op (`flops`, `traffic`). Bytes of a param are weight
traffic, those of a cache state traffic, the rest activations. A fused op without `flops` or
`traffic` is expanded (ir/flatten.py): it costs the sum of the nodes of its expansion, but moves
each operand at most once, and no intermediate values.

At a step of S tokens per sequence (M in a graph that verifies) on B sequences whose caches hold C
tokens each, a cache has min(its slots, C) slots in use before it is written, min(its slots, C + S)
after. Weights are read once per step. The weight prologue costs nothing: it is not run in a step.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cache
from operator import add
from typing import Any

from g4ir.ir.flatten import inner_nodes
from g4ir.ir.graph import Graph, Node, Value
from g4ir.ir.rewrite import split_prologue
from g4ir.model.names import kind_of_name
from g4ir.ops.base import KINDS, nothing
from g4ir.ops.types import Type


@dataclass(frozen=True)
class Cost:
    """FLOPs (a multiply-add counts two) and bytes moved, by what they belong to."""

    flops: int = 0
    weight_bytes: int = 0  # params read
    state_bytes: int = 0  # caches read and written
    other_bytes: int = 0  # activations, as if each passed through memory between two nodes

    def __add__(self, other: Cost) -> Cost:
        return Cost(*map(add, vars(self).values(), vars(other).values()))

    def __mul__(self, times: int) -> Cost:
        return Cost(*(n * times for n in vars(self).values()))

    @property
    def nbytes(self) -> int:
        return self.needed_bytes + self.other_bytes

    @property
    def needed_bytes(self) -> int:
        """Weights and caches: bytes that move however nodes are fused."""
        return self.weight_bytes + self.state_bytes


@dataclass(frozen=True)
class NodeCost:
    """The cost of one node, named by its first output; `kind`: by `kind_of`; `parts`: cost by kind,
    if the nodes of a fused op's expansion are of several kinds."""

    node: str
    op: str
    kind: str
    cost: Cost
    parts: Mapping[str, Cost] = field(default_factory=dict)

    def kinds(self) -> Mapping[str, Cost]:
        return self.parts or {self.kind: self.cost}


def total(costs: Iterable[NodeCost]) -> Cost:
    return sum((c.cost for c in costs), Cost())


def by_kind(costs: Iterable[NodeCost]) -> dict[str, Cost]:
    """Return the cost of each kind that occurs, in the order of KINDS."""
    table = dict.fromkeys(KINDS, Cost())
    for c in costs:
        for kind, cost in c.kinds().items():
            table[kind] += cost
    return {kind: cost for kind, cost in table.items() if cost != Cost()}


def kind_of(n: Node) -> str:
    """Return a node's kind (one of KINDS): its op's, else the one that the name of its first result
    implies. Passes keep names, so a matmul keeps its kind."""
    return n.definition.kind or kind_of_name(n.outputs[0].name) or "other"


@dataclass(frozen=True)
class Step:
    """One run of a graph: B sequences, with S new tokens each and C tokens each in their caches
    before it."""

    B: int = 1
    S: int = 1
    C: int = 0


def graph_costs(g: Graph, *, B: int = 1, S: int = 1, C: int = 0) -> list[NodeCost]:
    """Return the cost of each node at one step (see Step); `S` is ignored for a graph of single
    tokens (decode).

    The weights that `experts` reads are those of the expected number of different experts for
    uniform routing (ops/moe.py). The graph may be from before or after any pass.
    """
    return _Meter(g).nodes(Step(B, S, C))


def step_costs(g: Graph) -> Callable[[Step], Cost]:
    """Return a cached function from a step to the cost of the whole graph."""
    return cache(_Meter(g).total)


class _Meter:
    """Computes the costs of a graph's nodes at a step; equal nodes (repeated layers) only once."""

    def __init__(self, g: Graph) -> None:
        self.graph = g = split_prologue(g)[1]
        self.chunked = any({"S", "M"} & {*v.type.shape} for v in g.inputs)
        #: dequantised weight -> bytes of its quantised values and scales per byte of the
        #: dequantised tensor
        self.coded = {
            n.out.name: sum(v.type.nbytes() for v in n.inputs) / n.out.type.nbytes()
            for n in g.find("dequantize", "dequantize_columns", "dequantize_tiles")
        }
        self.written = {v.name for v in g.next.values()}
        states = {v.name for v in g.state} | self.written
        weight = {v.name for v in g.params} | self.coded.keys()
        self.roles = dict.fromkeys(states, "state") | dict.fromkeys(weight, "weight")
        self.keys = [self._key(n) for n in g.nodes]
        self.groups: dict[Any, list[Node]] = {}
        for key, n in zip(self.keys, g.nodes, strict=True):
            self.groups.setdefault(key, []).append(n)

    def _key(self, n: Node) -> Any:
        """Return the cache key of a node's cost."""
        operands = tuple(
            (v.type, self._role(v), v.name in self.written, self.coded.get(v.name))
            for v in (*n.inputs, *n.outputs)
        )
        return n.op, kind_of(n), operands, tuple(n.attrs.items())

    def _role(self, v: Value) -> str:
        return self.roles.get(v.name, "other")

    def nodes(self, step: Step) -> list[NodeCost]:
        parts = {key: self._parts(group[0], step) for key, group in self.groups.items()}
        totals = {key: sum(kinds.values(), Cost()) for key, kinds in parts.items()}
        return [
            NodeCost(
                n.outputs[0].name,
                n.op,
                kind_of(n),
                totals[key],
                parts[key] if len(parts[key]) > 1 else {},
            )
            for key, n in zip(self.keys, self.graph.nodes, strict=True)
        ]

    def total(self, step: Step) -> Cost:
        groups = self.groups.values()
        parts = (c * len(group) for group in groups for c in self._parts(group[0], step).values())
        return sum(parts, Cost())

    def _parts(self, n: Node, step: Step) -> dict[str, Cost]:
        """Return the cost of a node by kind. A fused op moves each operand at most once, and no
        intermediate values."""
        step = step if self.chunked else Step(step.B, 1, step.C)
        nodes = inner_nodes(n)
        owners, unmoved = _owners(n, nodes), Counter[str]()
        for v in (*n.inputs, *n.outputs):
            unmoved[v.name] += self._bound(v, step).nbytes()
        parts: dict[str, Cost] = {}
        for m in nodes:
            kind = kind_of(m)
            parts[kind] = parts.get(kind, Cost()) + self._cost(m, step, owners, unmoved)
        return {kind: cost for kind, cost in parts.items() if cost != Cost()}

    def _cost(
        self, n: Node, step: Step, owners: Mapping[str, Value], unmoved: Counter[str]
    ) -> Cost:
        """Return the cost of one node of an expansion. `owners`: see `_owners`; `unmoved`: operand
        of the fused node -> its bytes that no node has moved yet, updated here."""
        values = (*n.inputs, *n.outputs)
        types = tuple(self._bound(v, step) for v in values)
        ins, outs = types[: len(n.inputs)], types[len(n.inputs) :]
        op = n.definition
        assert op.flops and op.traffic
        moved = {"weight": 0, "state": 0, "other": 0}
        reads, writes = op.traffic(ins, outs, **n.attrs)
        for v, size in zip(values, (*reads, *writes), strict=True):
            if owner := owners.get(v.name):
                size = min(size, unmoved[owner.name])
                unmoved[owner.name] -= size
                moved[self._role(owner)] += round(size * self.coded.get(owner.name, 1))
        return Cost(op.flops(ins, outs, **n.attrs), *moved.values())

    def _bound(self, v: Value, step: Step) -> Type:
        """Return the type with the step's dims; a cache has only its slots in use."""
        t = v.type.bind({"B": step.B, "S": step.S, "M": step.S})
        if self._role(v) != "state":
            return t
        tokens = step.C + (step.S if v.name in self.written else 0)
        slots = t.shape[0]
        return t.with_shape(min(slots, tokens) if isinstance(slots, int) else tokens, *t.shape[1:])


def _owners(n: Node, nodes: Iterable[Node]) -> dict[str, Value]:
    """Return a mapping: name of a value in a fused node's expansion -> the fused node's input or
    output that it equals or is a view of."""
    owners = {v.name: v for v in (*n.inputs, *n.outputs)}
    for m in nodes:
        if m.definition.traffic is nothing and m.inputs[0].name in owners:
            owners = {v.name: owners[m.inputs[0].name] for v in m.outputs} | owners
    return owners


@dataclass(frozen=True)
class Roof:
    """Roofline of a device: peak rates, from its data sheet or measured."""

    bytes_per_s: float
    flops_per_s: float
    name: str = ""


@dataclass(frozen=True)
class Floor:
    """Minimum time of a cost under a roofline: the longer of memory and compute time, which
    overlap."""

    memory_s: float
    compute_s: float

    @property
    def seconds(self) -> float:
        return max(self.memory_s, self.compute_s)

    @property
    def bound(self) -> str:
        return "memory" if self.memory_s >= self.compute_s else "compute"


def floor(cost: Cost, roof: Roof) -> Floor:
    """Return the minimum time of a cost; activations do not count, as if they stayed on the
    chip."""
    return Floor(cost.needed_bytes / roof.bytes_per_s, cost.flops / roof.flops_per_s)
