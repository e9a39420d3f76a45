"""The cost of a request: bytes and FLOPs of its steps by the cost model.

The steps are those that a session makes: a prompt in chunks, of which only the last computes
logits, and a chunk of one token is a decode step. Of experts the expected number for uniform
choices is counted, an upper bound for routers that have favourites (ops/moe.py).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from g4ir.engine.engine import Engine
from g4ir.ir.rewrite import drop_dead
from g4ir.plan.cost import Cost, NodeCost, graph_costs, total

from .runners import Workload

#: decode steps whose cost is worked out, spread evenly over a request
DECODE_STEPS = 16


@dataclass(frozen=True)
class GraphRun:
    """One run of a graph: `new` tokens a row on rows that hold `held`."""

    phase: str
    new: int
    held: int
    logits: bool

    def costs(self, engine: Engine, batch: int) -> list[NodeCost]:
        """Return the costs of the nodes that run: all for logits, else those that the caches follow
        from."""
        g = engine.program.graphs[self.phase]
        needed = g if self.logits else drop_dead(replace(g, outputs=()))
        return graph_costs(needed, B=batch, S=self.new, C=self.held)


def request_chunks(w: Workload, size: int) -> Iterator[GraphRun]:
    """Yield the runs of a request in an engine whose chunks have `size` tokens."""
    end = w.context + w.input_len
    for at in range(w.context, end, size):
        new = min(size, end - at)
        yield GraphRun("decode" if new == 1 else "prefill", new, at, at + new == end)
    for at in range(end, w.fed):
        yield GraphRun("decode", 1, at, True)


def request_costs(engine: Engine, w: Workload) -> dict[str, Cost]:
    """Return the costs of a whole prompt, and of a decode step on average, by phase."""
    chunks = [*request_chunks(w, engine.limits.prefill_chunk)]
    prompts, steps = chunks[: 1 - w.output_len], chunks[1 - w.output_len :]
    count = min(DECODE_STEPS, len(steps))
    some = [steps[i * len(steps) // count] for i in range(count)]
    costs = {}
    for phase, runs, parts in (("prefill", prompts, 1), ("decode", some, count)):
        whole = sum((total(run.costs(engine, w.batch)) for run in runs), Cost())
        costs[phase] = Cost(*(v // parts for v in vars(whole).values()))
    return costs
