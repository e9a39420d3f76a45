"""The graph that a command line names: of an engine, or of a model that none is built of."""

from __future__ import annotations

import argparse
from collections.abc import Collection, Iterable
from dataclasses import replace
from typing import Any

from g4ir.artefact.directory import Artefact
from g4ir.errors import InputError
from g4ir.ir.graph import Graph, Program
from g4ir.ir.names import layer_of
from g4ir.model.decoder import BLOCKS, VERIFY
from g4ir.model.draft import DRAFT, build_draft, shipped_drafter
from g4ir.model.media import Media, offered
from g4ir.model.text import TEXT_GRAPHS, build_graph
from g4ir.model.towers import PARTS, build_towers, default_tower
from g4ir.parallel.shard import shard
from g4ir.passes import Dump, PassOptions, find_pass, run_passes
from g4ir.passes.latent_kv import PLAIN
from g4ir.plan import resolve
from g4ir.quant.recipe import find_recipe, one_recipe
from g4ir.quant.rewrite import quantised
from g4ir.spec.record import Spec

from .common import flag_of, given_spec, tables
from .models import Model, named_model

#: what the towers of each part are for
OF_PART = {"vision": "image", "audio": "audio"}
#: tokens drafted at a time, where a graph that verifies is shown and nothing is said
DRAFTED = 4
#: graph of speculative decoding -> the option that builds it
DRAFTING = {VERIFY: "--draft-tokens K", DRAFT: "--drafter default"}


def check_graph(args: argparse.Namespace) -> None:
    """Find what is named and fill in the default phase; InputError for options that an engine has
    already."""
    decided = tables()["of engine"]
    if engine_of(args) and any(getattr(args, name) for name in decided):
        flags = ", ".join(map(flag_of, decided))
        raise InputError(f"an engine has its own spec: leave out {flags}")
    args.phase = args.phase or "decode"


def chosen_graph(args: argparse.Namespace) -> Graph:
    """Return an engine's graph as it runs; for a spec, or with `--after`, a stage of the
    pipeline."""
    if args.after is None and (engine := engine_of(args)):
        if args.skip:
            raise InputError("--skip needs --after or --why: an engine's graph is what was built")
        return found_graph(engine.packing.program, args.phase, engine.spec)
    graph, skip = given_graph(args)
    return graph if args.after == "none" else behind(args, graph, skip)


def behind(
    args: argparse.Namespace, graph: Graph, skip: Collection[str], dump: Dump | None = None
) -> Graph:
    """Return a graph behind the pass of `--after`."""
    if args.after in skip:
        find_pass(args.after)
        raise InputError(f"--after {args.after}: the pass is skipped")
    options = pass_options(args)
    return run_passes(graph, skip=skip, until=args.after, dump=dump, options=options)


def plain_graph(
    spec: Spec,
    phase: str,
    all_logits: bool = False,
    dtype: str | None = None,
    media: Media | None = None,
    drafter: Spec | None = None,
) -> Graph:
    """Return a graph before all passes; a tower in the largest size of `media`, or in the variant's
    own; a step of the drafter, or of the one that is shipped for the variant. Raises InputError
    where the variant has none."""
    if phase == DRAFT:
        return build_draft(spec, drafter or shipped_drafter(spec), dtype)
    if phase not in PARTS:
        return build_graph(spec, phase, all_logits, dtype, media, hidden=drafter is not None)
    can = offered(spec)
    if OF_PART[phase] not in can:
        takes = ", ".join(("text", *can)) if can else "text alone"
        raise InputError(f"--phase {phase}: {spec.name} takes {takes}, and has no such tower")
    if media is None:
        return default_tower(spec, phase, dtype)
    others: dict[str, Any] = {"vision": {"lengths": ()}, "audio": {"budgets": (), "frame": None}}
    return [*build_towers(spec, replace(media, **others[phase]), dtype).values()][-1]


def given_graph(args: argparse.Namespace) -> tuple[Graph, set[str]]:
    """Return the graph before all passes, and the passes to leave out."""
    model, spec = model_of(args), spec_of(args)
    if not (found := model.engine):
        plain = plain_graph(spec, args.phase, args.all_logits)
        recipe = one_recipe(find_recipe(args.quant), model.held, args.engine)
        held = quantised(Program({args.phase: plain}), spec, recipe, spec.dtype).graphs[args.phase]
        if args.tp is not None or args.ep:
            held = _rank_graph(args, held, spec)
        return held, set(args.skip)
    found_graph(found.packing.program, args.phase, spec)
    c = found.config
    plain = plain_graph(spec, args.phase, c.all_logits, c.dtype, c.media, c.drafter)
    if plain.state:
        plain = shard(plain, spec, c.ranks, c.ep)
    graph = quantised(Program({args.phase: plain}), spec, c.quant, c.dtype)
    return graph.graphs[args.phase], {*c.skip, *args.skip}


def _rank_graph(args: argparse.Namespace, graph: Graph, spec: Spec) -> Graph:
    """Return the graph of one rank of `--tp`; InputError for one that ranks do not share."""
    phases = (*TEXT_GRAPHS, VERIFY, BLOCKS, DRAFT)
    if args.phase not in phases:
        raise InputError(f"--tp: --phase {args.phase} is whole on every rank; {', '.join(phases)}")
    return shard(graph, spec, 1 if args.tp is None else args.tp, args.ep)


def ranks_of(args: argparse.Namespace) -> int | None:
    """Return how many ranks share the model: --tp, or those of an engine; None for one."""
    if not (engine := engine_of(args)):
        given: int | None = args.tp
        return given
    return engine.config.ranks if engine.config.ranks > 1 else None


def found_graph(program: Program, phase: str, spec: Spec) -> Graph:
    """Return a graph of an engine; of several sizes of a tower the largest."""
    if phase in program.graphs:
        return program.graphs[phase]
    sizes = [g for name, g in program.graphs.items() if name.startswith(f"{phase}_")]
    if phase in PARTS and sizes:
        return sizes[-1]
    raise _absent(phase, spec, program.graphs)


def _absent(phase: str, spec: Spec, known: Iterable[str]) -> InputError:
    """Return the error for an absent graph: what to build, where the variant could have it."""
    found = f"--phase {phase}: this engine has {', '.join(known)}"
    if phase in DRAFTING:
        return InputError(f"{found}; build it with {DRAFTING[phase]}")
    try:
        plain_graph(spec, phase)
    except InputError as e:
        return InputError(f"{found}; {str(e).removeprefix(f'--phase {phase}: ')}")
    return InputError(f"{found}; build it with --media all")


def spec_of(args: argparse.Namespace) -> Spec:
    return model_of(args).spec


def pass_options(args: argparse.Namespace) -> PassOptions:
    """Return the passes' own arguments: the engine's, or those given."""
    if not (engine := engine_of(args)):
        spec = spec_of(args)
        kv = resolve.find_kv_dtype(args.kv_dtype, spec.dtype)
        form = resolve.check_latent(args.latent_kv or PLAIN, spec)
        return resolve.pass_options(form, kv, args.quant_activations, drafted_tokens(args))
    return engine.config.options


def drafted_tokens(args: argparse.Namespace) -> int:
    """Return how many tokens are drafted at a time: the engine's, or those given; of a graph that
    verifies some where nothing is said."""
    if engine := engine_of(args):
        return engine.config.draft_tokens
    given, verifies = args.draft_tokens, args.phase == VERIFY
    if given is None:
        return DRAFTED * verifies
    if verifies and given == 0:
        raise InputError(
            "--draft-tokens 0: --phase verify shows a step over 1 drafted token or more"
        )
    return resolve.find_draft_tokens(given, spec_of(args).text.max_position_embeddings)


def model_of(args: argparse.Namespace) -> Model:
    """Return what is named; it is read once, since every file of an engine is."""
    if args.model is None:
        args.model = _named(args)
    found: Model = args.model
    return found


def _named(args: argparse.Namespace) -> Model:
    if args.engine is not None:
        if args.variant is not None or args.spec is not None:
            raise InputError("give either MODEL or --variant or --spec, not both")
        return named_model(args.engine)
    if spec := given_spec(args):
        return Model(spec)
    raise InputError("give MODEL: an engine directory, GGUF file, checkpoint or variant")


def engine_of(args: argparse.Namespace) -> Artefact | None:
    return model_of(args).engine


def no_layer(graph: Graph, layer: int) -> InputError:
    layers = {layer_of(v.name) for v in graph.params} - {None}
    has = f"layers 0 to {len(layers) - 1}" if layers else "no layers"
    return InputError(f"--layer {layer}: graph {graph.name} has {has}")
