"""The cost of a request: bytes and FLOPs of its steps by the cost model, experts counted.

The steps are those that a session makes: a prompt in chunks, of which only the last computes
logits, and a chunk of one token is a decode step.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch

from g4ir.check.reference import reference_engine, watched
from g4ir.engine.engine import Engine
from g4ir.ir.flatten import flatten
from g4ir.ir.graph import Graph
from g4ir.ir.rewrite import drop_dead
from g4ir.plan.cost import Cost, NodeCost, Roof, floor, graph_costs, total

from .measure import mean
from .runners import EngineRunner, Workload, pieces
from .schema import PhaseWork, WorkFacts

#: decode steps whose cost is worked out, spread evenly over a request
DECODE_STEPS = 16


@dataclass(frozen=True)
class GraphRun:
    """One run of a graph: `new` tokens a row on rows that hold `held`; `distinct` is the mean
    number of experts that a layer's tokens chose, where it was counted."""

    phase: str
    new: int
    held: int
    logits: bool
    distinct: float | None = None


@dataclass(frozen=True)
class PhaseCost:
    """Runs of a graph and the costs of their nodes; a prompt or a step is `count`-th of them."""

    runs: tuple[tuple[GraphRun, list[NodeCost]], ...]
    count: int = 1

    def cost(self) -> Cost:
        """Return the cost of a whole prompt, or of a step on average."""
        whole = sum((total(costs) for _, costs in self.runs), Cost())
        return Cost(*(v // self.count for v in asdict(whole).values()))

    def floor(self, roof: Roof) -> float:
        """Return its seconds at the roofline: the runs follow each other."""
        return sum(floor(total(costs), roof).seconds for _, costs in self.runs) / self.count

    def facts(self, roof: Roof) -> PhaseWork:
        """Return what a report keeps."""
        cost = self.cost()
        bound = floor(cost, roof).bound
        return PhaseWork(**asdict(cost), floor_ms=self.floor(roof) * 1e3, bound=bound)


@dataclass(frozen=True)
class Work:
    """The chunks of a prompt, and decode steps that stand for all of them."""

    prefill: PhaseCost
    decode: PhaseCost
    experts: dict[str, Any] | None

    def facts(self, roof: Roof) -> WorkFacts:
        """Return the part of the work that a report keeps."""
        return WorkFacts(self.prefill.facts(roof), self.decode.facts(roof), self.experts)


def request_chunks(w: Workload, size: int) -> Iterator[GraphRun]:
    """Yield the runs of a request in an engine whose chunks have `size` tokens."""
    end = w.context + w.input_len
    for at in range(w.context, end, size):
        new = min(size, end - at)
        yield GraphRun("decode" if new == 1 else "prefill", new, at, at + new == end)
    for at in range(end, w.fed):
        yield GraphRun("decode", 1, at, True)


def find_work(engine: Engine, w: Workload, tokens: torch.Tensor) -> Work:
    """Return the cost of a request. Experts are counted by the interpreter, which runs the same
    tokens once more; an engine without experts is not run."""
    chunks, moe = list(request_chunks(w, engine.limits.prefill_chunk)), engine.spec.text.moe
    if moe:
        chunks = _counted(engine, w, tokens, chunks)
    prompts, steps = chunks[: 1 - w.output_len], chunks[1 - w.output_len :]
    count = min(DECODE_STEPS, len(steps))
    some = [steps[i * len(steps) // count] for i in range(count)]
    experts: dict[str, Any] | None = None
    if moe:
        experts = {
            "source": "counted by the interpreter on the same tokens",
            "experts": moe.num_experts,
            "per_token": moe.top_k_experts,
        }
        for phase, many in (("prefill", prompts), ("decode", steps)):
            seen = [c.distinct for c in many if c.distinct is not None]
            experts[f"{phase}_distinct"] = mean(seen)
    prefill, decode = (
        tuple((c, chunk_costs(engine, c, w.batch)) for c in many) for many in (prompts, some)
    )
    return Work(PhaseCost(prefill), PhaseCost(decode, count), experts)


def chunk_costs(engine: Engine, c: GraphRun, batch: int) -> list[NodeCost]:
    """Return the costs of the nodes that a run of a chunk needs."""
    g = _needed(engine.program.graphs[c.phase], c)
    return graph_costs(g, B=batch, S=c.new, C=c.held, experts=c.distinct)


def _needed(g: Graph, c: GraphRun) -> Graph:
    """Return the nodes that run: all for logits, else those that the caches follow from."""
    return g if c.logits else drop_dead(replace(g, outputs=()))


def _counted(
    engine: Engine, w: Workload, tokens: torch.Tensor, chunks: list[GraphRun]
) -> list[GraphRun]:
    """Return the chunks with their `distinct`. Fused ops are opened: each router is a node."""
    engine = replace(engine, program=engine.program.map(flatten))
    graphs = engine.program.graphs
    names = {n.outputs[1].name for g in graphs.values() for n in g.find("router")}
    counts: dict[tuple[range, str], int] = {}

    def see(chunk: range, name: str, t: torch.Tensor) -> None:
        if name in names:
            counts[chunk, name] = int(t.unique().numel())

    runner = EngineRunner(watched(reference_engine(engine, held=True), see), w.batch)
    runner.hold(tokens[:, : w.context])
    for piece in pieces(w, tokens):
        runner.step(piece)
    found = []
    for c in chunks:
        place = range(c.held, c.held + c.new)
        routers = _needed(graphs[c.phase], c).find("router")
        ran = [counts[place, n.outputs[1].name] for n in routers]
        found.append(replace(c, distinct=mean(ran)) if ran else c)
    return found
