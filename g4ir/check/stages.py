"""The stages of a pipeline: the graphs after each pass, params of any of them, and their runs."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch

from g4ir.backends import find_backend
from g4ir.engine.engine import Engine
from g4ir.ir.graph import Graph, Node, Program, Value
from g4ir.ir.interpret import empty_state, interpret
from g4ir.ir.rewrite import bind, drop_dead
from g4ir.ir.wide import in_float64
from g4ir.model.decoder import VERIFY
from g4ir.model.draft import DRAFT
from g4ir.model.names import checkpoint_name
from g4ir.model.text import TEXT_GRAPHS, build_program
from g4ir.model.towers import is_tower
from g4ir.ops.types import Type, torch_dtype
from g4ir.parallel.shard import shard_program, split_name, unroll
from g4ir.parallel.table import Share
from g4ir.passes import run_program
from g4ir.quant.rewrite import from_codes, quantised
from g4ir.weights.pack import Packing, UnpackedWeights, own_params, split_program

from .reference import original_weights
from .steps import GraphStep

Tensor = torch.Tensor
#: the embedding of a step that has none
NO_EMBEDDING = Graph("nothing", (), (), (), (), ())
BACKEND, STORED, MODEL, SHARD = "backend", "stored graphs", "model", "shard"


@dataclass(frozen=True)
class PlainParams:
    """Params of the graph before all passes, of the model or of a rank (parallel/shard.py): from
    `whole`, or joined from what each of several ranks holds."""

    share: Share
    whole: Callable[[Value], Tensor]
    held: Sequence[UnpackedWeights] = ()

    @property
    def unpacked(self) -> UnpackedWeights | None:
        """What undoes the packing, where params come from that."""
        return self.whole if isinstance(self.whole, UnpackedWeights) else None

    def __call__(self, v: Value) -> Tensor:
        """Return the tensor of a param, of a rank's own or of the model's."""
        rank, name = split_name(v.name)
        if rank is not None:
            return self._own(rank, replace(v, name=name))
        made: Tensor = self.share.joined(v, self._own) if self.held else self.whole(v)
        return made

    def _own(self, rank: int, v: Value) -> Tensor:
        if self.held:
            return self.held[rank](v)
        share = replace(self.share, rank=rank)
        made: Tensor = share.own(v.name, lambda name: self.whole(replace(v, name=name)))
        return made


def plain_params(engine: Engine, checkpoint: str | Path | None = None) -> PlainParams:
    """Return params by value, in the engine's dtype: from `checkpoint`, else from the engine.

    Raises WeightsError where the checkpoint does not fit the engine's spec; the function that is
    returned raises EngineError for what a packed engine no longer holds.
    """
    source = original_weights(engine, checkpoint)
    if source is None:
        ranks = range(engine.ranks) if engine.ranks > 1 else ()
        held = [engine.unpacked(rank) for rank in ranks]
        return PlainParams(engine.share, engine.unpacked(), held)

    def stored(v: Value) -> Tensor:
        return source.tensor(checkpoint_name(v.name)).to(torch_dtype(v.type.dtype))

    return PlainParams(engine.share, stored)


@dataclass
class StageWeights:
    """Params of any stage of the pipeline on one device. One tensor serves all stages that make it
    in the same way."""

    plain: PlainParams
    device: str
    _made: dict[str, tuple[Graph, Tensor]] = field(default_factory=dict)
    _plain: dict[str, Tensor] = field(default_factory=dict)

    def params(self, packing: Packing, graph: Graph) -> dict[str, Tensor]:
        """Return the params of one of the packing's main graphs."""
        made = packing.prologue.producers()
        return {
            v.name: self._param(packing.prologue, v) if v.name in made else self._held(v)
            for v in graph.params
        }

    def _param(self, prologue: Graph, v: Value) -> Tensor:
        recipe = drop_dead(replace(prologue, outputs=(v,)))
        if v.name not in self._made or self._made[v.name][0] != recipe:
            given = {x.name: self._held(x) for x in recipe.params}
            self._made[v.name] = recipe, interpret(recipe, {}, given, {})[0][v.name]
        return self._made[v.name][1]

    def _held(self, v: Value) -> Tensor:
        if v.name not in self._plain:
            self._plain[v.name] = self.plain(v).to(self.device)
        return self._plain[v.name]


@dataclass(frozen=True)
class Recording:
    """The graphs of one phase: embedding, then text; or nothing, then a tower.

    `nodes` has the maker of every value, in order; `types` these and the inputs; `kept` the values
    that become the KV cache.
    """

    graphs: tuple[Graph, Graph]
    params: tuple[Mapping[str, Any], Mapping[str, Any]]
    prologue: Graph

    @cached_property
    def nodes(self) -> dict[str, Node]:
        return {k: n for g in self.graphs for k, n in g.producers().items()}

    @cached_property
    def place(self) -> dict[int, int]:
        return {id(n): i for i, n in enumerate(n for g in self.graphs for n in g.nodes)}

    @cached_property
    def types(self) -> dict[str, Type]:
        inputs = {v.name: v.type for g in self.graphs for v in g.inputs}
        return inputs | {v.name: v.type for n in self.nodes.values() for v in n.outputs}

    @cached_property
    def kept(self) -> set[str]:
        return {v.name for v in self.graphs[1].next.values()}

    def cone(self, name: str, given: Container[str]) -> tuple[Node, ...]:
        """Return the nodes between a value and values that are given, in order."""
        found: dict[int, Node] = {}
        queue = [name]
        while queue:
            n = self.nodes.get(queue.pop())
            if n and id(n) not in found:
                found[id(n)] = n
                queue += [v.name for v in n.inputs if v.name not in given]
        return tuple(sorted(found.values(), key=lambda n: self.place[id(n)]))

    def makers(self, nodes: Sequence[Node]) -> tuple[Node, ...]:
        """Return the nodes, after those that make their params."""
        made = self.prologue.producers()
        early = {v.name: made[v.name] for n in nodes for v in n.inputs if v.name in made}
        return (*early.values(), *nodes)


@dataclass(frozen=True)
class Stage:
    """The graphs after a pass, and their params by graph."""

    name: str
    packing: Packing
    params: Mapping[str, Mapping[str, Any]]

    @cached_property
    def recordings(self) -> dict[str, Recording]:
        graphs = self.packing.program.graphs
        recordings = {}
        for name in self.params.keys() - {"embed"}:
            first, given = graphs["embed"], self.params["embed"]
            if name == VERIFY:  # values of both graphs have one type by name
                first = bind(first, S="M")
            if is_tower(name) or name == DRAFT:
                first, given = NO_EMBEDDING, {}
            both, params = (first, graphs[name]), (given, self.params[name])
            recordings[name] = Recording(both, params, self.packing.prologue)
        return recordings

    def caches(self, slots: int, device: str) -> dict[str, Tensor]:
        """Return empty KV caches for one sequence."""
        state = tuple(self.packing.program.state().values())
        empty = empty_state(replace(NO_EMBEDDING, state=state), {"B": 1, "C": slots})
        return {name: t.to(device) for name, t in empty.items()}


def stages_of(
    engine: Engine, weights: StageWeights, graphs: Sequence[str] = TEXT_GRAPHS
) -> Iterator[Stage]:
    """Yield the model as written, sharded, and after each pass; then the engine's own graphs if
    they differ (an engine of an older version). Only `graphs` can be run."""
    facts, held = engine.facts, weights.plain.unpacked is not None
    stored = partial(find_backend(facts.backend).stored, device=facts.device)
    stage = partial(_stage, engine, weights, graphs)
    plain = _written(engine)
    if held:
        plain = plain.map(from_codes)
    after: dict[str, dict[str, Graph]] = {MODEL: dict(plain.graphs)}
    if engine.ranks > 1:
        if engine.recipe and not engine.recipe.held:
            after.clear()  # each rank made codes of its part, with scales of their own
        plain = shard_program(plain, engine.spec, engine.ranks, facts.ep)
        after[SHARD] = dict(plain.graphs)

    def keep(name: str, g: Graph) -> None:
        after.setdefault(name, {})[g.name] = g

    run_program(plain, skip=facts.skipped_passes, dump=keep, options=facts.options)
    packing = None
    for name, made in after.items():
        packing = split_program(stored(Program(made)))
        yield stage(name, packing)
    own = Packing(engine.program, from_codes(engine.prologue) if held else engine.prologue)
    if packing != own:
        yield stage(STORED, own)


def _written(engine: Engine) -> Program:
    plain = build_program(
        engine.spec,
        engine.all_logits,
        engine.dtype,
        media=engine.media,
        verifies=VERIFY in engine.program.graphs,
        drafter=engine.drafter,
    )
    return quantised(plain, engine.spec, engine.recipe, engine.dtype)


def _stage(
    engine: Engine, weights: StageWeights, graphs: Sequence[str], name: str, packing: Packing
) -> Stage:
    if engine.ranks > 1 and name != MODEL:
        packing = _side_by_side(packing, engine.share)
    made = {g: weights.params(packing, packing.program.graphs[g]) for g in graphs}
    return Stage(name, packing, {"embed": engine.tables, **made})


def _side_by_side(packing: Packing, share: Share) -> Packing:
    own = own_params(packing, share)
    cut = {v.name for v in packing.prologue.params if share.cuts(v.name)}
    program = packing.program.map(lambda g: unroll(g, own, share.ranks) if g.state else g)
    return Packing(program, unroll(packing.prologue, cut, share.ranks))


@dataclass(frozen=True)
class Trace:
    """Every value of a stage in one step, and its KV cache before it."""

    values: Mapping[str, Tensor]
    state: Mapping[str, Tensor]

    def in_float64(self, recording: Recording, cone: Sequence[Node], name: str) -> Tensor:
        """Recompute `name` in float64 through the nodes of the cone."""
        known = {**recording.params[0], **recording.params[1], **self.state, **self.values}
        made = {v.name for n in cone for v in n.outputs}
        needed = {v.name for n in cone for v in n.inputs} - made
        graph = replace(NO_EMBEDDING, nodes=tuple(cone))
        return in_float64(graph, {k: known[k] for k in needed}, {})[name]


class StageRun:
    """A stage on its own, step after step."""

    def __init__(self, stage: Stage, slots: int, device: str) -> None:
        self.stage, self.device = stage, device
        self.state = stage.caches(slots, device)

    def trace(self, step: GraphStep) -> Trace:
        values, before = step.feeds(self.device), self.state
        recording = self.stage.recordings[step.phase]

        def keep(v: Value, t: Tensor) -> None:
            values[v.name] = t.to(self.device)

        for graph, params in zip(recording.graphs, recording.params, strict=True):
            state = {v.name: self.state[v.name] for v in graph.state}
            _, after = interpret(graph, dict(values), params, state, keep)
            self.state = {**self.state, **after}
        return Trace(values, before)
