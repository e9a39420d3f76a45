"""The end of a step that chooses its own tokens: what each row goes on with, in one kernel.

By torch it would be ten kernels of a few numbers each, of which every one waits for the one in
front. The kernel is part of an engine (kernel_graph.py), so that loading compiles nothing.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from g4ir.backends.cuda.kernels.launch import begin, ready, start_untraced


@triton.jit
def end_of_step(sums, chosen, tokens, lengths, active, flaws, AHEAD: tl.constexpr = False):
    """`end_step` of one row. Grid: B."""
    begin(AHEAD)
    ready(AHEAD)
    row = tl.program_id(0)
    runs = tl.load(active + row)
    flaw = tl.load(sums + row) * 0
    tl.store(flaws + row, tl.load(flaws + row) + tl.where(runs > 0, flaw, 0.0))
    token = tl.where(runs > 0, tl.load(chosen + row), tl.load(tokens + row))
    tl.store(tokens + row, token)
    tl.store(lengths + row, tl.load(lengths + row) + runs)


def end_step(operands: Sequence[torch.Tensor]) -> None:
    """Do what `token_loop.end_by_torch` says."""
    start_untraced(end_of_step, (len(operands[0]),), tuple(operands))
