"""Products of a few rows: where partial sums end, and weights that are refused."""

from __future__ import annotations

import pytest
import torch

from g4ir.backends.cuda.kernels.linear_triton import skinny_linear

from .samples import kernel_called

PRODUCT = kernel_called("skinny_linear")


def test_a_weight_whose_rows_lie_apart_is_refused() -> None:
    x, w = torch.ones(3, 1, 40), torch.ones(40, 9).t()
    with pytest.raises(ValueError, match="strides"):
        skinny_linear(x, w, None, "", 1, 4, 32, 1, 2, None)
