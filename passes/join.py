"""Joins: a node and its only reader become one op. A pass lists its joins as rows; one runner.

    reader(.., producer(..), ..)  ->  joined(..)

The joined node has the reader's results, then the producer's other results. Its operands and
attributes are, by name, those of the producer, else of the reader. An operand that neither has, or
that the producer makes, is the next of the producer's that is left over; `*rest` is what then
remains of both.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain, repeat

from g4ir.ir.graph import Attr, Graph, Node, Value
from g4ir.ops import OPS

from .match import Edit, Left, Note, after, edit_each, ignore, parts_of


@dataclass(frozen=True)
class Join:
    """A row: which two ops become which one."""

    reader: str
    #: operands of the reader that are results of the producer, from its result `first` on
    operands: tuple[str, ...]
    producer: str
    joined: str
    first: int = 0
    #: the value may have other readers: it stays a result
    shared: bool = False
    #: only for one token of each sequence
    one_token: bool = False
    #: reason to leave the two apart, or ""
    refuses: Callable[[Graph, Node, Node], str] | None = None
    #: attributes of the joined node that neither of the two has
    attrs: Mapping[str, Attr] = field(default_factory=dict)

    def taken(self, n: Node) -> tuple[Value, ...]:
        """Return the reader's operands that the producer makes."""
        return tuple(n[operand] for operand in self.operands)

    def takes(self, n: Node, producer: Node) -> bool:
        """Whether the row is about these two nodes."""
        made = producer.outputs[self.first :][: len(self.operands)]
        return producer.op == self.producer and made == self.taken(n)

    def edit(self, g: Graph, n: Node, producer: Node) -> Edit:
        """Return the two as one; Left with the reason to leave them apart."""
        value = self.taken(n)[0]
        if n.inputs.count(value) > 1:
            raise Left(f"{value} has another user")
        if self.one_token and (value.type.rank < 3 or value.type.shape[1] != 1):
            raise Left(f"{value} is of several tokens")
        if self.refuses and (reason := self.refuses(g, producer, n)):
            raise Left(reason)
        made = self.node(n, producer)
        parts = parts_of(g, made)
        later = {v for m in after(g, producer.outputs) if m != n for v in m.outputs}
        if later.intersection(n.inputs):
            raise Left(f"{n.outputs[0]} reads what is made of {producer.outputs[0]}")
        return Edit(parts, [made], f"fused with {producer.outputs[0]}")

    def node(self, n: Node, producer: Node) -> Node:
        """Return the joined node."""
        kept = () if self.shared else self.taken(n)
        results = (*n.outputs, *(v for v in producer.outputs if v not in kept))
        attrs, known = {**self.attrs, **producer.attrs, **n.attrs}, OPS[self.joined].attrs
        own = {name: value for name, value in attrs.items() if name in known}
        return Node(self.joined, self._inputs(n, producer), results, own)

    def _inputs(self, n: Node, producer: Node) -> tuple[Value, ...]:
        names, given, rest = OPS[self.joined].operands, dict[str, Value](), list[Value]()
        for m in (producer, n):
            for name, v in zip(chain(m.definition.operands, repeat("")), m.inputs, strict=False):
                if name in names and name not in given and v not in producer.outputs:
                    given[name] = v
                elif v not in producer.outputs:
                    rest.append(v)
        named = [given[k] if k in given else rest.pop(0) for k in names if k in given or rest]
        return (*named, *rest)


def join(g: Graph, note: Note = ignore, *, rows: Sequence[Join]) -> Graph:
    """Join every reader with its producer if a row takes them."""

    def edit(n: Node) -> Edit:
        own = [row for row in rows if row.reader == n.op]
        taken = own[0].taken(n)
        producer = g.producer(taken[0])
        row = next((row for row in own if producer and row.takes(n, producer)), None)
        if row is None or producer is None:
            ops = " or ".join(dict.fromkeys(row.producer for row in own))
            are = "is" if len(taken) == 1 else "are"
            raise Left(f"{' and '.join(map(str, taken))} {are} not made by {ops}")
        return row.edit(g, n, producer)

    return edit_each(g, g.find(*(row.reader for row in rows)), edit, note)
