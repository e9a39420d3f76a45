"""LoRA adapters that requests choose: matmuls of the text graphs add low-rank terms, whose values
are params with a slot per adapter, written while the engine runs.

A slot has the size of one adapter of rank `rank`; smaller ones are padded. For packed matmuls (Q, K
and V in one) the A of all parts are concatenated by rows, and B has the columns of all parts.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise

from g4ir.errors import InputError
from g4ir.ir.graph import Graph, Node, Program, Value
from g4ir.ir.verify import verify
from g4ir.model.decoder import BLOCKS, VERIFY
from g4ir.model.names import CODES, checkpoint_name
from g4ir.ops.types import Type, torch, zeros
from g4ir.spec.record import Spec

from .adapter import Adapter, Factors, read_factors
from .pack import Packing
from .tensorfile import quoted

#: input of the graphs: the slot of each sequence, -1 for none
ADAPTERS = "adapters"
PHASES = ("prefill", "decode", BLOCKS, VERIFY)
#: ops between a stored weight and the matmul's operand that keep the order of rows
_KEEPS_ROWS = {"quantize", "dequantize", "dequantize_tiles", "tiles", "as_bytes", "concat"}
MERGE = "requests cannot change that: build the engine with --adapter"


@dataclass(frozen=True)
class Product:
    """The adapter params of a matmul's weight: A [slots, parts * rank, K], B [slots, rank, N];
    `parts`: checkpoint name and rows of each weight packed into it."""

    parts: tuple[tuple[str, int], ...]
    a: Value
    b: Value

    @property
    def sizes(self) -> tuple[int, ...]:
        return tuple(rows for _, rows in self.parts)


@dataclass(frozen=True)
class Slots:
    """A program with `count` slots for adapters of rank up to `rank`, and the slots' params:
    `products` by the name of the matmul's weight, `tensors` by the param's."""

    spec: Spec
    program: Program
    products: Mapping[str, Product]
    tensors: Mapping[str, torch.Tensor]
    count: int
    rank: int

    def fill(self, slot: int, adapter: Adapter) -> None:
        """Write an adapter's values into a free slot. WeightsError or InputError, and nothing is
        written, if it is not one of this model, has a larger rank, or changes a weight without
        slots."""
        factors = {f.bare: f for f in read_factors(self.spec, adapter)}
        names = {name for p in self.products.values() for name, _ in p.parts}
        for f in sorted(factors.values(), key=lambda f: -f.a.shape[0]):  # the largest rank first
            if f.bare not in names:
                raise InputError(f"{adapter.path}: changes {quoted(f.bare)}, and {MERGE}")
            if (rank := f.a.shape[0]) > self.rank:
                fix = f"load the engine with adapter_rank={rank} (serve: --set adapter_rank={rank})"
                why = f"rank {rank} of {f.bare}; slots have room for {self.rank}"
                raise InputError(f"{adapter.path}: {why}: {fix}")
        for p in self.products.values():
            self._write(slot, p, factors)

    def _write(self, slot: int, p: Product, factors: Mapping[str, Factors]) -> None:
        a, b = self.tensors[p.a.name][slot], self.tensors[p.b.name][slot]
        a.zero_()
        b.zero_()
        spans = pairwise(accumulate(p.sizes, initial=0))
        for i, ((name, _), (start, stop)) in enumerate(zip(p.parts, spans, strict=True)):
            if f := factors.get(name):
                rank = f.a.shape[0]
                a[i * self.rank : i * self.rank + rank].copy_(f.a)
                b[:rank, start:stop].copy_(f.scale * f.b.T)


def with_slots(
    packing: Packing, spec: Spec, plain: Mapping[str, Value], count: int, rank: int
) -> Slots:
    """Return an engine's program with `count` slots of this rank. `plain`: the params of the graphs
    before packing, by name."""
    products: dict[str, Product] = {}
    graphs = {
        name: _with_slots(g, packing.prologue, plain, (count, rank), products)
        if name in PHASES
        else g
        for name, g in packing.program.graphs.items()
    }
    tensors = {v.name: zeros(v.type) for p in products.values() for v in (p.a, p.b)}
    return Slots(spec, Program(graphs), products, tensors, count, rank)


def _with_slots(
    g: Graph,
    prologue: Graph,
    plain: Mapping[str, Value],
    slots: tuple[int, int],
    products: dict[str, Product],
) -> Graph:
    """Return a graph in which a node `lora` follows the matmuls with weights of the text decoder
    (`_parts`); the adapter params (A and B) of each are added to `products`, by the weight's
    name."""
    index, params = Value(ADAPTERS, Type("i64", ("B",))), dict[str, Value]()
    nodes, renamed = list[Node](), dict[str, Value]()

    def look(v: Value) -> Value:
        return renamed.get(v.name, v)

    for n, results in _flat(g.nodes):
        n = replace(n, inputs=tuple(map(look, n.inputs)))
        nodes.append(n)
        renamed |= {outer.name: look(inner) for outer, inner in results}
        if n.op != "linear" or not (parts := _parts(n.inputs[1], nodes, prologue, plain)):
            continue
        (x, w), y = n.inputs, n.out
        p = products.setdefault(w.name, _product(w, parts, *slots))
        rounded = next((m for m in nodes if m.op == "fake_quantize" and m.out == x), None)
        inputs = (y, rounded.inputs[0] if rounded else x, index, p.a, p.b)
        added = Node("lora", inputs, (Value(f"{y.name}.adapted", y.type),), {"sizes": p.sizes})
        nodes.append(added)
        for name in [y.name, *(o for o, v in renamed.items() if v == y)]:
            renamed[name] = added.out
        params |= {p.a.name: p.a, p.b.name: p.b}
    if not params:
        return g
    out = replace(
        g,
        inputs=(*g.inputs, index),
        params=(*g.params, *params.values()),
        nodes=tuple(nodes),
        outputs=tuple(map(look, g.outputs)),
        next={name: look(v) for name, v in g.next.items()},
    )
    verify(out)
    return out


def _flat(nodes: tuple[Node, ...]) -> Iterator[tuple[Node, tuple[tuple[Value, Value], ...]]]:
    """Yield nodes, with fused nodes that contain a matmul expanded. The last node of an expansion
    comes with pairs: a result of the fused node, and the value that replaces it."""
    for n in nodes:
        if not _multiplies(n):
            yield n, ()
            continue
        inner, values = n.expanded
        *flat, (last, results) = _flat(inner)
        yield from flat
        yield last, (*results, *zip(n.outputs, values, strict=True))


def _multiplies(n: Node) -> bool:
    """Whether a node's expansion contains a matmul."""
    inner = n.expanded[0] if n.definition.expand else ()
    return any(m.op == "linear" or _multiplies(m) for m in inner)


def _product(w: Value, parts: tuple[tuple[str, int], ...], count: int, rank: int) -> Product:
    (n, k), dtype = w.type.shape, w.type.dtype
    a = Value(f"{w.name}.lora_a", Type(dtype, (count, len(parts) * rank, k)))
    return Product(parts, a, Value(f"{w.name}.lora_b", Type(dtype, (count, rank, n))))


def _parts(
    w: Value, nodes: list[Node], prologue: Graph, plain: Mapping[str, Value]
) -> tuple[tuple[str, int], ...]:
    """Return the checkpoint names and rows of the weights that were packed into `w`, the operand of
    a matmul; empty if they are not text weights, or not concatenated by rows."""
    makers = {v.name: n for n in nodes for v in n.outputs} | dict(prologue.producers)

    def leaves(name: str) -> Iterator[str]:
        n = makers.get(name)
        if n is None:
            yield name.removesuffix(CODES)
        elif n.op in _KEEPS_ROWS and n.attrs.get("axis", 0) == 0:
            for v in n.inputs if n.op == "concat" else n.inputs[:1]:
                yield from leaves(v.name)
        else:
            yield ""

    names = [*leaves(w.name)]
    # Only weights of the decoder: no table or head, no tower or draft model.
    if not all(n in plain and (n == "ple.w" or n.startswith("L")) for n in names):
        return ()
    shapes = [plain[name].type.shape for name in names]
    n, k = w.type.shape
    if any(len(s) != 2 or s[1] != k for s in shapes) or sum(int(s[0]) for s in shapes) != n:
        return ()
    rows = (int(s[0]) for s in shapes)
    return tuple(zip(map(checkpoint_name, names), rows, strict=True))
