"""The programs that choose tokens from the logits of a decode step on a GPU."""

from __future__ import annotations

from typing import Any

from g4ir.ir.graph import Builder, Program
from g4ir.ir.text import print_graph
from g4ir.plan.engine_limits import Limits

from .kernels.base import CANDIDATES


def choice_texts(program: Program, limits: Limits) -> dict[str, str]:
    """Return op -> the text of its program."""
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
