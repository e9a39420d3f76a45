"""The CPU kernels of fused ops: products of rounded rows, and experts."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch

from g4ir.backends.cpu import pyops
from g4ir.backends.cpu.isa import multiplies_integers
from g4ir.backends.cuda.lowerings import grouped_experts
from g4ir.ops import OPS
from g4ir.ops.codecs import dequantize_codes, fake_quantize_values, to_tiles
from g4ir.ui.processor import cpu_flags
from tests.cases import TABLES
from tests.coded_products import (
    GROUPS,
    QUANTIZE,
    asked_of,
    cpu_kernels,  # noqa: F401
    layouts,
    with_outliers,
)

pytestmark = pytest.mark.usefixtures("cpu_kernels")

#: format -> values that share a scale
CODED = {"int8": 32, "int6": 128, "uint5": 256, "int4": 32, "int5": 64, "uint4": 256}
CODED |= {"int3": 32, "int2": 96, "fp4": 64}
#: for what a product makes: `SUM` of its terms' size
SUM = 2.0**-8
#: largest difference, relative to the rms of the result: fp32 sums in another order; bf16 rounds
#: each product once, to 2^-9 of its own size
BUDGETS = {torch.float32: 1e-5, torch.bfloat16: 3e-2}


@pytest.mark.parametrize(
    ("form", "to", "taken"), [("int4", "int8", 1), ("int8", "int8", 1), ("fp8", "fp8", 0)]
)
def test_rows_as_they_are(form: str, to: str, taken: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """On the CPU, through a fused op too; what takes no such rows gets the rounded numbers."""
    asked, dtype = asked_of("linear_rounded", pyops.linear_rounded, form, to, monkeypatch)
    assert asked == taken * [dtype]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize(("form", "group", "scale"), GROUPS)
@pytest.mark.parametrize(("n", "k"), [(37, 704), (48, 704), (16, 12288), (128, 64)])
def test_rounded_rows(
    dtype: torch.dtype, form: str, group: int, scale: str, n: int, k: int
) -> None:
    """The grid's own numbers, not rounded to x's dtype; those of many rows are, and the weight,
    where the CPU multiplies no such codes."""
    x, codes, scales, exact = with_outliers(37, n, k, (form, group, scale), dtype)
    rows = fake_quantize_values(x.double(), "int8")
    # A difference of a scaled code and a minimum is rounded by the size of both.
    lost = 2.0**-22 * rows.abs().sum(1)[:, None] * exact.abs().amax(1)
    want, size = rows @ exact.t(), (rows.square() @ exact.square().t()).sqrt()
    counts = (1, 2, 3, 4, 8, 9, *[37] * (dtype == torch.bfloat16))
    for (*weight, tiles), count in itertools.product(layouts(codes, scales), counts):
        got = pyops.linear_rounded(x[None, :count], *weight, tiles)[0].double()
        exactly = tiles and (count <= 8 or pyops._takes_gemm(x[:count], *weight, True))
        unit = SUM * (2 - exactly) if dtype == torch.bfloat16 else 1e-5
        budget = unit * (want.abs() + 2 * size) + lost
        assert ((got - want[:count]).abs() <= budget[:count]).all()


@pytest.mark.parametrize("form", CODED)
def test_many_rounded_rows_are_multiplied_as_codes(form: str) -> None:
    """Each row has the same bits beside any others, more than a unit of them too; of a block that
    is no number, none are."""
    g = torch.Generator().manual_seed(len(form))
    x, w = torch.randn(600, 768, generator=g).bfloat16(), torch.randn(304, 768, generator=g)
    parts = QUANTIZE(w, form=form, group=CODED[form], scale="f16")
    codes, scales = map(to_tiles, parts)
    in_pairs = not {"avx512_vnni", "avx_vnni", "asimd"} & {*cpu_flags()}
    if not multiplies_integers(form) or (form == "int8" and in_pairs):  # 16 bits would overflow
        assert not pyops._takes_gemm(x, codes, scales, True)
        return
    assert pyops._takes_gemm(x, codes, scales, True)
    x[:, 32:64] *= 1000  # codes of +-127, all of one sign: the largest sums
    x[1, 64:96], x[2, 64:96] = 3.0, -3.0
    x[3, 5] = float("nan")
    every = pyops.linear_rounded(x, codes, scales, True)
    rows = fake_quantize_values(x.float(), "int8").double()
    exact = dequantize_codes(*parts, torch.float64)
    want = rows @ exact.t()
    near = SUM * (want.abs() + 2 * (rows.square() @ exact.square().t()).sqrt())
    good = torch.arange(600) != 3
    assert ((every.double() - want).abs() <= near)[good].all() and every[3].isnan().all()
    some = pyops.linear_rounded(x[4:49], codes, scales, True)
    assert torch.equal(some, every[4:49])


@pytest.mark.skipif("avx512_vnni" not in cpu_flags(), reason="this CPU multiplies no such codes")
def test_where_codes_are_multiplied(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows in bf16; others are rounded first, and go on as products with codes do."""
    seen: list[int] = []

    def counted(x: torch.Tensor, *weight: Any) -> torch.Tensor:
        seen.append(x.shape[0])
        return x.new_zeros(x.shape[0], 16)

    monkeypatch.setattr(pyops, "linear_coded", counted)
    parts = QUANTIZE(torch.randn(16, 64), form="int4", group=32, scale="bf16")
    tiles = (*map(to_tiles, parts), True)
    for rows in (1, 8, 9):
        pyops.linear_rounded(torch.randn(rows, 64).bfloat16(), *tiles)
    pyops.linear_rounded(torch.randn(2, 64), *tiles)
    pyops.linear_rounded(torch.randn(3, 64).bfloat16(), *parts)
    assert seen == [2, 3]


def close(got: torch.Tensor, want: torch.Tensor, budget: float) -> None:
    got, want = got.double(), want.double()
    error = ((got - want).abs().max() / want.pow(2).mean().sqrt().clamp(min=1e-30)).item()
    assert got.shape == want.shape and error <= budget, f"{error:.1e}, budget {budget:.0e}"


INDICES: dict[str, list[list[int]]] = TABLES["chosen experts"]


@pytest.mark.parametrize("dtype", BUDGETS, ids=str)
@pytest.mark.parametrize("case", INDICES)
@pytest.mark.parametrize("form", ["callback", "grouped"])
@pytest.mark.parametrize("first", [None, 0, 3, 6])
def test_experts(form: str, case: str, dtype: torch.dtype, first: int | None) -> None:
    """Both lowerings against the op's reference; with and without leading dims, and of two experts
    that a rank has."""
    index = torch.tensor(INDICES[case])
    g = torch.Generator().manual_seed(3)
    x = torch.randn(len(index), 64, generator=g).to(dtype)
    weights = torch.rand(index.shape, generator=g)
    gate_up = (torch.randn(8, 96, 64, generator=g) / 8).to(dtype)
    down = (torch.randn(8, 64, 48, generator=g) / 7).to(dtype)
    run = pyops.experts if form == "callback" else grouped_experts
    act = "gelu_pytorch_tanh"
    reference, part = OPS["experts"].reference, ()
    assert reference
    want = reference(x, weights, index, gate_up, down, act=act)
    if first is not None:
        part = (torch.tensor([first]),)
        gate_up, down = (w[first : first + 2] for w in (gate_up, down))
        chosen = weights * ((index >= first) & (index < first + 2))
        place = (index - first).clamp(0, 1)
        want = reference(x, chosen, place, gate_up, down, act=act)
    got = run(x, weights, index, gate_up, down, act, *part)
    assert got.dtype == dtype
    close(got, want, BUDGETS[dtype])
    lead = run(x[None], weights[None], index[None], gate_up, down, act, *part)
    assert lead.shape == (1, *x.shape)
    close(lead[0], want, BUDGETS[dtype])
