"""`g4ir show`: printed IR at any point of the pipeline, and what a pass did."""

from __future__ import annotations

import argparse
from collections import Counter
from typing import TYPE_CHECKING, Any

from g4ir.errors import InputError
from g4ir.ui import console
from g4ir.ui.table import aligned
from g4ir.ui.units import size_text

from .common import add_verb, emit, flag_of
from .graphs import (
    add_graph,
    add_step,
    check_graph,
    chosen_graph,
    given_graph,
    in_layer,
    no_layer,
    pass_options,
    ranks_of,
    spec_of,
)

if TYPE_CHECKING:
    from g4ir.ir.graph import Graph

#: options of `--timeline` alone
TIMELINE_OPTIONS = ("batch", "context", "prefill_chunk", "gpu", "plot", "constants")
#: what goes with `--ops`; the rest chooses a graph, or something else to show
WITH_OPS = ("ops", "json", "trace", "command")
#: one token of one row
ONE = {"B": 1, "S": 1, "M": 1, "C": 1}
#: at most one of these
VIEWS = ("timeline", "why", "collectives")


def add_show(verbs: Any) -> None:
    p = add_verb(verbs, "show", _show, "printed IR at any point of the pipeline")
    add_graph(p)
    p.add_argument("--layer", metavar="I", type=int, help="only the nodes of layer I")
    p.add_argument("--why", metavar="PASS", help="explain why a pass did or did not match")
    p.add_argument(
        "--diff",
        action="store_true",
        help="with --after PASS: diff of the graph before and after it; ~ marks changed lines,\n"
        "with old->new inside",
    )
    p.add_argument(
        *("--compare", "--against"),
        dest="against",
        metavar="B",
        help="diff against the same graph of another variant (a name, a YAML file, a checkpoint\n"
        "or its config.json); exit 1 if they differ",
    )
    p.add_argument(
        "--collectives",
        action="store_true",
        help="with --tp or a tensor-parallel engine: collectives of a step and their bytes",
    )
    p.add_argument(
        "--ops",
        action="store_true",
        help="list the ops of the IR: kind, tolerance, requirements, definition",
    )
    p.add_argument(
        "--timeline",
        action="store_true",
        help="predicted time of a decode step per kernel, and its share of the roofline; not a\n"
        "measurement",
    )
    group = p.add_argument_group("with --timeline")
    add_step(group)
    group.add_argument("--plot", metavar="FILE", help="plot it, PNG or SVG")
    group.add_argument(
        "--constants",
        metavar="FILE",
        help="constants of the model (default: the shipped step_model.yaml)",
    )


def _check(args: argparse.Namespace) -> None:
    views = [v for v in VIEWS if getattr(args, v)]
    for name in TIMELINE_OPTIONS:
        if getattr(args, name) is not None and not args.timeline:
            verbs = "" if name in ("plot", "constants") else ", or the verb cost or kernels"
            raise InputError(f"{flag_of(name)} needs --timeline{verbs}")
    if args.collectives and ranks_of(args) is None:
        raise InputError("--collectives needs --tp N: a single rank has no collectives")
    if args.against and ranks_of(args) is not None:
        raise InputError(
            "--compare compares one rank alone: leave out --tp, or give an engine of one rank"
        )
    if len(views) > 1:
        raise InputError(f"give --{views[0]} or --{views[1]}, not both")


def _show(args: argparse.Namespace) -> int:
    if args.ops:
        return _show_ops(args)
    check_graph(args)
    _check(args)
    args.gpu_kernels = args.timeline
    if args.diff or args.against is not None:
        from .show_diff import show_diff

        return show_diff(args, (*given_graph(args), pass_options(args)))
    if args.why:
        return _show_why(args)
    graph = chosen_graph(args)
    if args.timeline:
        from .show_timeline import show_timeline

        return show_timeline(args, graph, spec_of(args))
    if args.collectives:
        return _show_collectives(args, graph)
    text = str(graph) if args.layer is None else _layer_text(graph, args.layer)
    emit({"graph": graph.name, "text": text}) if args.json else print(text, end="")
    return 0


def _show_why(args: argparse.Namespace) -> int:
    from g4ir.passes import find_pass, run_passes

    if args.after is not None:
        raise InputError("give --why or --after, not both")
    find_pass(args.why)
    graph, skip = given_graph(args)
    rows: list[dict[str, str]] = []
    if args.why in skip:
        rows.append({"value": graph.name, "reason": f"{args.why} is skipped"})
    else:

        def note(name: str, value: str, reason: str) -> None:
            if name == args.why and (args.layer is None or in_layer(value, args.layer)):
                rows.append({"value": f"%{value}", "reason": reason})

        run_passes(graph, skip=skip, until=args.why, note=note, options=pass_options(args))
    if args.json:
        emit(rows)
    for row in () if args.json else rows:
        print(f"{row['value']}: {row['reason']}")
    if not rows:
        console.say(f"{args.why} found no candidate in graph {graph.name}")
    return 0


def _show_collectives(args: argparse.Namespace, graph: Graph) -> int:
    """Print the collectives of a graph, equal ones together, and the bytes that a rank sends for
    one token of one sequence."""
    from g4ir.parallel.shard import collectives

    found = Counter((n.op, tuple(v.type.bind(ONE) for v in n.inputs)) for n in collectives(graph))
    rows: list[dict[str, Any]] = [
        {
            "op": op,
            "messages": count,
            "tensors": [str(t) for t in types],
            "bytes": sum(t.nbytes() for t in types),
        }
        for (op, types), count in found.items()
    ]
    total, ranks = sum(found.values()), ranks_of(args)
    if args.json:
        emit({"phase": graph.name, "ranks": ranks, "messages": total, "rows": rows})
        return 0
    print(f"{graph.name} on {ranks} ranks: {total} messages a step")
    table = [
        (r["op"], str(r["messages"]), " ".join(r["tensors"]), size_text(r["bytes"])) for r in rows
    ]
    print(aligned([("op", "messages", "tensors of a rank", "each"), *table]), end="")
    return 0


def _show_ops(args: argparse.Namespace) -> int:
    from .show_ops import show_ops

    given = [n for n, v in vars(args).items() if v not in (None, []) and v is not False]
    others = [n for n in given if n not in WITH_OPS]
    if others:
        flags = ["the engine" if n == "engine" else f"--{n.replace('_', '-')}" for n in others]
        raise InputError(f"--ops shows the ops of every graph: leave out {', '.join(flags)}")
    return show_ops(args)


def _layer_text(graph: Graph, layer: int) -> str:
    """Return the lines of one layer: its nodes and the sources that they read."""
    from g4ir.ir.graph import print_node

    nodes = [n for n in graph.nodes if any(in_layer(v.name, layer) for v in n.outputs)]
    if not nodes:
        raise no_layer(graph, layer)
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
