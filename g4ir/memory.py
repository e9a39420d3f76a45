"""What an engine needs besides its weights, from its optimised graphs, before anything exists.

Exact: the caches, which are the graphs' state. Estimated, each as the most over all steps of a
phase, for B rows, chunks of S tokens and caches of C slots:

    activations   values that a later node reads, with the graph's inputs; a view takes nothing, a
                  cache is written in place. At the end the logits, and their copy in fp32.
    workspace     what one node allocates for itself, as the torch backend computes it: attention
                  joins the cache and the chunk (T = slots + S rows), rebuilds K and V from the
                  `raw` form, and makes a mask [B,S,T] and its bias for each query head of a group;
                  with a softcap the scores [B,nq,S,T] exist too. Routed experts gather their rows.

Fused ops are opened (g4ir/flatten.py): what lies between their parts counts, as if no kernel kept
it on the chip. The peaks of both need not coincide, so their sum is rather too much than too
little.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from .cache_sizes import capacity
from .flatten import flatten
from .ir import Graph, Node, Value
from .ops.base import nothing
from .ops.latent import PARTS
from .types import ITEMSIZE, Type

Dims = Mapping[str, int]


# --- sums of products of dims ------------------------------------------------------------------


@dataclass(frozen=True)
class Size:
    """Bytes as a sum of products of named dims: (("B", "S"), 4096) is 4096 * B * S."""

    terms: tuple[tuple[tuple[str, ...], int], ...]

    @staticmethod
    def of(types: Iterable[Type]) -> Size:
        terms: Counter[tuple[str, ...]] = Counter()
        for t in types:
            terms[_names(t)] += _bytes_per_product(t)
        return Size(tuple(sorted(terms.items())))

    def at(self, dims: Dims) -> int:
        return sum(n * math.prod(dims[name] for name in names) for names, n in self.terms)

    def within(self, other: Size) -> bool:
        """Never more than `other`, term by term."""
        most = dict(other.terms)
        return all(n <= most.get(names, 0) for names, n in self.terms)


def _names(t: Type) -> tuple[str, ...]:
    return tuple(sorted(d for d in t.shape if isinstance(d, str)))


def _bytes_per_product(t: Type) -> int:
    return math.prod(d for d in t.shape if isinstance(d, int)) * ITEMSIZE[t.dtype]


# --- activations -------------------------------------------------------------------------------


def live_sizes(g: Graph) -> frozenset[Size]:
    """Sizes of what is alive while a node runs, and at the end; without those that another is
    never less than."""
    root = _storage(g)
    last = {
        root[v.name]: i for i, n in enumerate(g.nodes) for v in (*n.inputs, *n.outputs)
        if v.name in root
    }  # fmt: skip
    last |= {root[v.name]: len(g.nodes) for v in g.results() if v.name in root}
    ends: dict[int, list[str]] = {}
    for name, i in last.items():
        ends.setdefault(i, []).append(name)
    types = {v.name: v.type for n in g.nodes for v in n.outputs}
    live, sizes = Counter(_terms(v.type for v in g.inputs)), set[Size]()
    for i, n in enumerate(g.nodes):
        live.update(_terms(v.type for v in n.outputs if root.get(v.name) == v.name))
        sizes.add(_snapshot(live))
        live.subtract(_terms(types[name] for name in ends.get(i, ())))
    live.update(_terms(Type("f32", v.type.shape) for v in g.outputs))
    return _largest({*sizes, _snapshot(live)})


def _largest(sizes: Iterable[Size]) -> frozenset[Size]:
    kept = list(dict.fromkeys(sizes))
    return frozenset(
        s for s in kept if not any(s is not other and s.within(other) for other in kept)
    )


def _storage(g: Graph) -> dict[str, str]:
    """Value -> the value that owns its memory; without caches, params, inputs and their views."""
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


def _terms(types: Iterable[Type]) -> Counter[tuple[str, ...]]:
    return Counter(dict(Size.of(types).terms))


def _snapshot(live: Counter[tuple[str, ...]]) -> Size:
    return Size(tuple(sorted((names, n) for names, n in live.items() if n)))


# --- workspace ---------------------------------------------------------------------------------


def _attention(held: int) -> Callable[[Node, Dims], int]:
    """Of an attention whose caches begin at input `held`."""

    def size(n: Node, dims: Dims) -> int:
        q, *kept = (v.type.bind(dims) for v in (n.inputs[0], *n.inputs[held:]))
        parts = len(PARTS[str(n.attrs["form"])]) if "form" in n.attrs else 2
        caches, chunk = kept[:parts], len(kept) > parts
        b, s, heads, d = map(int, q.shape)
        kv_heads, width = int(caches[0].shape[2]), ITEMSIZE[q.dtype]
        slots = int(caches[0].shape[0])
        keys = slots + (s if chunk else 0)
        joined = sum(t.nbytes() for t in kept) if chunk else 0
        rebuilt = n.attrs.get("form") == "raw" and (b > 1 or s > 1)
        made = 2 * keys * b * kv_heads * d * width if rebuilt else 0
        mask = b * s * keys * (1 + heads // kv_heads * width)
        scores = b * heads * s * keys * 2 * (width + 4) if n.attrs["softcap"] else 0
        return joined + made + mask + scores

    return size


def _experts(n: Node, dims: Dims) -> int:
    """Rows gathered, gate and up, their product, the result; it and its weighted form in fp32."""
    x, index, gate_up = (n.inputs[i].type.bind(dims) for i in (0, 2, 3))
    double, hidden = map(int, gate_up.shape[1:])
    width = ITEMSIZE[x.dtype]
    return index.numel() * (2 * hidden * width + double * 3 // 2 * width + 2 * hidden * 4)


def _pool(n: Node, dims: Dims) -> int:
    """The share of every patch in every square, and the patches in fp32."""
    _, patches, width = (int(d) for d in n.inputs[0].type.shape)
    squares = patches // n.whole("k") ** 2
    return ITEMSIZE["f32"] * patches * (squares + width)


#: op -> bytes that it allocates beside its results
WORKSPACE: dict[str, Callable[[Node, Dims], int]] = {
    "attention": _attention(3),
    "attention_latent": _attention(4),
    "experts": _experts,
    "pool_patches": _pool,
}


def _distinct(g: Graph) -> list[Node]:
    """One of each kind of node that has workspace."""
    found: dict[Any, Node] = {}
    for n in g.nodes:
        if n.op in WORKSPACE:
            key = (n.op, tuple(v.type for v in n.inputs), tuple(n.attrs.items()))
            found.setdefault(key, n)
    return list(found.values())


# --- all of it ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class Needs:
    """Bytes that an engine needs beside its weights, by rows, tokens and those of a prefill call.

    `graphs` are those that run on the device; the caches are the state of all of them.
    """

    graphs: tuple[Graph, ...]

    def cache(self, batch: int, context: int) -> int:
        """Bytes of the caches of a session; what `Caches` allocates."""
        return self._state.at({"B": batch, "C": capacity(context)})

    def activations(self, batch: int, context: int, chunk: int) -> int:
        dims = _dims(batch, context, chunk)
        return max(size.at(dims) for size in self._live)

    def workspace(self, batch: int, context: int, chunk: int) -> int:
        dims = _dims(batch, context, chunk)
        return max((WORKSPACE[n.op](n, dims) for n in self._costly), default=0)

    @cached_property
    def _state(self) -> Size:
        unique: dict[str, Value] = {v.name: v for g in self.graphs for v in g.state}
        return Size.of(v.type for v in unique.values())

    @cached_property
    def _live(self) -> frozenset[Size]:
        return _largest(size for g in self._flat for size in live_sizes(g))

    @cached_property
    def _costly(self) -> list[Node]:
        return [n for g in self._flat for n in _distinct(g)]

    @cached_property
    def _flat(self) -> tuple[Graph, ...]:
        return tuple(map(flatten, self.graphs))


def _dims(batch: int, context: int, chunk: int) -> Dims:
    return {"B": batch, "S": min(chunk, context), "C": capacity(context)}
