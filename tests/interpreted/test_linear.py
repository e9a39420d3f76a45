"""Products of a few rows: where partial sums end, and weights that are refused."""

from __future__ import annotations

import pytest
import torch

from g4ir.backends.cuda.kernels.base import Sample
from g4ir.backends.cuda.kernels.launch import by_default
from g4ir.backends.cuda.kernels.linear_triton import chunk, skinny_linear

from .samples import Try, kernel_called

PRODUCT = kernel_called("skinny_linear")


@pytest.mark.parametrize("dtype", ["f32", "bf16"])
@pytest.mark.parametrize("split", [3, 4])
@pytest.mark.parametrize("sample", PRODUCT.samples[:6], ids=lambda s: s.inputs[0])
def test_each_part_is_the_sum_of_its_chunk(sample: Sample, split: int, dtype: str) -> None:
    x, w = Try(PRODUCT, sample, dtype).given
    use = {**sample.use, "split": split}
    parts = skinny_linear(x, w, None, "", **use)
    step = chunk(w.shape[1], split, sample.use["block_k"])
    assert parts.shape == (split, *x.shape[:-1], len(w)) and parts.dtype == torch.float32
    for p in range(split):
        at = slice(p * step, (p + 1) * step)
        want = x[..., at].double() @ w[:, at].double().t()
        torch.testing.assert_close(parts[p].double(), want, rtol=1e-5, atol=1e-5)
    with by_default():
        torch.testing.assert_close(
            parts, skinny_linear(x, w, None, "", **use), rtol=1e-5, atol=1e-5
        )


def test_chunks_cover_k() -> None:
    for k in (1, 31, 32, 33, 100, 5376):
        for split in (1, 3, 4, 8):
            step = chunk(k, split, 32)
            assert step % 32 == 0
            assert (split * step >= k) and (step - 32) * split < k


def test_a_weight_whose_rows_lie_apart_is_refused() -> None:
    x, w = torch.ones(3, 1, 40), torch.ones(40, 9).t()
    with pytest.raises(ValueError, match="strides"):
        skinny_linear(x, w, None, "", 1, 4, 32, 1, 2, None)
