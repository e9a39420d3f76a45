"""Dry run of a build on any machine: writes the full-size networks without weights."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from g4ir.backends.onnx_graph.backend import require
from g4ir.model.draft import DRAFT
from g4ir.ui.memory import peak_resident_bytes
from g4ir.ui.progress import Progress

from . import build
from .interface import ENGINE, interface, networks

if TYPE_CHECKING:
    from g4ir.backends.base import Prepared


def dry_run(p: Prepared, progress: Progress) -> dict[str, Any]:
    """Return the network's part of `g4ir build --dry-run`'s report."""
    require("onnx", backend="trt")
    start = time.monotonic()
    progress("writing the network at full size")
    return {
        **full_size(p),
        "dry_run_s": round(time.monotonic() - start, 1),
        "peak_bytes": peak_resident_bytes(),
    }


def full_size(p: Prepared) -> dict[str, Any]:
    """Report the build's networks without weights: sizes, and the text model's inputs."""
    from g4ir.backends.onnx_graph.export import NullStorage

    from .dialect import emitted

    graphs = networks(p.packing.program)
    written = {
        n: emitted(g, p.config.limits, NullStorage(), p.config.settings) for n, g in graphs.items()
    }
    sizes = {name: f"{len(e.nodes)} nodes" for name, (e, _) in written.items()}
    dense = sum(1 for _ in p.packing.prologue.find("dense"))
    dense_note = (
        f"{dense} quantised weights are made dense at build: gates of per-layer embeddings, and "
        f"what TensorRT does not take: it takes 8 bits with a scale for each row, in the engine's "
        f"dtype, and 4 bits with scales of groups"
    )
    io = interface(graphs[ENGINE], p.config.limits)
    report = {
        "network": sizes.pop(ENGINE),
        "inputs": {n: str(t) for n, t in io.inputs.items() if n not in io.aliased.values()},
        "outputs": {n: str(t) for n, t in io.outputs.items() if n not in io.aliased},
        "caches": {"in_place": len(io.aliased)},
        "builder": str(build.estimate([*graphs.values()])),
        "notes": [*written[ENGINE][1], *([dense_note] if dense else [])],
    }
    drafter = {DRAFT: sizes.pop(DRAFT)} if DRAFT in sizes else {}
    return {**report, **drafter, **({"towers": sizes} if sizes else {})}
