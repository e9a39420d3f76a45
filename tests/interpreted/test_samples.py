"""Every kernel on the samples of its record (see samples.py), in memory that is poisoned."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from g4ir.backends.cuda.kernels import KERNELS
from g4ir.backends.cuda.kernels.base import Kernel, Sample
from g4ir.backends.cuda.kernels.launch import by_default

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
@pytest.mark.parametrize("size", [0.0, 1e4])
@pytest.mark.parametrize("kernel", [k for k in KERNELS if "eps" in k.samples[0].attrs], ids=called)
def test_small_and_large_values(kernel: Kernel, size: float, dtype: str) -> None:
    """Norms of other sizes; of zeros eps alone is under the root."""
    for sample in kernel.samples[1:3]:
        one = Try(kernel, sample, dtype, size=size)
        one.check(one.run())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kernel", KERNELS, ids=called)
def test_off_the_gpu(kernel: Kernel, dtype: str) -> None:
    """There a kernel computes what the op does: in bf16 bit for bit, but for partial sums."""
    for sample in kernel.samples:
        one = Try(kernel, sample, dtype)
        given = [one.ours[i] if i in sample.parts else x.clone() for i, x in enumerate(one.given)]
        with by_default():
            got = one.call(given)
        one.check(got)
        pairs = [(a, b) for a, b in zip(got, one.expect()[0]) if a.dim() == b.dim()]
        assert dtype == "f32" or all(torch.equal(a, b) for a, b in pairs)
