"""Checks the pipeline pass by pass: each stage against the one before, the last with the backend.

The interpreter runs every stage on the engine's own weights and the same tokens. Comparing whole
runs would say little, because rounding grows from layer to layer. So a stage is forced by the one
before it: a value's name is its identity under passes, and a node takes its inputs from the earlier
stage's values of those names. An error of a node is then its own, and is compared with its op's
tolerance. Values that only the new stage has (a packed projection, a shared table) are its own, and
so are its KV caches, kept from step to step; the next value that both stages have tests them.

The same with a backend: after each compiled region its results are compared and replaced by the
interpreter's, and so are the KV caches after each step. Several ranks are interpreted side by side;
each rank's values are compared with its own part. A backend shows no values inside a tower: its
soft tokens are held to the joint tolerance of all its ops. steps.py has the steps.
"""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass
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
from g4ir.parallel.unroll import own_name
from g4ir.passes import CHANGES_MEANING
from g4ir.ui.progress import Progress, no_progress

from .media import smallest_items
from .pass_report import CLOSE_EXPERTS, Made, StageComparison, StageReport, StagesReport
from .report import engine_name
from .stages import (
    BACKEND,
    Plain,
    Recording,
    Stage,
    StageRun,
    StageWeights,
    Trace,
    plain_params,
    stages_of,
    unpacked,
)
from .steps import STEPS, GraphStep, Series, chunks_of_tokens, series_of
from .tokens import Turns, chosen_tokens, window_of
from .watch import first_not_finite

# ---- the way through --------------------------------------------------------------------------


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
    known = [i for i in items if _is_known(plain, engine, i.tower)]
    series = [*series_of(engine, chunks, known)]
    graphs = tuple(dict.fromkeys((*TEXT_GRAPHS, *(c.phase for part in series for c in part))))
    reports: list[StageReport] = []
    stages = stages_of(engine, StageWeights(plain, engine.device), graphs)
    old = next(stages)
    for new in stages:
        if new.packing == old.packing:
            reports.append(StageReport(new.name, 0, (), None))
            continue
        if new.name in CHANGES_MEANING:
            reports.append(StageReport(new.name, 0, (), None, meant=True))
            old = new
            continue
        progress(f"{new.name}: against {old.name}")
        try:
            reports.append(_against(old, new, series, engine))
        except CheckError:  # the first value that was compared need not be the first
            if found := first_not_finite(engine, Turns(ids, [c.valid for c in chunks])):
                raise CheckError(f"{engine_name(engine)}: {found}") from None
            raise
        if not reports[-1].ok:
            break
        old = new
    else:
        progress(f"{engine.facts.backend} backend")
        reports.append(_backend(engine, old, series))
    sizes = tuple(c.valid for c in chunks)
    unknown = tuple(i.tower for i in items if i not in known)
    ran = ("embed", *graphs, *unknown)
    return StagesReport(
        engine_name(engine),
        len(ids),
        sizes,
        tuple(reports),
        media=tuple(g for g in graphs if g not in (*TEXT_GRAPHS, VERIFY, DRAFT)),
        rounds=tuple(c.valid for part in series for c in part if c.phase == VERIFY),
        unknown=unknown,
        left_out=tuple(g for g in engine.program.graphs if g not in ran),
    )


def _is_known(plain: Plain, engine: Engine, tower: str) -> bool:
    """Whether the tower's unpacked weights can be recovered from the engine."""
    held = unpacked(plain)
    if held is None:
        return True
    graph = build_towers(engine.spec, engine.media, engine.dtype)[tower]
    return all(held.holds(v) for v in graph.params)


# ---- one stage forced by another ----------------------------------------------------------------


def _against(old: Stage, new: Stage, series: Sequence[Series], engine: Engine) -> StageReport:
    comparison = StageComparison(new.name, engine.dtype)
    for steps in series:
        slots = max(c.end for c in steps)
        run = StageRun(old, slots, engine.device)
        forced = ForcedChoices(
            old, new, new.caches(slots, engine.device), comparison, engine.device
        )
        for step in steps:
            forced.follow(step, run.trace(step))
            if comparison.first:
                return comparison.report()
    return comparison.report()


class ForcedChoices:
    """A stage whose nodes take their inputs from another stage's values of the same names."""

    def __init__(
        self,
        old: Stage,
        new: Stage,
        state: dict[str, torch.Tensor],
        comparison: StageComparison,
        device: str,
    ) -> None:
        self.old, self.new, self.comparison, self.device = old, new, comparison, device
        self.state = state

    def follow(self, step: GraphStep, trace: Trace) -> None:
        """Compare the new stage's values of a step with the old one's."""
        self.step, self.trace = step, trace
        self.was, self.now = self.old.recordings[step.phase], self.new.recordings[step.phase]
        self.given = {k for k, t in self.now.types.items() if self._guide(k, t) is not None}
        self.own: dict[str, torch.Tensor] = {}
        for graph, params, before in zip(
            self.now.graphs, self.now.params, self.was.params, strict=True
        ):
            self.params = params
            same = {k for k in params if params[k] is before.get(k)} | self.given
            for n in graph.nodes:
                if self.comparison.first:
                    return
                if not self._is_unchanged(n, same):
                    self._evaluate(n)
            self.state = self.state | {k: self._look(v) for k, v in graph.next.items()}

    def _guide(self, name: str, t: Type) -> torch.Tensor | None:
        """Return the old stage's value in the new one's shape; None where it has none."""
        if name not in self.was.types:
            return None
        old, value = self.was.types[name], self.trace.values[name]
        if old == t:
            return value
        axis = _narrowed(old, t)
        return None if axis is None else self._last(value, axis)

    def _last(self, t: torch.Tensor, axis: int) -> torch.Tensor:
        return t.narrow(axis, self.step.valid - 1, 1)

    def _look(self, v: Value) -> torch.Tensor:
        if v.name in self.state:
            return self.state[v.name]
        if v.name in self.given:
            found = self._guide(v.name, v.type)
            assert found is not None
            return found
        out: torch.Tensor = self.params[v.name] if v.name in self.params else self.own[v.name]
        return out

    def _is_unchanged(self, n: Node, same: set[str]) -> bool:
        """Whether this is the same node on the same values: nothing to compare."""
        return self.was.nodes.get(n.outputs[0].name) == n and all(v.name in same for v in n.inputs)

    def _evaluate(self, n: Node) -> None:
        inputs = [self._look(v) for v in n.inputs]
        for v, t in zip(n.outputs, run_node(n, inputs), strict=True):
            self.own[v.name] = t.to(self.device)
            if v.name in self.was.types:
                self._compare(n, v, self.own[v.name], inputs)

    def _compare(self, n: Node, v: Value, got: torch.Tensor, inputs: list[Any]) -> None:
        want = self._guide(v.name, v.type)
        cone = self.now.cone(v.name, self.given)
        before = self.was.makers(self.was.cone(v.name, self.given))
        made = Made(v, self.step.phase, self.step.at, cone, before, self.now.makers(cone))
        if want is None:
            # A cache may be laid out anew: those who read it show what it is worth.
            if v.name not in self.was.kept:
                self.comparison.decide(made, math.inf, 0.0)
            return
        got, want = (comparable(self.step.without_padding(t, v.type)) for t in (got, want))
        if want.is_floating_point():
            self.comparison.compare(made, got, want, lambda: self._wide(made))
            return

        def chances() -> torch.Tensor:
            return self.step.without_padding(expert_chances(n, inputs), v.type)

        _compare_whole(self.comparison, made, got, want, chances)

    def _wide(self, made: Made) -> torch.Tensor:
        """Return the old stage's value without rounding, from what the new one was given."""
        name, given = made.value.name, {v.name for n in made.cone for v in n.inputs}
        out = self.trace.in_float64(self.was, self.was.cone(name, given & self.given), name)
        axis = _narrowed(self.was.types[name], made.value.type)
        if axis is not None:
            return self._last(out, axis)
        return comparable(self.step.without_padding(out, made.value.type))


def _narrowed(old: Type, new: Type) -> int | None:
    """Return the axis along which only the last row is left, or None."""
    if old.dtype != new.dtype or old.rank != new.rank:
        return None
    axes = [i for i, (a, b) in enumerate(zip(old.shape, new.shape, strict=True)) if a != b]
    fits = len(axes) == 1 and (old.shape[axes[0]], new.shape[axes[0]]) == ("S", 1)
    return axes[0] if fits else None


# ---- a backend forced by the interpreter --------------------------------------------------------


def _backend(engine: Engine, stage: Stage, series: Sequence[Series]) -> StageReport:
    """Compare the engine's runtime, forced by the interpreter's values after each region."""
    comparison = StageComparison(BACKEND, engine.dtype)
    for steps in series:
        run = StageRun(stage, max(c.end for c in steps), engine.device)
        state = None if is_tower(steps[0].phase) else engine.runtime.new_state(1)
        for step in steps:
            _show(engine, run, state, step, comparison)
            if comparison.first:
                return comparison.report()
    return comparison.report()


def _show(
    engine: Engine, run: StageRun, state: Any, step: GraphStep, comparison: StageComparison
) -> None:
    trace, recording = run.trace(step), run.stage.recordings[step.phase]
    feeds = {v.name: trace.values[v.name].clone() for v in recording.graphs[1].inputs}
    shown = Shown(recording, step, trace, comparison, set(feeds))
    if state is None:
        (soft,) = recording.graphs[1].outputs
        made = engine.runtime.encode(step.phase, feeds)
        shown.compare(soft, made, trace.values[soft.name])
        return
    run_watched(engine.runtime, step.phase, feeds, state, step.end, shown.watch)
    for name in engine.program.graphs[step.phase].next:
        watch_held(state, name, shown.held(name, run.state), shown.cache(run.state))


@dataclass
class Shown:
    """Compares a runtime's values of one step, and replaces them by the interpreter's."""

    recording: Recording
    step: GraphStep
    trace: Trace
    comparison: StageComparison
    names: set[str]

    def watch(self, rank: int, name: str, got: torch.Tensor) -> None:
        """Compare one value of a rank's runtime; KV caches come after the step."""
        name = self._named(name, rank, self.recording.nodes)
        if name in self.recording.kept:
            return
        want = self.trace.values[name]
        v = next(v for v in self.recording.nodes[name].outputs if v.name == name)
        self.compare(v, got, want)
        got.copy_(want)
        self.names.add(name)

    def held(self, name: str, state: Mapping[str, torch.Tensor]) -> range:
        """Return the positions that a cache holds after the step; others, such as those of padding,
        are never read."""
        slots = len(state[self._named(name, 0, state)])
        return range(max(self.step.end - slots, 0), self.step.end)

    def cache(self, state: Mapping[str, torch.Tensor]) -> See:
        """Return a callback that compares these positions of a rank's cache with `state`."""

        def see(rank: int, name: str, got: torch.Tensor) -> None:
            own = self._named(name, rank, state)
            want = state[own][slots_of(self.held(name, state), state[own])]
            self.compare(self.recording.graphs[1].next[own], got, want)
            got.copy_(want)

        return see

    def _named(self, name: str, rank: int, known: Container[str]) -> str:
        """Return the name of a rank's value in the side-by-side program."""
        own = own_name(name, rank)
        return own if own in known else name

    def compare(self, v: Value, got: torch.Tensor, want: torch.Tensor) -> None:
        cone = self.recording.cone(v.name, self.names)
        made = Made(v, self.step.phase, self.step.at, cone, (), cone[-1:])
        got, want = (comparable(self.step.without_padding(t, v.type)) for t in (got, want))
        if not want.is_floating_point():
            _compare_whole(self.comparison, made, got, want, lambda: self._chances(cone[-1]))
            return

        def wide() -> torch.Tensor:
            out = self.trace.in_float64(self.recording, cone, v.name)
            return comparable(self.step.without_padding(out, v.type))

        self.comparison.compare(made, got, want, wide, lambda: self._close(cone))

    def _close(self, cone: Iterable[Node]) -> torch.Tensor | None:
        """Return bool[B, S]: rows in which a router of the cone, alone or in a fused op, chose by
        next to nothing."""
        rows = [self._near(m) for n in cone for m in inner_nodes(n) if m.op == "router"]
        return functools.reduce(operator.or_, rows) if rows else None

    def _near(self, router: Node) -> torch.Tensor:
        """Return bool[B, S]: the last expert chosen hardly beats the first that is not."""
        k = router.outputs[1].type.shape[-1]
        assert isinstance(k, int)
        best = self._chances(router).sort(-1, descending=True).values
        # Where all are chosen, none is left that could have been.
        last, rest = best[..., k - 1 : k], best[..., k : k + 1]
        return ((last - rest) / last <= CLOSE_EXPERTS[self.comparison.dtype]).any(-1)

    def _chances(self, router: Node) -> torch.Tensor:
        known = {**self.recording.params[1], **self.trace.values}
        chances = expert_chances(router, [known[v.name] for v in router.inputs])
        return self.step.without_padding(chances, router.outputs[1].type)


def _compare_whole(
    comparison: StageComparison,
    made: Made,
    got: torch.Tensor,
    want: torch.Tensor,
    chances: Callable[[], torch.Tensor],
) -> None:
    """Compare whole numbers: they are equal, but for experts that are as probable."""
    if made.cone[-1].op == "router" and not got.equal(want):
        comparison.decide_experts(made, got, want, chances())
    else:
        comparison.decide(made, 0.0 if got.equal(want) else math.inf, 0.0)


def expert_chances(n: Node, inputs: Sequence[Any]) -> torch.Tensor:
    """f32[B, S, experts]: a router node's probabilities of all experts."""
    x, scale, proj, per_expert = inputs
    reference = n.definition.reference
    assert reference
    count = proj.shape[0]
    ones = torch.ones_like(per_expert)
    weights, index = reference(x, scale, proj, ones, **{**n.attrs, "top_k": count})
    out: torch.Tensor = torch.zeros_like(weights).scatter(-1, index, weights)
    return out
