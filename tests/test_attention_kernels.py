"""The CPU kernels of attention: few queries, chunks, masks, and in compiled programs."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch

from g4ir.backends.cpu import pyops
from g4ir.ops import OPS
from g4ir.ops.attention import last_visible, slot_positions, visible
from g4ir.ops.kv_quant import dequantize_rows, quantize_rows
from tests.coded_products import (
    BUDGET,
    cpu_kernels,  # noqa: F401
    kernels_of_other_cpu,  # noqa: F401
)

pytestmark = pytest.mark.usefixtures("cpu_kernels")

#: rows of the batch, queries, heads of keys, heads of a group
QUERIES = ((1, 1, 1, 8), (1, 1, 2, 4), (3, 1, 2, 1), (2, 1, 1, 2), (2, 3, 2, 3), (1, 7, 1, 2))
#: slots of a cache, window: rings of one window, lists, and a ring of several
SLOTS_WINDOWS = ((9, 9), (64, 0), (500, 0), (512, 512), (300, 100))
ATTENTION: Any = OPS["attention"].reference
BITS8 = (torch.int8, torch.float8_e4m3fn)


def cached(held: torch.dtype, g: torch.Generator, *shape: int) -> torch.Tensor:
    """Random rows as a cache holds them."""
    rows = torch.randn(shape, generator=g)
    return quantize_rows(rows) if held == torch.int8 else rows.to(held)


def check_attention(
    dtype: torch.dtype, held: torch.dtype, shape: tuple[int, int, int, int], d: int, seed: int
) -> None:
    """Against float64, over every kind of cache; in what nobody sees there is no number."""
    b, s, kv_heads, group = shape
    g = torch.Generator().manual_seed(seed)
    for slots, window in SLOTS_WINDOWS:
        slots += (s - 1) * bool(window)  # rows that are verified leave the ring's last window there
        most = 3 * slots + 2 if window else slots
        written = torch.randint(s, most + 1, (b,), generator=g)
        positions = written[:, None] - s + torch.arange(s)
        q = (torch.randn(b, s, kv_heads * group, d, generator=g) * 2 * d**-0.5).to(dtype)
        k, v = (cached(held, g, slots, b, kv_heads, d) for _ in "kv")
        seen = visible(slot_positions(written, slots), positions, window).any(1).t()
        if held in (torch.float32, torch.bfloat16):
            for rows in (k, v):
                rows[~seen] = float("nan")
        attrs = {"window": window, "scale": 0.75}
        exact = [torch.nan_to_num(dequantize_rows(rows, torch.float64)) for rows in (k, v)]
        want = ATTENTION(q.double(), positions, written, *exact, **attrs, softcap=0.0)
        got = pyops.attend(q, positions, written, k, v, **attrs)
        assert got.dtype == dtype and got.shape == q.shape
        assert (got.double() - want).abs().max() <= 2 * BUDGET[dtype] * want.abs().max()


@pytest.mark.parametrize("dtype", BUDGET, ids=str)
@pytest.mark.parametrize("shape", QUERIES, ids=str)
@pytest.mark.parametrize("d", [8, 40, 64, 256, 512])
def test_attention_of_few(dtype: torch.dtype, shape: tuple[int, int, int, int], d: int) -> None:
    check_attention(dtype, dtype, shape, d, d + sum(shape))


@pytest.mark.parametrize("dtype", BUDGET, ids=str)
@pytest.mark.parametrize("held", [torch.bfloat16, torch.float16, *BITS8], ids=str)
def test_attention_over_narrow_rows(dtype: torch.dtype, held: torch.dtype) -> None:
    for shape, d in (((2, 1, 2, 4), 40), ((1, 3, 1, 5), 256)):
        check_attention(dtype, held, shape, d, d)


#: the same of chunks: heads of a group times queries fill blocks of 48 and do not
CHUNKS = ((1, 5, 1, 8), (2, 37, 2, 4), (1, 130, 1, 3), (3, 1, 1, 2))


@pytest.mark.parametrize("held", [None, *BITS8], ids=str)
@pytest.mark.parametrize("shape", CHUNKS, ids=str)
@pytest.mark.parametrize(
    ("dtype", "d"), [(torch.float32, 256), *((torch.bfloat16, d) for d in (8, 40, 256, 512))]
)
def test_attention_of_a_chunk(
    held: torch.dtype | None, shape: tuple[int, int, int, int], dtype: torch.dtype, d: int
) -> None:
    """Against float64, over every kind of cache, with and without blocks of soft tokens; empty
    slots hold no number."""
    b, s, kv_heads, group = shape
    held, g = held or dtype, torch.Generator().manual_seed(d + s)
    for (slots, window), blocks in itertools.product(SLOTS_WINDOWS, (False, True)):
        most = 3 * slots if window else max(slots - s, 0)
        written = torch.randint(0, most + 1, (b,), generator=g)
        positions = written[:, None] + torch.arange(s)
        q = (torch.randn(b, s, kv_heads * group, d, generator=g) * 2 * d**-0.5).to(dtype)
        kept = [cached(held, g, slots, b, kv_heads, d) for _ in "kv"]
        kept += [cached(held, g, b, s, kv_heads, d) for _ in "kv"]
        ids = torch.randint(-1, 1, (b, s), generator=g).cummax(1).values
        last = last_visible(positions, ids) if blocks else positions
        exact = [dequantize_rows(rows, dtype).double() for rows in kept]
        if held == dtype:
            for rows in kept[:2]:
                rows[slot_positions(written, slots) < 0] = float("nan")
        given = (*exact, ids) if blocks else exact
        attrs = {"window": window, "scale": 0.75}
        want = ATTENTION(q.double(), positions, written, *given, **attrs, softcap=0.0)
        got = pyops.attend_chunk(q, positions, last, written, kept, **attrs)
        assert got.dtype == q.dtype and got.shape == q.shape
        assert (got.double() - want).abs().max() <= 2**-7 * want.abs().max()


@pytest.mark.parametrize("name", ["q", "k"])
def test_a_chunk_keeps_what_is_no_number(name: str) -> None:
    """Queries that see it, of its head."""
    q, k, v = (torch.ones(1, 70, heads, 64).bfloat16() for heads in (4, 2, 2))
    {"q": q[:, 60, 2], "k": k[:, 60, 1]}[name].fill_(float("nan"))
    cache, positions = torch.zeros(16, 1, 2, 64).bfloat16(), torch.arange(70)[None]
    written = torch.tensor([0])
    got = pyops.attend_chunk(q, positions, positions, written, (cache, cache, k, v), 5, 1.0)
    lost = got.isnan().all(-1).nonzero().tolist()
    seen = [[0, 60, 2]] if name == "q" else [[0, s, h] for s in range(60, 65) for h in (2, 3)]
    assert lost == seen and got.isnan().sum() == 64 * len(seen)


@pytest.mark.parametrize("dtype", BUDGET, ids=str)
@pytest.mark.parametrize("d", [40, 256])
def test_attention_on_other_cpus(other_cpu: None, dtype: torch.dtype, d: int) -> None:
    for shape in QUERIES:
        check_attention(dtype, dtype, shape, d, d)
    check_attention(dtype, torch.int8, QUERIES[0], d, d)


@pytest.mark.parametrize("dtype", BUDGET, ids=str)
@pytest.mark.parametrize("value", ["q", "k", "v"])
def test_attention_keeps_what_is_no_number(dtype: torch.dtype, value: str) -> None:
    """In its row and its head alone; a row that holds nothing is finite."""
    g = torch.Generator().manual_seed(0)
    q = torch.randn(3, 1, 4, 64, generator=g).to(dtype)
    k, v = (torch.randn(130, 3, 2, 64, generator=g).to(dtype) for _ in "kv")
    {"q": q[1, 0, 2:], "k": k[100, 1, 1], "v": v[100, 1, 1]}[value].fill_(float("nan"))
    positions, written = torch.tensor([[120], [120], [0]]), torch.tensor([121, 121, 0])
    got = pyops.attend(q, positions, written, k, v, window=0, scale=1.0)
    lost = got.isnan().all(-1).nonzero().tolist()
    assert lost == [[1, 0, 2], [1, 0, 3]] and got.isnan().sum() == 2 * 64
