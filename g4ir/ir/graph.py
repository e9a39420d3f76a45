"""A small SSA IR without control flow, and its builder.

Tensors are positional, metadata is keyword. The name of a value is its identity and stays the same
under passes. Caches are `state`: read as values, with `next` mapping those that are updated to
their new values. Params are weights; nodes that depend on params alone form the weight prologue,
which runs once, at build (at load if weights are linked), if their ops may `fold`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from g4ir.errors import VerifyError
from g4ir.ops import OPS, Op
from g4ir.ops.base import as_tuple
from g4ir.ops.types import Type

Attr = int | float | str | bool | tuple[int, ...] | tuple[bool, ...]


@dataclass(frozen=True)
class Value:
    """A tensor: its name is its identity."""

    name: str
    type: Type = field(hash=False)  # within a graph, equal names have equal types

    def __str__(self) -> str:
        return f"%{self.name}"


@dataclass(frozen=True)
class Node:
    """One op applied to values."""

    op: str
    inputs: tuple[Value, ...]
    outputs: tuple[Value, ...]
    attrs: Mapping[str, Attr] = field(default_factory=dict)

    def __getitem__(self, operand: str) -> Value:
        """Return the input for the op's parameter `operand`."""
        return self.inputs[self.definition.operands.index(operand)]

    @property
    def definition(self) -> Op:
        return OPS[self.op]

    @cached_property
    def inferred(self) -> tuple[Type, ...]:
        """Result types by the op's `infer`; VerifyError names the node."""
        return infer(self.op, self.inputs, self.attrs, self.result_names())

    @cached_property
    def is_typed(self) -> bool:
        """Whether the results have the inferred types."""
        return self.inferred == tuple(v.type for v in self.outputs)

    def result_names(self) -> str:
        return ", ".join(map(str, self.outputs))

    @cached_property
    def expanded(self) -> tuple[tuple[Node, ...], tuple[Value, ...]]:
        """A fused node's expansion: the nodes, and the values that are its results."""
        b = Builder(scope=f"{self.outputs[0].name}/")
        assert self.definition.expand
        results = as_tuple(self.definition.expand(b, *self.inputs, **self.attrs))
        return tuple(b.nodes), results

    @property
    def out(self) -> Value:
        """The only result."""
        (value,) = self.outputs
        return value

    @property
    def caches(self) -> tuple[Value, ...]:
        """The KV caches among an attention's inputs: K and V, or a latent one."""
        return self.inputs[slice(*self._cache_range())]

    @property
    def chunk(self) -> tuple[Value, ...]:
        """Inputs of an attention after its KV caches, if any: K and V of the chunk (or its latent
        rows), then block ids."""
        return self.inputs[self._cache_range()[1] :]

    def _cache_range(self) -> tuple[int, int]:
        cache_range = self.definition.cache_range
        assert cache_range
        return cache_range(**self.attrs)

    # Attributes as Python types, which `infer_types` has checked.

    def number(self, attr: str) -> float:
        return float(self._attr(attr, int | float))

    def integer(self, attr: str) -> int:
        return int(self._attr(attr, int))

    def integers(self, attr: str) -> tuple[int, ...]:
        return tuple(map(int, self._attr(attr, tuple)))

    def word(self, attr: str) -> str:
        return str(self._attr(attr, str))

    def _attr(self, attr: str, kind: Any) -> Any:
        value = self.attrs[attr]
        assert isinstance(value, kind)
        return value


def print_node(n: Node) -> str:
    """`%a, %b = op(%x) {attr=1}: type, type`"""
    outs, ins = ", ".join(map(str, n.outputs)), ", ".join(map(str, n.inputs))
    attrs = ", ".join(f"{k}={v!r}" for k, v in sorted(n.attrs.items()))
    types = ", ".join(str(v.type) for v in n.outputs)
    return f"{outs} = {n.op}({ins})" + (f" {{{attrs}}}" if attrs else "") + f": {types}"


@dataclass(frozen=True)
class Graph:
    """One phase of the model (prefill, decode, ...): inputs, weights, caches and nodes in order;
    `next`: name of a cache -> its new value, for the caches that the graph updates."""

    name: str
    inputs: tuple[Value, ...]
    params: tuple[Value, ...]
    state: tuple[Value, ...]
    nodes: tuple[Node, ...]
    outputs: tuple[Value, ...]
    next: Mapping[str, Value] = field(default_factory=dict)

    def __str__(self) -> str:
        """Return the graph's text, a line per source, node, output and updated cache, which
        `parse_graph` reads back."""
        sources = {"input": self.inputs, "param": self.params, "state": self.state}
        lines = [f"{kind} {v}: {v.type}" for kind, values in sources.items() for v in values]
        lines += map(print_node, self.nodes)
        lines += [f"output {v}" for v in self.outputs]
        lines += [f"next %{name} = {v}" for name, v in self.next.items()]
        return f"graph {self.name} {{\n" + "".join(f"  {line}\n" for line in lines) + "}\n"

    def find(self, *ops: str) -> Iterator[Node]:
        """Yield the nodes of these ops, in order."""
        return (n for n in self.nodes if n.op in ops)

    def producer(self, v: Value) -> Node | None:
        """Return the node that defines a value; None for a source."""
        return self.producers.get(v.name)

    def readers(self, v: Value) -> list[Node]:
        """Return the nodes that read a value, and RESULT if it is an output or the new value of a
        cache."""
        return self.users.get(v.name, [])

    @cached_property
    def producers(self) -> Mapping[str, Node]:
        """Value name -> the node that defines it."""
        return {v.name: n for n in self.nodes for v in n.outputs}

    @cached_property
    def param_set(self) -> frozenset[Value]:
        return frozenset(self.params)

    @cached_property
    def users(self) -> Mapping[str, list[Node]]:
        """Value name -> the nodes that read it, RESULT for outputs and new values of caches."""
        table: dict[str, list[Node]] = {}
        for n in self.nodes:
            for v in dict.fromkeys(n.inputs):
                table.setdefault(v.name, []).append(n)
        for v in self.results():
            table.setdefault(v.name, []).append(RESULT)
        return table

    @cached_property
    def last_uses(self) -> dict[int, list[str]]:
        """Node index -> names of the values to be freed after it: it reads them last, or defines
        them and none reads them. Results and caches stay."""
        keep = {v.name for v in (*self.results(), *self.state)}
        nodes = enumerate(self.nodes)
        last = {v.name: i for i, n in nodes for v in (*n.inputs, *n.outputs)}
        table: dict[int, list[str]] = {}
        for name, i in last.items():
            if name not in keep:
                table.setdefault(i, []).append(name)
        return table

    def results(self) -> tuple[Value, ...]:
        return (*self.outputs, *self.next.values())

    def sources(self) -> tuple[Value, ...]:
        return (*self.inputs, *self.params, *self.state)


#: stands in `Graph.users` for the reader of the graph's outputs and of new values of caches
RESULT = Node("result", (), ())


@dataclass(frozen=True)
class Program:
    """The graphs of one engine, which share state and params."""

    graphs: Mapping[str, Graph]

    def state(self) -> dict[str, Value]:
        """Return each cache once; VerifyError if two graphs disagree on its type."""
        return self._unify("state")

    def params(self) -> dict[str, Value]:
        return dict(self._params)

    @cached_property
    def _params(self) -> dict[str, Value]:
        return self._unify("params")

    def map(self, f: Callable[[Graph], Graph]) -> Program:
        return Program({name: f(g) for name, g in self.graphs.items()})

    def _unify(self, kind: str) -> dict[str, Value]:
        merged: dict[str, Value] = {}
        for g in self.graphs.values():
            for v in getattr(g, kind):
                first = merged.setdefault(v.name, v)
                if first is not v and first != v:
                    both = f"{v.type} in graph {g.name} and {first.type} in another"
                    raise VerifyError(f"{kind.removesuffix('s')} %{v.name} is {both}")
        return merged


class Builder:
    """Builds a graph node by node, with inferred types; a node without `name` gets generated names
    (`scope`, op, number)."""

    def __init__(self, name: str = "graph", scope: str = "") -> None:
        self.name, self.scope = name, scope
        self.inputs: list[Value] = []
        self.params: dict[str, Value] = {}
        self.state: dict[str, Value] = {}
        self.nodes: list[Node] = []
        self.next: dict[str, Value] = {}
        self._count = 0

    def input(self, name: str, type: Type) -> Value:
        self.inputs.append(Value(name, type))
        return self.inputs[-1]

    def param(self, name: str, type: Type) -> Value:
        return self.params.setdefault(name, Value(name, type))

    def cache(self, name: str, type: Type) -> Value:
        return self.state.setdefault(name, Value(name, type))

    def emit(self, op: str, *inputs: Value, name: str | Sequence[str] = (), **attrs: Attr) -> Value:
        """Append a node and return its only result."""
        (value,) = self.emit_all(op, *inputs, name=name, **attrs)
        return value

    def emit_all(
        self, op: str, *inputs: Value, name: str | Sequence[str] = (), **attrs: Attr
    ) -> tuple[Value, ...]:
        """Append a node and return its results."""
        types = infer(op, inputs, attrs, where=str(name))
        names = [name] if isinstance(name, str) else list(name) or self._fresh(op, len(types))
        outputs = tuple(Value(n, t) for n, t in zip(names, types, strict=True))
        self.nodes.append(Node(op, inputs, outputs, attrs))
        return outputs

    def _fresh(self, op: str, count: int) -> list[str]:
        self._count += 1
        name = f"{self.scope}{op}{self._count}"
        return [f"{name}.{i}" for i in range(count)] if count > 1 else [name]

    def graph(self, *outputs: Value) -> Graph:
        return Graph(
            name=self.name,
            inputs=tuple(self.inputs),
            params=tuple(self.params.values()),
            state=tuple(self.state.values()),
            nodes=tuple(self.nodes),
            outputs=outputs,
            next=dict(self.next),
        )


#: cache of `infer`, since layers repeat: (op, input types, attributes) -> types of the results
_INFERRED: dict[tuple[str, tuple[Type, ...], str], tuple[Type, ...]] = {}
#: number of entries at which that cache is emptied
MAX_INFERRED = 1 << 16


def infer(
    op: str, inputs: Sequence[Value], attrs: Mapping[str, Attr], where: str
) -> tuple[Type, ...]:
    """Return the result types of an op. VerifyError, which begins with `where`, for an unknown op,
    or for inputs (printed with their types) or attributes that do not fit."""
    if op not in OPS:
        raise VerifyError(f"{where}: unknown op {op!r}")
    types = tuple(v.type for v in inputs)
    # `repr` tells True from 1 and 1 from 1.0, which are equal as keys.
    key = (op, types, repr(attrs))
    if key in _INFERRED:
        return _INFERRED[key]
    if len(_INFERRED) >= MAX_INFERRED:
        _INFERRED.clear()
    try:
        return _INFERRED.setdefault(key, OPS[op].infer_types(types, attrs))
    except (ValueError, TypeError, LookupError, ArithmeticError) as e:
        operands = ", ".join(f"{v}: {v.type}" for v in inputs)
        raise VerifyError(f"{where}: {op}({operands}): {e}") from e
