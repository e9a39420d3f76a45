"""Joins: a node and its only reader become one op. A pass lists its joins as rows; one runner.

    reader(.., producer(..), ..)  ->  joined(..)

The joined node has the reader's results, then the producer's other results, and of the attributes
of both those that the joined op has.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from g4ir.ir.graph import Attr, Graph, Node, Value
from g4ir.ops import OPS

from .match import Edit, Left, Note, after, edit_each, ignore


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
    #: inputs of the joined node; None: the reader's, the producer's in place of the operands
    inputs: Callable[[Node, Node], Sequence[Value]] | None = None
    #: attributes of the joined node that neither of the two has
    attrs: Mapping[str, Attr] = field(default_factory=dict)

    def taken(self, n: Node) -> tuple[Value, ...]:
        """Return the reader's operands that the producer makes."""
        return tuple(n[operand] for operand in self.operands)

    def takes(self, n: Node, producer: Node) -> bool:
        """Whether the row is about these two nodes."""
        made = producer.outputs[self.first :][: len(self.operands)]
        return producer.op == self.producer and made == self.taken(n)

    def check(self, g: Graph, n: Node, producer: Node) -> None:
        """Raise Left with the reason to leave the two apart."""
        taken = self.taken(n)
        if self.one_token and (taken[0].type.rank < 3 or taken[0].type.shape[1] != 1):
            raise Left(f"{taken[0]} is of several tokens")
        if self.refuses and (reason := self.refuses(g, producer, n)):
            raise Left(reason)
        for v in taken:
            alone = self.shared or g.readers(v) == [n]
            if not alone or n.inputs.count(v) > 1:
                raise Left(f"{v} has another user")
        if len(producer.outputs) > len(taken) or self.shared:
            later = {v for m in after(g, producer.outputs) for v in m.outputs}
            if later.intersection(n.inputs):
                raise Left(f"{n.outputs[0]} reads what is made of {producer.outputs[0]}")

    def node(self, n: Node, producer: Node) -> Node:
        """Return the joined node."""
        kept = () if self.shared else self.taken(n)
        results = (*n.outputs, *(v for v in producer.outputs if v not in kept))
        attrs, known = {**self.attrs, **producer.attrs, **n.attrs}, OPS[self.joined].attrs
        inputs = self.inputs(producer, n) if self.inputs else self._in_place(producer, n)
        own = {name: value for name, value in attrs.items() if name in known}
        return Node(self.joined, tuple(inputs), results, own)

    def _in_place(self, producer: Node, n: Node) -> Sequence[Value]:
        """Return the reader's inputs with all of the producer's in place of one operand, or one
        each in place of several."""
        taken = self.taken(n)
        parts = [producer.inputs] if len(taken) == 1 else [(v,) for v in producer.inputs]
        made = dict(zip(taken, parts, strict=True))
        return [x for v in n.inputs for x in made.get(v, (v,))]


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
        row.check(g, n, producer)
        return Edit([producer, n], [row.node(n, producer)], f"fused with {producer.outputs[0]}")

    return edit_each(g, g.find(*(row.reader for row in rows)), edit, note)
