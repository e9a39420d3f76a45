"""Bytes that an engine needs in addition to its weights, from its optimised graphs.

The KV cache, which is the graphs' state, is exact. Two maxima over the nodes of all graphs are
estimated, for B sequences, chunks of S tokens and caches of C slots:

    activations   values that a later node reads, inputs, logits and their copy in fp32; a view
                  takes nothing, a cache is written in place
    workspace     what one node allocates for itself, as the torch backend computes it

Fused ops are expanded (ir/flatten.py), as if their intermediate values were in memory, and the two
maxima may occur at different nodes: so the sum is an upper bound.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from g4ir.ir.flatten import flatten
from g4ir.ir.graph import Graph, Node
from g4ir.ops.base import nothing
from g4ir.ops.types import ITEMSIZE, Type

from .formats import capacity

Dims = Mapping[str, int]


@dataclass(frozen=True)
class Size:
    """Bytes as a sum of products of named dims: (("B", "S"), 4096) is 4096 * B * S."""

    terms: tuple[tuple[tuple[str, ...], int], ...]

    @staticmethod
    def of(terms: Mapping[tuple[str, ...], int]) -> Size:
        return Size(tuple(sorted((names, n) for names, n in terms.items() if n)))

    def at(self, dims: Dims) -> int:
        return sum(n * math.prod(dims[name] for name in names) for names, n in self.terms)

    def within(self, other: Size) -> bool:
        most = dict(other.terms)
        return all(n <= most.get(names, 0) for names, n in self.terms)


def _terms(types: Iterable[Type]) -> Counter[tuple[str, ...]]:
    terms: Counter[tuple[str, ...]] = Counter()
    for t in types:
        names = tuple(sorted(d for d in t.shape if isinstance(d, str)))
        terms[names] += math.prod(d for d in t.shape if isinstance(d, int)) * ITEMSIZE[t.dtype]
    return terms


def live_sizes(g: Graph) -> frozenset[Size]:
    """Return the sizes of the values that are live at each node, and at the end with the outputs in
    fp32; sizes that never exceed another one are left out."""
    root = _storage(g)
    steps = [(n.inputs, n.outputs) for n in g.nodes] + [(tuple(g.results()), ())]
    last = {root[v.name]: i for i, s in enumerate(steps) for v in (*s[0], *s[1]) if v.name in root}
    ends: dict[int, list[str]] = {}
    for name, i in last.items():
        ends.setdefault(i, []).append(name)
    types = {v.name: v.type for n in g.nodes for v in n.outputs}
    live, sizes = Counter(_terms(v.type for v in g.inputs)), set[Size]()
    for i, n in enumerate(g.nodes):
        live.update(_terms(v.type for v in n.outputs if root.get(v.name) == v.name))
        sizes.add(Size.of(live))
        live.subtract(_terms(types[name] for name in ends.get(i, ())))
    live.update(_terms(Type("f32", v.type.shape) for v in g.outputs))
    return _largest({*sizes, Size.of(live)})


def _largest(sizes: Iterable[Size]) -> frozenset[Size]:
    unique = set(sizes)
    return frozenset(s for s in unique if not any(s != o and s.within(o) for o in unique))


def _storage(g: Graph) -> dict[str, str]:
    """Return name of a value -> name of the value that owns its memory; caches, params, inputs and
    their views are left out."""
    caches = {v.name for v in g.next.values()}
    caches |= {new.name for n in g.nodes for _, new in n.definition.updated(n.inputs, n.outputs)}
    root: dict[str, str] = {}
    for n in g.nodes:
        view = n.definition.traffic is nothing
        for v in n.outputs:
            if view and n.inputs[0].name in root:
                root[v.name] = root[n.inputs[0].name]
            elif not view and v.name not in caches:
                root[v.name] = v.name
    return root


def _workspace(nodes: Iterable[Node], dims: Dims) -> int:
    """Return the largest workspace, in bytes, of nodes whose ops have one."""
    sizes = [0]
    for n in nodes:
        ins, outs = (tuple(v.type.bind(dims) for v in vs) for vs in (n.inputs, n.outputs))
        assert n.definition.workspace
        sizes.append(n.definition.workspace(ins, outs, **n.attrs))
    return max(sizes)


@dataclass(frozen=True)
class Needs:
    """Bytes that an engine needs for its weights (`params`), and in addition to weights and caches,
    as functions of batch size, context length and prefill chunk. `graphs`: those that run on the
    device.
    """

    graphs: tuple[Graph, ...]

    def activations(self, batch: int, context: int, chunk: int) -> int:
        dims = _dims(batch, context, chunk)
        return max(size.at(dims) for size in self._live)

    def workspace(self, batch: int, context: int, chunk: int) -> int:
        return _workspace(self.costly, _dims(batch, context, chunk))

    @cached_property
    def params(self) -> int:
        """Bytes of the packed weights of these graphs; tables that are only looked up are not among
        them."""
        return param_bytes(self.graphs)

    @cached_property
    def _live(self) -> frozenset[Size]:
        return _largest(size for g in self._flat for size in live_sizes(g))

    @cached_property
    def costly(self) -> list[Node]:
        """Nodes with a workspace, one per distinct size."""
        distinct: dict[Any, Node] = {}
        for n in (n for g in self._flat for n in g.nodes if n.definition.workspace):
            distinct.setdefault((n.op, *(v.type for v in n.inputs), *n.attrs.items()), n)
        return list(distinct.values())

    @cached_property
    def _flat(self) -> tuple[Graph, ...]:
        return tuple(map(flatten, self.graphs))


def param_bytes(graphs: Iterable[Graph], chosen: Callable[[str], bool] = bool) -> int:
    """Return the bytes of the params of graphs, or of those graphs whose names `chosen` accepts;
    shared params count once."""
    params = {v.name: v.type for g in graphs if chosen(g.name) for v in g.params}
    return sum(t.nbytes() for t in params.values())


def _dims(batch: int, context: int, chunk: int) -> Dims:
    return {"B": batch, "S": min(chunk, context), "C": capacity(context)}
