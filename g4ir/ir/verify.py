"""The verifier: run before the first pass and after every pass, in production too."""

from __future__ import annotations

from g4ir.errors import VerifyError

from .graph import Graph, Value


def verify(g: Graph) -> None:
    """Check that every name is defined once and before its use with the same type, that results
    have the inferred types, and that next states have their state's type.

    Raises VerifyError with the graph and the value, and both types if they differ.
    """
    try:
        _verify(g)
    except VerifyError as e:
        raise VerifyError(f"graph {g.name}: {e}") from e


def _verify(g: Graph) -> None:
    defined: dict[str, Value] = {}
    for v in g.sources():
        _define(defined, v)
    for n in g.nodes:
        for v in n.inputs:
            if defined.get(v.name) is not v:
                _use(defined, v, f"input of {n.op}")
        # is_typed is cached in the node: inference runs once for a node that several graphs share
        if not n.is_typed:
            one, two = (", ".join(map(str, t)) for t in ([v.type for v in n.outputs], n.inferred))
            raise VerifyError(f"{n.result_names()} = {n.op}: declared {one}, inferred {two}")
        for v in n.outputs:
            _define(defined, v)
    for v in g.outputs:
        _use(defined, v, "output")
    states = {v.name: v.type for v in g.state}
    for name, v in g.next.items():
        _use(defined, v, f"next of {name}")
        if name not in states:
            raise VerifyError(f"next of %{name} is defined, but %{name} is no state")
        if states[name] != v.type:
            raise VerifyError(f"next of %{name} is {v.type}, but the state is {states[name]}")


def _define(defined: dict[str, Value], v: Value) -> None:
    if v.name in defined:
        raise VerifyError(f"%{v.name} is defined twice")
    defined[v.name] = v


def _use(defined: dict[str, Value], v: Value, use: str) -> None:
    if v.name not in defined:
        raise VerifyError(f"{use} %{v.name} is not defined before its use")
    declared = defined[v.name].type
    if declared != v.type:
        raise VerifyError(f"{use} %{v.name} is used as {v.type}, defined as {declared}")
