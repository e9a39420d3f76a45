"""The verifier: run before and after every pass, in production too."""

from __future__ import annotations

from g4ir.errors import VerifyError

from .graph import Graph, Value


def verify(g: Graph) -> None:
    """Check a graph: every name defined once and before its use, with the declared type; every
    op known and its results as inferred; next states of their state's type.

    Raises VerifyError with the graph, the node and both types.
    """
    try:
        _verify(g)
    except VerifyError as e:
        raise VerifyError(f"graph {g.name}: {e}") from e


def _verify(g: Graph) -> None:
    known: dict[str, Value] = {}
    for v in g.sources():
        _define(known, v)
    for n in g.nodes:
        for v in n.inputs:
            if known.get(v.name) is not v:
                _use(known, v, f"input of {n.op}")
        if not n.is_typed:  # once for all graphs that have the node
            one, two = (", ".join(map(str, t)) for t in ([v.type for v in n.outputs], n.inferred))
            raise VerifyError(f"{n.result_names()} = {n.op}: declared {one}, inferred {two}")
        for v in n.outputs:
            _define(known, v)
    for v in g.outputs:
        _use(known, v, "output")
    states = {v.name: v.type for v in g.state}
    for name, v in g.next.items():
        _use(known, v, f"next of {name}")
        if name not in states:
            raise VerifyError(f"next of %{name}, which is no state")
        if states[name] != v.type:
            raise VerifyError(f"next of %{name} is {v.type}, the state {states[name]}")


def _define(known: dict[str, Value], v: Value) -> None:
    if v.name in known:
        raise VerifyError(f"%{v.name} is defined twice")
    known[v.name] = v


def _use(known: dict[str, Value], v: Value, what: str) -> None:
    if v.name not in known:
        raise VerifyError(f"{what} %{v.name} is not defined before its use")
    defined = known[v.name].type
    if defined != v.type:
        raise VerifyError(f"{what} %{v.name} is used as {v.type}, defined as {defined}")
