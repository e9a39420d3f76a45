"""`g4ir cost`: FLOPs, bytes and roofline time of a graph, by kind of op or node by node."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict
from typing import Any

from g4ir.errors import InputError
from g4ir.ir.graph import Graph
from g4ir.ir.names import layer_of
from g4ir.model.decoder import VERIFY
from g4ir.model.draft import DRAFT
from g4ir.model.towers import PARTS, is_tower
from g4ir.ops.codecs import FORMAT_OF
from g4ir.plan.cost import Cost, Roof, Step, by_kind, floor, graph_costs, total
from g4ir.plan.gpus import find_gpu, gpu_names
from g4ir.quant.recipe import QuantConfig
from g4ir.ui.table import aligned
from g4ir.ui.units import si

from .common import output
from .graphs import NamedGraph, no_layer
from .verb import Count, Part, Verb, flag, flag_of, json_flag

#: default chunk size, and default context of a decode step
TOKENS = 1024
NOTE = (
    "time: the longer of bytes (weights and caches) and FLOPs at the roofline; activations\n"
    "are left out, as if they stayed on the chip"
)
#: formats with a smaller share of the weights' bytes are omitted
LITTLE = 0.15
#: field of StepSize -> word of the error for a graph without it: `vision has no batch`
SIZES = {"prefill_chunk": "chunks", "batch": "batch", "context": "cache"}


class StepSize(Part):
    """Flags of a step's size, and of the GPU for its roofline."""

    batch: Count | None = flag("batch size (default 1)", None, "N")
    context: Count | None = flag("tokens in the KV cache after the step, such as 32K", None, "N")
    prefill_chunk: Count | None = flag(
        "tokens of a prefill chunk (default: 1K, or --context if that is less)", None, "N"
    )
    gpu: str | None = flag(f"GPU of the roofline or kernels: {gpu_names()}", None, "NAME")

    def of(self, graph: NamedGraph) -> Step:
        """Return the step that the options describe; InputError for one longer than the model's
        context or --context, and for an option that does not apply to the graph."""
        spec, phase, context, chunk = graph.spec, graph.graph_name, self.context, self.prefill_chunk
        longest = spec.text.max_position_embeddings
        single = phase in ("decode", VERIFY, DRAFT)
        for name, words in SIZES.items():
            if vars(self)[name] and (phase in PARTS or (single and name == "prefill_chunk")):
                given = f"{flag_of(name)} {vars(self)[name]}"
                raise InputError(f"{given}: {phase} has no {words}; leave it out")
        new = 1 if single else chunk or min(TOKENS, context or longest)
        if phase == VERIFY:
            new = graph.config.draft_tokens + 1
        length = context or (min(TOKENS, longest) if single else new)
        if length > longest:
            option = "context" if context else "prefill_chunk"
            raise InputError(f"{flag_of(option)} {length}: {spec.name} has {longest} positions")
        if new > length:
            of_step = f"the {new} tokens of a step with --draft-tokens {new - 1}"
            detail = of_step if single else f"--prefill-chunk {new}"
            raise InputError(f"--context {length}: less than {detail}")
        if phase == DRAFT:  # the newest token is not in the KV cache
            return Step(self.batch or 1, 1, length)
        return Step(self.batch or 1, new, length - new)


class CostOf(Verb):
    """Print the cost of one step of a graph."""

    graph: NamedGraph
    layer: int | None = flag("only the nodes of layer I", None, "I")
    step: StepSize
    json: bool = json_flag()

    def __call__(self) -> int:
        self.graph.check()
        graph, step = self.graph.chosen(), self.step.of(self.graph)
        roof = find_gpu(self.step.gpu).roof if self.step.gpu is not None else None
        costs = graph_costs(graph, B=step.B, S=step.S, C=step.C)
        if self.layer is not None:
            costs = [c for c in costs if layer_of(c.node) == self.layer]
            if not costs:
                raise no_layer(graph, self.layer)
        report: dict[str, Any] = {
            "variant": self.graph.spec.name,
            "phase": graph.name,
            "batch": step.B,
            "new_tokens": step.S,
            "context": step.C + step.S,
            "weights": _formats(graph, self.graph.config.quant),
            "layer": self.layer,
            "roof": roof and asdict(roof),
            "total": _row(total(costs), roof),
            "kinds": {kind: _row(cost, roof) for kind, cost in by_kind(costs).items()},
        }
        if self.layer is not None:
            report["nodes"] = [
                {"node": c.node, "op": c.op, "kind": c.kind, **_row(c.cost, roof)}
                for c in costs
                if c.cost != Cost()
            ]
        return output(self.json, report, "".join(f"{line}\n" for line in _lines(report)))


def _formats(graph: Graph, quant: QuantConfig | None) -> str:
    """Return the name of the quantisation config, if the graph's weights are still to be quantised;
    else the formats of its params, joined by slashes, largest share of the bytes first."""
    coded = any(v.type.dtype in FORMAT_OF for v in graph.params)
    if quant and not coded and not is_tower(graph.name):
        return quant.name
    nbytes: Counter[str] = Counter()
    for v in graph.params:
        nbytes[FORMAT_OF.get(v.type.dtype, v.type.dtype)] += v.type.nbytes()
    return "/".join(d for d, n in nbytes.most_common() if n >= LITTLE * nbytes.total())


def _row(cost: Cost, roof: Roof | None) -> dict[str, Any]:
    if roof is None:
        return asdict(cost)
    f = floor(cost, roof)
    return {**asdict(cost), **asdict(f), "floor_s": f.seconds, "bound": f.bound}


def _lines(report: dict[str, Any]) -> Iterable[str]:
    roof = report["roof"]
    part = "" if report["layer"] is None else f" layer {report['layer']}"
    new = f"{report['new_tokens']} new of {report['context']} tokens per sequence"
    size = "one item" if is_tower(report["phase"]) else f"batch {report['batch']}, {new}"
    yield f"{report['variant']} {report['phase']}{part}: {size}, weights {report['weights']}"
    if roof:
        rates = f"{si(roof['bytes_per_s'], 'B')}/s, {si(roof['flops_per_s'], 'FLOP')}/s"
        yield f"roof: {roof['name']}: {rates}"
    yield ""
    if "nodes" in report:
        yield from _table("node", {r["node"]: r for r in report["nodes"]}, roof)
        yield ""
    yield from _table("kind", {**report["kinds"], "total": report["total"]}, roof)
    if roof:
        yield from ("", NOTE)


#: heading of a column, key of a row, unit
COLUMNS = (
    ("FLOPs", "flops", "FLOP"),
    ("weights", "weight_bytes", "B"),
    ("caches", "state_bytes", "B"),
    ("activations", "other_bytes", "B"),
)


def _table(title: str, rows: dict[str, dict[str, Any]], roof: Any) -> list[str]:
    """Return the lines of a table: a heading, and one per entry; with a roofline also time, bound
    and share of the total time."""
    times = sum(r["floor_s"] for name, r in rows.items() if name != "total") if roof else 0
    head = [title, *(c for c, _, _ in COLUMNS), *(["time", "bound", "share"] if roof else [])]
    body = [head]
    for name, r in rows.items():
        cells = [name, *(si(r[key], unit) for _, key, unit in COLUMNS)]
        if roof:
            share = "" if name == "total" or not times else f"{r['floor_s'] / times:.1%}"
            cells += [si(r["floor_s"], "s"), r["bound"] if r["floor_s"] else "", share]
        body.append(cells)
    return aligned(body, indent=0).splitlines()
