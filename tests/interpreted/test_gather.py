"""Rows of a table that is known by its address."""

from __future__ import annotations

import pytest
import torch

from g4ir.backends.cuda.host_table import ROW_BLOCK as BLOCK
from g4ir.backends.cuda.host_table import HostTable

DTYPES = [
    torch.float32,
    torch.bfloat16,
    torch.float16,
    torch.int8,
    torch.uint8,
    torch.float8_e4m3fn,
]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("columns", [1, 33, BLOCK, 2 * BLOCK + 48])
def test_rows_by_address(dtype: torch.dtype, columns: int) -> None:
    """Bit for bit, whatever shape the ids have and wherever the table begins."""
    random = torch.Generator().manual_seed(columns)
    memory = torch.randn(11 * columns + 1, generator=random).mul_(40).to(dtype)
    for begin in (0, 1):
        plain = memory[begin : begin + 11 * columns].view(11, columns)
        table = HostTable(plain, torch.device("cpu"))
        for ids in ([[4], [0], [10]], [[3, 3, 9]], [7]):
            index = torch.tensor(ids)
            assert same(table[index], plain[index])
        strided = torch.arange(10)[::3]
        assert same(table[strided], plain[strided])


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Bit for bit."""
    return a.dtype == b.dtype and torch.equal(a.view(torch.uint8), b.view(torch.uint8))
