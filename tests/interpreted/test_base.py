"""The arithmetic that the kernels share, and the interpreter's bf16."""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl

from g4ir.backends.cuda.kernels.launch import activate, rounded
from g4ir.ops.mlp import ACTIVATIONS
from g4ir.ops.mlp import activate as reference


@triton.jit
def _activate(x, like, y, N: tl.constexpr, ACT: tl.constexpr):
    i = tl.arange(0, N)
    tl.store(y + i, rounded(activate(tl.load(x + i), ACT), like))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("act", ACTIVATIONS)
def test_activations(act: str, dtype: torch.dtype) -> None:
    """Also of what would overflow; halves of a bf16 step go to the even number."""
    x = torch.cat((torch.linspace(-12, 12, 1021), torch.tensor([1e30, 1 + 2**-8, 1 + 3 * 2**-8])))
    y = torch.empty_like(x)
    _activate[(1,)](x, torch.empty(0, dtype=dtype), y, N=1024, ACT=act)
    want, step = reference(x, act), 2.0**-8 if dtype == torch.bfloat16 else 1e-6
    torch.testing.assert_close(y, want, rtol=step, atol=1e-6)
    if act == "relu":
        assert torch.equal(y, want.to(dtype).float())
