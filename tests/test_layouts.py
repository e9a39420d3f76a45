"""Bit layouts: every byte of a block has one meaning, and values come back from all of them."""

from __future__ import annotations

import pytest
import torch

from g4ir.ops.codecs import FORMATS
from g4ir.ops.layouts import LAYOUTS, in_order
from g4ir.weights.gguf.blocks import CODED, REQUANTISED
from g4ir.weights.gguf.container import TYPES

GGUF = tuple(k for k in CODED if k not in REQUANTISED)


def random_bytes(*shape: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator)


@pytest.mark.parametrize("name", LAYOUTS)
def test_blocks_come_back(name: str) -> None:
    """Values and what they share are all of a block."""
    layout = LAYOUTS[name]
    blocks = random_bytes(900, 3, layout.nbytes)
    values = layout.read(blocks)
    parts = layout.split(blocks)
    bits = sum(layout.fields[name][1].width for name in ("low", "high") if name in parts)
    assert values.shape == (900, 3, layout.values) and values.max() == 2**bits - 1
    shared = {name: parts[name] for name in ("integers", "scales") if name in parts}
    assert torch.equal(layout.write(values, **shared), blocks)


@pytest.mark.parametrize("kind", GGUF)
def test_blocks_of_gguf_have_the_size_of_their_type(kind: str) -> None:
    sizes = {t.name: (t.block, t.nbytes) for t in TYPES.values()}
    assert sizes[kind] == (LAYOUTS[kind].values, LAYOUTS[kind].nbytes)


@pytest.mark.parametrize("kind", [k for k in GGUF if k not in ("Q3_K", "MXFP4")])
def test_conversion_keeps_values(kind: str) -> None:
    own, other = FORMATS[CODED[kind].scheme.form].layout, LAYOUTS[kind]
    assert own.zero == other.zero
    blocks = random_bytes(40, other.nbytes)
    made = other.convert(blocks, own).unflatten(-1, (-1, own.nbytes))
    assert torch.equal(own.read(made).flatten(1), other.read(blocks))
    if "integers" in own.fields:
        shared = other.split(blocks)["integers"]
        assert torch.equal(own.split(made)["integers"].flatten(1), shared)


@pytest.mark.parametrize("width", [1, 2, 4, 8])
def test_values_in_order(width: int) -> None:
    data = random_bytes(5, 12)
    numbers = [int.from_bytes(bytes(row), "little") for row in data.tolist()]
    want = [[n >> at & (1 << width) - 1 for at in range(0, 96, width)] for n in numbers]
    assert in_order(width).read(data).tolist() == want
    assert torch.equal(in_order(width).write(in_order(width).read(data)), data)
