"""Products of a few rows with a weight, against the ops `linear`, `glu` and `glu_packed`."""

from __future__ import annotations

import pytest
import torch

from g4ir.backends.torch_compile.kernels.linear import (
    chunk,
    launch_skinny_linear,
    launch_skinny_linear_glu,
    launch_skinny_linear_parts,
    skinny_linear_parts,
)
from g4ir.ops.mlp import ACTIVATIONS, glu

pytestmark = pytest.mark.covering

#: (block_m, block_n, block_k, warps, stages)
ONE, MANY, WIDE = (1, 4, 32, 1, 2), (16, 16, 32, 1, 2), (32, 16, 32, 1, 2)
#: rows and sizes: both kernels with every number of rows, more of them than block_m too
ROWS = [(ONE, 1), (ONE, 3), (MANY, 1), (MANY, 2), (MANY, 3), (MANY, 16), (MANY, 19), (WIDE, 27)]
#: (n, k): tiny, odd, not whole blocks, whole blocks
SHAPES = [(1, 1), (3, 7), (5, 33), (17, 100), (32, 96)]
DTYPES = [torch.float32, torch.bfloat16]


def drawn(*shape: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def check_sums(got: torch.Tensor, x: torch.Tensor, w: torch.Tensor) -> None:
    """Within 1e-5 of the rms of the exact sums; bf16: half a unit in the last place more."""
    exact = x.double() @ w.double().t()
    bound = 1e-5 * exact.pow(2).mean().sqrt()
    if got.dtype == torch.bfloat16:
        bound = bound + 2.0**-8 * 2.0 ** exact.abs().clamp_min(1e-30).log2().floor()
    assert got.shape == exact.shape
    assert ((got.double() - exact).abs() <= bound).all()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("n", "k"), SHAPES)
@pytest.mark.parametrize(("sizes", "rows"), ROWS)
def test_linear(
    sizes: tuple[int, int, int, int, int], rows: int, n: int, k: int, dtype: torch.dtype
) -> None:
    x, w = drawn(rows, k, dtype=dtype), drawn(n, k, dtype=dtype, seed=1)
    got = launch_skinny_linear(x, w, *sizes)
    assert got.dtype == dtype
    check_sums(got, x, w)


@pytest.mark.parametrize("sizes", [ONE, MANY])
def test_leading_dims_and_views(sizes: tuple[int, int, int, int, int]) -> None:
    x = drawn(3, 2, 40, dtype=torch.float32)[:, 1:]
    w = drawn(9, 40, dtype=torch.float32, seed=1)
    got = launch_skinny_linear(x, w, *sizes)
    assert got.shape == (3, 1, 9)
    check_sums(got[:, 0], x[:, 0], w)
    with pytest.raises(ValueError, match="strides"):
        launch_skinny_linear(x, drawn(40, 9, dtype=torch.float32).t(), *sizes)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("split", [1, 3, 4])
@pytest.mark.parametrize("k", [7, 96, 100, 256])
@pytest.mark.parametrize(("sizes", "rows"), [(ONE, 1), (MANY, 3), (MANY, 16)])
def test_parts(
    sizes: tuple[int, int, int, int, int], rows: int, k: int, split: int, dtype: torch.dtype
) -> None:
    x, w = drawn(rows, 1, k, dtype=dtype), drawn(21, k, dtype=dtype, seed=1)
    parts = launch_skinny_linear_parts(x, w, split, *sizes)
    assert parts.shape == (split, rows, 1, 21)
    assert parts.dtype == torch.float32
    check_sums(parts.sum(0)[:, 0], x[:, 0], w)
    check_sums(parts.sum(0).to(dtype)[:, 0], x[:, 0], w)
    step = chunk(k, split, sizes[2])
    for p in range(split):
        at = slice(p * step, (p + 1) * step)
        torch.testing.assert_close(
            parts[p, :, 0].double(),
            x[:, 0, at].double() @ w[:, at].double().t(),
            rtol=1e-5,
            atol=1e-5,
        )
    off_cuda = skinny_linear_parts(x, w, split, *sizes)
    torch.testing.assert_close(parts, off_cuda, rtol=1e-5, atol=1e-5)


def test_chunks_cover_k() -> None:
    for k in (1, 31, 32, 33, 100, 5376):
        for split in (1, 3, 4, 8):
            step = chunk(k, split, 32)
            assert step % 32 == 0
            assert (split * step >= k) and (step - 32) * split < k


def check_gated(got: torch.Tensor, gate: torch.Tensor, up: torch.Tensor, act: str) -> None:
    """Against the op on the kernel's own rounded gate: the activation is within a few 1e-7.

    fp32: 1e-6. bf16: then equal, unless the activation is as close to a tie of its rounding:
    one unit there, at most one more by the product's rounding, in at most one element of fifty.
    """
    want = glu.reference(gate, up, act=act)
    if got.dtype == torch.float32:
        torch.testing.assert_close(got, want, rtol=1e-6, atol=1e-6)
    else:
        torch.testing.assert_close(got, want, rtol=2.0**-7, atol=1e-6)
        assert (got == want).double().mean() >= 0.98


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("act", ACTIVATIONS)
@pytest.mark.parametrize(("sizes", "rows"), [(ONE, 1), (MANY, 3), (MANY, 16)])
@pytest.mark.parametrize(("n", "k"), [(5, 33), (32, 96)])
def test_packed_glu(
    sizes: tuple[int, int, int, int, int], rows: int, n: int, k: int, act: str, dtype: torch.dtype
) -> None:
    x, w = drawn(rows, 1, k, dtype=dtype), drawn(2 * n, k, dtype=dtype, seed=1) / k**0.5
    gate, up = launch_skinny_linear(x, w, *sizes).chunk(2, -1)
    got = launch_skinny_linear_glu(x, w, None, act, *sizes)
    assert got.shape == (rows, 1, n)
    check_gated(got, gate, up, act)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("act", ACTIVATIONS)
@pytest.mark.parametrize(("sizes", "rows"), [(ONE, 1), (MANY, 3), (MANY, 16)])
def test_glu_with_a_given_up(
    sizes: tuple[int, int, int, int, int], rows: int, act: str, dtype: torch.dtype
) -> None:
    n, k = 37, 45
    x, w = drawn(rows, 1, k, dtype=dtype), drawn(n, k, dtype=dtype, seed=1) / k**0.5
    up = drawn(rows, 1, 2, n, dtype=dtype, seed=2)[:, :, 1]  # a column of a larger table
    got = launch_skinny_linear_glu(x, w, up, act, *sizes)
    check_gated(got, launch_skinny_linear(x, w, *sizes), up, act)


@pytest.mark.full
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("rows", "sizes"), [(1, (1, 8, 512, 4, 4)), (5, (16, 64, 128, 4, 3))])
@pytest.mark.parametrize(("n", "k"), [(200, 1536), (136, 2816), (64, 5376)])
def test_real_lengths(
    rows: int, sizes: tuple[int, int, int, int, int], n: int, k: int, dtype: torch.dtype
) -> None:
    x, w = drawn(rows, k, dtype=dtype), drawn(n, k, dtype=dtype, seed=1) / k**0.5
    check_sums(launch_skinny_linear(x, w, *sizes), x, w)
    gate, up = launch_skinny_linear(x, w, *sizes).chunk(2, -1)
    got = launch_skinny_linear_glu(x, w, None, "gelu_pytorch_tanh", *sizes)
    check_gated(got, gate, up, "gelu_pytorch_tanh")
