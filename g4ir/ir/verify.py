"""The verifier: run before and after every pass, in production too."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from g4ir.errors import VerifyError
from g4ir.ops.types import Type

from .graph import Graph, Node, Value


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
