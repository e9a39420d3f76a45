"""Dry run of a build on any machine: writes the full-size networks without weights; if TensorRT-RTX
is installed it parses the text model's, and compiles it if it is small."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from g4ir.backends.onnx_graph.backend import require
from g4ir.model.draft import DRAFT
from g4ir.ui.memory import peak_resident_bytes
from g4ir.ui.progress import Progress

from . import build
from .compiled import summary
from .host import Api, installed, require_library
from .interface import ENGINE, interface, networks
from .target import RTX, TARGETS
from .trial import compile_once, parse_once

if TYPE_CHECKING:
    from g4ir.backends.base import Prepared

#: bytes of the builder's host memory up to which a dry run compiles the text model's network; a
#: larger one is only parsed
MAX_COMPILED_BYTES = 3 * build.GIB


def dry_run(p: Prepared, progress: Progress) -> dict[str, Any]:
    """Return the keys of `g4ir build --dry-run`'s report about networks, time and memory."""
    require("onnx", backend="trt")
    start = time.monotonic()
    progress("writing the network at full size")
    report = full_size(p)
    if installed(RTX):
        progress("checking the network with TensorRT-RTX")
        report |= by_library(require_library(RTX), p)
    return {
        **report,
        "dry_run_s": round(time.monotonic() - start, 1),
        "peak_bytes": peak_resident_bytes(),
    }


def by_library(api: Api, p: Prepared) -> dict[str, Any]:
    """Parse the text model's network with a library that needs no GPU, and compile it if it is
    small; return the number of layers, and a line per compiled profile. LowerError if the library
    refuses the network."""
    every = networks(p.packing.program)
    args = (api, every[ENGINE], p.config.limits, p.config.settings)
    name = f"{api.library.name} {api.version}"
    if build.estimate([*every.values()]).host_bytes > MAX_COMPILED_BYTES:
        return {"parsed": f"{parse_once(*args)} layers, by {name}"}
    trial = compile_once(*args, TARGETS["rtx"])
    return {"parsed": f"{trial.layers} layers, by {name}", "compiled": summary(trial.profiles)}


def full_size(p: Prepared) -> dict[str, Any]:
    """Emit the build's networks without weights; report their sizes, inputs and outputs of the text
    model's, an estimate of the builder's memory, and notes."""
    from g4ir.backends.onnx_graph.export import NullStorage

    from .dialect import emitted

    graphs = networks(p.packing.program)
    written = {
        n: emitted(g, p.config.limits, NullStorage(), p.config.settings) for n, g in graphs.items()
    }
    sizes = {name: f"{len(e.nodes)} nodes" for name, (e, _) in written.items()}
    dense = sum(1 for _ in p.packing.prologue.find("dense"))
    dense_note = (
        f"{dense} quantised weights are dequantised at build: gates of per-layer embeddings, and "
        f"all but int8 and fp8 with a scale per row in the engine's dtype, int4, and, for sm120 "
        f"and sm121, matrices in fp4 with a scale per row"
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
