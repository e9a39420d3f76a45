"""Reports of `verify --each-pass`: errors of single values, held against their ops' budgets."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch

from g4ir.ir.graph import Node, Value, print_node
from g4ir.ops import OPS
from g4ir.ops.finite import require_finite
from g4ir.ops.kv_quant import comparable

from .stages import GraphStep

Tensor = torch.Tensor
#: values compared at once, in float64
BLOCK = 1 << 24
#: what a value out of tolerance may still differ by: this many times its own rounding, measured
#: against float64 on the same inputs. Two computations are off by one such error each; rounding
#: is a matter of luck, and where it is amplified (softmax over large scores) the luck varies.
MEASURED = 4.0
#: two experts whose probabilities lie this close (relative) may change places: four times what
#: moves a score. Scores of a segment are rounded where the backend's fused ops keep more digits.
CLOSE_EXPERTS = {"f32": 1e-3, "f16": 2.0**-5, "bf16": 2.0**-2}


def joint_budget(ops: Iterable[str], dtype: str) -> float:
    """Return the error allowed to a value that several ops make: their errors are independent."""
    return sum((OPS[op].budget.at(dtype) ** 2 for op in ops), 0.0) ** 0.5


@dataclass(frozen=True)
class OpError:
    """The largest error of an op (or of several in a row), at `value`, and what is allowed."""

    ops: str
    error: float
    budget: float
    value: str

    @property
    def share(self) -> float:
        """The error as a share of the budget; infinity where it is not a number."""
        if math.isnan(self.error) or (self.error and not self.budget):
            return math.inf
        return self.error / self.budget if self.budget else 0.0


@dataclass(frozen=True)
class Difference(OpError):
    """A value out of tolerance: the nodes that made it in the earlier stage and those that make it
    now, from values that both stages have."""

    phase: str
    at: int
    before: tuple[str, ...]
    after: tuple[str, ...]

    def text(self) -> str:
        """Describe what moved, how far, and the nodes that make it in either stage."""
        lines = [
            f"%{self.value} ({self.ops}), in {self.phase} at token {self.at}: error "
            f"{self.error:.1e}, tolerance {self.budget:.1e}",
            *(f"  - {line}" for line in self.before),
            *(f"  + {line}" for line in self.after),
        ]
        return "\n".join(lines)


@dataclass(frozen=True)
class StageReport:
    """One pass, or the backend: tensors compared, and the worst of each op. Nothing is compared of
    a pass that is `meant` to change what is computed: those after it are, with it."""

    name: str
    values: int = 0
    worst: tuple[OpError, ...] = ()
    first: Difference | None = None
    excused: int = 0
    meant: bool = False

    @property
    def ok(self) -> bool:
        return self.first is None

    def text(self) -> str:
        moved = [w for w in self.worst if w.error != 0]
        what = f"{self.values} values" if self.values else "changes nothing"
        what = "rounds what caches hold, as asked: not compared" if self.meant else what
        what += "" if moved or not self.values else ", bit for bit"
        more = f", {self.excused} rows left to close calls of a router" if self.excused else ""
        lines = [f"  {self.name:20} {'ok' if self.ok else 'FAILED'}, {what}{more}"]
        lines += [f"    {w.ops:32} {w.error:8.1e} of {w.budget:.1e}  %{w.value}" for w in moved]
        return "\n".join(lines)


@dataclass(frozen=True)
class StagesReport:
    """All stages up to the first that fails. `rounds` are tokens that were verified at once.
    `media` are graphs for media that were run too, `left_out` those that were not, `unknown` those
    whose weights before packing are lost."""

    engine: str
    tokens: int
    chunks: tuple[int, ...]
    stages: tuple[StageReport, ...]
    media: tuple[str, ...]
    rounds: tuple[int, ...]
    unknown: tuple[str, ...]
    left_out: tuple[str, ...]

    @property
    def ok(self) -> bool:
        return self.culprit is None

    @property
    def culprit(self) -> StageReport | None:
        """The first stage that moves a value by more than its op's budget."""
        return next((s for s in self.stages if not s.ok), None)

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        out = {**asdict(self), "ok": self.ok, "failed": self.culprit and self.culprit.name}
        for row, s in zip(out["stages"], self.stages, strict=True):
            row["ok"] = s.ok
        return out

    def text(self) -> str:
        """Return a few lines per stage."""
        sizes = ", ".join(map(str, self.chunks))
        lines = [f"{self.engine}, pass by pass on {self.tokens} tokens in chunks of {sizes}"]
        for label, names in (
            ("also in rounds of", self.rounds),
            ("also", self.media),
            ("not checked:", self.left_out),
            ("not checked without --checkpoint DIR:", self.unknown),
        ):
            lines += [f"  {label} {', '.join(map(str, names))}"] if names else []
        lines += [s.text() for s in self.stages]
        if self.culprit and self.culprit.first:
            lines.append(f"{self.culprit.name} moves {self.culprit.first.text()}")
        return "\n".join([*lines, "ok" if self.ok else "FAILED"])


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
class StageComparison:
    """Holds errors against budgets; keeps the worst of each op and the first out of tolerance."""

    name: str
    dtype: str
    values: int = 0
    excused: int = 0
    worst: dict[str, OpError] = field(default_factory=dict)
    first: Difference | None = None

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
        whose near ties excuse a row. Whole numbers are equal, but for experts as probable. Raises
        CheckError if the expected value is NaN or infinite, which is not a fault of the stage."""
        step, maker = made.step, made.cone[-1]

        def valid(t: Tensor) -> Tensor:
            out: Tensor = comparable(step.without_padding(t, made.value.type))
            return out

        got, want = valid(got), valid(want)
        if not want.is_floating_point():
            if maker.op == "router" and not got.equal(want):
                self._decide_experts(made, got, want, _chances(step, maker, look))
            else:
                self.decide(made, 0.0 if got.equal(want) else math.inf, 0.0)
            return
        what = f"%{made.value.name}, in {step.phase} at token {step.at}, before {self.name}"
        require_finite(want, what, self.dtype)
        budget = joint_budget((n.op for n in made.cone), self.dtype)
        # Most values of right stages are equal: seen in a tenth of the time.
        alike = got.dtype == want.dtype and got.device == want.device
        if alike and torch.equal(got, want):
            self.decide(made, 0.0, budget)
            return
        errors = local_errors(got, want)
        if budget and not bool((errors <= budget).all()):
            excused = self._excused(step, routers, look, errors)
            self.excused += int((excused & ~(errors <= budget)).sum())
            errors = errors.masked_fill(excused, 0.0)
            rounding = local_errors(want, valid(wide())).masked_fill(excused, 0.0)
            budget = max(budget, MEASURED * float(rounding.max()))
        self.decide(made, float(errors.max()), budget)

    def _excused(
        self,
        step: GraphStep,
        routers: Sequence[Node],
        look: Callable[[Value], Any],
        errors: Tensor,
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
        if self.first:
            return
        self.values += 1
        found = OpError(made.ops(self.dtype), error, budget, made.value.name)
        kept = self.worst.get(found.ops)
        if kept is None or found.share > kept.share:
            self.worst[found.ops] = found
        if not error <= budget:
            before, after = (tuple(map(print_node, n)) for n in (made.before, made.after))
            where: dict[str, Any] = {"phase": made.step.phase, "at": made.step.at}
            self.first = Difference(**vars(found), **where, before=before, after=after)

    def report(self) -> StageReport:
        """Return what was found."""
        worst = tuple(self.worst.values())
        return StageReport(self.name, self.values, worst, self.first, self.excused)


def _chances(step: GraphStep, router: Node, look: Callable[[Value], Any]) -> Tensor:
    """Return f32[B, S, experts]: the router's probabilities of all experts."""
    x, scale, proj, per_expert = map(look, router.inputs)
    reference = router.definition.reference
    assert reference
    every, ones = {**router.attrs, "top_k": proj.shape[0]}, torch.ones_like(per_expert)
    weights, index = reference(x, scale, proj, ones, **every)
    chances = torch.zeros_like(weights).scatter(-1, index, weights)
    return step.without_padding(chances, router.outputs[1].type)
