"""The comparator: values of one computation against those of another, node by node.

Rounding grows from layer to layer, so whole runs are not compared. A stage of the pipeline is
forced by the one before it: a value's name is its identity under passes, and a node takes its
inputs from the earlier stage's values of those names; its error is then its own, and is held to its
op's tolerance. Values that only the new stage has (a packed projection, a KV cache) are tested by
the next value that both have. A backend is forced in the same way after each compiled region, its
caches after each step. Several ranks are interpreted side by side.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Container, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch

from g4ir.backends.base import Tensors
from g4ir.engine.engine import Engine
from g4ir.engine.ranks import run_watched, slots_of, watch_held
from g4ir.engine.session import Session
from g4ir.ir.flatten import inner_nodes
from g4ir.ir.graph import Node, Value, print_node
from g4ir.ir.interpret import run_node
from g4ir.model.towers import is_tower
from g4ir.ops import OPS
from g4ir.ops.kv_quant import to_comparable
from g4ir.ops.types import Type
from g4ir.parallel.shard import own_name

from .reference import with_run
from .stage_report import Difference, OpError, StageReport
from .stages import BACKEND, GraphStep, Recording, Series, Stage, StageRun, Trace, stored_stage

Tensor = torch.Tensor
#: the tensor of a node's input
Look = Callable[[Value], Any]
#: what a session is asked for
Step = Callable[[Session], Any]
#: values compared at once, in float64
BLOCK = 1 << 24
#: what a value out of tolerance may still differ by: this many times its own rounding, measured
#: against float64 on the same inputs. Two computations are off by one such error each; rounding
#: is a matter of luck, and where it is amplified (softmax over large scores) the luck varies.
MEASURED = 4.0
#: two experts whose probabilities lie this close (relative) may change places: four times what
#: moves a score. Scores of a segment are rounded where the backend's fused ops keep more digits.
CLOSE_EXPERTS = {"f32": 1e-3, "bf16": 2.0**-2}
#: tokens of a chunk all of whose values are kept
CHUNK = 512


def first_difference(
    engine: Engine, reference: Engine, steps: Sequence[Step], tokens: int
) -> Difference | None:
    """Take an engine through steps of a session on one row of `tokens` tokens, chunks of at most
    CHUNK of them, forced by the interpreter's values; return the first that is out of tolerance."""
    run = StageRun(stored_stage(engine, reference), tokens, engine)
    comparison = Comparison(StageReport(BACKEND), engine.dtype)

    def forced(
        phase: str, feeds: dict[str, Tensor], state: Any, context: int, logits: bool
    ) -> Tensors | None:
        at, valid = (int(feeds[name].flatten()[0]) for name in ("positions", "lengths"))
        trace = run.trace(GraphStep(phase, at, context, feeds, valid, "S"))
        Shown(trace, comparison).follow(engine, state)
        return {"logits": trace.values["logits"]} if logits else None

    limits = replace(engine.limits, prefill_chunk=min(engine.limits.prefill_chunk, CHUNK))
    session = with_run(engine.configured(limits=limits), forced).session()
    for step in steps:
        step(session)
        if comparison.report.first:
            break
    return comparison.report.first


def stage_against(old: Stage, new: Stage, series: Sequence[Series], engine: Engine) -> StageReport:
    """Compare a stage, forced by the values of the one before it."""
    comparison = Comparison(StageReport(new.name), engine.dtype)
    for steps in series:
        slots = max(c.end for c in steps)
        run, state = StageRun(old, slots, engine), new.caches(slots, engine.device)
        for step in steps:
            forced = Forced(
                run.trace(step), comparison, new.recordings[step.phase], state, engine.device
            )
            state = forced.follow()
            if comparison.report.first:
                return comparison.report
    return comparison.report


@dataclass
class Forced:
    """A stage whose nodes take their inputs from the trace's values of the same names. `own` are
    values and params that only this stage has."""

    trace: Trace
    comparison: Comparison
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
            if self.comparison.report.first:
                return self.state
            # The same node on the same values is not computed again.
            alike = self.was.nodes[self.was.places.get(n.outputs[0].name, 0)] == n
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


def backend_against(stage: Stage, series: Sequence[Series], engine: Engine) -> StageReport:
    """Compare the engine's runtime, forced by the interpreter's values after each region."""
    comparison = Comparison(StageReport(BACKEND), engine.dtype)
    for steps in series:
        run = StageRun(stage, max(c.end for c in steps), engine)
        state = None if is_tower(steps[0].phase) else engine.runtime.new_state(1)
        for step in steps:
            Shown(run.trace(step), comparison).follow(engine, state)
            if comparison.report.first:
                return comparison.report
    return comparison.report


@dataclass
class Shown:
    """Compares a runtime's values, and replaces them by the interpreter's. `names` are the values
    that the runtime has from there."""

    trace: Trace
    comparison: Comparison
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
        name = _named(name, rank, recording.places)
        if name not in recording.kept:
            self.see(Value(name, recording.types[name]), got)
            got.copy_(self.trace.values[name])
            self.names.add(name)

    def watch_cache(self, held: range, rank: int, name: str, got: Tensor) -> None:
        """Compare these positions of a rank's cache."""
        name = _named(name, rank, self.trace.after)
        cache = self.trace.after[name]
        slots = slots_of(held, cache)
        self.see(self.trace.recording.graph.next[name], got, slots)
        got.copy_(cache[slots])

    def see(self, v: Value, got: Tensor, slots: Sequence[int] | None = None) -> None:
        """Compare a value, of a cache these slots; routers on the way, alone or in a fused op, may
        excuse rows."""
        recording, values = self.trace.recording, self.trace.values
        cone = recording.cone(v.name, self.names)
        made = Made(v, self.trace.step, cone, (), cone[-1:])
        routers = [m for n in cone for m in inner_nodes(n) if m.op == "router"]

        def cut(t: Tensor) -> Tensor:
            return t if slots is None else t[slots]

        def wide() -> Tensor:
            return cut(self.trace.in_float64(cone, v.name))

        def look(x: Value) -> Any:
            return recording.params[x.name] if x.name in recording.params else values[x.name]

        self.comparison.compare(made, got, cut(values[v.name]), wide, look, routers)


def _named(name: str, rank: int, known: Container[str]) -> str:
    """Return the name of a rank's value in the side-by-side program."""
    own = own_name(name, rank)
    return own if own in known else name


def joint_budget(ops: Iterable[str], dtype: str) -> float:
    """Return the error allowed to a value that several ops make: their errors are independent."""
    return sum((OPS[op].budget.at(dtype) ** 2 for op in ops), 0.0) ** 0.5


def local_errors(got: Tensor, want: Tensor) -> Tensor:
    """[..., n] -> f64[...]: largest difference of each row, relative to the larger of the wanted
    value and its row's rms. Rows of next to no size count relative to the whole. A value that is
    not a number stays so."""
    size = want.shape[-1]
    rows = max(1, BLOCK // size)
    ones, twos = (t.detach().reshape(-1, size).split(rows) for t in (got, want))
    squares = sum(float(t.double().pow(2).sum()) for t in twos)
    floor = 1e-3 * math.sqrt(squares / want.numel()) + 1e-30
    errors = [_block_errors(a, b, floor) for a, b in zip(ones, twos, strict=True)]
    return torch.cat(errors).view(want.shape[:-1])


def _block_errors(got: Tensor, want: Tensor, floor: float) -> Tensor:
    got, want = got.cpu().double(), want.cpu().double()
    rms = want.pow(2).mean(-1, keepdim=True).sqrt()
    return ((got - want).abs() / want.abs().maximum(rms).clamp(min=floor)).amax(-1)


@dataclass(frozen=True)
class Made:
    """How a value of a step came about: the nodes between it and values that were given; for a
    report, the nodes that make it, earlier and now."""

    value: Value
    step: GraphStep
    cone: tuple[Node, ...]
    before: tuple[Node, ...]
    after: tuple[Node, ...]

    def ops(self, dtype: str) -> str:
        """Return the ops that round, in order."""
        names = dict.fromkeys(n.op for n in self.cone if joint_budget([n.op], dtype))
        if len(names) > 3:
            return f"{len(self.cone)} ops up to {self.cone[-1].op}"
        return " + ".join(names) or self.cone[-1].op


@dataclass
class Comparison:
    """Holds errors against budgets, and reports the worst of each op and the first out of
    tolerance."""

    report: StageReport
    dtype: str

    def compare(
        self,
        made: Made,
        got: Tensor,
        want: Tensor,
        wide: Callable[[], Tensor],
        look: Look,
        routers: Sequence[Node] = (),
    ) -> None:
        """Compare a value. wide: it without rounding; look: operands of routers; routers: those
        whose near ties excuse a row. Whole numbers are equal, but for experts as probable."""
        step, maker = made.step, made.cone[-1]

        def valid(t: Tensor) -> Tensor:
            out: Tensor = to_comparable(step.without_padding(t, made.value.type))
            return out

        got, want = valid(got), valid(want)
        if not want.is_floating_point():
            if maker.op == "router" and not got.equal(want):
                self._decide_experts(made, got, want, _chances(step, maker, look))
            else:
                self.decide(made, 0.0 if got.equal(want) else math.inf, 0.0)
            return
        budget = joint_budget((n.op for n in made.cone), self.dtype)
        # Most values of right stages are equal: seen in a tenth of the time.
        alike = got.dtype == want.dtype and got.device == want.device
        if alike and torch.equal(got, want):
            self.decide(made, 0.0, budget)
            return
        errors = local_errors(got, want)
        if budget and not bool((errors <= budget).all()):
            excused = self._excused(step, routers, look, errors)
            self.report.excused += int((excused & ~(errors <= budget)).sum())
            errors = errors.masked_fill(excused, 0.0)
            rounding = local_errors(want, valid(wide())).masked_fill(excused, 0.0)
            budget = max(budget, MEASURED * float(rounding.max()))
        self.decide(made, float(errors.max()), budget)

    def _excused(
        self, step: GraphStep, routers: Sequence[Node], look: Look, errors: Tensor
    ) -> Tensor:
        """Return bool, as errors [B, S, ...]: rows in which a router chose by next to nothing."""
        excused = torch.zeros_like(errors, dtype=torch.bool)
        for router in routers:
            k = router.outputs[1].type.shape[-1]
            assert isinstance(k, int)
            best = _chances(step, router, look).sort(-1, descending=True).values
            # Where all are chosen, none is left that could have been.
            last, rest = best[..., k - 1 : k], best[..., k : k + 1]
            close = ((last - rest) / last <= CLOSE_EXPERTS[self.dtype]).any(-1)
            if close.shape == errors.shape[:2]:
                excused |= close.cpu().reshape(close.shape + (1,) * (errors.dim() - 2))
        return excused

    def _decide_experts(self, made: Made, got: Tensor, want: Tensor, chances: Tensor) -> None:
        """Compare chosen experts: others are as good where they are as probable."""
        one, two = chances.gather(-1, got), chances.gather(-1, want)
        error = float(((one - two).abs() / two).max())
        self.decide(made, error, CLOSE_EXPERTS[self.dtype])

    def decide(self, made: Made, error: float, budget: float) -> None:
        """Keep the result; after the first failure nothing is kept."""
        if self.report.first:
            return
        found = OpError(made.ops(self.dtype), error, budget, made.value.name)
        self.report.keep(found)
        if not error <= budget:
            before, after = (tuple(map(print_node, n)) for n in (made.before, made.after))
            where: dict[str, Any] = {"phase": made.step.phase, "at": made.step.at}
            self.report.first = Difference(**vars(found), **where, before=before, after=after)


def _chances(step: GraphStep, router: Node, look: Look) -> Tensor:
    """Return f32[B, S, experts]: the router's probabilities of all experts."""
    x, scale, proj, per_expert = map(look, router.inputs)
    reference = router.definition.reference
    assert reference
    every, ones = {**router.attrs, "top_k": proj.shape[0]}, torch.ones_like(per_expert)
    weights, index = reference(x, scale, proj, ones, **every)
    chances = torch.zeros_like(weights).scatter(-1, index, weights)
    return step.without_padding(chances, router.outputs[1].type)
