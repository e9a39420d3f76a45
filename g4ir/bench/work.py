"""The cost of a request: bytes and FLOPs of its steps by the cost model.

The steps are those of a session: a prompt in chunks, of which only the last computes logits, and a
chunk of one token is a decode step. Of experts the expected number for uniform choices is counted,
an upper bound for routers with favourites (ops/moe.py).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from g4ir.engine.engine import Engine
from g4ir.ir.rewrite import drop_dead
from g4ir.plan.cost import Cost, NodeCost, graph_costs, total

from .runners import Workload

#: decode steps whose cost is computed, spread evenly over a request
DECODE_STEPS = 16


@dataclass(frozen=True)
class GraphRun:
    """One run of a graph: `new` tokens per sequence after `context` in the KV cache."""

    phase: str
    new: int
    context: int
    logits: bool

    def costs(self, engine: Engine, batch: int) -> list[NodeCost]:
        """Return the costs of the nodes that run: all for logits, else those that the KV cache
        depends on."""
        g = engine.program.graphs[self.phase]
        needed = g if self.logits else drop_dead(replace(g, outputs=()))
        return graph_costs(needed, B=batch, S=self.new, C=self.context)


def request_runs(w: Workload, chunk: int) -> Iterator[GraphRun]:
    """Yield the runs of a request in an engine of this prefill chunk."""
    end = w.context + w.input_len
    for at in range(w.context, end, chunk):
        new = min(chunk, end - at)
        yield GraphRun("decode" if new == 1 else "prefill", new, at, at + new == end)
    for at in range(end, w.max_len):
        yield GraphRun("decode", 1, at, True)


def request_costs(engine: Engine, w: Workload) -> dict[str, Cost]:
    """Return the costs by phase: of the prompt, and of a decode step on average."""
    runs, steps = [*request_runs(w, engine.limits.prefill_chunk)], w.output_len - 1
    count = min(DECODE_STEPS, steps)
    decode = [runs[-steps:][i * steps // count] for i in range(count)]
    prefill, decoded = (
        sum((total(run.costs(engine, w.batch)) for run in part), Cost())
        for part in (runs[:-steps], decode)
    )
    return {"prefill": prefill, "decode": Cost(*(v // count for v in vars(decoded).values()))}
