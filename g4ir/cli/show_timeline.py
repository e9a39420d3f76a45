"""`g4ir show --timeline`: how long a decode step is expected to take on a GPU, kernel by kernel."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from g4ir.backends.experimental import experiment
from g4ir.errors import InputError
from g4ir.ui.table import Line, aligned
from g4ir.ui.units import count_text, si

from .common import emit
from .kernels import scheduled

if TYPE_CHECKING:
    from g4ir.ir.graph import Graph
    from g4ir.spec.record import Spec


def show_timeline(args: argparse.Namespace, graph: Graph, spec: Spec) -> int:
    """Print the kernels of a decode step with their predicted times, and the share of the roof;
    draw them where a file is named."""
    from g4ir.ui.plots import check_plot, plot_launches

    if graph.name != "decode":
        raise InputError(f"--timeline is of decode, not of {graph.name}: leave out --phase")
    if args.plot:
        check_plot(args.plot)
    s, step, moved = scheduled(args, graph, spec)
    model = experiment("step_model")
    path = Path(args.constants) if args.constants else model.TABLE
    ways = {way: model.predict(s, moved, step.C + step.S, path, way) for way in model.WAYS}
    found = ways[model.WAYS[0]]
    if args.plot:
        kinds = [(x.kernel, sum(x.us) / 2) for x in found.launches]
        plot_launches(args.plot, kinds, found.roof_us, f"{spec.name}, {found.gpu}")
    if args.json:
        said = _plain(found, spec.name, step.B, step.C + step.S)
        if args.tp is not None:
            said |= {"ranks": args.tp, "time_us_by": {way: _us(p) for way, p in ways.items()}}
        emit(said)
        return 0
    rows = "1 row" if step.B == 1 else f"{step.B} rows"
    on = found.gpu if args.tp is None else f"one of {args.tp} {found.gpu}"
    print(f"{spec.name} decode on {on}, {rows} of {count_text(step.C + step.S)} tokens")
    print(_summary(found, step.B))
    if args.tp is not None:
        fast, slow = ways[model.NCCL].us
        print(f"messages by one-shot kernels; by NCCL {fast / 1e3:.2f} to {slow / 1e3:.2f} ms")
    head = ["kernel", "launches", "bytes", "us each", "us", "of the step"]
    print(aligned([head, *_lines(found)]), end="")
    return 0


def _summary(p: Any, rows: int) -> str:
    """Return a line on launches and time, and one on the roof."""
    (fast, slow), (low, high) = p.us, p.share
    rates = f"{rows * 1e6 / slow:.0f} to {rows * 1e6 / fast:.0f} tokens/s"
    return (
        f"{len(p.launches)} launches, predicted {fast / 1e3:.2f} to {slow / 1e3:.2f} ms, {rates}\n"
        f"roof {p.roof_us / 1e3:.2f} ms: {si(p.nbytes, 'B')} at {p.rate / 1e6:.2f} TB/s, of which "
        f"it reaches {100 * low:.0f} to {100 * high:.0f} %"
    )


def _us(p: Any) -> list[float]:
    return [round(t, 1) for t in p.us]


def _lines(p: Any) -> list[Line]:
    """List kernels of one name, those that take longest first; times between both bounds."""
    groups: dict[str, list[Any]] = {}
    for x in p.launches:
        groups.setdefault(x.kernel, []).append(x)
    whole = sum(p.us)

    def line(name: str, found: Sequence[Any]) -> Line:
        us, nbytes = _middle(found), sum(x.nbytes for x in found)
        moved = si(nbytes, "B") if nbytes else ""
        share = f"{200 * us / whole:.0f} %"
        return [name, str(len(found)), moved, f"{us / len(found):.2f}", f"{us:.0f}", share]

    ordered = sorted(groups.items(), key=lambda item: -_middle(item[1]))
    return [line(name, found) for name, found in ordered]


def _middle(found: Sequence[Any]) -> float:
    return sum(sum(x.us) for x in found) / 2


def _plain(p: Any, variant: str, rows: int, context: int) -> dict[str, Any]:
    launches = [
        {"kernel": x.kernel, "node": x.node, "bytes": x.nbytes, "us": [round(t, 3) for t in x.us]}
        for x in p.launches
    ]
    return {
        "variant": variant,
        "gpu": p.gpu,
        "batch": rows,
        "context": context,
        "bytes": p.nbytes,
        "time_us": _us(p),
        "roof_us": round(p.roof_us, 1),
        "share": [round(x, 4) for x in p.share],
        "launches": launches,
    }
