"""`g4ir show`: printed IR at any point of the pipeline, what a pass did, what two graphs differ in,
the ops of the IR."""

from __future__ import annotations

import argparse
from collections import Counter
from dataclasses import asdict
from typing import Any

from g4ir.errors import InputError
from g4ir.ir.diff import diff_graphs, diff_text
from g4ir.ir.graph import Graph, Node, print_node
from g4ir.ir.names import layer_of
from g4ir.model.decoder import BLOCKS, VERIFY
from g4ir.ops import OPS, Op
from g4ir.parallel.shard import collectives
from g4ir.passes import find_pass, run_passes
from g4ir.plan.count import Block, layer_blocks
from g4ir.ui import console
from g4ir.ui.table import aligned
from g4ir.ui.units import size_text

from . import graphs
from .common import flag_of, output
from .models import any_spec

#: what goes with `--ops`; the rest chooses a graph, or something else to show
WITH_OPS = ("ops", "json", "trace", "command", "of_build", "given")
#: graphs of the layers of the model
DECODER = ("prefill", "decode", VERIFY, BLOCKS)
#: one token of one row
ONE = {"B": 1, "S": 1, "M": 1, "C": 1}
NOTE = """\
kind: the part of the model; `by name`: that of the first result's name
rounded, summed: how far two right computations may lie apart, in units of the dtype and in fp32
units of a sum
"""


def _check(args: argparse.Namespace) -> None:
    if args.collectives and graphs.ranks_of(args) is None:
        raise InputError("--collectives needs --tp N: a single rank has no collectives")
    if args.against and graphs.ranks_of(args) is not None:
        raise InputError(
            "--compare compares one rank alone: leave out --tp, or give an engine of one rank"
        )


def show(args: argparse.Namespace) -> int:
    """Print a graph, or what is asked of it."""
    if args.ops:
        return _show_ops(args)
    graphs.check_graph(args)
    _check(args)
    if args.diff or args.against is not None:
        return _show_diff(args)
    if args.why:
        return _show_why(args)
    graph = graphs.chosen_graph(args)
    if args.collectives:
        return _show_collectives(args, graph)
    text = str(graph) if args.layer is None else _layer_text(graph, args.layer)
    if args.layer is not None and args.phase in DECODER:
        text = _about(layer_blocks(graphs.spec_of(args))[args.layer]) + text
    return output(args, {"graph": graph.name, "text": text}, text)


def _show_why(args: argparse.Namespace) -> int:
    find_pass(args.why)
    graph, skip = graphs.given_graph(args)
    rows: list[dict[str, str]] = []

    def note(name: str, value: str, reason: str) -> None:
        if name == args.why and (args.layer is None or layer_of(value) == args.layer):
            rows.append({"value": f"%{value}", "reason": reason})

    if args.why in skip:
        rows.append({"value": graph.name, "reason": f"{args.why} is skipped"})
    elif args.layer is not None and not _nodes_of(graph, args.layer):
        raise graphs.no_layer(graph, args.layer)
    else:
        run_passes(graph, skip=skip, until=args.why, note=note, options=graphs.pass_options(args))
    output(args, rows, "".join(f"{row['value']}: {row['reason']}\n" for row in rows))
    if not rows:
        console.say(f"{args.why} found no candidate in graph {graph.name}")
    return 0


def _show_collectives(args: argparse.Namespace, graph: Graph) -> int:
    """Print the collectives of a graph, equal ones together, and the bytes that a rank sends for
    one token of one sequence."""
    found = Counter((n.op, tuple(v.type.bind(ONE) for v in n.inputs)) for n in collectives(graph))
    rows: list[dict[str, Any]] = []
    table = [("op", "messages", "tensors of a rank", "each")]
    for (op, types), count in found.items():
        tensors, nbytes = [str(t) for t in types], sum(t.nbytes() for t in types)
        rows.append({"op": op, "messages": count, "tensors": tensors, "bytes": nbytes})
        table.append((op, str(count), " ".join(tensors), size_text(nbytes)))
    total, ranks = sum(found.values()), graphs.ranks_of(args)
    facts = {"phase": graph.name, "ranks": ranks, "messages": total, "rows": rows}
    head = f"{graph.name} on {ranks} ranks: {total} messages a step\n"
    return output(args, facts, head + aligned(table))


def _show_ops(args: argparse.Namespace) -> int:
    given = [n for n, v in vars(args).items() if v not in (None, []) and v is not False]
    if others := [n for n in given if n not in WITH_OPS]:
        flags = ["the engine" if n == "engine" else flag_of(n) for n in others]
        raise InputError(f"--ops shows the ops of every graph: leave out {', '.join(flags)}")
    facts = [_op_facts(o) for o in OPS.values()]
    head = ("op", "kind", "rounded", "summed", "has", "meaning")
    table = aligned([head, *map(_op_line, facts)], indent=0, left=len(head))
    return output(args, facts, table + NOTE)


def _layer_text(graph: Graph, layer: int) -> str:
    nodes = _nodes_of(graph, layer)
    if not nodes:
        raise graphs.no_layer(graph, layer)
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


def _about(b: Block) -> str:
    """Return what attention of a layer is like; RoPE rotates some dims of a head, or all."""
    heads = f"{b.heads} heads of {b.head_dim} dims, {b.kv_heads} KV heads"
    rotated = f"RoPE rotates {b.rotated} dims of a head, not {b.head_dim - b.rotated}"
    return f"# layer {b.layers[0]}, {b.kind} attention: {heads}; {rotated}\n"


def _show_diff(args: argparse.Namespace) -> int:
    """Print a diff. A pass is there to change something: exit 0. Two variants: exit 1 where they
    differ, as `specs diff` and diff(1)."""
    a, b = _stages(args) if args.against is None else _variants(args)
    if args.layer is not None and not any(_nodes_of(g, args.layer) for g in (a, b)):
        raise graphs.no_layer(a, args.layer)
    changes = [c for c in diff_graphs(a, b) if args.layer is None or c.layer == args.layer]
    output(args, [asdict(c) for c in changes], diff_text(changes))
    if args.against is None and not changes:
        console.say(f"{args.after} changes nothing in graph {a.name}")
    return int(args.against is not None and bool(changes))


def _stages(args: argparse.Namespace) -> tuple[Graph, Graph]:
    if args.after in (None, "none"):
        raise InputError(
            "--diff: give --after PASS for what a pass changes, or --compare B for two variants"
        )
    find_pass(args.after)
    graph, skip = graphs.given_graph(args)
    stages = [graph]
    graphs.behind(args, graph, skip, dump=lambda _, g: stages.append(g))
    return stages[-2], stages[-1]


def _variants(args: argparse.Namespace) -> tuple[Graph, Graph]:
    (graph, skip), options = graphs.given_graph(args), graphs.pass_options(args)
    dtype = graph.outputs[0].type.dtype
    all_logits = "logits.all" not in graph.producers
    spec, media = any_spec(args.against), None
    if engine := graphs.engine_of(args):
        media = engine.config.media
    other = graphs.plain_graph(spec, args.phase, all_logits, dtype, media)
    if args.after == "none":
        return graph, other
    one, two = (run_passes(g, skip=skip, until=args.after, options=options) for g in (graph, other))
    return one, two


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
