"""Small builds before a large one: what takes an hour should not fail at its end for a reason that
seconds show."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from g4ir.errors import LowerError
from g4ir.ir.graph import Graph, Node
from g4ir.ui.progress import Progress

from . import build


def attention_graphs(graph: Graph) -> list[Graph]:
    """Return a graph for each distinct attention of a graph: it alone, which reads caches and
    writes none."""
    kinds: dict[Any, Graph] = {}
    for n in (n for n in graph.nodes if n.definition.held):
        key = (n.op, tuple(sorted(n.attrs.items())), *(v.type for v in n.inputs))
        kinds.setdefault(key, _alone(n))
    return [*kinds.values()]


def _alone(n: Node) -> Graph:
    others = tuple(dict.fromkeys(v for v in n.inputs if v not in n.caches))
    return Graph("prefill", others, (), tuple(dict.fromkeys(n.caches)), (n,), n.outputs, {})


def attention_form(
    graph: Graph, form: str, build_alone: Callable[[Graph, str], None], progress: Progress
) -> str:
    """Return the form of attention that TensorRT builds: this one, or `plain` where a refusal names
    the wrapper that takes layers for attention. LowerError of another refusal."""
    for g in attention_graphs(graph):
        place = g.outputs[0].name
        progress(f"trial build of the attention of {place}")
        try:
            build_alone(g, form)
        except build.RefusedError as e:
            if form == "plain" or build.WRAPPER not in str(e):
                raise LowerError(f"a trial build of the attention of {place} alone: {e}") from e
            form = "plain"
            build_alone(g, form)
    return form
