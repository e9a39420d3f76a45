"""The programs that an engine has: the segments of each phase, and what chooses tokens."""

from __future__ import annotations

from typing import Any

from g4ir.ir.graph import Builder, Program
from g4ir.ir.rewrite import bind
from g4ir.ir.text import print_graph
from g4ir.plan.engine_limits import Limits

from .kernels.base import CANDIDATES
from .segment import Step, graph_steps

#: the graphs that a step may run; only an engine that drafts has `verify`, only one of images
#: `prefill_media`
PHASES = ("prefill", "decode", "verify", "prefill_media")
KERNELS_FILE = "kernels.so"


def phases(program: Program) -> list[str]:
    """Return the graphs of a program that append tokens."""
    return [p for p in PHASES if p in program.graphs]


def phase_steps(program: Program, limits: Limits, device: str) -> dict[str, list[Step]]:
    """Return the steps of each phase and tower that is compiled; an engine for one row has its
    batch dim fixed."""
    from .step_program import step_phases  # which imports torch

    fixed = {"B": 1} if limits.max_batch == 1 else {}
    others = ("embed", *step_phases(program, limits, device))
    return {
        name: graph_steps(bind(g, **fixed))
        for name, g in program.graphs.items()
        if name not in others
    }


def choice_texts(program: Program, limits: Limits) -> dict[str, str]:
    """Return the programs of one op that choose tokens from the logits of a decode step."""
    logits = program.graphs["decode"].outputs[0]
    fixed = {"B": 1} if limits.max_batch == 1 else {}
    kind, vocab = logits.type.bind(fixed), logits.type.shape[2]
    assert isinstance(vocab, int)
    attrs: dict[str, dict[str, Any]] = {
        "greedy": {},
        "candidates": {"k": min(CANDIDATES, vocab)},
    }
    texts = {}
    for op, given in attrs.items():
        b = Builder("segment")
        made = b.emit_all(op, b.input("x0", kind), **given)
        texts[op] = print_graph(b.graph(*made))
    return texts
