"""Finds the graph that a command line selects: of an engine, or of a model without an engine."""

from __future__ import annotations

from dataclasses import replace
from functools import cached_property
from typing import Any

from g4ir.artefact.directory import Artefact, refuse_options
from g4ir.errors import InputError, SpecError
from g4ir.ir.graph import Graph, Program
from g4ir.ir.names import layer_of
from g4ir.model.decoder import BLOCKS, VERIFY
from g4ir.model.draft import DRAFT, build_draft, shipped_drafter
from g4ir.model.encoder import ENCODE
from g4ir.model.media import Media, supported_media
from g4ir.model.text import TEXT_GRAPHS, build_graph, text_graphs
from g4ir.model.towers import PARTS, build_towers, default_tower
from g4ir.parallel.shard import shard
from g4ir.passes import find_pass, run_passes
from g4ir.plan import resolve
from g4ir.plan.backend import DEFINITION
from g4ir.plan.engine_limits import Limits
from g4ir.plan.options import BuildConfig, BuildOptions
from g4ir.quant.recipe import choose_config, find_quant_config
from g4ir.quant.rewrite import quantise
from g4ir.spec.record import Spec

from .common import Source
from .models import Model, named_model
from .verb import ANY_MODEL, Part, argument, flag, flag_of, options

#: name of a tower's graph (PARTS) -> kind of media that it encodes
OF_PART = {"vision": "image", "audio": "audio"}
#: default draft tokens of a printed verification graph
DRAFTED = 4
#: graph of speculative decoding -> the option that builds it
DRAFTING = {VERIFY: "--draft-tokens K", DRAFT: "--drafter DIR (`default` if one is shipped)"}


#: values of --phase: graphs of the text model and of the draft model, and the names of towers
PHASES = (*TEXT_GRAPHS, ENCODE, VERIFY, DRAFT, "embed", BLOCKS, *PARTS)
#: build options that change a graph: --set sets them; refused for an engine, which has them fixed
GRAPH_SETTINGS = "all_logits kv_dtype quant_activations latent_kv draft_tokens tp ep"


class NamedGraph(Part):
    """Flags that select a graph of an engine, or of a model without an engine."""

    engine: str | None = argument(ANY_MODEL, "MODEL", "?")
    source: Source
    phase: str | None = flag("graph (default: decode, or encode of an encoder)", choices=PHASES)
    after: str | None = flag("stop after this pass; `none`: before the first", None, "PASS")
    options: BuildOptions = options("skip quant settings", GRAPH_SETTINGS)

    def check(self) -> None:
        """Raise InputError if the model does not exist, or for options that an engine has fixed."""
        if self.built:
            fixed = self.explicit & {"quant", *GRAPH_SETTINGS.split()}
            refuse_options(self.built.path, [*map(flag_of, fixed)])

    @cached_property
    def model(self) -> Model:
        """The named model, cached: opening an engine checks the digests of its files."""
        if self.engine is not None:
            if self.source.variant is not None or self.source.spec is not None:
                raise InputError("give only one of MODEL, --variant and --spec")
            return named_model(self.engine)
        if spec := self.source.load():
            return Model(spec)
        raise InputError(f"give MODEL: {ANY_MODEL}")

    @property
    def spec(self) -> Spec:
        return self.model.spec

    @property
    def graph_name(self) -> str:
        """The name of the graph: --phase, by default `decode`, or `encode` for an encoder."""
        return self.phase or text_graphs(self.spec)[-1]

    @property
    def built(self) -> Artefact | None:
        """The engine directory that MODEL names; None for a model without an engine."""
        return self.model.engine

    @cached_property
    def config(self) -> BuildConfig:
        """The build config: an engine's own; else that of the flags, with the model's quantised
        formats and its longest context."""
        if self.built:
            return self.built.config
        spec, requested = self.spec, self.options
        if self.graph_name == VERIFY and requested.draft_tokens == 0:
            raise InputError("--draft-tokens 0: --phase verify needs at least 1 draft token")
        if self.graph_name == VERIFY and requested.draft_tokens is None:
            requested = replace(requested, draft_tokens=DRAFTED)
        return resolve.resolved(
            spec,
            requested,
            DEFINITION,
            limits=Limits(max_seq=spec.text.max_position_embeddings),
            media=Media(),
            quant=choose_config(find_quant_config(requested.quant), self.model.quant, self.engine),
            drafter=None,
        )

    def chosen(self) -> Graph:
        """Return an engine's graph as it runs; without an engine, or with `--after`, the graph
        after all passes or after that one."""
        if self.after is None and (engine := self.built):
            if self.options.skip:
                raise InputError("--skip needs --after or --why: an engine's graph is as built")
            return find_graph(engine.packing.program, self.graph_name, engine.spec)
        graph, skip = self.before_passes()
        if self.after == "none":
            return graph
        if self.after and self.after in skip:
            find_pass(self.after)
            raise InputError(f"--after {self.after}: the pass is skipped")
        return run_passes(graph, skip=skip, until=self.after, options=self.config.options)

    def before_passes(self) -> tuple[Graph, set[str]]:
        """Return the graph before all passes, quantised and for one rank, and the names of the
        passes to skip."""
        spec, phase, built, c = self.spec, self.graph_name, self.built, self.config
        if built:
            find_graph(built.packing.program, phase, spec)
        media = c.media if built else None
        plain = plain_graph(spec, phase, c.all_logits, c.dtype, media, c.drafter)
        graph = quantise(Program({phase: plain}), spec, c.quant, c.dtype).graphs[phase]
        if c.ranks > 1 or c.ep:
            graph = self._of_rank(graph)
        return graph, {*c.skip, *self.options.skip}

    def _of_rank(self, graph: Graph) -> Graph:
        """Return the graph sharded for one rank; InputError (without an engine) for a graph that is
        replicated on every rank."""
        phases = (*TEXT_GRAPHS, VERIFY, BLOCKS, DRAFT)
        if self.graph_name in phases:
            return shard(graph, self.config.sharding)
        if self.built:
            return graph
        reason = f"--phase {self.graph_name} is replicated on every rank: leave tp and ep out"
        raise InputError(f"{reason}; sharded phases: {', '.join(phases)}")


def plain_graph(
    spec: Spec,
    phase: str,
    all_logits: bool = False,
    dtype: str | None = None,
    media: Media | None = None,
    drafter: Spec | None = None,
) -> Graph:
    """Return a graph before all passes: for a tower, the one of the largest size of `media` (None:
    of the variant's default size); for the draft model, the one of `drafter` (None: of the draft
    model shipped for the variant). InputError or SpecError if there is no such graph."""
    if phase == DRAFT:
        try:
            drafter = drafter or shipped_drafter(spec)
        except SpecError:
            why = f"{spec.name} {'is an encoder' if spec.embedding else 'has no shipped drafter'}"
            raise InputError(f"--phase draft: {why}; give an engine with a drafter") from None
        return build_draft(spec, drafter, dtype)
    if phase not in PARTS:
        return build_graph(spec, phase, all_logits, dtype, media, hidden=drafter is not None)
    can = supported_media(spec)
    if OF_PART[phase] not in can:
        takes = ", ".join(("text", *can)) if can else "text alone"
        raise InputError(f"--phase {phase}: {spec.name} takes {takes}, and has no such tower")
    if media is None:
        return default_tower(spec, phase, dtype)
    unused: dict[str, Any] = {"vision": {"lengths": ()}, "audio": {"budgets": (), "frame": None}}
    return [*build_towers(spec, replace(media, **unused[phase]), dtype).values()][-1]


def find_graph(program: Program, phase: str, spec: Spec) -> Graph:
    """Return an engine's graph of a phase; for a tower, the one of the largest size. InputError if
    there is none."""
    if phase in program.graphs:
        return program.graphs[phase]
    sizes = [g for name, g in program.graphs.items() if name.startswith(f"{phase}_")]
    if phase in PARTS and sizes:
        return sizes[-1]
    if phase != DRAFT or spec.embedding:
        plain_graph(spec, phase)  # raises if the variant has none
    names, fix = ", ".join(program.graphs), DRAFTING.get(phase, "--media all (GGUF: --mmproj too)")
    raise InputError(f"--phase {phase}: this engine has {names}; build it with {fix}")


def no_layer(graph: Graph, layer: int) -> InputError:
    layers = {layer_of(v.name) for v in graph.params} - {None}
    has = f"layers 0 to {len(layers) - 1}" if layers else "no layers"
    return InputError(f"--layer {layer}: graph {graph.name} has {has}")
