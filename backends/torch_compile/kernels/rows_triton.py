"""The end of a step that chooses its own tokens: what each row goes on with, in one kernel.

By torch it would be a dozen kernels of a few numbers each, of which every one waits for the one in
front.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from .launch import begin, power_of_2, ready, start_untraced, takes

Tensor = torch.Tensor


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


def end_step(
    sums: Tensor,
    chosen: Tensor,
    tokens: Tensor,
    lengths: Tensor,
    active: Tensor,
    flaws: Tensor,
    stops: Tensor,
) -> None:
    """Write tokens, lengths and active i64[B] and flaws f32[B] in place: a row that runs takes its
    chosen token i64[B], and ends at one of `stops` i64[N]; sums f32[B] of its logits that are not
    finite make its flaw NaN."""
    if takes(tokens):
        given = (sums, chosen, tokens, lengths, active, flaws, stops, len(stops))
        start_untraced(end_of_step, (len(tokens),), given, BLOCK=power_of_2(max(1, len(stops))))
        return
    flaws += (sums * 0).where(active > 0, 0.0)
    lengths += active
    tokens.copy_(torch.where(active > 0, chosen, tokens))
    active *= (tokens[:, None] != stops).all(-1)
