"""Producer-reader fusion: a node and a reader of its result become one op, which a pass lists in
JOINS.

The pattern is the fused op's expansion, a producer and its reader. The fused op's results are the
reader's, then those of the producer's that the expansion returns too. Its operands are matched by
name, first with the producer's, then with the reader's; an operand without a match gets the next
unmatched input, and a variadic operand all that remain. An attribute is the reader's of that name,
else the producer's, else the sample's.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import chain, repeat
from typing import Any

from g4ir.ir.graph import Graph, Node, Value
from g4ir.ops import OPS

from .match import Edit, NoMatch, Note, after, edit_each, ignore, match_parts


@dataclass(frozen=True)
class _Pair:
    """A pattern of the fused op `op`: `operand` of the reader is a result of the producer;
    `shared`: indices of the producer's results that are also results of the fused op; `attrs`: of
    the sample from which the pattern was derived."""

    op: str
    producer: str
    reader: str
    operand: str
    shared: tuple[int, ...]
    attrs: Mapping[str, Any]

    def edit(self, g: Graph, n: Node, producer: Node, positions: Mapping[str, int]) -> Edit:
        """Return the fusion of two nodes; NoMatch with the reason. `positions`: value name -> index
        of its node."""
        value = n[self.operand]
        if n.inputs.count(value) > 1:
            raise NoMatch(f"{value} is used more than once")
        fused = self.joined(n, producer)
        parts = match_parts(g, fused)
        produced_at = positions[value.name]
        if any(positions.get(v.name, -1) > produced_at for v in n.inputs):  # `after` is slow
            later = {v for m in after(g, producer.outputs) if m != n for v in m.outputs}
            if later.intersection(n.inputs):
                raise NoMatch(f"another operand of {n.outputs[0]} depends on {producer.outputs[0]}")
        return Edit(parts, [fused], f"fused with {producer.outputs[0]}")

    def joined(self, n: Node, producer: Node) -> Node:
        op = OPS[self.op]
        operands, remaining = dict[str, Value](), list[Value]()
        for m in (producer, n):
            for name, v in zip(chain(m.definition.operands, repeat("")), m.inputs, strict=False):
                if name in op.operands and name not in operands and v not in producer.outputs:
                    operands[name] = v
                elif v not in producer.outputs:
                    remaining.append(v)
        named = [
            operands[k] if k in operands else remaining.pop(0)
            for k in op.operands
            if k in operands or remaining
        ]
        attrs = {**self.attrs, **producer.attrs, **n.attrs}
        op_attrs = {name: value for name, value in attrs.items() if name in op.attrs}
        shared = (v for i, v in enumerate(producer.outputs) if i in self.shared)
        return Node(op.name, (*named, *remaining), (*n.outputs, *shared), op_attrs)


@cache
def _pairs(op: str) -> tuple[_Pair, ...]:
    """Return the patterns of a fused op, from the expansions of its samples."""
    pairs = []
    for sample in OPS[op].samples:
        inputs = tuple(Value(f"x{i}", t) for i, t in enumerate(sample.types()))
        (producer, reader), results = Node(op, inputs, inputs[:1], sample.attrs).expanded
        named = zip(reader.definition.operands, reader.inputs, strict=False)
        operand = next(name for name, v in named if v in producer.outputs)
        shared = tuple(i for i, v in enumerate(producer.outputs) if v in results)
        pairs.append(_Pair(op, producer.op, reader.op, operand, shared, sample.attrs))
    return tuple(pairs)


def join(g: Graph, note: Note = ignore, *, ops: Sequence[str]) -> Graph:
    """Fuse each node with the producer of one of its operands, if the two match the expansion of
    one of `ops`."""
    pairs = [pair for op in ops for pair in _pairs(op)]
    positions = {v.name: i for i, n in enumerate(g.nodes) for v in n.outputs}

    def edit(n: Node) -> Edit:
        candidates = [pair for pair in pairs if pair.reader == n.op]
        value = n[candidates[0].operand]
        producer = g.producer(value)
        pair = next(
            (pair for pair in candidates if producer and pair.producer == producer.op), None
        )
        if pair is None or producer is None:
            producers = " or ".join(dict.fromkeys(pair.producer for pair in candidates))
            raise NoMatch(f"{value} is not a result of {producers}")
        return pair.edit(g, n, producer, positions)

    return edit_each(g, g.find(*(pair.reader for pair in pairs)), edit, note)
