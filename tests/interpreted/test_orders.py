"""Kernels whose programs work together, in orders that a GPU may choose."""

from __future__ import annotations

import pytest
import torch

from g4ir.backends.cuda.kernels.decode_attention_triton import decode_attention

from .orders import interleaved, poisoned
from .test_moe import routed


def decode(splits: int) -> torch.Tensor:
    """Attention of two rows over 70 and 9 keys."""
    g = torch.Generator().manual_seed(0)
    q, (k, v) = torch.randn(2, 1, 4, 16, generator=g), torch.randn(2, 80, 2, 2, 16, generator=g)
    end, arrivals = torch.tensor([70, 9]), torch.zeros(2, 2, dtype=torch.int64)
    attrs = {"window": 0, "scale": 0.25, "softcap": 0.0}
    got = decode_attention(
        q, end, None, [k, v], arrivals, **attrs, splits=splits, block_n=4, warps=4, stages=2
    )
    assert not arrivals.any()
    return got  # type: ignore[no-any-return]


@pytest.mark.parametrize(("splits", "seed"), [(16, 0), *((3, seed) for seed in range(8))])
def test_shares_of_attention(splits: int, seed: int) -> None:
    """Added by whoever is last; the same bits whoever that is."""
    want = decode(splits)
    with interleaved(seed), poisoned():
        assert torch.equal(decode(splits), want)


def test_the_choice_of_experts() -> None:
    g = torch.Generator().manual_seed(0)
    scores, factor = torch.randn(5, 1, 8, generator=g), torch.ones(8)
    want = routed(scores, factor, 2)
    with interleaved(1), poisoned():
        got = routed(scores, factor, 2)
    assert all(map(torch.equal, got, want))
