"""Joins: a node and its only reader become one op. A pass lists its joins as rows; one runner.

The joined op's expansion, a producer and its reader, is the pattern. Its results are the reader's,
then the producer's others. Its operands and attributes are, by name, those of the producer, else of
the reader; an operand that neither has is the next of the producer's that is left over, and `*rest`
is what then remains of both.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import chain, repeat
from typing import Any

from g4ir.ir.graph import Graph, Node, Value
from g4ir.ops import OPS

from .match import Edit, Left, Note, after, edit_each, ignore, parts_of


@dataclass(frozen=True)
class Join:
    """A row: the op that two nodes become."""

    op: str


@dataclass(frozen=True)
class _Pair:
    """An expansion: the reader takes a result of the producer as `operand`; the producer's results
    of the indices `kept` are results of both."""

    row: Join
    producer: str
    reader: str
    operand: str
    kept: tuple[int, ...]
    attrs: Mapping[str, Any]

    def edit(self, g: Graph, n: Node, producer: Node, places: Mapping[str, int]) -> Edit:
        """Return the two as one; Left with the reason to leave them apart. `places`: value name ->
        the index of the node that makes it."""
        value = n[self.operand]
        if n.inputs.count(value) > 1:
            raise Left(f"{value} has another user")
        made = self.joined(n, producer)
        parts = parts_of(g, made)
        made_at = places[value.name]
        if any(places.get(v.name, -1) > made_at for v in n.inputs):  # else `after` is in vain
            later = {v for m in after(g, producer.outputs) if m != n for v in m.outputs}
            if later.intersection(n.inputs):
                raise Left(f"{n.outputs[0]} reads what is made of {producer.outputs[0]}")
        return Edit(parts, [made], f"fused with {producer.outputs[0]}")

    def joined(self, n: Node, producer: Node) -> Node:
        op = OPS[self.row.op]
        given, rest = dict[str, Value](), list[Value]()
        for m in (producer, n):
            for name, v in zip(chain(m.definition.operands, repeat("")), m.inputs, strict=False):
                if name in op.operands and name not in given and v not in producer.outputs:
                    given[name] = v
                elif v not in producer.outputs:
                    rest.append(v)
        named = [given[k] if k in given else rest.pop(0) for k in op.operands if k in given or rest]
        attrs = {**self.attrs, **producer.attrs, **n.attrs}
        own = {name: value for name, value in attrs.items() if name in op.attrs}
        kept = (v for i, v in enumerate(producer.outputs) if i in self.kept)
        return Node(op.name, (*named, *rest), (*n.outputs, *kept), own)


@cache
def _pairs(row: Join) -> tuple[_Pair, ...]:
    """Return the expansions of the samples."""
    pairs = []
    for sample in OPS[row.op].samples:
        inputs = tuple(Value(f"x{i}", t) for i, t in enumerate(sample.types()))
        (producer, reader), results = Node(row.op, inputs, inputs[:1], sample.attrs).expanded
        named = zip(reader.definition.operands, reader.inputs, strict=False)
        operand = next(name for name, v in named if v in producer.outputs)
        kept = tuple(i for i, v in enumerate(producer.outputs) if v in results)
        pairs.append(_Pair(row, producer.op, reader.op, operand, kept, sample.attrs))
    return tuple(pairs)


def join(g: Graph, note: Note = ignore, *, rows: Sequence[Join]) -> Graph:
    """Join every reader with its producer if a row takes them."""
    pairs = [pair for row in rows for pair in _pairs(row)]
    places = {v.name: i for i, n in enumerate(g.nodes) for v in n.outputs}

    def edit(n: Node) -> Edit:
        own = [pair for pair in pairs if pair.reader == n.op]
        value = n[own[0].operand]
        producer = g.producer(value)
        pair = next((pair for pair in own if producer and pair.producer == producer.op), None)
        if pair is None or producer is None:
            ops = " or ".join(dict.fromkeys(pair.producer for pair in own))
            raise Left(f"{value} is not made by {ops}")
        return pair.edit(g, n, producer, places)

    return edit_each(g, g.find(*(pair.reader for pair in pairs)), edit, note)
