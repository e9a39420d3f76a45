"""`g4ir cost`: FLOPs, bytes and roofline time of a graph, by kind of op or node by node."""

from __future__ import annotations

import argparse
import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from typing import Any

from g4ir.errors import InputError
from g4ir.ir.graph import Graph
from g4ir.ir.names import layer_of
from g4ir.model.decoder import VERIFY
from g4ir.model.draft import DRAFT
from g4ir.model.towers import PARTS, is_tower
from g4ir.ops.codecs import FORM_OF
from g4ir.plan.cost import Cost, Roof, Step, by_kind, floor, graph_costs, prefill_chunks, total
from g4ir.plan.drafting import ACCEPTANCE, Gain, gains, gains_text
from g4ir.plan.gpus import find_gpu
from g4ir.spec.record import Spec
from g4ir.ui.table import aligned
from g4ir.ui.units import parse_count, si

from .common import flag_of, output
from .graphs import check_graph, chosen_graph, drafted_tokens, no_layer, spec_of

#: default chunk size, and default context of a decode step
TOKENS = 1024
RATES = {"bandwidth": "--bandwidth", "flop_rate": "--flop-rate"}
NOTE = (
    "time: the longer of bytes (weights and caches) and FLOPs at the roofline; activations\n"
    "are left out, since fused nodes keep them on the chip"
)
#: share of the weights' bytes below which a form is not named
LITTLE = 0.15
#: phase -> options that say nothing about it
MEANINGLESS: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("decode", VERIFY, DRAFT), ("prefill_chunk",)),
    "embed": ("context",),
    **dict.fromkeys(PARTS, ("prefill_chunk", "context", "batch")),
}


def cost(args: argparse.Namespace) -> int:
    """Print the cost of one step of a graph; for prefill also of the whole prompt, for a
    verification step also the expected speed-up of speculative decoding."""
    check_graph(args)
    graph, spec = chosen_graph(args), spec_of(args)
    step, weights = step_of(args, spec), args.weights
    roof = _roof(args)
    costs = graph_costs(graph, B=step.B, S=step.S, C=step.C, weights=weights)
    if args.layer is not None:
        costs = [c for c in costs if layer_of(c.node) == args.layer]
        if not costs:
            raise no_layer(graph, args.layer)
    report: dict[str, Any] = {
        "variant": spec.name,
        "phase": graph.name,
        "batch": step.B,
        "new_tokens": step.S,
        "context": step.C + step.S,
        "weights": weights or _forms(graph),
        "layer": args.layer,
        "roof": roof and asdict(roof),
        "total": _row(total(costs), roof),
        "kinds": {kind: _row(cost, roof) for kind, cost in by_kind(costs).items()},
    }
    if args.nodes or args.layer is not None:
        report["nodes"] = [
            {"node": c.node, "op": c.op, "kind": c.kind, **_row(c.cost, roof)}
            for c in costs
            if c.cost != Cost()
        ]
    if graph.name == "prefill" and args.layer is None:
        chunks = prefill_chunks(graph, step.C + step.S, step.S, B=step.B, weights=weights)
        report["prompt"] = {"chunks": len(chunks), **asdict(sum(chunks, Cost()))}
        if roof:
            report["prompt"]["floor_s"] = sum(floor(c, roof).seconds for c in chunks)
    found: Sequence[Gain] = ()
    if args.phase == VERIFY and args.layer is None:
        found = _gains(args, graph, step, roof)
        report["drafts"] = {"acceptance": ACCEPTANCE, "rounds": [g.to_dict() for g in found]}
    return output(args, report, "".join(f"{line}\n" for line in _lines(report, found)))


def _forms(graph: Graph) -> str:
    """Return the dtypes of the params or the forms of their codes, largest share first."""
    nbytes: Counter[str] = Counter()
    for v in graph.params:
        nbytes[FORM_OF.get(v.type.dtype, v.type.dtype)] += v.type.nbytes()
    return "/".join(d for d, n in nbytes.most_common() if n >= LITTLE * nbytes.total())


def _gains(args: argparse.Namespace, graph: Graph, step: Step, roof: Roof | None) -> Sequence[Gain]:
    """Compare a verification step with steps of one token."""
    same = {"phase": "decode", "draft_tokens": drafted_tokens(args)}
    single = chosen_graph(argparse.Namespace(**{**vars(args), **same}))
    held = step.C + step.S

    def cost(tokens: int) -> Cost:
        g = single if tokens == 1 else graph
        return total(graph_costs(g, B=step.B, S=tokens, C=held - tokens, weights=args.weights))

    return gains(cost, step.S - 1, roof)


def step_of(args: argparse.Namespace, spec: Spec) -> Step:
    """Return the step that the options describe, within the limits of the model."""
    for name in MEANINGLESS.get(args.phase, ()):
        if vars(args).get(name) is not None:
            raise InputError(f"{flag_of(name)} means nothing in phase {args.phase}")
    batch, chunk, context = (_count(args, name) for name in ("batch", "prefill_chunk", "context"))
    longest = spec.text.max_position_embeddings
    single = args.phase in ("decode", VERIFY, DRAFT)
    new = 1 if single else chunk or min(TOKENS, context or longest)
    if args.phase == VERIFY:
        new = drafted_tokens(args) + 1
    held = context or (min(TOKENS, longest) if single else new)
    if held > longest:
        given = "context" if context else "prefill_chunk"
        raise InputError(f"{flag_of(given)} {held}: {spec.name} has {longest} positions")
    if new > held:
        what = f"--draft-tokens {new - 1} and one" if single else f"--prefill-chunk {new}"
        raise InputError(f"{what} is more than --context {held}")
    if args.phase == DRAFT:  # the newest token is not in the caches
        return Step(batch or 1, 1, held)
    return Step(batch or 1, new, held - new)


def _count(args: argparse.Namespace, name: str) -> int | None:
    text = vars(args).get(name)
    return None if text is None else parse_count(text, flag_of(name))


def _roof(args: argparse.Namespace) -> Roof | None:
    for name in RATES:
        value = getattr(args, name)
        if value is not None and not 0 < value < math.inf:
            raise InputError(f"{RATES[name]} {value}: expected a positive number")
    card = find_gpu(args.gpu).roof if args.gpu is not None else None
    rates = (args.bandwidth, args.flop_rate)
    if card is None and rates == (None, None):
        return None
    if card is None and None in rates:
        raise InputError("--bandwidth and --flop-rate go together unless --gpu gives the other")
    names = [card.name] if card else []
    names += [flag for name, flag in RATES.items() if getattr(args, name) is not None]
    return Roof(
        args.bandwidth or (card.bytes_per_s if card else 0.0),
        args.flop_rate or (card.flops_per_s if card else 0.0),
        " with ".join(names),
    )


def _row(cost: Cost, roof: Roof | None) -> dict[str, Any]:
    if roof is None:
        return asdict(cost)
    f = floor(cost, roof)
    return {**asdict(cost), **asdict(f), "floor_s": f.seconds, "bound": f.bound}


def _lines(report: dict[str, Any], found: Sequence[Gain] = ()) -> Iterable[str]:
    roof = report["roof"]
    part = "" if report["layer"] is None else f" layer {report['layer']}"
    new = f"{report['new_tokens']} new of {report['context']} tokens a row"
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
    prompt = report.get("prompt", {"chunks": 1})
    if prompt["chunks"] > 1:
        yield ""
        floor_s = f", floor {si(prompt['floor_s'], 's')}" if roof else ""
        yield (
            f"whole prompt of {report['context']} tokens in {prompt['chunks']} chunks: "
            f"{si(prompt['flops'], 'FLOP')}{floor_s}"
        )
    if found:
        by = "time" if roof else "bytes of weights and caches"
        yield from ("", f"speed-up by share of drafts that are right, each by itself, by {by}")
        yield from gains_text(found, indent=0).splitlines()
    if roof:
        yield from ("", NOTE)


COLUMNS = (
    ("FLOPs", "flops", "FLOP"),
    ("weights", "weight_bytes", "B"),
    ("caches", "state_bytes", "B"),
    ("activations", "other_bytes", "B"),
)


def _table(title: str, rows: dict[str, dict[str, Any]], roof: Any) -> list[str]:
    """Return one row per entry; with a roofline also time, bound and share of the total."""
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
