"""Random weights: the same bits whatever part is asked for, and sane statistics."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from g4ir.errors import InputError, WeightsError
from g4ir.model.media import KINDS
from g4ir.model.tensors import media_tensors, text_tensors
from g4ir.spec.record import load_spec
from g4ir.weights.random import BLOCK, distribution, random_rows, random_tensor, random_weights
from tests.cases import TABLES

NAME = "layers.3.mlp.up_proj.weight"


def test_literal_values() -> None:
    for index, want in TABLES["random weights"].items():
        row, column = divmod(index, 1 << 10)
        got = random_rows(7, NAME, (1 << 38, 1 << 10), torch.tensor([row]), torch.float32)
        assert got[0, column].item() == want


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("shape", [(1000, 777), (3, BLOCK + 5), (5, 1), (1, 3 * BLOCK)])
def test_rows_equal_the_full_tensor(shape: tuple[int, int], dtype: torch.dtype) -> None:
    full = random_tensor(1, NAME, shape, dtype)
    assert torch.equal(full, random_tensor(1, NAME, shape, torch.float32).to(dtype))
    ids = torch.tensor([[0, shape[0] - 1], [shape[0] // 2, 0]])
    assert torch.equal(random_rows(1, NAME, shape, ids, dtype), full[ids])


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_cuda_makes_the_same_bits(dtype: torch.dtype) -> None:
    for name in (NAME, "norm.weight"):
        here = random_tensor(1, name, (1000, 777), dtype)
        there = random_tensor(1, name, (1000, 777), dtype, "cuda")
        ids = torch.tensor([999, 0, 338])
        rows = random_rows(1, name, (1000, 777), ids, dtype, "cuda")
        assert torch.equal(there.cpu(), here) and torch.equal(rows.cpu(), here[ids])


def test_too_large_is_an_error() -> None:
    with pytest.raises(InputError, match="at most"):
        random_rows(0, NAME, (1 << 33, 1 << 16), torch.tensor([0]), torch.float32)


def test_no_rows_and_no_elements() -> None:
    assert random_rows(0, NAME, (8, 4), torch.empty(0).long(), torch.float32).shape == (0, 4)
    assert random_tensor(0, NAME, (0, 4), torch.float32).shape == (0, 4)


LAYERS = {
    "layers.0.layer_scalar": ((1,), 0.95, 0.05),
    "layers.0.self_attn.q_norm.weight": ((4096,), 1 / 64, 0.3 / 64),
    "norm.weight": ((4096,), 4.0, 1.2),
    "embed_tokens.weight": ((8, 512), 0.0, 0.25 * (3 / 512) ** 0.5),
    "layers.0.experts.down_proj": ((4, 8, 512), 0.0, (3 / 512) ** 0.5),
}


@pytest.mark.parametrize("name", LAYERS)
def test_distributions(name: str) -> None:
    shape, centre, half = LAYERS[name]
    assert distribution(name, shape) == pytest.approx((centre, half))
    values = random_tensor(0, name, shape, torch.float32)
    assert values.min() >= centre - 1.00001 * half and values.max() <= centre + 1.00001 * half


def test_norms_about_zero() -> None:
    """Their weights are those of others less 1; scores are as large as without a divisor."""
    zero = load_spec("tiny-gemma3")
    text = replace(zero.text, norms_about_zero=False)
    plain, dim = replace(zero, text=text), zero.text.full.head_dim
    for name in (n for n, shape in text_tensors(zero).items() if len(shape) == 1):
        made, other = (random_weights(s, 0, torch.float32).tensor(name) for s in (zero, plain))
        torch.testing.assert_close(made + 1, other)
        if name.endswith("q_norm.weight"):
            assert other.mean().item() == pytest.approx((24 / dim) ** 0.5, rel=0.1)


@pytest.mark.parametrize(
    "name", ["tiny-dense", "tiny-moe", "tiny-ple", "tiny-media", "tiny-unified"]
)
def test_random_checkpoint_fills_every_tensor(name: str) -> None:
    spec = load_spec(name)
    source = random_weights(spec, seed=4, dtype=torch.float32)
    bounds = {"min": -1, "max": 1}
    text = text_tensors(spec)
    for tensor, shape in (text | media_tensors(spec, KINDS)).items():
        values = source.tensor(tensor)
        assert values.shape == shape and values.isfinite().all()
        assert tensor not in text or values.unique().numel() > values.numel() // 2, tensor
        assert shape or values.sign() == bounds[tensor[-3:]], "a range that holds 0"
    with pytest.raises(WeightsError, match="no tensor"):
        source.tensor("nothing")
