"""`g4ir show`: prints the IR at any point of the pipeline, what a pass did, or the ops."""

from __future__ import annotations

from typing import Any

from g4ir.errors import InputError
from g4ir.ir.graph import Graph, Node, print_node
from g4ir.ir.names import layer_of
from g4ir.ops import OPS, Op
from g4ir.passes import find_pass, run_passes
from g4ir.ui import console
from g4ir.ui.table import aligned

from .common import output
from .graphs import NamedGraph, no_layer
from .verb import Verb, flag, flag_of, json_flag

NOTE = """\
kind: the part of the model; `by name`: it depends on the name of a node's first result
rounded, summed: the tolerance: units in the last place of the model's dtype, for roundings, and of
fp32, for reordered sums
"""


class Show(Verb):
    """Print a graph, what a pass does to it, or the ops."""

    graph: NamedGraph
    layer: int | None = flag("only the nodes of layer I", None, "I")
    why: str | None = flag("explain why a pass did or did not match", None, "PASS")
    ops: bool = flag("list the ops of the IR: kind, tolerance, definition", False)
    json: bool = json_flag()

    def __post_init__(self) -> None:
        if self.ops and (extra := sorted(self.explicit - {"ops", "json"})):
            flags = ["the engine" if n == "engine" else flag_of(n) for n in extra]
            raise InputError(f"--ops shows the ops of every graph: leave out {', '.join(flags)}")
        if self.why is not None and self.graph.after is not None:
            raise InputError("give --why or --after, not both")

    def __call__(self) -> int:
        if self.ops:
            return self._ops()
        self.graph.check()
        if self.why:
            return self._why(self.why)
        graph = self.graph.chosen()
        text = _text(graph, self.layer)
        if self.layer is not None and not text:
            raise no_layer(graph, self.layer)
        return output(self.json, {"graph": graph.name, "text": text}, text)

    def _why(self, why: str) -> int:
        find_pass(why)
        graph, skip = self.graph.before_passes()
        rows: list[dict[str, str]] = []

        def note(name: str, value: str, reason: str) -> None:
            if name == why and (self.layer is None or layer_of(value) == self.layer):
                rows.append({"value": f"%{value}", "reason": reason})

        if why in skip:
            rows.append({"value": graph.name, "reason": f"{why} is skipped"})
        elif self.layer is not None and not _nodes_of(graph, self.layer):
            raise no_layer(graph, self.layer)
        else:
            run_passes(graph, skip=skip, until=why, note=note, options=self.graph.config.options)
        output(self.json, rows, "".join(f"{row['value']}: {row['reason']}\n" for row in rows))
        if not rows:
            where = graph.name if self.layer is None else f"{graph.name}, layer {self.layer}"
            console.say(f"{why} found no candidate in graph {where}")
        return 0

    def _ops(self) -> int:
        facts = [_op_facts(o) for o in OPS.values()]
        head = ("op", "kind", "rounded", "summed", "meaning")
        rows = [tuple(str(f[key] or "-") for key in head) for f in facts]
        return output(self.json, facts, aligned([head, *rows], indent=0, left=len(head)) + NOTE)


def _text(graph: Graph, layer: int | None) -> str:
    """Return the text of a graph, or of one layer; "" if it has no such layer."""
    nodes = [] if layer is None else _nodes_of(graph, layer)
    if not nodes:
        return str(graph) if layer is None else ""
    read = {v.name for n in nodes for v in n.inputs}
    lines = [
        f"{kind} {v}: {v.type}"
        for kind, values in (("param", graph.params), ("state", graph.state))
        for v in values
        if v.name in read
    ]
    lines += [print_node(n) for n in nodes]
    outputs = {v.name for n in nodes for v in n.outputs}
    lines += [f"next %{k} = {v}" for k, v in graph.next.items() if v.name in outputs]
    return "\n".join(lines) + "\n"


def _nodes_of(g: Graph, layer: int) -> list[Node]:
    return [n for n in g.nodes if any(layer_of(v.name) == layer for v in n.outputs)]


def _op_facts(o: Op) -> dict[str, Any]:
    """Return an op's kind, tolerance and the first paragraph of its definition."""
    return {
        "op": o.name,
        "kind": o.kind or "by name",
        "fused": o.expand is not None,
        **vars(o.budget),
        "meaning": " ".join(o.doc.split("\n\n")[0].split()),
    }
