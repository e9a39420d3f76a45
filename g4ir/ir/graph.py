"""The graph: a small SSA IR, its builder, its verifier and the two rewrite primitives.

A graph is a straight line of nodes. Tensors are positional, metadata is keyword. The name of a
value is its identity and stays the same under passes. Caches are `state`: read as values, and
their new contents are handed back by `next`. Params are weights; a node that depends on params
alone belongs to the weight prologue, which runs once at build.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

from g4ir.errors import VerifyError
from g4ir.ops import OPS, Op
from g4ir.ops.base import as_tuple
from g4ir.ops.types import Type

Attr = int | float | str | bool | tuple[int, ...] | tuple[bool, ...]


@dataclass(frozen=True)
class Value:
    """A tensor: its name is its identity."""

    name: str
    type: Type

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
        """Return the input that the op's `infer` calls so."""
        return self.inputs[self.definition.operands.index(operand)]

    @property
    def definition(self) -> Op:
        return OPS[self.op]

    @cached_property
    def inferred(self) -> tuple[Type, ...]:
        """Types of the results by the op's `infer`; VerifyError names the node. They follow from
        the node alone, which many passes leave as it is."""
        return infer(self.op, self.inputs, self.attrs, self.result_names())

    def result_names(self) -> str:
        """Return the names of the results, for a message."""
        return ", ".join(map(str, self.outputs))

    @cached_property
    def expanded(self) -> tuple[tuple[Node, ...], tuple[Value, ...]]:
        """A fused node in simpler ops, and the values that stand for its results."""
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
        """Caches that an attention reads: K and V, or what stands for both."""
        first, end = self._held()
        return self.inputs[first:end]

    @property
    def chunk(self) -> tuple[Value, ...]:
        """Inputs of an attention behind its caches: rows that are not in them yet, block ids."""
        return self.inputs[self._held()[1] :]

    def _held(self) -> tuple[int, int]:
        assert self.definition.held
        return self.definition.held(**self.attrs)

    # `infer_types` has checked attributes against the op; these say their kind again.

    def number(self, attr: str) -> float:
        value = self.attrs[attr]
        assert isinstance(value, int | float)
        return float(value)

    def whole(self, attr: str) -> int:
        value = self.attrs[attr]
        assert isinstance(value, int)
        return value

    def wholes(self, attr: str) -> tuple[int, ...]:
        value = self.attrs[attr]
        assert isinstance(value, tuple)
        return tuple(int(i) for i in value)

    def word(self, attr: str) -> str:
        value = self.attrs[attr]
        assert isinstance(value, str)
        return value


def print_node(n: Node) -> str:
    """`%a, %b = op(%x) {attr=1}: type, type`"""
    outs, ins = ", ".join(map(str, n.outputs)), ", ".join(map(str, n.inputs))
    attrs = ", ".join(f"{k}={v!r}" for k, v in sorted(n.attrs.items()))
    types = ", ".join(str(v.type) for v in n.outputs)
    return f"{outs} = {n.op}({ins})" + (f" {{{attrs}}}" if attrs else "") + f": {types}"


@dataclass(frozen=True)
class Graph:
    """A phase of the model: what it is fed, the weights and caches it uses, and its nodes."""

    name: str
    inputs: tuple[Value, ...]
    params: tuple[Value, ...]
    state: tuple[Value, ...]
    nodes: tuple[Node, ...]
    outputs: tuple[Value, ...]
    next: Mapping[str, Value] = field(default_factory=dict)

    def __str__(self) -> str:
        """Return one line per value and node, ending in a newline."""
        lines = [f"graph {self.name} {{"]
        for kind, values in (("input", self.inputs), ("param", self.params), ("state", self.state)):
            lines += [f"  {kind} {v}: {v.type}" for v in values]
        lines += [f"  {print_node(n)}" for n in self.nodes]
        lines += [f"  output {v}" for v in self.outputs]
        lines += [f"  next %{name} = {v}" for name, v in self.next.items()]
        return "\n".join([*lines, "}"]) + "\n"

    def find(self, *ops: str) -> Iterator[Node]:
        """Yield the nodes of these ops, in order."""
        return (n for n in self.nodes if n.op in ops)

    def producers(self) -> Mapping[str, Node]:
        """Value name -> the node that makes it."""
        return self._producers

    def users(self) -> Mapping[str, list[Node]]:
        """Value name -> the nodes that read it; RESULT stands for the graph's end."""
        return self._users

    # Worked out once: a graph never changes.
    @cached_property
    def _producers(self) -> dict[str, Node]:
        return {v.name: n for n in self.nodes for v in n.outputs}

    @cached_property
    def _users(self) -> dict[str, list[Node]]:
        table: dict[str, list[Node]] = {}
        for n in self.nodes:
            for v in dict.fromkeys(n.inputs):
                table.setdefault(v.name, []).append(n)
        for v in self.results():
            table.setdefault(v.name, []).append(RESULT)
        return table

    @cached_property
    def last_uses(self) -> dict[int, list[str]]:
        """Node index -> values that die there, so that a long graph stays small in memory."""
        keep = {v.name for v in (*self.results(), *self.state)}
        last: dict[str, int] = {}
        for i, n in enumerate(self.nodes):
            last.update({v.name: i for v in (*n.inputs, *n.outputs)})
        table: dict[int, list[str]] = {}
        for name, i in last.items():
            if name not in keep:
                table.setdefault(i, []).append(name)
        return table

    def results(self) -> tuple[Value, ...]:
        """Return outputs and next states."""
        return (*self.outputs, *self.next.values())

    def sources(self) -> tuple[Value, ...]:
        """Return values that no node makes."""
        return (*self.inputs, *self.params, *self.state)


#: stands for the graph's end among the users of a value
RESULT = Node("result", (), ())


@dataclass(frozen=True)
class Program:
    """The graphs of one engine and the state they share."""

    graphs: Mapping[str, Graph]

    def state(self) -> dict[str, Value]:
        """Return each cache once; VerifyError where two graphs disagree on its type."""
        return _unify(self.graphs.values(), "state")

    def params(self) -> dict[str, Value]:
        return dict(self._params)

    @cached_property
    def _params(self) -> dict[str, Value]:
        return _unify(self.graphs.values(), "params")

    def map(self, f: Callable[[Graph], Graph]) -> Program:
        return Program({name: f(g) for name, g in self.graphs.items()})


def _unify(graphs: Iterable[Graph], kind: str) -> dict[str, Value]:
    merged: dict[str, Value] = {}
    for g in graphs:
        for v in getattr(g, kind):
            found = merged.setdefault(v.name, v)
            if found is not v and found != v:
                raise VerifyError(
                    f"{kind} %{v.name} is {v.type} in graph {g.name} and {found.type} in another"
                )
    return merged


class Builder:
    """Makes a graph node by node; types are inferred, names are given or derived."""

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
        """Append a node of one result; returns that."""
        (value,) = self.emit_all(op, *inputs, name=name, **attrs)
        return value

    def emit_all(
        self, op: str, *inputs: Value, name: str | Sequence[str] = (), **attrs: Attr
    ) -> tuple[Value, ...]:
        """Append a node; returns its results."""
        types = infer(op, inputs, attrs, where=str(name))
        names = [name] if isinstance(name, str) else list(name) or self._fresh(op, len(types))
        outputs = tuple(Value(n, t) for n, t in zip(names, types, strict=True))
        self.nodes.append(Node(op, inputs, outputs, attrs))
        return outputs

    def _fresh(self, op: str, count: int) -> list[str]:
        self._count += 1
        return [
            f"{self.scope}{op}{self._count}" + (f".{i}" if count > 1 else "") for i in range(count)
        ]

    def graph(self, *outputs: Value) -> Graph:
        return Graph(
            self.name,
            tuple(self.inputs),
            tuple(self.params.values()),
            tuple(self.state.values()),
            tuple(self.nodes),
            outputs,
            dict(self.next),
        )


#: results of `infer`, which follow from its key alone; layers of a model repeat them
_INFERRED: dict[tuple[str, tuple[Type, ...], str], tuple[Type, ...]] = {}
_MOST_INFERRED = 1 << 16


def infer(
    op: str, inputs: Sequence[Value], attrs: Mapping[str, Attr], where: str
) -> tuple[Type, ...]:
    """Return result types of an op; VerifyError names the node and the types of its inputs."""
    if op not in OPS:
        raise VerifyError(f"{where}: unknown op {op!r}")
    types = tuple(v.type for v in inputs)
    # `repr` tells True from 1 and 1 from 1.0, which are equal as keys.
    key = (op, types, repr(attrs))
    if key in _INFERRED:
        return _INFERRED[key]
    if len(_INFERRED) >= _MOST_INFERRED:
        _INFERRED.clear()
    try:
        return _INFERRED.setdefault(key, OPS[op].infer_types(types, attrs))
    except (ValueError, TypeError, LookupError, ArithmeticError) as e:
        given = ", ".join(f"{v}: {v.type}" for v in inputs)
        raise VerifyError(f"{where}: {op}({given}): {e}") from e


def verify(g: Graph) -> None:
    """Check a graph: every name defined once and before its use, with the declared type; every
    op known and its results as inferred; next states of their state's type.

    Raises VerifyError with the graph, the node and both types.
    """
    known: dict[str, Value] = {}
    for v in g.sources():
        _define(g, known, v)
    for n in g.nodes:
        for v in n.inputs:
            if known.get(v.name) is not v:
                _use(g, known, v, f"input of {n.op}")
        _check_types(g, n)
        for v in n.outputs:
            _define(g, known, v)
    for v in g.outputs:
        _use(g, known, v, "output")
    states = {v.name: v for v in g.state}
    for name, v in g.next.items():
        _use(g, known, v, f"next of {name}")
        if name not in states:
            raise VerifyError(f"graph {g.name}: next of %{name}, which is no state")
        if states[name].type != v.type:
            raise VerifyError(
                f"graph {g.name}: next of %{name} is {v.type}, the state {states[name].type}"
            )


def _check_types(g: Graph, n: Node) -> None:
    try:
        types = n.inferred
    except VerifyError as e:
        raise VerifyError(f"graph {g.name}: {e}") from e
    declared = tuple(v.type for v in n.outputs)
    if types != declared:
        raise VerifyError(
            f"graph {g.name}: {n.result_names()} = {n.op}: declared {_list(declared)}, "
            f"inferred {_list(types)}"
        )


def _list(types: Iterable[Type]) -> str:
    return ", ".join(map(str, types))


def _define(g: Graph, known: dict[str, Value], v: Value) -> None:
    if v.name in known:
        raise VerifyError(f"graph {g.name}: %{v.name} is defined twice")
    known[v.name] = v


def _use(g: Graph, known: Mapping[str, Value], v: Value, what: str) -> None:
    if v.name not in known:
        raise VerifyError(f"graph {g.name}: {what} %{v.name} is not defined before its use")
    if known[v.name].type != v.type:
        raise VerifyError(
            f"graph {g.name}: {what} %{v.name} is used as {v.type}, defined as {known[v.name].type}"
        )


def splice(g: Graph, old: Sequence[Node], new: Sequence[Node]) -> Graph:
    """Replace `old` by `new`, which defines the same values where others use them.

    The new nodes stand where the last of the old ones stood, or later where they need a value
    defined after it; order is restored by `order`.
    """
    return splice_all(g, [(old, new)])


def splice_all(g: Graph, edits: Sequence[tuple[Sequence[Node], Sequence[Node]]]) -> Graph:
    """`splice` every (old, new); no node is in two of them. One ordering serves them all."""
    place = {id(n): i for i, n in enumerate(g.nodes)}
    gone = {id(n) for old, _ in edits for n in old}
    made: dict[int, list[Node]] = {}
    for old, new in edits:
        made.setdefault(max(place[id(n)] for n in old), []).extend(new)
    nodes: list[Node] = []
    for i, n in enumerate(g.nodes):
        nodes += [n] if id(n) not in gone else []
        nodes += made.get(i, [])
    return order(replace(g, nodes=tuple(nodes))) if edits else g


def order(g: Graph) -> Graph:
    """Order topologically and stably: nodes keep their place unless an input comes later.

    Raises VerifyError where a node needs its own result.
    """
    maker = {v.name: i for i, n in enumerate(g.nodes) for v in n.outputs}
    done, begun = set[int](), set[int]()
    out: list[Node] = []
    for root in range(len(g.nodes)):
        stack = [root]
        while stack:
            i = stack[-1]
            needs = (
                []
                if i in done
                else [
                    maker[v.name]
                    for v in g.nodes[i].inputs
                    if v.name in maker and maker[v.name] not in done
                ]
            )
            if needs:
                if i in begun:
                    raise VerifyError(f"graph {g.name}: cycle at {g.nodes[i].outputs[0]}")
                begun.add(i)
                stack.extend(reversed(needs))
                continue
            stack.pop()
            if i not in done:
                done.add(i)
                out.append(g.nodes[i])
    return replace(g, nodes=tuple(out))


def rebuild(g: Graph, rename: Mapping[str, Value] | None = None) -> Graph:
    """Infer all types again from the sources, after replacing uses as `rename` says."""
    now = {v.name: v for v in g.sources()}
    rename = dict(rename or {})

    def look(v: Value) -> Value:
        v = rename.get(v.name, v)
        return now.get(v.name, v)

    nodes = []
    for n in g.nodes:
        inputs = tuple(look(v) for v in n.inputs)
        types = infer(n.op, inputs, n.attrs, f"graph {g.name}: {n.outputs[0]}")
        outputs = tuple(Value(v.name, t) for v, t in zip(n.outputs, types, strict=True))
        now.update({v.name: v for v in outputs})
        nodes.append(replace(n, inputs=inputs, outputs=outputs))
    return replace(
        g,
        nodes=tuple(nodes),
        outputs=tuple(look(v) for v in g.outputs),
        next={k: look(v) for k, v in g.next.items()},
    )


def drop_dead(g: Graph) -> Graph:
    """Remove nodes, params and states that no result needs."""
    live = {v.name for v in g.results()}
    nodes: list[Node] = []
    for n in reversed(g.nodes):
        if any(v.name in live for v in n.outputs):
            nodes.append(n)
            live.update(v.name for v in n.inputs)
    return replace(
        g,
        nodes=tuple(reversed(nodes)),
        params=tuple(v for v in g.params if v.name in live),
        state=tuple(v for v in g.state if v.name in live or v.name in g.next),
    )


def bind(g: Graph, **dims: int | str) -> Graph:
    """Replace named dims by ints, or by other names, and infer the types again."""

    def b(v: Value) -> Value:
        return Value(v.name, v.type.bind(dims))

    bound = replace(
        g,
        inputs=tuple(map(b, g.inputs)),
        params=tuple(map(b, g.params)),
        state=tuple(map(b, g.state)),
    )
    return rebuild(bound)


def split_prologue(g: Graph) -> tuple[Graph, Graph]:
    """(prologue, main): nodes that depend on params alone, and the rest, which takes their
    results as params. Checked and run like any other graph."""
    params = {v.name: v for v in g.params}
    fixed = dict(params)
    early: list[Node] = []
    for n in g.nodes:
        if n.definition.fold and n.inputs and all(v.name in fixed for v in n.inputs):
            early.append(n)
            fixed.update({v.name: v for v in n.outputs})
    ids = {id(n) for n in early}
    late = tuple(n for n in g.nodes if id(n) not in ids)
    read = {v.name for n in late for v in n.inputs} | {v.name for v in g.results()}
    packed = tuple(v for n in early for v in n.outputs if v.name in read)
    main = replace(g, nodes=late, params=tuple(v for v in g.params if v.name in read) + packed)
    prologue = Graph(f"{g.name}.prologue", (), g.params, (), tuple(early), packed)
    return drop_dead(prologue), main
