"""Is each Triton kernel right on this GPU, and what share of the bandwidth does it reach?"""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch

from bench.gpu.cases import case_name, compile_ahead, one_kernel, programs
from bench.gpu.steps import CARD, DRY, Scale
from g4ir.backends.torch_compile.kernel_cases import all_cases
from g4ir.backends.torch_compile.kernels.interpreter import interpreted
from g4ir.backends.torch_compile.target import Target, find_target
from g4ir.bench.roof import Meter

__all__ = ["CARD", "DRY"]


@pytest.mark.limit(300)
@pytest.mark.parametrize("rows", [1, 8, 16])
def test_kernels(measure: Any, scale: Scale, variant: str, rows: int) -> None:
    target = Target(scale.device, scale.gpu or find_target(scale.device, 1).gpu, rows)
    every = all_cases(programs([variant], rows), [target], scale.tokens, scale.new)
    cases = {case_name(c): c for c in every}
    interpreting = scale.device == "cpu"
    if not interpreting:
        compile_ahead([c for name, c in cases.items() if name not in measure.found])
    rate = Meter(scale.device, torch.bfloat16).measure().bandwidth
    with interpreted() if interpreting else torch.no_grad():
        for name, case in cases.items():
            measure(name, partial(one_kernel, case, scale.device, rate))
