"""`g4ir show`: printed IR at any point of the pipeline, and what a pass did."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from g4ir import console
from g4ir.errors import InputError
from g4ir.spec import load_spec, spec_names

from .common import add_source, add_verb, emit, given_spec

if TYPE_CHECKING:
    from g4ir.ir import Graph, Program

PHASES = ("prefill", "decode", "embed")


def add_show(verbs: Any) -> None:
    p = add_verb(verbs, "show", _show, "printed IR at any point of the pipeline")
    p.add_argument("engine", metavar="ENGINE", nargs="?", help="an engine directory")
    add_source(p)
    p.add_argument("--phase", choices=PHASES, default="decode")
    p.add_argument(
        "--after", metavar="PASS", help="the graph after this pass; `none`: before all of them"
    )
    p.add_argument("--layer", metavar="I", type=int, help="the nodes of one layer")
    p.add_argument("--why", metavar="PASS", help="why a pass did or did not fire")


def _show(args: argparse.Namespace) -> int:
    if args.engine is not None and (args.variant or args.spec or args.all_logits):
        raise InputError("an engine has its own spec: leave out --variant, --spec, --all-logits")
    if args.why:
        return _show_why(args)
    graph = _shown_graph(args)
    text = str(graph) if args.layer is None else _layer_text(graph, args.layer)
    emit({"graph": graph.name, "text": text}) if args.json else print(text, end="")
    return 0


def _shown_graph(args: argparse.Namespace) -> Graph:
    """The graph of an engine as it runs; with `--after`, and for a spec, a stage of the
    pipeline."""
    from g4ir.pipeline import find_pass, run_passes

    if args.after is None and args.engine is not None:
        if args.skip:
            raise InputError("--skip needs --after or --why: an engine's graph is what was built")
        return _stored(args.engine)[1].graphs[args.phase]
    graph, skip = _plain_graph(args)
    if args.after == "none":
        return graph
    if args.after in skip:
        find_pass(args.after)
        raise InputError(f"--after {args.after}: the pass is skipped")
    return run_passes(graph, skip=skip, until=args.after)


def _show_why(args: argparse.Namespace) -> int:
    """What a pass says about each candidate."""
    from g4ir.pipeline import find_pass, run_passes

    if args.after is not None:
        raise InputError("give --why or --after, not both")
    find_pass(args.why)
    graph, skip = _plain_graph(args)
    rows: list[dict[str, str]] = []
    if args.why in skip:
        rows.append({"value": graph.name, "reason": f"{args.why} is skipped"})
    else:
        def note(name: str, value: str, reason: str) -> None:
            if name == args.why and (args.layer is None or value.startswith(f"L{args.layer}.")):
                rows.append({"value": f"%{value}", "reason": reason})

        run_passes(graph, skip=skip, until=args.why, note=note)
    if args.json:
        emit(rows)
    for row in () if args.json else rows:
        print(f"{row['value']}: {row['reason']}")
    if not rows:
        console.say(f"{args.why} found no candidate in graph {graph.name}")
    return 0


def _plain_graph(args: argparse.Namespace) -> tuple[Graph, set[str]]:
    """The graph before all passes, and the passes to leave out."""
    from g4ir.model import build_graph

    if args.engine is None:
        spec = given_spec(args)
        if spec is None:
            raise InputError("give --variant N, --spec F, or an engine directory")
        return build_graph(spec, args.phase, args.all_logits), set(args.skip)
    manifest, _ = _stored(args.engine)
    spec = load_spec(Path(args.engine) / "spec.yaml")
    graph = build_graph(spec, args.phase, manifest["all_logits"], manifest["dtype"])
    return graph, {*manifest["skipped_passes"], *args.skip}


def _stored(engine: str) -> tuple[dict[str, Any], Program]:
    if engine in spec_names() and not Path(engine).exists():
        raise InputError(f"{engine} is a variant: give --variant {engine}")
    from g4ir.engine import read_program

    return read_program(Path(engine))


def _layer_text(graph: Graph, layer: int) -> str:
    """The lines of one layer: its nodes and the sources that they read."""
    from g4ir.text import print_node

    mark = f"L{layer}."
    nodes = [n for n in graph.nodes if any(v.name.startswith(mark) for v in n.outputs)]
    if not nodes:
        raise InputError(f"--layer {layer}: graph {graph.name} has no such layer")
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
