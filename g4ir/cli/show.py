"""`g4ir show`: printed IR at any point of the pipeline, what a pass did, what two graphs differ in,
the ops of the IR."""

from __future__ import annotations

from collections import Counter
from difflib import unified_diff
from typing import Any

from g4ir.errors import InputError
from g4ir.ir.graph import Graph, Node, print_node
from g4ir.ir.names import layer_of
from g4ir.model.decoder import BLOCKS, VERIFY
from g4ir.ops import OPS, Op
from g4ir.parallel.shard import collectives
from g4ir.passes import find_pass, run_passes
from g4ir.spec.record import Spec
from g4ir.ui import console
from g4ir.ui.table import aligned
from g4ir.ui.units import size_text

from .common import output
from .graphs import NamedGraph, no_layer, plain_graph
from .models import any_spec
from .verb import Verb, flag, flag_of

#: graphs of the layers of the model
DECODER = ("prefill", "decode", VERIFY, BLOCKS)
#: one token of one row
ONE = {"B": 1, "S": 1, "M": 1, "C": 1}
NOTE = """\
kind: the part of the model; `by name`: that of the first result's name
rounded, summed: how far two right computations may lie apart, in units of the dtype and in fp32
units of a sum
"""


class Show(Verb):
    """Print a graph, or what is asked of it.

    layer I: only the nodes of layer I
    why PASS: explain why a pass did or did not match
    diff: with --after PASS: diff of the graph before and after it
    against B: diff against the same graph of another variant (a name, a YAML file, a checkpoint
        or its config.json); exit 1 if they differ
    collectives: with --tp or a tensor-parallel engine: collectives of a step and their bytes
    ops: list the ops of the IR: kind, tolerance, requirements, definition
    """

    json: bool = False
    graph: NamedGraph
    layer: int | None = None
    why: str | None = None
    diff: bool = False
    against: str | None = flag(None, name="--compare")
    collectives: bool = False
    ops: bool = False

    def __post_init__(self) -> None:
        if self.ops:
            if others := sorted(self.given - {"ops", "json"}):
                flags = ["the engine" if n == "engine" else flag_of(n) for n in others]
                what = f"leave out {', '.join(flags)}"
                raise InputError(f"--ops shows the ops of every graph: {what}")
            return
        if self.why is not None and self.collectives:
            raise InputError("give --why or --collectives, not both")
        if self.why is not None and (self.diff or self.against is not None):
            raise InputError("give --diff or --compare, or --why")
        if self.why is not None and self.graph.after is not None:
            raise InputError("give --why or --after, not both")
        if self.collectives and self.layer is not None:
            raise InputError("--collectives is of all layers: leave out --layer")

    def __call__(self) -> int:
        if self.ops:
            return self._ops()
        self.graph.check()
        if self.collectives and self.graph.ranks is None:
            raise InputError("--collectives needs --tp N: a single rank has no collectives")
        if self.against and self.graph.ranks is not None:
            raise InputError(
                "--compare compares one rank alone: leave out --tp, or give an engine of one rank"
            )
        if self.diff or self.against is not None:
            return self._diff()
        if self.why:
            return self._why(self.why)
        graph = self.graph.chosen()
        if self.collectives:
            return self._collectives(graph)
        text = _text(graph, self.layer)
        if self.layer is not None and not text:
            raise no_layer(graph, self.layer)
        if self.layer is not None and self.graph.phase in DECODER:
            text = _about(self.graph.spec, self.layer) + text
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
            run_passes(graph, skip=skip, until=why, note=note, options=self.graph.pass_options())
        output(self.json, rows, "".join(f"{row['value']}: {row['reason']}\n" for row in rows))
        if not rows:
            console.say(f"{why} found no candidate in graph {graph.name}")
        return 0

    def _collectives(self, graph: Graph) -> int:
        """Print the collectives of a graph, equal ones together, and the bytes that a rank sends
        for one token of one sequence."""
        found = Counter(
            (n.op, tuple(v.type.bind(ONE) for v in n.inputs)) for n in collectives(graph)
        )
        rows: list[dict[str, Any]] = []
        table = [("op", "messages", "tensors of a rank", "each")]
        for (op, types), count in found.items():
            tensors, nbytes = [str(t) for t in types], sum(t.nbytes() for t in types)
            rows.append({"op": op, "messages": count, "tensors": tensors, "bytes": nbytes})
            table.append((op, str(count), " ".join(tensors), size_text(nbytes)))
        total, ranks = sum(found.values()), self.graph.ranks
        facts = {"phase": graph.name, "ranks": ranks, "messages": total, "rows": rows}
        head = f"{graph.name} on {ranks} ranks: {total} messages a step\n"
        return output(self.json, facts, head + aligned(table))

    def _ops(self) -> int:
        facts = [_op_facts(o) for o in OPS.values()]
        head = ("op", "kind", "rounded", "summed", "has", "meaning")
        table = aligned([head, *map(_op_line, facts)], indent=0, left=len(head))
        return output(self.json, facts, table + NOTE)

    def _diff(self) -> int:
        """Print a diff. A pass is there to change something: exit 0. Two variants: exit 1 if they
        differ, as `specs diff` and diff(1)."""
        a, b = self._stages() if self.against is None else self._variants(self.against)
        if self.layer is not None and not any(_nodes_of(g, self.layer) for g in (a, b)):
            raise no_layer(a, self.layer)
        before, after = (_text(g, self.layer).splitlines() for g in (a, b))
        changes = [*unified_diff(before, after, n=0, lineterm="")][2:]  # without names of files
        output(self.json, changes, "".join(f"{line}\n" for line in changes))
        if self.against is None and not changes:
            console.say(f"{self.graph.after} changes nothing in graph {a.name}")
        return int(self.against is not None and bool(changes))

    def _stages(self) -> tuple[Graph, Graph]:
        if self.graph.after in (None, "none"):
            raise InputError(
                "--diff: give --after PASS for what a pass changes, or --compare B for two variants"
            )
        find_pass(self.graph.after)
        graph, skip = self.graph.before_passes()
        stages = [graph]
        self.graph.behind(graph, skip, dump=lambda _, g: stages.append(g))
        return stages[-2], stages[-1]

    def _variants(self, against: str) -> tuple[Graph, Graph]:
        (graph, skip), options = self.graph.before_passes(), self.graph.pass_options()
        dtype = graph.outputs[0].type.dtype
        all_logits = "logits.all" not in graph.producers
        built, until = self.graph.built, self.graph.after
        media = built.config.media if built else None
        other = plain_graph(any_spec(against), self.graph.phase, all_logits, dtype, media)
        if until == "none":
            return graph, other
        one, two = (run_passes(g, skip=skip, until=until, options=options) for g in (graph, other))
        return one, two


def _text(graph: Graph, layer: int | None) -> str:
    """Return the text of a graph, or of one of its layers: none if it has no such layer."""
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
    made = {v.name for n in nodes for v in n.outputs}
    lines += [f"next %{k} = {v}" for k, v in graph.next.items() if v.name in made]
    return "\n".join(lines) + "\n"


def _about(spec: Spec, index: int) -> str:
    """Return what attention of a layer is like; RoPE rotates some dims of a head, or all."""
    layer = spec.layers()[index]
    a, count = layer.attention, spec.text.num_attention_heads
    heads = f"{count} heads of {a.head_dim} dims, {a.num_key_value_heads} KV heads"
    rotated = 2 * a.rope.pairs(a.head_dim)
    rope = f"RoPE rotates {rotated} dims of a head, not {a.head_dim - rotated}"
    return f"# layer {index}, {layer.kind} attention: {heads}; {rope}\n"


def _nodes_of(g: Graph, layer: int) -> list[Node]:
    return [n for n in g.nodes if any(layer_of(v.name) == layer for v in n.outputs)]


def _op_facts(o: Op) -> dict[str, Any]:
    """Return what the record says; `kind` is null where it follows from the first result's name."""
    return {
        "op": o.name,
        "meaning": " ".join(o.doc.split("\n\n")[0].split()),
        "operands": _operands(o),
        "attributes": dict(o.attrs),
        "kind": o.kind,
        "fused": o.expand is not None,
        "view": o.glue,
        "writes_caches": len(o.updates),
        "workspace": o.workspace is not None,
        "budget": vars(o.budget),
    }


def _operands(o: Op) -> list[str]:
    """Return `x`, `w`, `*rest`, in order; `?` after those that may be left out."""
    found = []
    for p in o.parameters:
        if p.kind is p.VAR_POSITIONAL:
            found.append(f"*{p.name}")
        elif p.kind is not p.KEYWORD_ONLY:
            found.append(p.name if p.default is p.empty else f"{p.name}?")
    return found


def _op_line(facts: dict[str, Any]) -> tuple[str, ...]:
    notes = {"expansion": "fused", "caches": "writes_caches", "workspace": "workspace"}
    has = ", ".join(name for name, key in {**notes, "view": "view"}.items() if facts[key])
    errors = (str(facts["budget"][key] or "-") for key in ("rounded", "summed"))
    return facts["op"], facts["kind"] or "by name", *errors, has, facts["meaning"]
