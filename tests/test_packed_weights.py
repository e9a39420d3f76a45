"""Packed weights of engines."""

from __future__ import annotations

import pytest

from g4ir.builder.build import prepare
from g4ir.model.tensors import numel, text_tensors
from g4ir.ops.types import ITEMSIZE
from g4ir.plan.options import BuildOptions
from tests.configs import NAMES, few, spec_called


@pytest.mark.parametrize("name", few(NAMES))
def test_packed_weights_have_no_padding(name: str) -> None:
    """What an engine stores is every tensor once: a layer with K=V packs Q and K alone."""
    spec = spec_called(name)
    prepared = prepare(spec, BuildOptions(random_weights=0))
    assert prepared.param_bytes() == numel(text_tensors(spec)) * ITEMSIZE[spec.dtype]
