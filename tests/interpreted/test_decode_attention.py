"""Attention of one token: shares of the keys, counters, and who adds them up."""

from __future__ import annotations

from contextlib import nullcontext

import torch

from g4ir.backends.cuda.kernels.base import zeros_of
from g4ir.backends.cuda.kernels.decode_attention_triton import decode_attention
from g4ir.backends.cuda.kernels.launch import by_default, recorded

from .cases.base import attention_sample
from .samples import Try, kernel_called

USE = {"splits": 3, "block_n": 4, "warps": 4, "stages": 2}


def test_counters_are_zero_afterwards() -> None:
    """As they were, also where the reference computes; made of any queries, NaN and all."""
    q, (k, v) = torch.randn(2, 1, 4, 16), torch.randn(2, 80, 2, 2, 16)
    q[1] = torch.nan
    counts = zeros_of(q)
    assert counts.shape == (2, 1, 4) and counts.dtype == torch.int64 and not counts.any()
    end, rest = torch.tensor([70, 9]), {"window": 0, "scale": 1.0, "softcap": 0.0}
    for context in (nullcontext(), by_default()):
        with context:
            decode_attention(q, end, None, [k, v], counts, **rest, **{**USE, "splits": 4})
        assert not counts.any()


def test_one_split_needs_no_workspace() -> None:
    sample = attention_sample((3,), 64, 0, USE, heads=(2, 1))
    one = Try(kernel_called("decode_attention"), sample, "f32")
    with recorded() as launches:
        one.run(splits=1)
        one.run(splits=2)
    sizes = [[given[n].numel() for n in ("parts", "stats")] for _, _, given, _ in launches]
    assert sizes[0] == [0, 0] and all(sizes[1])
