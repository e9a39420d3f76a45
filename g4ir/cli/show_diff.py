"""`g4ir show --diff` and `--compare`: what a pass changes, and what two variants differ in."""

from __future__ import annotations

import argparse
from dataclasses import asdict
from typing import TYPE_CHECKING

from g4ir.errors import InputError
from g4ir.ir.diff import diff_graphs, diff_text
from g4ir.ui import console

from .common import emit
from .graphs import engine_media, in_layer, no_layer, plain_graph
from .specs import any_spec

if TYPE_CHECKING:
    from g4ir.ir.graph import Graph
    from g4ir.passes import PassOptions

#: what a stage of the pipeline is made from: the plain graph, passes left out, their options
Start = tuple["Graph", set[str], "PassOptions"]


def show_diff(args: argparse.Namespace, start: Start) -> int:
    """Print a diff. A pass is there to change something: exit 0. Two variants: exit 1 where they
    differ, as `specs diff` and diff(1)."""
    if args.why:
        raise InputError("give --diff or --compare, or --why")
    a, b = _stages(args, start) if args.against is None else _variants(args, start)
    if args.layer is not None and not any(_has_layer(g, args.layer) for g in (a, b)):
        raise no_layer(a, args.layer)
    changes = [c for c in diff_graphs(a, b) if args.layer is None or c.layer == args.layer]
    emit([asdict(c) for c in changes]) if args.json else print(diff_text(changes), end="")
    if args.against is None and not changes:
        console.say(f"{args.after} changes nothing in graph {a.name}")
    return int(args.against is not None and bool(changes))


def _stages(args: argparse.Namespace, start: Start) -> tuple[Graph, Graph]:
    from g4ir.passes import find_pass, run_passes

    if args.after in (None, "none"):
        raise InputError(
            "--diff: give --after PASS for what a pass changes, or --compare B for two variants"
        )
    find_pass(args.after)
    graph, skip, options = start
    if args.after in skip:
        raise InputError(f"--after {args.after}: the pass is skipped")
    stages = [graph]
    run_passes(
        graph, skip=skip, until=args.after, dump=lambda _, g: stages.append(g), options=options
    )
    return stages[-2], stages[-1]


def _variants(args: argparse.Namespace, start: Start) -> tuple[Graph, Graph]:
    from g4ir.passes import run_passes

    graph, skip, options = start
    dtype = graph.outputs[0].type.dtype
    all_logits = "logits.all" not in graph.producers()
    spec, media = any_spec(args.against), engine_media(args)
    other = plain_graph(spec, args.phase, all_logits, dtype, media)
    if args.after == "none":
        return graph, other
    one, two = (run_passes(g, skip=skip, until=args.after, options=options) for g in (graph, other))
    return one, two


def _has_layer(g: Graph, layer: int) -> bool:
    return any(in_layer(v.name, layer) for n in g.nodes for v in n.outputs)
