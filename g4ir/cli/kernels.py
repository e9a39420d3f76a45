"""`g4ir kernels`: the GPU kernel of each node, and its settings."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict
from typing import Any

from g4ir.backends.cuda.kernels.base import Schedule
from g4ir.backends.cuda.schedule import Row, kernel_rows, schedule
from g4ir.backends.cuda.target import gpu_name
from g4ir.backends.inductor.target import Target
from g4ir.errors import InputError
from g4ir.ir.graph import Graph
from g4ir.ir.rewrite import split_prologue
from g4ir.plan.cost import Step, graph_costs
from g4ir.plan.gpus import find_gpu
from g4ir.ui.table import aligned
from g4ir.ui.units import count_text, si

from .common import output
from .cost import StepSize
from .graphs import NamedGraph
from .verb import Verb, json_flag

#: GPU whose kernels are printed without --gpu
GPU = "h200"


class Kernels(Verb):
    """Print the kernels of a graph for a GPU and a maximum batch size, and the bytes of weights
    (quantised values and scales, if they are quantised) and KV caches that a step moves."""

    graph: NamedGraph
    step: StepSize
    json: bool = json_flag()

    def __call__(self) -> int:
        self.graph.check()
        graph = self.graph.chosen()
        s, step, moved = self._scheduled(graph)
        kernels, context, nbytes = kernel_rows(s, moved), step.C + step.S, sum(moved.values())
        facts = {"phase": graph.name, "gpu": s.target.gpu, "batch": s.target.rows}
        facts |= {"starts": sum(r.starts for r in kernels), "context": context, "bytes": nbytes}
        text = "{phase} on {gpu}, batch up to {batch}: {starts} g4ir kernels\n".format(**facts)
        text += f"weights and KV cache to read at {count_text(context)} tokens: {si(nbytes, 'B')}\n"
        head = ("op", "nodes", "kernel", "shape", "bytes", "settings")
        rows = [_plain(r) for r in kernels]
        text += aligned([head, *map(_line, kernels)])
        return output(self.json, facts | {"rows": rows}, text)

    def _scheduled(self, graph: Graph) -> tuple[Schedule, Step, dict[str, int]]:
        """Return the kernels of a graph, the step that the options describe, and the bytes of
        weights and KV caches that each node moves, by the name of its first result."""
        step = self.step.of(self.graph)
        card = find_gpu(self.step.gpu or GPU)
        if not card.capability:
            raise InputError(f"--gpu {self.step.gpu}: kernels are for NVIDIA cards; name one")
        gpu = gpu_name(card.name, card.capability)
        costs = graph_costs(graph, B=step.B, S=step.S, C=step.C)
        moved = {c.node: c.cost.needed_bytes for c in costs}
        return schedule(split_prologue(graph)[1], Target("cuda", gpu, step.B)), step, moved


def _plain(r: Row) -> dict[str, Any]:
    row = {**asdict(r), "shape": dict(r.shape), "use": dict(r.use)}
    return row | {"bytes": row.pop("nbytes")}


def _line(r: Row) -> tuple[str, ...]:
    moved = si(r.nbytes, "B") if r.nbytes else ""
    return r.op, str(r.nodes), r.kernel, _pairs(r.shape), moved, _pairs(r.use)


def _pairs(values: Iterable[tuple[str, int]]) -> str:
    return " ".join(f"{k}={v}" for k, v in values)
