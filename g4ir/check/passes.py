"""Checks the pipeline pass by pass: each stage against the one before, the last with the backend.

Rounding grows from layer to layer, so whole runs are not compared. A stage is forced by the one
before it: a value's name is its identity under passes, and a node takes its inputs from the earlier
stage's values of those names; its error is then its own, and is held to its op's tolerance. Values
that only the new stage has (a packed projection, a KV cache) are tested by the next value that both
have. A backend is forced in the same way after each compiled region, its caches after each step.
Several ranks are interpreted side by side.
"""

from __future__ import annotations

import math
from collections.abc import Container, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch

from g4ir.engine.engine import Engine
from g4ir.engine.ranks.leader import run_watched, slots_of, watch_held
from g4ir.errors import CheckError
from g4ir.ir.flatten import inner_nodes
from g4ir.ir.graph import Node, Value
from g4ir.ir.interpret import run_node
from g4ir.model.decoder import VERIFY
from g4ir.model.draft import DRAFT
from g4ir.model.text import TEXT_GRAPHS
from g4ir.model.towers import build_towers, is_tower
from g4ir.ops.types import Type
from g4ir.parallel.unroll import own_name
from g4ir.passes import CHANGES_MEANING
from g4ir.ui.progress import Progress, no_progress

from .media import smallest_items
from .pass_report import Made, StageComparison, StageReport, StagesReport
from .report import engine_name
from .stages import (
    BACKEND,
    STEPS,
    PlainParams,
    Recording,
    Series,
    Stage,
    StageRun,
    StageWeights,
    Trace,
    chunks_of_tokens,
    plain_params,
    series_of,
    stages_of,
)
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


def _stage_against(old: Stage, new: Stage, series: Sequence[Series], engine: Engine) -> StageReport:
    comparison = StageComparison(new.name, engine.dtype)
    for steps in series:
        slots = max(c.end for c in steps)
        run, state = StageRun(old, slots, engine.device), new.caches(slots, engine.device)
        for step in steps:
            forced = Forced(
                run.trace(step), comparison, new.recordings[step.phase], state, engine.device
            )
            state = forced.follow()
            if comparison.first:
                return comparison.report()
    return comparison.report()


@dataclass
class Forced:
    """A stage whose nodes take their inputs from the trace's values of the same names. `own` are
    values and params that only this stage has."""

    trace: Trace
    comparison: StageComparison
    now: Recording
    state: dict[str, Tensor]
    device: str

    def __post_init__(self) -> None:
        self.was, self.own = self.trace.recording, dict(self.now.params)
        self.given = {k for k, t in self.now.types.items() if self._guide(k, t) is not None}

    def follow(self) -> dict[str, Tensor]:
        """Compare the stage's values with the trace's, and return its caches after the step."""
        params = self.now.params
        same = {k for k in params if params[k] is self.was.params.get(k)} | self.given
        for n in self.now.nodes:
            if self.comparison.first:
                return self.state
            # The same node on the same values is not computed again.
            alike = self.was.makers.get(n.outputs[0].name) == n
            if not (alike and all(v.name in same for v in n.inputs)):
                self._evaluate(n)
        return self.state | {k: self._look(v) for k, v in self.now.graph.next.items()}

    def _guide(self, name: str, t: Type, value: Tensor | None = None) -> Tensor | None:
        """Return the trace's value (or another of its type) in the new stage's shape, which may be
        narrowed to the last row; None where it has none."""
        if name not in self.was.types:
            return None
        old, value = self.was.types[name], self.trace.values[name] if value is None else value
        if old == t:
            return value
        axis = _narrowed(old, t)
        return None if axis is None else value.narrow(axis, self.trace.step.valid - 1, 1)

    def _look(self, v: Value) -> Any:
        if v.name in self.state:
            return self.state[v.name]
        return self._guide(v.name, v.type) if v.name in self.given else self.own[v.name]

    def _evaluate(self, n: Node) -> None:
        for v, t in zip(n.outputs, run_node(n, [*map(self._look, n.inputs)]), strict=True):
            self.own[v.name] = t.to(self.device)
            if v.name in self.was.types:
                self._compare(v, self.own[v.name])

    def _compare(self, v: Value, got: Tensor) -> None:
        want, was = self._guide(v.name, v.type), self.was
        cone, before = (r.cone(v.name, self.given) for r in (self.now, was))
        made = Made(v, self.trace.step, cone, was.with_params(before), self.now.with_params(cone))
        if want is not None:
            self.comparison.compare(made, got, want, lambda: self._wide(made), self._look)
        # A cache may be laid out anew: those who read it show what it is worth.
        elif v.name not in was.kept:
            self.comparison.decide(made, math.inf, 0.0)

    def _wide(self, made: Made) -> Tensor:
        """Return the trace's value without rounding, from what the new stage was given."""
        v, given = made.value, {v.name for n in made.cone for v in n.inputs} & self.given
        wide = self.trace.in_float64(self.was.cone(v.name, given), v.name)
        out = self._guide(v.name, v.type, wide)
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
            Shown(run.trace(step), comparison).follow(engine, state)
            if comparison.first:
                return comparison.report()
    return comparison.report()


@dataclass
class Shown:
    """Compares a runtime's values, and replaces them by the interpreter's. `names` are the values
    that the runtime has from there."""

    trace: Trace
    comparison: StageComparison
    names: set[str] = field(default_factory=set)

    def follow(self, engine: Engine, state: Any) -> None:
        """Run the step; `state` is None for a tower."""
        graph, step, after = self.trace.recording.graph, self.trace.step, self.trace.after
        feeds = {v.name: self.trace.values[v.name].clone() for v in graph.inputs}
        self.names |= feeds.keys()
        if state is None:
            (soft,) = graph.outputs
            self.see(soft, engine.runtime.encode(step.phase, feeds))
            return
        run_watched(engine.runtime, step.phase, feeds, state, step.end, self.watch)
        for name in engine.program.graphs[step.phase].next:
            # Other positions, such as those of padding, are never read.
            slots = len(after[_named(name, 0, after)])
            held = range(max(step.end - slots, 0), step.end)
            watch_held(state, name, held, partial(self.watch_cache, held))

    def watch(self, rank: int, name: str, got: Tensor) -> None:
        """Compare one value of a rank's runtime; KV caches come after the step."""
        recording = self.trace.recording
        name = _named(name, rank, recording.makers)
        if name not in recording.kept:
            self.see(next(v for v in recording.makers[name].outputs if v.name == name), got)
            got.copy_(self.trace.values[name])
            self.names.add(name)

    def watch_cache(self, held: range, rank: int, name: str, got: Tensor) -> None:
        """Compare these positions of a rank's cache."""
        name = _named(name, rank, self.trace.after)
        cache = self.trace.after[name]
        want = cache[slots_of(held, cache)]
        self.see(self.trace.recording.graph.next[name], got, want)
        got.copy_(want)

    def see(self, v: Value, got: Tensor, want: Tensor | None = None) -> None:
        """Compare a value (with the trace's of its name); routers on the way, alone or in a fused
        op, may excuse rows."""
        recording, values = self.trace.recording, self.trace.values
        cone = recording.cone(v.name, self.names)
        made = Made(v, self.trace.step, cone, (), cone[-1:])
        routers = [m for n in cone for m in inner_nodes(n) if m.op == "router"]

        def wide() -> Tensor:
            return self.trace.in_float64(cone, v.name)

        def look(x: Value) -> Any:
            return recording.params[x.name] if x.name in recording.params else values[x.name]

        want = values[v.name] if want is None else want
        self.comparison.compare(made, got, want, wide, look, routers)


def _named(name: str, rank: int, known: Container[str]) -> str:
    """Return the name of a rank's value in the side-by-side program."""
    own = own_name(name, rank)
    return own if own in known else name
