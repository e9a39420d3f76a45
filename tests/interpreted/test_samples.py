"""Every kernel on the samples of its record (see samples.py), in memory that is poisoned."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from g4ir.backends.cuda.kernels import KERNELS
from g4ir.backends.cuda.kernels.base import Kernel, Sample
from g4ir.backends.cuda.kernels.launch import by_default
from g4ir.backends.cuda.kernels.linear_triton import skinny_linear

from .orders import poisoned
from .samples import Try

DTYPES = ("f32", "bf16")


def called(k: Kernel) -> str:
    return f"{k.op}-{list(k.starts)[-1]}"


def cases() -> Iterator[Any]:
    """All; unless --full is given, one in three in fp32 and one in three in bf16."""
    for kernel in KERNELS:
        for i, sample in enumerate(kernel.samples):
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
    for sample in kernel.samples:
        one = Try(kernel, sample, dtype)
        with by_default():
            got = one.call([x.clone() for x in one.given])
        one.check(got)
        assert dtype != "bf16" or all(map(torch.equal, got, one.expect()[0]))


def test_a_weight_whose_rows_lie_apart_is_refused() -> None:
    x, w = torch.ones(3, 1, 40), torch.ones(40, 9).t()
    with pytest.raises(ValueError, match="strides"):
        skinny_linear(x, w, None, "", 1, 4, 32, 1, 2, None)
