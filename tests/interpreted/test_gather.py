"""Rows of a table that is known by its address; and what rows go on with behind a step."""

from __future__ import annotations

import pytest
import torch

from g4ir.backends.cuda.host_table import ROW_BLOCK as BLOCK
from g4ir.backends.cuda.host_table import HostTable
from g4ir.backends.cuda.token_loop import end_by_torch
from g4ir.backends.experimental.end_of_step import end_step

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


def test_the_end_of_a_step() -> None:
    """As torch has it: rows that run, at rest, and with logits that are no numbers."""
    sums = torch.tensor([1.5, torch.nan, torch.inf, torch.nan, -2.0])
    chosen = torch.tensor([7, 3, 9, 5, 40])
    rows = [torch.tensor(x) for x in ([1, 2, 3, 4, 7], [5, 6, 7, 8, 9], [1, 1, 1, 0, 1])]
    rows.append(torch.zeros(5))
    want = [x.clone() for x in rows]
    end_by_torch([sums, chosen, *want])
    end_step([sums, chosen, *rows])
    for a, b in zip(rows, want, strict=True):
        torch.testing.assert_close(a, b, equal_nan=True)
    assert rows[3].isnan().tolist() == [False, True, True, False, False]


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Bit for bit."""
    return a.dtype == b.dtype and torch.equal(a.view(torch.uint8), b.view(torch.uint8))
