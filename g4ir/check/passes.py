"""Checks the pipeline pass by pass: each stage against the one before, the last with the backend.

Rounding grows from layer to layer, so whole runs are not compared. A stage is forced by the one
before it: a value's name is its identity under passes, and a node takes its inputs from the earlier
stage's values of those names; its error is then its own, and is held to its op's tolerance. Values
that only the new stage has (a packed projection, a KV cache) are tested by the next value that both
have. A backend is forced in the same way after each compiled region, its caches after each step.
Several ranks are interpreted side by side. steps.py has the steps.
"""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from g4ir.engine.engine import Engine
from g4ir.engine.ranks.leader import See, run_watched, slots_of, watch_held
from g4ir.errors import CheckError
from g4ir.ir.flatten import inner_nodes
from g4ir.ir.graph import Node, Value
from g4ir.ir.interpret import run_node
from g4ir.model.decoder import VERIFY
from g4ir.model.draft import DRAFT
from g4ir.model.text import TEXT_GRAPHS
from g4ir.model.towers import build_towers, is_tower
from g4ir.ops.kv_quant import comparable
from g4ir.ops.types import Type
from g4ir.parallel.shard import own_name
from g4ir.passes import CHANGES_MEANING
from g4ir.ui.progress import Progress, no_progress

from .media import smallest_items
from .pass_report import CLOSE_EXPERTS, Made, StageComparison, StageReport, StagesReport
from .report import engine_name
from .stages import (
    BACKEND,
    PlainParams,
    Recording,
    Stage,
    StageRun,
    StageWeights,
    Trace,
    plain_params,
    stages_of,
)
from .steps import STEPS, GraphStep, Series, chunks_of_tokens, series_of
from .tokens import Turns, chosen_tokens, window_of
from .watch import first_not_finite

Tensor = torch.Tensor


def verify_each_pass(
    engine: Engine,
    tokens: Sequence[int] | None = None,
    checkpoint: str | Path | None = None,
    progress: Progress = no_progress,
) -> StagesReport:
    """Run the engine's pipeline again, pass by pass, and compare each stage with the one before;
    at the end the engine's backend with the last. Stops at the first stage that fails.

    tokens: ids to compare on, at least 2; default: drawn from a fixed seed, enough for a chunk
    longer than the window after a shorter one, and single steps (as far as max_seq goes).
    checkpoint: the weights before packing, if the engine does not refer to them. Raises InputError
    for a wrong request, PassError if a pass breaks its contract, CheckError if values are NaN or
    infinite before it.
    """
    window = window_of(engine)
    wanted = min(window // 2, 64) + 1 + window + 1 + 3 + STEPS
    ids = chosen_tokens(engine, tokens, min(engine.limits.max_seq, wanted))
    chunks = [*chunks_of_tokens(ids, window, engine.limits.prefill_chunk)]
    plain = plain_params(engine, checkpoint)
    items = smallest_items(engine)
    unknown = tuple(i.tower for i in items if not _is_known(plain, engine, i.tower))
    series = [*series_of(engine, chunks, [i for i in items if i.tower not in unknown])]
    steps = [step for part in series for step in part]
    graphs = tuple(dict.fromkeys((*TEXT_GRAPHS, *(step.phase for step in steps))))
    stages = stages_of(engine, StageWeights(plain, engine.device), graphs)
    sizes = tuple(c.valid for c in chunks)
    try:
        reports = _compared(engine, series, stages, progress)
    except CheckError:  # the first value that was compared need not be the first
        if found := first_not_finite(engine, Turns(ids, sizes)):
            raise CheckError(f"{engine_name(engine)}: {found}") from None
        raise
    ran = ("embed", *graphs, *unknown)
    return StagesReport(
        engine_name(engine),
        len(ids),
        sizes,
        tuple(reports),
        media=tuple(g for g in graphs if g not in (*TEXT_GRAPHS, VERIFY, DRAFT)),
        rounds=tuple(step.valid for step in steps if step.phase == VERIFY),
        unknown=unknown,
        left_out=tuple(g for g in engine.program.graphs if g not in ran),
    )


def _is_known(plain: PlainParams, engine: Engine, tower: str) -> bool:
    """Whether the tower's unpacked weights can be recovered from the engine."""
    held = plain.unpacked
    if held is None:
        return True
    graph = build_towers(engine.spec, engine.media, engine.dtype)[tower]
    return all(held.holds(v) for v in graph.params)


def _compared(
    engine: Engine, series: Sequence[Series], stages: Iterator[Stage], progress: Progress
) -> list[StageReport]:
    """Return a report of each stage up to the first that fails, then of the backend."""
    reports, old = list[StageReport](), next(stages)
    for new in stages:
        if new.packing == old.packing:
            reports.append(StageReport(new.name))
            continue
        if new.name in CHANGES_MEANING:
            reports.append(StageReport(new.name, meant=True))
        else:
            progress(f"{new.name}: against {old.name}")
            reports.append(_stage_against(old, new, series, engine))
        if not reports[-1].ok:
            return reports
        old = new
    progress(f"{engine.facts.backend} backend")
    return [*reports, _backend_against(old, series, engine)]


@dataclass(kw_only=True)
class Forced:
    """Compares values of one step with those of a trace, which `recording` made."""

    recording: Recording
    step: GraphStep
    trace: Trace
    comparison: StageComparison

    def compare(
        self,
        made: Made,
        got: Tensor,
        want: Tensor,
        wide: Callable[[], Tensor],
        look: Callable[[Value], Any],
        routers: Sequence[Node] = (),
    ) -> None:
        """Compare a value. wide: it without rounding; look: operands of routers; routers: those
        whose near ties excuse a row. Whole numbers are equal, but for experts as probable."""

        def valid(t: Tensor) -> Tensor:
            out: Tensor = comparable(self.step.without_padding(t, made.value.type))
            return out

        got, want, maker = valid(got), valid(want), made.cone[-1]
        if want.is_floating_point():
            close = functools.partial(self._close, routers, look)
            self.comparison.compare(made, got, want, lambda: valid(wide()), close)
        elif maker.op == "router" and not got.equal(want):
            self.comparison.decide_experts(made, got, want, self._chances(maker, look))
        else:
            self.comparison.decide(made, 0.0 if got.equal(want) else math.inf, 0.0)

    def _close(self, routers: Sequence[Node], look: Callable[[Value], Any]) -> Tensor | None:
        """Return bool[B, S]: rows in which a router chose by next to nothing."""
        rows = []
        for router in routers:
            k = router.outputs[1].type.shape[-1]
            assert isinstance(k, int)
            best = self._chances(router, look).sort(-1, descending=True).values
            # Where all are chosen, none is left that could have been.
            last, rest = best[..., k - 1 : k], best[..., k : k + 1]
            limit = CLOSE_EXPERTS[self.comparison.dtype]
            rows.append(((last - rest) / last <= limit).any(-1))
        return functools.reduce(operator.or_, rows) if rows else None

    def _chances(self, router: Node, look: Callable[[Value], Any]) -> Tensor:
        """Return f32[B, S, experts]: the router's probabilities of all experts."""
        x, scale, proj, per_expert = map(look, router.inputs)
        reference = router.definition.reference
        assert reference
        every, ones = {**router.attrs, "top_k": proj.shape[0]}, torch.ones_like(per_expert)
        weights, index = reference(x, scale, proj, ones, **every)
        chances = torch.zeros_like(weights).scatter(-1, index, weights)
        return self.step.without_padding(chances, router.outputs[1].type)


def _stage_against(old: Stage, new: Stage, series: Sequence[Series], engine: Engine) -> StageReport:
    comparison = StageComparison(new.name, engine.dtype)
    for steps in series:
        slots = max(c.end for c in steps)
        run, state = StageRun(old, slots, engine.device), new.caches(slots, engine.device)
        for step in steps:
            forced = ForcedStage(
                recording=old.recordings[step.phase],
                step=step,
                trace=run.trace(step),
                comparison=comparison,
                now=new.recordings[step.phase],
                state=state,
                device=engine.device,
            )
            state = forced.follow()
            if comparison.first:
                return comparison.report()
    return comparison.report()


@dataclass(kw_only=True)
class ForcedStage(Forced):
    """A stage whose nodes take their inputs from the trace's values of the same names. `own` are
    values and params that only this stage has."""

    now: Recording
    state: dict[str, Tensor]
    device: str
    own: dict[str, Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.given = {k for k, t in self.now.types.items() if self._guide(k, t) is not None}

    def follow(self) -> dict[str, Tensor]:
        """Compare the stage's values with the trace's, and return its caches after the step."""
        for graph, params, before in zip(
            self.now.graphs, self.now.params, self.recording.params, strict=True
        ):
            self.own |= params
            same = {k for k in params if params[k] is before.get(k)} | self.given
            for n in graph.nodes:
                if self.comparison.first:
                    return self.state
                # The same node on the same values is not computed again.
                alike = self.recording.nodes.get(n.outputs[0].name) == n
                if not (alike and all(v.name in same for v in n.inputs)):
                    self._evaluate(n)
            self.state = self.state | {k: self._look(v) for k, v in graph.next.items()}
        return self.state

    def _guide(self, name: str, t: Type, value: Tensor | None = None) -> Tensor | None:
        """Return the trace's value (or another of its type) in the new stage's shape, which may be
        narrowed to the last row; None where it has none."""
        if name not in self.recording.types:
            return None
        old, value = self.recording.types[name], self.trace.values[name] if value is None else value
        if old == t:
            return value
        axis = _narrowed(old, t)
        return None if axis is None else value.narrow(axis, self.step.valid - 1, 1)

    def _look(self, v: Value) -> Any:
        if v.name in self.state:
            return self.state[v.name]
        return self._guide(v.name, v.type) if v.name in self.given else self.own[v.name]

    def _evaluate(self, n: Node) -> None:
        for v, t in zip(n.outputs, run_node(n, [*map(self._look, n.inputs)]), strict=True):
            self.own[v.name] = t.to(self.device)
            if v.name in self.recording.types:
                self._compare(v, self.own[v.name])

    def _compare(self, v: Value, got: Tensor) -> None:
        want, was = self._guide(v.name, v.type), self.recording
        cone, before = (r.cone(v.name, self.given) for r in (self.now, was))
        made = Made(v, self.step, cone, was.makers(before), self.now.makers(cone))
        if want is not None:
            self.compare(made, got, want, lambda: self._wide(made), self._look)
        # A cache may be laid out anew: those who read it show what it is worth.
        elif v.name not in was.kept:
            self.comparison.decide(made, math.inf, 0.0)

    def _wide(self, made: Made) -> Tensor:
        """Return the trace's value without rounding, from what the new stage was given."""
        v, given = made.value, {v.name for n in made.cone for v in n.inputs} & self.given
        cone = self.recording.cone(v.name, given)
        out = self._guide(v.name, v.type, self.trace.in_float64(self.recording, cone, v.name))
        assert out is not None
        return out


def _narrowed(old: Type, new: Type) -> int | None:
    """Return the axis along which only the last row is left, or None."""
    if old.dtype != new.dtype or old.rank != new.rank:
        return None
    axes = [i for i, (a, b) in enumerate(zip(old.shape, new.shape, strict=True)) if a != b]
    fits = len(axes) == 1 and (old.shape[axes[0]], new.shape[axes[0]]) == ("S", 1)
    return axes[0] if fits else None


def _backend_against(stage: Stage, series: Sequence[Series], engine: Engine) -> StageReport:
    """Compare the engine's runtime, forced by the interpreter's values after each region."""
    comparison = StageComparison(BACKEND, engine.dtype)
    for steps in series:
        run = StageRun(stage, max(c.end for c in steps), engine.device)
        state = None if is_tower(steps[0].phase) else engine.runtime.new_state(1)
        for step in steps:
            recording, trace = stage.recordings[step.phase], run.trace(step)
            shown = Shown(recording=recording, step=step, trace=trace, comparison=comparison)
            shown.follow(engine, state, run.state)
            if comparison.first:
                return comparison.report()
    return comparison.report()


@dataclass(kw_only=True)
class Shown(Forced):
    """Compares a runtime's values, and replaces them by the interpreter's. `names` are the values
    that the runtime has from there."""

    names: set[str] = field(default_factory=set)

    def follow(self, engine: Engine, state: Any, after: Mapping[str, Tensor]) -> None:
        """Run the step; `after` are the interpreter's caches after it, `state` None for a tower."""
        graph, phase = self.recording.graphs[1], self.step.phase
        feeds = {v.name: self.trace.values[v.name].clone() for v in graph.inputs}
        self.names |= feeds.keys()
        if state is None:
            (soft,) = graph.outputs
            self.see(soft, engine.runtime.encode(phase, feeds), self.trace.values[soft.name])
            return
        run_watched(engine.runtime, phase, feeds, state, self.step.end, self.watch)
        for name in engine.program.graphs[phase].next:
            # Other positions, such as those of padding, are never read.
            slots = len(after[_named(name, 0, after)])
            held = range(max(self.step.end - slots, 0), self.step.end)
            watch_held(state, name, held, self._cache(held, after))

    def watch(self, rank: int, name: str, got: Tensor) -> None:
        """Compare one value of a rank's runtime; KV caches come after the step."""
        name = _named(name, rank, self.recording.nodes)
        if name in self.recording.kept:
            return
        want = self.trace.values[name]
        v = next(v for v in self.recording.nodes[name].outputs if v.name == name)
        self.see(v, got, want)
        got.copy_(want)
        self.names.add(name)

    def _cache(self, held: range, after: Mapping[str, Tensor]) -> See:
        """Return a callback that compares these positions of a rank's cache."""

        def see(rank: int, name: str, got: Tensor) -> None:
            own = _named(name, rank, after)
            want = after[own][slots_of(held, after[own])]
            self.see(self.recording.graphs[1].next[own], got, want)
            got.copy_(want)

        return see

    def see(self, v: Value, got: Tensor, want: Tensor) -> None:
        """Compare a value; routers on the way, alone or in a fused op, may excuse rows."""
        cone = self.recording.cone(v.name, self.names)
        made = Made(v, self.step, cone, (), cone[-1:])
        params = self.recording.params[1]
        routers = [m for n in cone for m in inner_nodes(n) if m.op == "router"]

        def wide() -> Tensor:
            return self.trace.in_float64(self.recording, cone, v.name)

        def look(x: Value) -> Any:
            return params[x.name] if x.name in params else self.trace.values[x.name]

        self.compare(made, got, want, wide, look, routers)


def _named(name: str, rank: int, known: Container[str]) -> str:
    """Return the name of a rank's value in the side-by-side program."""
    own = own_name(name, rank)
    return own if own in known else name
