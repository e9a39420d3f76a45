"""The steps of an engine's graphs: segments, each compiled to a program, and eager nodes between
them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from g4ir.ir.graph import Program
from g4ir.ir.rewrite import bind
from g4ir.plan.engine_limits import Limits

from .segment import Step, graph_steps

#: graph of embedding lookups
EMBED = "embed"
#: graphs of the text model's layers: `verify` with speculative decoding only, `prefill_media` with
#: media only, `encode` of text encoders only
PHASES = ("prefill", "decode", "verify", "prefill_media", "encode")

#: graph -> its steps, each with its program file; None: torch runs the step
Steps = Mapping[str, Sequence[tuple[Step, str | None]]]


def phases(program: Program) -> list[str]:
    """Return the names of those graphs of a program that are in PHASES."""
    return [p for p in PHASES if p in program.graphs]


def phase_steps(program: Program, limits: Limits) -> dict[str, list[Step]]:
    """Return the steps of each graph; without `embed` if no table is quantised, since the host then
    gathers rows. At max_batch 1 the batch dim is a constant."""
    fixed = {"B": 1} if limits.max_batch == 1 else {}
    return {
        name: graph_steps(bind(g, **fixed))
        for name, g in program.graphs.items()
        if name != EMBED or any(g.find("embedding_quantized"))
    }
