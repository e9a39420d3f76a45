"""Packed weights of engines."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

from g4ir.builder.build import prepare
from g4ir.model.tensors import numel, text_tensors
from g4ir.ops.quant import quantize
from g4ir.ops.types import ITEMSIZE
from g4ir.plan.options import BuildOptions
from g4ir.weights.pack import MadeParams
from tests.configs import NAMES, few, spec_called


@pytest.mark.parametrize("name", few(NAMES))
def test_packed_weights_have_no_padding(name: str) -> None:
    """What an engine stores is every tensor once: a layer with K=V packs Q and K alone."""
    spec = spec_called(name)
    prepared = prepare(spec, BuildOptions(random_weights=0))
    assert prepared.param_bytes() == numel(text_tensors(spec)) * ITEMSIZE[spec.dtype]


def test_codes_and_scales_are_computed_once() -> None:
    """Though threads ask for them at the same time; again for who asks again."""
    p = prepare(spec_called("tiny-dense"), BuildOptions(random_weights=0, quant="int4"))
    calls = list[torch.Size]()

    def quantized(w: torch.Tensor, **attrs: Any) -> tuple[Any, ...]:
        calls.append(w.shape)
        time.sleep(0.05)
        return quantize.reference(w, **attrs)

    params = MadeParams(p.packing, p.source, quantized=quantized)
    names = [v.name for v in p.packing.recipe("embed.table.codes").outputs]
    assert len(names) == 2
    with ThreadPoolExecutor(2) as pool:
        first = [*pool.map(params.tensor, names)]
    assert len(calls) == 1 and not params._pending
    assert all(torch.equal(t, params.tensor(n)) for t, n in zip(first, names, strict=True))
    assert torch.equal(params.tensor(names[0]), first[0])
    assert torch.equal(params.tensor(names[0]), first[0]) and len(calls) == 4
