"""The cost of a request: bytes and FLOPs of its steps by the cost model, experts counted.

The steps are those that a session makes: a prompt in chunks, of which only the last computes
logits, and a chunk of one token is a decode step.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch

from g4ir.check.reference import reference_engine
from g4ir.check.watch import ChunkPosition, watching
from g4ir.engine.engine import Engine
from g4ir.ir.flatten import flatten
from g4ir.ir.graph import Graph
from g4ir.plan.cost import Cost, NodeCost, Roof, floor, graph_costs, total

from .runners import EngineRunner, pieces
from .schema import PhaseWork, WorkFacts
from .stats import mean
from .workload import Workload

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
class Work:
    """The chunks of a prompt, and decode steps that stand for all of them, with their costs."""

    prefill: tuple[tuple[GraphRun, list[NodeCost]], ...]
    decode: tuple[tuple[GraphRun, list[NodeCost]], ...]
    experts: dict[str, Any] | None

    def prefill_cost(self) -> Cost:
        """Return the cost of a whole prompt."""
        return sum((total(c) for _, c in self.prefill), Cost())

    def decode_cost(self) -> Cost:
        """Return the cost of a step, on average."""
        whole = sum((total(c) for _, c in self.decode), Cost())
        return Cost(*(v // len(self.decode) for v in asdict(whole).values()))

    def prefill_floor(self, roof: Roof) -> float:
        """Return the seconds at the roof: the chunks follow each other."""
        return sum(floor(total(c), roof).seconds for _, c in self.prefill)

    def decode_floor(self, roof: Roof) -> float:
        """Return the seconds of a step, on average."""
        return sum(floor(total(c), roof).seconds for _, c in self.decode) / len(self.decode)

    def facts(self, roof: Roof) -> WorkFacts:
        """Return the part of the work that a report keeps."""

        def phase(cost: Cost, seconds: float) -> PhaseWork:
            return PhaseWork(**asdict(cost), floor_ms=seconds * 1e3, bound=floor(cost, roof).bound)

        return WorkFacts(
            phase(self.prefill_cost(), self.prefill_floor(roof)),
            phase(self.decode_cost(), self.decode_floor(roof)),
            self.experts,
        )


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
    chunks = list(request_chunks(w, engine.limits.prefill_chunk))
    moe = engine.spec.text.moe
    if moe:
        chunks = _counted(engine, w, tokens, chunks)
    prompts, steps = chunks[: 1 - w.output_len], chunks[1 - w.output_len :]
    count = min(DECODE_STEPS, len(steps))
    some = [steps[i * len(steps) // count] for i in range(count)]
    experts: dict[str, Any] | None = None
    if moe:
        prefill, decode = (
            mean([c.distinct for c in many if c.distinct is not None]) for many in (prompts, steps)
        )
        experts = {
            "source": "counted by the interpreter on the same tokens",
            "experts": moe.num_experts,
            "per_token": moe.top_k_experts,
            "prefill_distinct": prefill,
            "decode_distinct": decode,
        }

    def priced(many: Sequence[GraphRun]) -> tuple[tuple[GraphRun, list[NodeCost]], ...]:
        return tuple((c, chunk_costs(engine, c, w.batch)) for c in many)

    return Work(priced(prompts), priced(some), experts)


def chunk_costs(engine: Engine, c: GraphRun, batch: int) -> list[NodeCost]:
    """Return the costs of the nodes that a run of a chunk needs."""
    g = engine.program.graphs[c.phase]
    live = _live(g, c)
    costs = graph_costs(g, B=batch, S=c.new, C=c.held, experts=c.distinct)
    return [n for n in costs if n.node in live]


def _live(g: Graph, c: GraphRun) -> set[str]:
    """Return the first results of the nodes that run: all for logits, else those that the caches
    follow from."""
    if c.logits:
        return {n.outputs[0].name for n in g.nodes}
    wanted, live = {v.name for v in g.next.values()}, set()
    for n in reversed(g.nodes):
        if any(v.name in wanted for v in n.outputs):
            live.add(n.outputs[0].name)
            wanted |= {v.name for v in n.inputs}
    return live


def _counted(
    engine: Engine, w: Workload, tokens: torch.Tensor, chunks: list[GraphRun]
) -> list[GraphRun]:
    """Return the chunks with their `distinct`. Fused ops are opened: each router is a node."""
    engine = replace(engine, program=engine.program.map(flatten))
    routers = {p: [*g.find("router")] for p, g in engine.program.graphs.items()}
    names = {n.outputs[1].name for nodes in routers.values() for n in nodes}
    counts: defaultdict[ChunkPosition, dict[str, int]] = defaultdict(dict)

    def see(place: ChunkPosition, name: str, t: torch.Tensor) -> None:
        if name in names:
            counts[place][name] = int(t.unique().numel())

    runner = EngineRunner(watching(reference_engine(engine, held=True), see), w.batch)
    runner.hold(tokens[:, : w.context])
    for piece in pieces(w, tokens):
        runner.step(piece)
    found = []
    for c in chunks:
        seen = counts[ChunkPosition(c.phase, c.held, c.held + c.new - 1)]
        live = _live(engine.program.graphs[c.phase], c)
        ran = [seen[n.outputs[1].name] for n in routers[c.phase] if n.outputs[0].name in live]
        found.append(replace(c, distinct=mean(ran)) if ran else c)
    return found
