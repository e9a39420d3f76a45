"""%x of a rank, all_reduce(%x)  ->  %r0.x, %r1.x, their sum: the ranks of a model as one graph

Sums, and whatever follows from sums and whole weights, is there once and keeps its name.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from dataclasses import replace
from functools import partial, reduce

from g4ir.ir.flatten import with_messages
from g4ir.ir.graph import Builder, Graph, Node, Value
from g4ir.ops.collective import COLLECTIVES

_OWN = re.compile(r"r(\d+)\.(.+)")


def own_name(name: str, rank: int) -> str:
    """Return the name of a rank's own value."""
    return f"r{rank}.{name}"


def split_name(name: str) -> tuple[int | None, str]:
    """Return the rank that a value is of, None where it is of all, and its name there."""
    match = _OWN.fullmatch(name)
    return (int(match[1]), match[2]) if match else (None, name)


def unroll(g: Graph, own: Collection[str], ranks: int) -> Graph:
    """Return the graph of all ranks, from that of each; `own` are the params of which each has its
    own, as it has caches and results that follow from them."""
    known, b = {*own, *(v.name for v in g.state)}, Builder()
    for n in with_messages(g).nodes:
        if n.op in COLLECTIVES:
            _exchange(b, n, ranks)
        elif known.isdisjoint(v.name for v in n.inputs):
            b.nodes.append(n)
        else:
            known |= {v.name for v in n.outputs}
            b.nodes += [_of_rank(n, known, rank) for rank in range(ranks)]
    each = partial(_each, own=known, ranks=ranks)
    return replace(
        g,
        params=each(g.params),
        state=each(g.state),
        nodes=tuple(b.nodes),
        outputs=each(g.outputs),
        next={
            own_name(name, rank): _own(v, known, rank)
            for name, v in g.next.items()
            for rank in range(ranks)
        },
    )


def _own(v: Value, own: Collection[str], rank: int) -> Value:
    return Value(own_name(v.name, rank), v.type) if v.name in own else v


def _each(values: Sequence[Value], own: Collection[str], ranks: int) -> tuple[Value, ...]:
    counted = ((v, rank) for v in values for rank in range(ranks if v.name in own else 1))
    return tuple(_own(v, own, rank) for v, rank in counted)


def _of_rank(n: Node, own: Collection[str], rank: int) -> Node:
    inputs, outputs = (tuple(_own(v, own, rank) for v in vs) for vs in (n.inputs, n.outputs))
    return replace(n, inputs=inputs, outputs=outputs)


def _exchange(b: Builder, n: Node, ranks: int) -> None:
    for x, y in zip(n.inputs, n.outputs, strict=True):
        parts = [Value(own_name(x.name, rank), x.type) for rank in range(ranks)]
        if n.op == "all_gather":
            b.emit("concat", *parts, axis=x.type.rank - 1, name=y.name)
            continue
        rounded = y.type.dtype in ("bf16", "f16")  # summed in fp32
        if rounded:
            parts = [b.emit("cast", x, dtype="f32", name=f"{x.name}.wide") for x in parts]
        *first, last = parts
        total = reduce(lambda a, x: b.emit("add", a, x, name=f"{x.name}.sum"), first)
        whole = b.emit("add", total, last, name=f"{y.name}.wide" if rounded else y.name)
        if rounded:
            b.emit("cast", whole, dtype=y.type.dtype, name=y.name)
