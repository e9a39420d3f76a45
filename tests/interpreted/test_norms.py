"""RMS norms: what samples cannot say of them."""

from __future__ import annotations

import pytest
import torch

from g4ir.backends.cuda.kernels.norms_triton import norm_residual
from g4ir.ops.norm import rms_norm

EPS = 1e-6


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_order_of_partial_sums(dtype: torch.dtype) -> None:
    """(big - big) + small is small; in any other order most of small is lost."""
    x = torch.randn(3, 2, 1, 16, generator=torch.Generator().manual_seed(16))
    x[0] *= 1e8
    x[1] = -x[0]
    zeros, w = torch.zeros(2, 1, 16, dtype=dtype), torch.ones(16, dtype=dtype)
    got = norm_residual(x, zeros, w, None, [], EPS, 1)[0]
    torch.testing.assert_close(got, rms_norm.reference(x[2].to(dtype), w, eps=EPS))
    assert not torch.allclose(norm_residual(x.flip(0), zeros, w, None, [], EPS, 1)[0], got)


def test_a_fourth_pre_norm_is_refused() -> None:
    x, w = torch.ones(1, 1, 8), torch.ones(8)
    with pytest.raises(ValueError, match="4 pre-norms"):
        norm_residual(x, x, w, None, [w] * 4, EPS, 1)
