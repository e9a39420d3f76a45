"""Compares a stage's values with those of the stage before it, node by node.

Rounding grows from layer to layer, so whole runs are not compared. A stage is "forced" by the stage
before it: names identify values across passes, and each node takes its inputs from the earlier
stage's values of the same names. Its output thus has no errors of earlier nodes, and is compared
within its op's tolerance. Values that only the new stage has (a packed projection, a KV cache) are
tested by the next value that both have. A backend is forced in the same way after each compiled
region, its caches after each step. Several ranks are interpreted in one graph.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Container, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch

from g4ir.backends.base import GraphRun, Tensors
from g4ir.engine.engine import Engine
from g4ir.engine.ranks import run_watched, slots_of, watch_cache
from g4ir.engine.session import Session
from g4ir.ir.flatten import inner_nodes
from g4ir.ir.graph import Node, Value, print_node
from g4ir.ir.interpret import run_node
from g4ir.model.decoder import VERIFY
from g4ir.model.towers import is_tower
from g4ir.ops import OPS
from g4ir.ops.kv_quant import to_comparable
from g4ir.ops.types import Type
from g4ir.parallel.shard import rank_name

from .reference import with_run
from .stage_report import Difference, OpError, StageReport
from .stages import BACKEND, GraphStep, Recording, Series, Stage, StageRun, Trace, stored_stage

Tensor = torch.Tensor
#: input of a node -> its tensor
Operand = Callable[[Value], Any]
#: calls `prefill`, `decode` or `verify` of a session
Step = Callable[[Session], Any]
#: an error out of tolerance is accepted up to this many times the expected value's rounding error,
#: measured against float64 on the same inputs. Each of the two computations has such an error;
#: rounding errors are random, and vary where they are amplified (softmax over large scores)
MEASURED = 4.0
#: relative distance of the probabilities of two experts below which either may be chosen. In bf16
#: four times the rounding of a score of 8 (2^-4): compiled regions round scores where fused ops of
#: the backend do not
CLOSE_EXPERTS = {"f32": 1e-3, "bf16": 2.0**-2}
#: values compared at once, in float64
BLOCK = 1 << 24
#: maximum tokens of a chunk: all of its intermediate values are stored
CHUNK = 512


def compare_session(
    engine: Engine, reference: Engine, steps: Sequence[Step], tokens: int
) -> StageReport:
    """Run `steps` of a session of one sequence on an engine (`tokens` tokens in all, in chunks of
    at most CHUNK), forced by the interpreter's values on the params of `stored_stage`; report on
    the values up to the first out of tolerance."""
    run = StageRun(stored_stage(engine, reference), tokens, engine)
    comparison = Comparison(StageReport(BACKEND), engine.dtype)

    def forced(step: GraphRun, state: Any) -> Tensors | None:
        phase, feeds = step.phase, step.feeds
        at, valid = (int(feeds[name].flatten()[0]) for name in ("positions", "lengths"))
        padded = "M" if phase == VERIFY else "S"
        trace = run.trace(GraphStep(phase, at, step.context, feeds, valid, padded))
        runtime = ForcedRuntime(trace, comparison)
        runtime.run(engine, state)
        comparison.report.phases[phase] = len(runtime.names) > len(trace.recording.graph.inputs)
        return {"logits": trace.values["logits"]} if step.logits else None

    limits = replace(engine.limits, prefill_chunk=min(engine.limits.prefill_chunk, CHUNK))
    session = with_run(engine.configured(limits=limits), forced).session()
    for step in steps:
        step(session)
        if comparison.report.first:
            break
    return comparison.report


def compare_stage(
    old: Stage, new: Stage | None, series: Sequence[Series], engine: Engine
) -> StageReport:
    """Compare the stage `new`, or for None the engine's runtime, forced by the values of `old`, in
    each series of steps, up to the first value out of tolerance."""
    comparison = Comparison(StageReport(new.name if new else BACKEND), engine.dtype)
    for steps in series:
        slots = max(c.end for c in steps)
        run = StageRun(old, slots, engine)
        state: Any = None
        if new:
            state = new.caches(slots, engine.device)
        elif not is_tower(steps[0].phase):
            state = engine.runtime.new_state(steps[0].texts)
        for step in steps:
            trace = run.trace(step)
            if new:
                recording = new.recordings[step.phase]
                state = ForcedStage(trace, comparison, recording, state, engine.device).run()
            else:
                ForcedRuntime(trace, comparison).run(engine, state)
            if comparison.report.first:
                return comparison.report
    return comparison.report


@dataclass
class ForcedStage:
    """A stage whose nodes take their inputs from the trace's values of the same names (`shared`).
    Their other inputs are KV caches (`state`), params and values of this stage (`values`)."""

    trace: Trace
    comparison: Comparison
    recording: Recording
    state: dict[str, Tensor]
    device: str

    def __post_init__(self) -> None:
        self.earlier, self.values = self.trace.recording, dict(self.recording.params)
        types = self.recording.types
        self.shared = {k for k, t in types.items() if self._reference(k, t) is not None}

    def run(self) -> dict[str, Tensor]:
        """Compare the stage's values with the trace's, and return its caches after the step."""
        params, earlier = self.recording.params, self.earlier
        same = {k for k in params if params[k] is earlier.params.get(k)} | self.shared
        for n in self.recording.nodes:
            if self.comparison.report.first:
                return self.state
            # The same node on the same values is not computed again.
            if not (earlier.has(n) and all(v.name in same for v in n.inputs)):
                self._evaluate(n)
        return self.state | {k: self._operand(v) for k, v in self.recording.graph.next.items()}

    def _reference(self, name: str, t: Type, value: Tensor | None = None) -> Tensor | None:
        """Return the trace's value `name` (or `value` instead) for comparison with a value of type
        `t` of the new stage: whole if the types are equal, its last valid row if `t` has only that.
        None if the trace has no such value, or the types differ otherwise."""
        if name not in self.earlier.types:
            return None
        old = self.earlier.types[name]
        value = self.trace.values[name] if value is None else value
        if old == t:
            return value
        axis = _narrowed_axis(old, t)
        return None if axis is None else value.narrow(axis, self.trace.step.valid - 1, 1)

    def _operand(self, v: Value) -> Any:
        if v.name in self.state:
            return self.state[v.name]
        return self._reference(v.name, v.type) if v.name in self.shared else self.values[v.name]

    def _evaluate(self, n: Node) -> None:
        for v, t in zip(n.outputs, run_node(n, [*map(self._operand, n.inputs)]), strict=True):
            self.values[v.name] = t.to(self.device)
            if v.name in self.earlier.types:
                self._compare(v, self.values[v.name])

    def _compare(self, v: Value, got: Tensor) -> None:
        want, earlier = self._reference(v.name, v.type), self.earlier
        cone, before = (r.cone(v.name, self.shared) for r in (self.recording, earlier))
        after = self.recording.with_params(cone)
        origin = Derivation(v, self.trace.step, cone, earlier.with_params(before), after)
        if want is not None:
            exact = partial(self._exact, origin)
            self.comparison.compare(origin, got, want, exact, self._operand)
        # A cache may have another layout: its readers are compared instead.
        elif v.name not in earlier.cached:
            self.comparison.add(origin, math.inf, 0.0)

    def _exact(self, origin: Derivation) -> Tensor:
        """Return the trace's value, recomputed in float64 by the trace's nodes from the shared
        values that the new stage's cone reads."""
        v, inputs = origin.value, {v.name for n in origin.cone for v in n.inputs} & self.shared
        value = self.trace.in_float64(self.earlier.cone(v.name, inputs), v.name)
        out = self._reference(v.name, v.type, value)
        assert out is not None
        return out


def _narrowed_axis(old: Type, new: Type) -> int | None:
    """Return the axis on which the new type has only the last row, or None."""
    if old.dtype != new.dtype or old.rank != new.rank:
        return None
    axes = [i for i, (a, b) in enumerate(zip(old.shape, new.shape, strict=True)) if a != b]
    fits = len(axes) == 1 and (old.shape[axes[0]], new.shape[axes[0]]) == ("S", 1)
    return axes[0] if fits else None


@dataclass
class ForcedRuntime:
    """Compares a runtime's values, and replaces them by the interpreter's. `names`: the values that
    the runtime took from the interpreter."""

    trace: Trace
    comparison: Comparison
    names: set[str] = field(default_factory=set)

    def run(self, engine: Engine, state: Any) -> None:
        """Run the step; `state` is None for a tower."""
        graph, step, after = self.trace.recording.graph, self.trace.step, self.trace.after
        feeds = {v.name: self.trace.values[v.name].clone() for v in graph.inputs}
        self.names |= feeds.keys()
        if state is None:
            (soft,) = graph.outputs
            self.compare(soft, engine.runtime.encode(step.phase, feeds))
            return
        run = GraphRun(step.phase, feeds, step.end)
        run_watched(engine.runtime, run, state, self.watch)
        for name in engine.program.graphs[step.phase].next:
            # Only the last `slots` positions up to the step's end are compared: others, such as
            # padding, are never read.
            slots = len(after[_joint_name(name, 0, after)])
            positions = range(max(step.end - slots, 0), step.end)
            watch_cache(state, name, positions, partial(self.watch_cache, positions))

    def watch(self, rank: int, name: str, got: Tensor) -> None:
        """Compare one value of a rank's runtime, and replace it by the interpreter's; KV caches are
        compared after the step."""
        recording = self.trace.recording
        name = _joint_name(name, rank, recording.makers)
        if name not in recording.cached:
            self.compare(Value(name, recording.types[name]), got)
            got.copy_(self.trace.values[name])
            self.names.add(name)

    def watch_cache(self, positions: range, rank: int, name: str, got: Tensor) -> None:
        """Compare these positions of a rank's cache, and replace them by the interpreter's."""
        name = _joint_name(name, rank, self.trace.after)
        cache = self.trace.after[name]
        slots = slots_of(positions, cache)
        self.compare(self.trace.recording.graph.next[name], got, slots)
        got.copy_(cache[slots])

    def compare(self, v: Value, got: Tensor, slots: Sequence[int] | None = None) -> None:
        """Compare a value (of a cache only these `slots`). Rows are excused if a router between it
        and the values in `names` chose between nearly tied experts, also within fused ops."""
        tensors = self.trace.tensors
        cone = self.trace.recording.cone(v.name, self.names)
        origin = Derivation(v, self.trace.step, cone, (), cone[-1:])
        routers = [m for n in cone for m in inner_nodes(n) if m.op == "router"]

        def select(t: Tensor) -> Tensor:
            return t if slots is None else t[slots]

        def exact() -> Tensor:
            return select(self.trace.in_float64(cone, v.name))

        want = select(tensors[v.name])
        self.comparison.compare(origin, got, want, exact, lambda x: tensors[x.name], routers)


def _joint_name(name: str, rank: int, names: Container[str]) -> str:
    """Return the name of a rank's value in the program of all ranks (parallel/shard.py: unroll)."""
    local = rank_name(name, rank)
    return local if local in names else name


def joint_budget(ops: Iterable[str], dtype: str) -> float:
    """Return the tolerance of a value computed by several ops, whose errors are independent."""
    return sum((OPS[op].budget.at(dtype) ** 2 for op in ops), 0.0) ** 0.5


def local_errors(got: Tensor, want: Tensor) -> Tensor:
    """[..., n] -> f64[...]: largest relative error in each row; the denominator is the maximum of
    the absolute expected value, its row's RMS, and 1e-3 of the whole tensor's RMS. NaN stays
    NaN."""
    size = want.shape[-1]
    rows = max(1, BLOCK // size)
    blocks, wants = (t.detach().reshape(-1, size).split(rows) for t in (got, want))
    squares = sum(float(t.double().pow(2).sum()) for t in wants)
    floor = 1e-3 * math.sqrt(squares / want.numel()) + 1e-30
    errors = [_block_errors(a, b, floor) for a, b in zip(blocks, wants, strict=True)]
    return torch.cat(errors).view(want.shape[:-1])


def _block_errors(got: Tensor, want: Tensor, floor: float) -> Tensor:
    got, want = got.cpu().double(), want.cpu().double()
    rms = want.pow(2).mean(-1, keepdim=True).sqrt()
    return ((got - want).abs() / want.abs().maximum(rms).clamp(min=floor)).amax(-1)


@dataclass(frozen=True)
class Derivation:
    """How a value of a step is computed: `cone` are the nodes between it and forced values; for the
    report, the nodes that compute it `before` in the earlier stage and `after` in this one."""

    value: Value
    step: GraphStep
    cone: tuple[Node, ...]
    before: tuple[Node, ...]
    after: tuple[Node, ...]

    def ops(self, dtype: str) -> str:
        """Return the ops of the cone that round, joined by " + ", or its last op if none does; for
        more than three, how many nodes the cone has and its last op."""
        names = dict.fromkeys(n.op for n in self.cone if joint_budget([n.op], dtype))
        if len(names) > 3:
            return f"{len(self.cone)} ops up to {self.cone[-1].op}"
        return " + ".join(names) or self.cone[-1].op


@dataclass
class Comparison:
    """Compares values within their ops' tolerances; the report has the worst error of each op and
    the first value out of tolerance."""

    report: StageReport
    dtype: str

    def compare(
        self,
        origin: Derivation,
        got: Tensor,
        want: Tensor,
        exact: Callable[[], Tensor],
        operand: Operand,
        routers: Sequence[Node] = (),
    ) -> None:
        """Compare a value. `exact` recomputes `want` in float64; `operand` returns inputs of
        routers; `routers`: nodes whose near ties excuse a row. Integers must be equal, except
        indices of almost equally probable experts."""
        step, maker = origin.step, origin.cone[-1]

        def valid(t: Tensor) -> Tensor:
            return to_comparable(step.without_padding(t, origin.value.type))

        got, want = valid(got), valid(want)
        if not want.is_floating_point():
            if maker.op == "router" and not got.equal(want):
                self._compare_experts(origin, got, want, _probabilities(step, maker, operand))
            else:
                self.add(origin, 0.0 if got.equal(want) else math.inf, 0.0)
            return
        budget = joint_budget((n.op for n in origin.cone), self.dtype)
        # Most values of a correct stage are equal: this test takes a tenth of local_errors' time.
        same_type = got.dtype == want.dtype and got.device == want.device
        if same_type and torch.equal(got, want):
            self.add(origin, 0.0, budget)
            return
        errors = local_errors(got, want)
        if budget and not bool((errors <= budget).all()):
            excused = self._excused(step, routers, operand, errors)
            self.report.excused += int((excused & ~(errors <= budget)).sum())
            errors = errors.masked_fill(excused, 0.0)
            rounding = local_errors(want, valid(exact())).masked_fill(excused, 0.0)
            budget = max(budget, MEASURED * float(rounding.max()))
        self.add(origin, float(errors.max()), budget)

    def _excused(
        self, step: GraphStep, routers: Sequence[Node], operand: Operand, errors: Tensor
    ) -> Tensor:
        """Return bool in the shape of `errors` [B, S, ...]: rows in which a router's choice is a
        near tie."""
        excused = torch.zeros_like(errors, dtype=torch.bool)
        for router in routers:
            k = router.outputs[1].type.shape[-1]
            assert isinstance(k, int)
            best = _probabilities(step, router, operand).sort(-1, descending=True).values
            # `following` is empty, and nothing excused, if all experts are chosen.
            last, following = best[..., k - 1 : k], best[..., k : k + 1]
            close = ((last - following) / last <= CLOSE_EXPERTS[self.dtype]).any(-1)
            if close.shape == errors.shape[:2]:
                excused |= close.cpu().reshape(close.shape + (1,) * (errors.dim() - 2))
        return excused

    def _compare_experts(
        self, origin: Derivation, got: Tensor, want: Tensor, probabilities: Tensor
    ) -> None:
        """Compare chosen experts (indices i64[B, S, top_k]) by their probabilities f32[B, S,
        experts]."""
        chosen, best = probabilities.gather(-1, got), probabilities.gather(-1, want)
        error = float(((chosen - best).abs() / best).max())
        self.add(origin, error, CLOSE_EXPERTS[self.dtype])

    def add(self, origin: Derivation, error: float, budget: float) -> None:
        """Add a result to the report; after the first failure none is added."""
        if self.report.first:
            return
        result = OpError(origin.ops(self.dtype), error, budget, origin.value.name)
        self.report.add(result)
        if not error <= budget:
            before, after = (tuple(map(print_node, n)) for n in (origin.before, origin.after))
            where: dict[str, Any] = {"phase": origin.step.phase, "at": origin.step.at}
            self.report.first = Difference(**vars(result), **where, before=before, after=after)


def _probabilities(step: GraphStep, router: Node, operand: Operand) -> Tensor:
    """Return f32[B, S, experts]: the router's probabilities of all experts."""
    x, scale, proj, per_expert = map(operand, router.inputs)
    reference = router.definition.reference
    assert reference
    attrs, ones = {**router.attrs, "top_k": proj.shape[0]}, torch.ones_like(per_expert)
    weights, index = reference(x, scale, proj, ones, **attrs)
    probabilities = torch.zeros_like(weights).scatter(-1, index, weights)
    return step.without_padding(probabilities, router.outputs[1].type)
