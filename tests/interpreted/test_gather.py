"""Rows of a table that is known by its address."""

from __future__ import annotations

import pytest
import torch

from g4ir.backends.torch_compile.host_table import HostTable
from g4ir.backends.torch_compile.kernels.gather_triton import BLOCK


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("columns", [1, 33, BLOCK, 2 * BLOCK + 48])
def test_rows_by_address(dtype: torch.dtype, columns: int) -> None:
    """Bit for bit, whatever shape the ids have and wherever the table begins."""
    random = torch.Generator().manual_seed(columns)
    memory = torch.randn(11 * columns + 1, generator=random).to(dtype)
    for begin in (0, 1):
        plain = memory[begin : begin + 11 * columns].view(11, columns)
        table = HostTable(plain, torch.device("cpu"))
        for ids in ([[4], [0], [10]], [[3, 3, 9]], [7]):
            index = torch.tensor(ids)
            assert torch.equal(table[index], plain[index])
        strided = torch.arange(10)[::3]
        assert torch.equal(table[strided], plain[strided])
