"""The best tokens, against torch's argmax and its stable sort: equal in every bit."""

from __future__ import annotations

import pytest
import torch

from g4ir.backends.cuda.kernels.head_triton import block_argmax, top_candidates

pytestmark = pytest.mark.covering

INF = float("inf")
DTYPES = [torch.float32, torch.bfloat16]


def rows_of(vocab: int, dtype: torch.dtype, batch: int = 1, seed: int = 0) -> torch.Tensor:
    g = torch.Generator().manual_seed(seed)
    return (torch.randn(batch, vocab, generator=g) * 4).to(dtype)


def check(logits: torch.Tensor, k: int, block: int) -> None:
    """Both kernels against a stable sort."""
    values, index = logits.float().sort(dim=-1, descending=True, stable=True)
    token = block_argmax(logits, block)
    assert token.dtype == torch.int64
    assert torch.equal(token, index[:, 0])
    assert torch.equal(token, logits.argmax(-1))
    got = top_candidates(logits, k, block)
    assert (got[0].dtype, got[1].dtype) == (torch.float32, torch.int64)
    assert torch.equal(got[0], values[:, :k])
    assert torch.equal(got[1], index[:, :k])


def test_fp16() -> None:
    check(rows_of(300, torch.float16, 3), 7, 128)


@pytest.mark.parametrize("block", [2, 16, 512])
def test_blocks_do_not_matter(block: int) -> None:
    check(rows_of(200, torch.bfloat16), 5, block)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("value", [0.0, -3.0, 2.5, -INF])
def test_all_equal(value: float, dtype: torch.dtype) -> None:
    check(torch.full((2, 200), value, dtype=dtype), 10, 64)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_ties(dtype: torch.dtype) -> None:
    logits = (rows_of(300, dtype, 2) / 4).round()  # seven values
    assert (logits == logits.max(-1, keepdim=True).values).sum() > 2
    check(logits, 30, 128)


def test_signed_zeros_are_equal() -> None:
    logits = torch.full((1, 40), -1.0)
    logits[0, 7], logits[0, 9], logits[0, 30] = -0.0, 0.0, -0.0
    check(logits, 4, 16)


def test_extremes() -> None:
    """Negative only, subnormal, largest; suppressed tokens, up to all but two."""
    check(-rows_of(300, torch.float32).abs() - 1e30, 10, 64)
    tiny = torch.finfo(torch.float32).smallest_normal
    odd = [-tiny / 8, tiny / 4, tiny / 8, -3e38, 3e38, tiny, -tiny, 0.0, INF, -INF, 1.0]
    check(torch.tensor([odd]), len(odd), 4)
    logits = rows_of(300, torch.float32, 2)
    logits[:, 50:250] = -INF
    check(logits, 20, 64)
    logits[:] = -INF
    logits[0, 299], logits[1, 128] = -2.0, 5.0
    logits[:, 3] = -7.0
    check(logits, 6, 64)


def test_the_best_at_every_place() -> None:
    for at in range(70):
        logits = torch.zeros(1, 70, dtype=torch.bfloat16)
        logits[0, at] = 1
        assert block_argmax(logits, 16).item() == at


def test_views() -> None:
    check(rows_of(128, torch.float32, 4)[::2, 5:], 5, 32)


@pytest.mark.parametrize("k", [0, 65, 11])
def test_impossible_counts(k: int) -> None:
    with pytest.raises(ValueError, match="candidates of 10"):
        top_candidates(torch.zeros(1, 10), k)


@pytest.mark.full
def test_real_vocabulary() -> None:
    logits = rows_of(262144, torch.bfloat16, 2)  # many ties
    check(logits, 64, 4096)
