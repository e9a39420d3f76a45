"""`g4ir show`: printed IR at any point of the pipeline, and what a pass did."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from g4ir.errors import InputError
from g4ir.model.decoder import BLOCKS, VERIFY
from g4ir.model.draft import DRAFT
from g4ir.model.text import TEXT_GRAPHS
from g4ir.model.towers import PARTS
from g4ir.ui import console

from .common import (
    ENGINE_HELP,
    GPU_HELP,
    PASS_OPTIONS,
    Parser,
    add_options,
    add_source,
    add_verb,
    emit,
)
from .graphs import (
    drafted_tokens,
    found_graph,
    given_graph,
    in_layer,
    no_layer,
    pass_options,
    ranks_of,
    spec_of,
    stored,
)

if TYPE_CHECKING:
    from g4ir.ir.graph import Graph

#: the text model's graphs, and the towers by their part
PHASES = (*TEXT_GRAPHS, VERIFY, DRAFT, "embed", BLOCKS, *PARTS)
#: options that only `--cost` has
COST_OPTIONS = (
    "batch",
    "chunk",
    "context",
    "gpu",
    "bandwidth",
    "flop_rate",
    "weights",
    "nodes",
)
#: and those that other views have too
OTHER_OPTIONS: dict[str, tuple[str, ...]] = {
    "kernels": ("batch", "chunk", "context", "gpu"),
    "timeline": ("batch", "context", "gpu"),
}
#: options that only `--timeline` has
TIMELINE_OPTIONS = ("plot", "constants")
#: options that an engine has already
OF_ENGINE = (
    "variant",
    "spec",
    "all_logits",
    "quant",
    "quant_activations",
    "kv_dtype",
    "latent_kv",
    "draft_tokens",
    "residual_scale",
    "tp",
    "ep",
)
#: views that do not take `--tp`
WITHOUT_RANKS = ("against",)
#: what goes with `--ops`; the rest chooses a graph, or something else to show
WITH_OPS = ("ops", "json", "trace", "command", "stored")
#: phase -> options that say nothing about it
MEANINGLESS: dict[str, tuple[str, ...]] = {
    "prefill": (),
    "prefill_media": (),
    "decode": ("chunk",),
    "verify": ("chunk",),
    "draft": ("chunk",),
    "embed": ("context",),
    "vision": ("chunk", "context", "batch"),
    "audio": ("chunk", "context", "batch"),
}


def add_show(verbs: Any) -> None:
    p = add_verb(verbs, "show", _show, "graphs, costs and kernels of a variant or an engine")
    p.add_argument("engine", metavar="ENGINE", nargs="?", help=ENGINE_HELP)
    add_source(p)
    add_options(p, (*PASS_OPTIONS, "quant", "quant_activations", "kv_dtype", "draft_tokens"))
    add_options(p, ("residual_scale",))
    p.set_defaults(stored=None, draft_tokens=None, residual_scale=None)
    p.add_argument("--phase", choices=PHASES, help="graph to print (default decode)")
    p.add_argument("--after", metavar="PASS", help="stop after this pass; `none`: before the first")
    p.add_argument(
        "--latent-kv",
        metavar="FORM",
        help="latent KV cache of layers with K=V: off (default), value or raw",
    )
    p.add_argument(
        "--tp",
        metavar="N",
        type=int,
        help="graph of one rank at tensor-parallel size N",
    )
    add_options(p, ("ep",))
    p.add_argument(
        "--collectives",
        action="store_true",
        help="with --tp or a tensor-parallel engine: collectives of a step and their bytes",
    )
    p.add_argument("--layer", metavar="I", type=int, help="only the nodes of layer I")
    p.add_argument("--why", metavar="PASS", help="explain why a pass did or did not match")
    p.add_argument(
        "--diff",
        action="store_true",
        help="with --after PASS: diff of the graph before and after it; ~ marks changed lines,\n"
        "with old->new inside",
    )
    p.add_argument(
        "--against",
        metavar="B",
        help="diff against the same graph of another variant (a name, a YAML file, a checkpoint\n"
        "or its config.json); exit 1 if they differ",
    )
    p.add_argument(
        "--kernels",
        action="store_true",
        help="GPU kernel of each node and its settings (--gpu, default h200; --batch: maximum\n"
        "batch size); bytes moved at --context, --chunk",
    )
    p.add_argument(
        "--timeline",
        action="store_true",
        help="predicted time of a decode step per kernel (--gpu, --batch, --context), and its\n"
        "share of the roofline; not a measurement",
    )
    p.add_argument("--plot", metavar="FILE", help="with --timeline: plot it, PNG or SVG")
    p.add_argument(
        "--constants",
        metavar="FILE",
        help="with --timeline: constants of the model (default: the shipped step_model.yaml)",
    )
    p.add_argument(
        "--provenance",
        action="store_true",
        help="origin of an engine (builder, sources), and whether its code is trusted",
    )
    p.add_argument(
        "--ops",
        action="store_true",
        help="list the ops of the IR: kind, tolerance, requirements, definition",
    )
    _add_cost(p)


def _add_cost(p: Parser) -> None:
    p.add_argument(
        "--cost", action="store_true", help="FLOPs, bytes and roofline time by kind of op"
    )
    group = p.add_argument_group("with --cost, --kernels or --timeline")
    group.add_argument("--batch", metavar="N", help="batch size (default 1)")
    group.add_argument(
        "--chunk", metavar="N", help="prefill chunk size (default 1K); not with --timeline"
    )
    group.add_argument(
        "--context",
        metavar="N",
        help="tokens in the KV cache after the step, such as 32K\n"
        "(default: decode 1K, prefill the chunk size)",
    )
    group.add_argument("--gpu", metavar="NAME", help=GPU_HELP)
    group = p.add_argument_group("with --cost")
    group.add_argument(
        "--bandwidth", metavar="X", type=float, help="memory bandwidth of the roofline, bytes/s"
    )
    group.add_argument(
        "--flop-rate", metavar="X", type=float, help="peak rate of the roofline, FLOP/s"
    )
    group.add_argument(
        "--weights",
        metavar="FORMAT",
        help="weight format: f32, bf16, f16, fp8, int8 or int4 (default: the graph's)",
    )
    group.add_argument(
        "--nodes", action="store_true", default=None, help="list every node with a cost"
    )


def _check_cost(args: argparse.Namespace) -> None:
    """Raise InputError where an option means nothing here."""
    given = [name for name in COST_OPTIONS if getattr(args, name) is not None]
    views = [v for v in ("cost", "kernels", "timeline", "why", "collectives") if getattr(args, v)]
    known = {name for v in views for name in OTHER_OPTIONS.get(v, ())}
    useless = [n for n in given if not (args.cost or n in known)]
    if useless:
        raise InputError(f"--{useless[0].replace('_', '-')} needs --cost")
    for name in TIMELINE_OPTIONS:
        if getattr(args, name) is not None and not args.timeline:
            raise InputError(f"--{name} needs --timeline")
    if args.collectives and ranks_of(args) is None:
        raise InputError("--collectives needs --tp N: one rank has nobody to talk to")
    for name in WITHOUT_RANKS:
        if getattr(args, name) and ranks_of(args) is not None:
            raise InputError(
                f"--{name} knows one rank alone: leave out --tp, or take an engine of one"
            )
    if len(views) > 1:
        raise InputError(f"give --{views[0]} or --{views[1]}, not both")
    for name in MEANINGLESS[args.phase]:
        if name in given:
            raise InputError(f"--{name} means nothing in phase {args.phase}")


def _show(args: argparse.Namespace) -> int:
    if args.engine is not None and any(getattr(args, name) for name in OF_ENGINE):
        flags = ", ".join(f"--{name.replace('_', '-')}" for name in OF_ENGINE)
        raise InputError(f"an engine has its own spec: leave out {flags}")
    if args.ops:
        return _show_ops(args)
    args.phase = args.phase or "decode"
    _check_cost(args)
    if args.provenance:
        return _show_provenance(args)
    if args.diff or args.against is not None:
        from .show_diff import show_diff

        return show_diff(args, (*given_graph(args), pass_options(args)))
    if args.why:
        return _show_why(args)
    graph = _shown_graph(args)
    if args.cost:
        from .show_cost import show_cost

        return show_cost(args, graph, spec_of(args), _single_steps(args))
    if args.timeline:
        from .show_timeline import show_timeline

        return show_timeline(args, graph, spec_of(args))
    if args.kernels:
        from .show_kernels import show_kernels

        return show_kernels(args, graph, spec_of(args))
    if args.collectives:
        from .show_collectives import show_collectives

        return show_collectives(args, graph)
    text = str(graph) if args.layer is None else _layer_text(graph, args.layer)
    emit({"graph": graph.name, "text": text}) if args.json else print(text, end="")
    return 0


def _shown_graph(args: argparse.Namespace) -> Graph:
    """Return the graph of an engine as it runs; with `--after`, and for a spec, a stage of the
    pipeline."""
    from g4ir.passes import find_pass, run_passes

    if args.after is None and args.engine is not None:
        if args.skip:
            raise InputError("--skip needs --after or --why: an engine's graph is what was built")
        return found_graph(stored(args).packing.program, args.phase, spec_of(args))
    graph, skip = given_graph(args)
    if args.after == "none":
        return graph
    if args.after in skip:
        find_pass(args.after)
        raise InputError(f"--after {args.after}: the pass is skipped")
    return run_passes(graph, skip=skip, until=args.after, options=pass_options(args))


def _single_steps(args: argparse.Namespace) -> Graph | None:
    """Return the graph of single steps beside one that verifies, at the same stage."""
    if args.phase != VERIFY:
        return None
    same = {"phase": "decode", "draft_tokens": drafted_tokens(args)}
    return _shown_graph(argparse.Namespace(**{**vars(args), **same}))


def _show_why(args: argparse.Namespace) -> int:
    """Print what a pass says about each candidate."""
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


def _show_ops(args: argparse.Namespace) -> int:
    from .show_ops import show_ops

    def meant(value: object) -> bool:
        return value is not None and value is not False and value != []

    def flag(name: str) -> str:
        return "the engine" if name == "engine" else f"--{name.replace('_', '-')}"

    if given := [flag(n) for n, value in vars(args).items() if n not in WITH_OPS and meant(value)]:
        raise InputError(f"--ops shows the ops of every graph: leave out {', '.join(given)}")
    return show_ops(args)


def _show_provenance(args: argparse.Namespace) -> int:
    from g4ir.engine.trust import provenance

    if args.engine is None:
        raise InputError("--provenance: give an engine directory")
    said = provenance(stored(args))
    if args.json:
        emit(said)
        return 0
    for key, value in said.items():
        print(f"{key.replace('_', ' '):<14} {value}")
    return 0


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
