"""The end of a step that chooses its own tokens: what each row goes on with, in one kernel.

By torch it would be ten kernels of a few numbers each, of which every one waits for the one in
front. The kernel is part of an engine (kernel_graph.py), so that loading compiles nothing.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from ..torch_compile.kernels.launch import begin, power_of_2, ready, start_untraced


@triton.jit
def end_of_step(
    sums,
    chosen,
    tokens,
    lengths,
    active,
    flaws,
    stops,
    count,
    BLOCK: tl.constexpr,
    AHEAD: tl.constexpr = False,
):
    """`end_step` of one row; stops [count]. Grid: B."""
    begin(AHEAD)
    ready(AHEAD)
    row, i = tl.program_id(0), tl.arange(0, BLOCK)
    runs = tl.load(active + row)
    flaw = tl.load(sums + row) * 0
    tl.store(flaws + row, tl.load(flaws + row) + tl.where(runs > 0, flaw, 0.0))
    token = tl.where(runs > 0, tl.load(chosen + row), tl.load(tokens + row))
    tl.store(tokens + row, token)
    tl.store(lengths + row, tl.load(lengths + row) + runs)
    ends = tl.max((tl.load(stops + i, mask=i < count, other=-1) == token).to(tl.int64), 0)
    tl.store(active + row, runs * (1 - ends))


def end_step(operands: Sequence[torch.Tensor]) -> None:
    """Do what `token_loop.end_by_torch` says."""
    tokens, stops = operands[2], operands[-1]
    given, block = (*operands, len(stops)), power_of_2(max(1, len(stops)))
    start_untraced(end_of_step, (len(tokens),), given, BLOCK=block)
