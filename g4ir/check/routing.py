"""Logits of a model with routers, compared on equal choices of experts.

In 16 bits a router between two nearly tied experts takes either, and the logits of that token and
of later ones then move by far more than rounding. How many rows that concerns is luck. So a batch
with too many far rows is judged in two parts. Each side is compared with float64 that takes the
same experts as that side: what remains is rounding. And the engine's choices have to be near ties
by float64's probabilities, and hardly more of them than the reference's.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from g4ir.engine.engine import Engine
from g4ir.ir.distance import (
    FAR_SHARE,
    FAR_TIMES,
    Agreement,
    Anchor,
    Rounding,
    Tolerance,
    row_errors,
)
from g4ir.ir.flatten import inner_nodes
from g4ir.ir.graph import Node
from g4ir.ir.interpret import Run, run_node

from .compare import CLOSE_EXPERTS
from .peers import EnginePeer
from .reference import float64_engine, reference_engine, with_run
from .tokens import Turns

Tensor = torch.Tensor
#: graph -> its routers, those inside fused ops too
Routers = Mapping[str, Sequence[Node]]


@dataclass
class Choices:
    """Experts i64[B, S, k] of each router, in order of computation. `gaps`: by how much the chosen
    probabilities are below float64's best ones, relative to these; 0 for equal choices."""

    indices: list[Tensor] = field(default_factory=list)
    gaps: list[Tensor] = field(default_factory=list)

    def record(self, n: Node, operands: list[Any]) -> tuple[Any, ...]:
        """Run a node, and append the experts of a router."""
        outputs = run_node(n, operands, self.record)
        if n.op == "router":
            self.indices.append(outputs[1])
        return outputs

    def forced(self) -> Run:
        """Return a function that runs a node, and routers with these experts; it appends gaps."""
        indices = iter(self.indices)

        def run(n: Node, operands: list[Any]) -> tuple[Any, ...]:
            if n.op != "router":
                return run_node(n, operands, run)
            *inputs, per_expert = operands
            every = replace(n, attrs={**n.attrs, "top_k": len(per_expert)})
            best, order = run_node(every, [*inputs, torch.ones_like(per_expert)])
            index = next(indices)
            chosen = torch.zeros_like(best).scatter(-1, order, best).gather(-1, index)
            gap = 1 - chosen.sort(-1, descending=True).values / best[..., : index.shape[-1]]
            self.gaps.append(gap.amax(-1).flatten())
            return chosen / chosen.sum(-1, keepdim=True) * per_expert[index], index

        return run

    def ties(self) -> tuple[float, float]:
        """Return the share of choices that are not float64's, and the largest gap."""
        gaps = torch.cat(self.gaps)
        return float((gaps > 0).double().mean()), float(gaps.max())


@dataclass(frozen=True)
class Routing:
    """Choices of experts that are not float64's on the same inputs: share of all choices, and
    largest gap, of the engine and of the reference."""

    share: float
    gap: float
    reference_share: float
    reference_gap: float
    max_gap: float

    @property
    def ok(self) -> bool:
        """Whether the engine's are near ties, and not many more than the reference's."""
        max_share = FAR_TIMES * self.reference_share + FAR_SHARE
        return self.gap <= self.max_gap and self.share <= max_share

    def text(self) -> str:
        """Return a line."""
        shares = f"{self.share:.1%} of choices, the reference {self.reference_share:.1%}"
        gaps = f"probabilities at most {self.gap:.1e} and {self.reference_gap:.1e} apart"
        return f"near ties taken otherwise than by float64: {shares}; {gaps} of {self.max_gap:.1e}"


def equal_experts(
    engine: Engine, turns: Turns, got: Tensor, rounds: Tensor, rounding: Rounding
) -> tuple[Agreement, Agreement, Routing] | None:
    """Compare rows `got` of turns, and `rounds`, the same with verification steps, on equal
    experts. None if the model has no routers, float64 is not the anchor, or the backend does not
    expose the routers' inputs or computes other rows while it does."""
    routers = {
        name: [m for n in g.nodes for m in inner_nodes(n) if m.op == "router"]
        for name, g in engine.program.graphs.items()
    }
    if engine.ranks > 1 or rounding.reason or not any(routers.values()):
        return None
    local, chosen = Choices(), Choices()
    reference: Any = reference_engine(engine, run=chosen.record)
    params = reference.runtime.params
    want = EnginePeer(reference).logits(turns)

    def exact(method: str, choices: Choices) -> Tensor:
        peer = EnginePeer(float64_engine(engine, run=choices.forced()))
        rows: Tensor = getattr(peer, method)(turns)
        return rows

    anchor = Anchor("float64 with the same experts", exact("logits", chosen), ())
    measured = anchor.rounding(want, engine.dtype)
    # A row's limit stays: of equal scores the backend may take another one than is found here.
    tolerance = Tolerance(rounding=replace(measured, worst=max(rounding.worst, measured.worst)))
    sides = [("logits", got)]
    if not torch.equal(rounds, got):
        sides.append(("in_rounds", rounds[len(rounds) - turns.steps :]))
    rows = list[Tensor]()
    for method, side in sides:
        choices = Choices()
        try:
            again = getattr(EnginePeer(_watched(engine, routers, params, choices)), method)(turns)
        except KeyError:
            return None
        if not torch.equal(again, side):
            return None
        rows.append(exact(method, choices))
        local.gaps += choices.gaps
    origin = torch.cat((rows[0][: len(got) - len(rows[-1])], rows[-1]))
    routing = Routing(*local.ties(), *chosen.ties(), CLOSE_EXPERTS[engine.dtype])
    plain, again = (
        Agreement(row_errors(side, side_rows), tolerance)
        for side, side_rows in ((got, rows[0]), (rounds, origin))
    )
    return plain, again, routing


def _watched(
    engine: Engine, routers: Routers, params: Mapping[str, Tensor], choices: Choices
) -> Engine:
    """Return the engine, which records choices, computed from its routers' inputs."""

    def run(phase: str, feeds: Any, state: Any, context: int, logits: bool) -> Any:
        values = dict[str, Tensor]()

        def watch(name: str, t: Tensor) -> None:
            values[name] = t.clone()

        outputs = engine.runtime.run(phase, feeds, state, context, True, watch)
        for n in routers[phase]:
            x, *weights = (v.name for v in n.inputs)
            choices.record(n, [values[x], *(params[name] for name in weights)])
        return outputs if logits else None

    return with_run(engine, run)
