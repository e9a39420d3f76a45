"""`g4ir show`: printed IR at any point of the pipeline, and what a pass did."""

from __future__ import annotations

import argparse
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from g4ir import console
from g4ir.errors import InputError
from g4ir.latent_forms import FORMS
from g4ir.spec import Spec, spec_names

from .common import Parser, add_source, add_verb, emit, given_spec

if TYPE_CHECKING:
    from g4ir.artefact import Artefact
    from g4ir.ir import Graph, Program
    from g4ir.media.choice import Media

#: the text model's graphs, and the towers by their part
PHASES = ("prefill", "decode", "embed", "prefill_media", "vision", "audio")
#: options that only `--cost` has
COST_OPTIONS = (
    "batch", "chunk", "context", "gpu", "bandwidth", "flop_rate", "weights", "nodes",
)  # fmt: skip
#: and those that `--kernels` has too
KERNEL_OPTIONS = ("batch", "gpu")
#: phase -> options that say nothing about it
MEANINGLESS: dict[str, tuple[str, ...]] = {
    "prefill": (), "prefill_media": (), "decode": ("chunk",), "embed": ("context",),
    "vision": ("chunk", "context", "batch"), "audio": ("chunk", "context", "batch"),
}  # fmt: skip


def add_show(verbs: Any) -> None:
    p = add_verb(verbs, "show", _show, "printed IR at any point of the pipeline")
    p.add_argument("engine", metavar="ENGINE", nargs="?", help="an engine directory")
    p.set_defaults(stored=None)
    add_source(p)
    p.add_argument("--phase", choices=PHASES, default="decode")
    p.add_argument(
        "--after", metavar="PASS", help="the graph after this pass; `none`: before all of them"
    )
    p.add_argument("--latent-kv", metavar="FORM",
                   help="what layers with K=V cache: off (default), value or raw")  # fmt: skip
    p.add_argument("--layer", metavar="I", type=int, help="the nodes of one layer")
    p.add_argument("--why", metavar="PASS", help="why a pass did or did not fire")
    p.add_argument(
        "--diff", action="store_true",
        help="with --after PASS: what the pass changes; - and + are lines of one graph, ~ lines\n"
        "of both with old->new inside",
    )  # fmt: skip
    p.add_argument(
        "--against", metavar="B",
        help="the same graph of another variant (a name, a YAML file, a checkpoint or its\n"
        "config.json), as a diff; exit 1 where they differ",
    )  # fmt: skip
    p.add_argument("--kernels", action="store_true",
                   help="which kernel each node becomes on a GPU (--gpu, default h200; --batch:\n"
                   "most rows), and its settings")  # fmt: skip
    p.add_argument("--provenance", action="store_true",
                   help="who built an engine, of what; whether its code is run")  # fmt: skip
    _add_cost(p)


def _add_cost(p: Parser) -> None:
    p.add_argument("--cost", action="store_true", help="FLOPs, bytes and the time floor by kind")
    group = p.add_argument_group("with --cost")
    group.add_argument("--batch", metavar="N", help="rows (default 1)")
    group.add_argument("--chunk", metavar="N", help="new tokens of a row in prefill (default 1K)")
    group.add_argument("--context", metavar="N",
                       help="tokens that a row holds when the step is done, such as 32K\n"
                       "(default: decode 1K, prefill the chunk)")  # fmt: skip
    group.add_argument("--gpu", metavar="NAME", help="the roof of a card, such as h100-80gb")
    group.add_argument("--bandwidth", metavar="X", type=float,
                       help="the roof's bytes per second, measured, say")  # fmt: skip
    group.add_argument("--flop-rate", metavar="X", type=float, help="and its FLOPs per second")
    group.add_argument("--weights", metavar="FORMAT",
                       help="f32, bf16, f16, fp8, int8 or int4 (default: the graph's)")  # fmt: skip
    group.add_argument("--nodes", action="store_true", default=None,
                       help="every node that costs something")  # fmt: skip


def _check_cost(args: argparse.Namespace) -> None:
    """Raises InputError where an option means nothing here."""
    given = [name for name in COST_OPTIONS if getattr(args, name) is not None]
    useless = [n for n in given if not (args.cost or (args.kernels and n in KERNEL_OPTIONS))]
    if useless:
        raise InputError(f"--{useless[0].replace('_', '-')} needs --cost")
    views = [v for v in ("cost", "kernels", "why") if getattr(args, v)]
    if len(views) > 1:
        raise InputError(f"give --{views[0]} or --{views[1]}, not both")
    for name in MEANINGLESS[args.phase]:
        if name in given:
            raise InputError(f"--{name} means nothing in phase {args.phase}")


def _show(args: argparse.Namespace) -> int:
    if args.engine is not None and (args.variant or args.spec or args.all_logits):
        raise InputError("an engine has its own spec: leave out --variant, --spec, --all-logits")
    _check_cost(args)
    if args.provenance:
        return _show_provenance(args)
    if args.diff or args.against is not None:
        from .show_diff import show_diff

        return show_diff(args, (*_plain_graph(args), _options(args)))
    if args.why:
        return _show_why(args)
    graph = _shown_graph(args)
    if args.cost:
        from .show_cost import show_cost

        return show_cost(args, graph, _spec(args))
    if args.kernels:
        from .show_kernels import show_kernels

        return show_kernels(args, graph)
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
        return _found(_stored(args).packing.program, args.phase, _spec(args))
    graph, skip = _plain_graph(args)
    if args.after == "none":
        return graph
    if args.after in skip:
        find_pass(args.after)
        raise InputError(f"--after {args.after}: the pass is skipped")
    return run_passes(graph, skip=skip, until=args.after, options=_options(args))


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
            if name == args.why and (args.layer is None or in_layer(value, args.layer)):
                rows.append({"value": f"%{value}", "reason": reason})

        run_passes(graph, skip=skip, until=args.why, note=note, options=_options(args))
    if args.json:
        emit(rows)
    for row in () if args.json else rows:
        print(f"{row['value']}: {row['reason']}")
    if not rows:
        console.say(f"{args.why} found no candidate in graph {graph.name}")
    return 0


def _found(program: Program, phase: str, spec: Spec) -> Graph:
    """A graph of an engine; of several sizes of a tower the largest."""
    from g4ir.towers import PARTS

    if phase in program.graphs:
        return program.graphs[phase]
    sizes = [g for name, g in program.graphs.items() if name.startswith(f"{phase}_")]
    if phase in PARTS and sizes:
        return sizes[-1]
    raise _absent(phase, spec, program.graphs)


def _absent(phase: str, spec: Spec, known: Iterable[str]) -> InputError:
    """An engine has no such graph; what to build, where its variant could have one."""
    found = f"--phase {phase}: this engine has {', '.join(known)}"
    try:
        plain_graph(spec, phase)
    except InputError as e:
        return InputError(f"{found}; {str(e).removeprefix(f'--phase {phase}: ')}")
    return InputError(f"{found}; build it with --media all")


def plain_graph(
    spec: Spec, phase: str, all_logits: bool = False, dtype: str | None = None,
    media: Media | None = None,
) -> Graph:  # fmt: skip
    """A graph before all passes; a tower in the largest size of `media`, or in the variant's own.
    InputError where the variant has none."""
    from g4ir.model import build_graph
    from g4ir.towers import PARTS, build_towers, default_tower

    if phase not in PARTS:
        return build_graph(spec, phase, all_logits, dtype, media)
    _check_part(spec, phase)
    if media is None:
        return default_tower(spec, phase, dtype)
    towers = build_towers(spec, _of_part(media, phase), dtype)
    return list(towers.values())[-1]


#: what the towers of each part are for
OF_PART = {"vision": "image", "audio": "audio"}


def _check_part(spec: Spec, part: str) -> None:
    from g4ir.media.choice import offered

    can = offered(spec)
    if OF_PART[part] not in can:
        takes = ", ".join(("text", *can)) if can else "text alone"
        raise InputError(f"--phase {part}: {spec.name} takes {takes}, and has no such tower")


def _of_part(media: Media, part: str) -> Media:
    """The sizes of one part's towers."""
    if part == "vision":
        return replace(media, lengths=())
    return replace(media, budgets=(), frame=None)


def _show_provenance(args: argparse.Namespace) -> int:
    from g4ir.trust import provenance

    if args.engine is None:
        raise InputError("--provenance: give an engine directory")
    said = provenance(_stored(args))
    if args.json:
        emit(said)
        return 0
    for key, value in said.items():
        print(f"{key.replace('_', ' '):<14} {value}")
    return 0


def _plain_graph(args: argparse.Namespace) -> tuple[Graph, set[str]]:
    """The graph before all passes, and the passes to leave out."""
    spec = _spec(args)
    if args.engine is None:
        return plain_graph(spec, args.phase, args.all_logits), set(args.skip)
    stored = _stored(args)
    m = stored.manifest
    _found(stored.packing.program, args.phase, spec)
    graph = plain_graph(spec, args.phase, m.all_logits, m.dtype, m.media)
    return graph, {*m.skipped_passes, *args.skip}


def engine_media(args: argparse.Namespace) -> Media | None:
    """What an engine takes; None for a spec."""
    return None if args.engine is None else _stored(args).manifest.media


def _spec(args: argparse.Namespace) -> Spec:
    if args.engine is not None:
        return _stored(args).spec
    spec = given_spec(args)
    if spec is None:
        raise InputError("give --variant N, --spec F, or an engine directory")
    return spec


def _options(args: argparse.Namespace) -> dict[str, Any]:
    """The passes' own arguments: the engine's, or those given."""
    if args.latent_kv is not None and args.latent_kv not in FORMS:
        raise InputError(f"--latent-kv {args.latent_kv!r}: expected one of {', '.join(FORMS)}")
    if args.engine is None:
        return {"latent_kv": {"form": args.latent_kv}} if args.latent_kv else {}
    if args.latent_kv is not None:
        raise InputError("--latent-kv: an engine has its own form")
    return dict(_stored(args).manifest.pass_options)


def _stored(args: argparse.Namespace) -> Artefact:
    """The engine; read once, since every file of it is."""
    if args.stored is None:
        if args.engine in spec_names() and not Path(args.engine).exists():
            raise InputError(f"{args.engine} is a variant: give --variant {args.engine}")
        from g4ir.artefact import open_artefact

        args.stored = open_artefact(Path(args.engine))
    found: Artefact = args.stored
    return found


def in_layer(value: str, layer: int) -> bool:
    """Whether a value's name is that of a layer, of the text model or of a tower."""
    from g4ir.towers import PARTS

    return value.startswith(tuple(f"{part}L{layer}." for part in ("", *(f"{p}." for p in PARTS))))


def no_layer(graph: Graph, layer: int) -> InputError:
    return InputError(f"--layer {layer}: graph {graph.name} has no such layer")


def _layer_text(graph: Graph, layer: int) -> str:
    """The lines of one layer: its nodes and the sources that they read."""
    from g4ir.text import print_node

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
