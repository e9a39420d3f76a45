"""The arithmetic that the kernels share, and the interpreter's bf16."""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl

from g4ir.backends.cuda.kernels.launch import activate, rounded, tanh
from g4ir.ops.mlp import ACTIVATIONS
from g4ir.ops.mlp import activate as reference


@triton.jit
def _activate(x, y, N: tl.constexpr, ACT: tl.constexpr):
    i = tl.arange(0, N)
    tl.store(y + i, activate(tl.load(x + i), ACT))


@triton.jit
def _tanh(x, y, N: tl.constexpr):
    i = tl.arange(0, N)
    tl.store(y + i, tanh(tl.load(x + i)))


@triton.jit
def _round(x, like, y, N: tl.constexpr):
    i = tl.arange(0, N)
    tl.store(y + i, rounded(tl.load(x + i), like))


@pytest.mark.parametrize("act", ACTIVATIONS)
def test_activations(act: str) -> None:
    x = torch.linspace(-12, 12, 1024)
    y = torch.empty_like(x)
    _activate[(1,)](x, y, N=1024, ACT=act)
    torch.testing.assert_close(y, reference(x, act), rtol=1e-6, atol=1e-6)


def test_tanh() -> None:
    x = torch.cat((torch.linspace(-30, 30, 1023), torch.tensor([1e30])))
    y = torch.empty_like(x)
    _tanh[(1,)](x, y, N=1024)
    torch.testing.assert_close(y, x.tanh(), rtol=0, atol=2e-7)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_rounding(dtype: torch.dtype) -> None:
    x = torch.randn(1024, generator=torch.Generator().manual_seed(0)) * 3
    x[:2] = torch.tensor([1 + 2**-8, 1 + 3 * 2**-8])  # halfway: to even
    y = torch.empty_like(x)
    _round[(1,)](x, torch.empty(0, dtype=dtype), y, N=1024)
    if dtype == torch.float16:  # the interpreter truncates it
        torch.testing.assert_close(y, x, rtol=2**-10, atol=0)
    else:
        assert torch.equal(y, x.to(dtype).float())
