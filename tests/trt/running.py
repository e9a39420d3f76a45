"""What is emitted in the dialect, computed by onnxruntime."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any

import torch

from g4ir.backends.trt.dialect import Dialect
from g4ir.backends.trt.parse import Addresses
from tests.trt.execute import with_weights
from tests.trt.segments import Exchange, computed, segments


def new_emitter(weights: Callable[[str], torch.Tensor] | None = None) -> Dialect:
    params: Any = SimpleNamespace(tensor=weights)
    return Dialect(Addresses(params))


def outputs_of(
    e: Dialect, feeds: Mapping[str, torch.Tensor], exchange: Exchange | None = None
) -> dict[str, torch.Tensor]:
    """The outputs; feeds that it has no input for are left out."""
    made = computed([*segments(with_weights(e, "network"))], feeds, exchange)
    return {name: made[name] for name in e.results}
