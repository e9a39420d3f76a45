"""Every kernel on its samples (see samples.py), in memory that is poisoned; the
arithmetic that they share, and the interpreter's bf16."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import triton
import triton.language as tl

from g4ir.backends.cuda.kernels import KERNELS
from g4ir.backends.cuda.kernels.base import Kernel
from g4ir.backends.cuda.kernels.launch import activate, by_default, rounded
from g4ir.backends.cuda.kernels.linear_triton import skinny_linear
from g4ir.ops.mlp import ACTIVATIONS
from g4ir.ops.mlp import activate as reference

from .cases.base import Sample
from .orders import poisoned
from .samples import Try, budget_of

DTYPES = ("f32", "bf16")


def called(k: Kernel) -> str:
    return f"{k.op}-{list(k.starts)[-1]}"


def cases() -> Iterator[Any]:
    """All; unless --full is given, one in three in fp32 and one in three in bf16."""
    for kernel in KERNELS:
        for i, sample in enumerate(budget_of(kernel).samples):
            for dtype in DTYPES:
                marks = () if i % 3 == DTYPES.index(dtype) else pytest.mark.full
                yield pytest.param(
                    kernel, sample, dtype, marks=marks, id=f"{called(kernel)}-{i}-{dtype}"
                )


@pytest.mark.parametrize(("kernel", "sample", "dtype"), cases())
def test_sample(kernel: Kernel, sample: Sample, dtype: str) -> None:
    one = Try(kernel, sample, dtype, views=dtype == "f32")
    with poisoned():
        got = one.run()
    one.check(got)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kernel", KERNELS, ids=called)
def test_off_the_gpu(kernel: Kernel, dtype: str) -> None:
    """There a kernel computes what the op does: in bf16 bit for bit."""
    for sample in budget_of(kernel).samples:
        one = Try(kernel, sample, dtype)
        with by_default():
            got = one.call([x.clone() for x in one.given])
        one.check(got)
        assert dtype != "bf16" or all(map(torch.equal, got, one.expect()[0]))


def test_a_weight_whose_rows_lie_apart_is_refused() -> None:
    x, w = torch.ones(3, 1, 40), torch.ones(40, 9).t()
    with pytest.raises(ValueError, match="strides"):
        skinny_linear(x, w, None, "", 1, 4, 32, 1, 2, None)


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
