"""The CPU kernels: products of a few rows, with and without the CPU's bf16 instructions."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Sequence
from threading import Event, Thread
from typing import Any

import pytest
import torch
from torch.nn.functional import pad

from g4ir.backends.cpu import isa, pyops, tiles
from g4ir.ir.graph import Builder, Program
from g4ir.ops import OPS
from g4ir.ops.codecs import (
    FORMATS,
    dequantize_codes,
    from_tiles,
    pack_codes,
    rows_from_tiles,
    to_tiles,
)
from g4ir.ops.moe import experts as experts_op
from g4ir.ops.types import ITEMSIZE, Type, torch_dtype
from g4ir.ui.processor import ISA, SETS, InstructionSet
from tests.cases import TABLES
from tests.coded_products import (
    BUDGET,
    GROUPS,
    QUANTIZE,
    cpu_kernels,  # noqa: F401
    kernels_of_other_cpu,  # noqa: F401
    layouts,
    with_outliers,
)

pytestmark = pytest.mark.usefixtures("cpu_kernels")

#: of the last, few rows of x lie in a core's nearest cache, and more do not
SHAPES = [(1, 1), (7, 33), (24, 64), (5, 127), (64, 256), (3, 1000), (130, 515), (37, 9216)]
SHAPES += [(32, 800)]


def check_linear(dtype: torch.dtype, n: int, k: int, counts: Sequence[int]) -> None:
    """Products of so many rows each."""
    g = torch.Generator().manual_seed(n * k)
    x, w = (torch.randn(s, k, generator=g).to(dtype) for s in (max(counts), n))
    for rows in counts:
        want = x[:rows].double() @ w.double().t()
        got = pyops.linear(x[None, :rows], w)
        assert got.dtype == dtype and got.shape == (1, rows, n)
        budget = BUDGET[dtype] * want.abs().max().clamp(min=1)
        assert (got[0].double() - want).abs().max() <= budget, rows


@pytest.mark.parametrize("dtype", BUDGET, ids=str)
@pytest.mark.parametrize(("n", "k"), SHAPES)
def test_linear(dtype: torch.dtype, n: int, k: int) -> None:
    check_linear(dtype, n, k, (*range(1, 10), 24, 25, 515))


CODED: dict[str, list[int]] = TABLES["groups of codes"]


@pytest.mark.parametrize("form", CODED)
@pytest.mark.parametrize("lead", [(), (3,)])
def test_tiles_are_undone(form: str, lead: tuple[int, ...]) -> None:
    """Whole, and row by row."""
    parts = QUANTIZE(torch.randn(*lead, 48, 512), form=form, group=256, scale="bf16")
    for t in parts:
        tiled, data = to_tiles(t), t.view(torch.uint8)
        assert tiled.shape == t.shape and torch.equal(from_tiles(tiled).view(torch.uint8), data)
        assert not torch.equal(tiled.view(torch.uint8), data)
        ids = torch.tensor([[47, 0, 16], [5, 5, 31]])
        assert lead or torch.equal(rows_from_tiles(tiled, ids).view(torch.uint8), data[ids])


@pytest.mark.parametrize("dtype", BUDGET, ids=str)
@pytest.mark.parametrize("rows", [9, 130, 515])
@pytest.mark.parametrize("form", CODED)
def test_panels_of_tiles(
    form: str, rows: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prompts: no weight is decoded whole; units of rows, and rows that fill no panel."""
    w, x = torch.randn(80, 512).to(dtype), torch.randn(1, rows, 512).to(dtype)
    group = max(size for size in CODED[form] if not size or 512 % size == 0)
    codes, scales = QUANTIZE(w, form=form, group=group, scale="f32")
    want = x[0].double() @ dequantize_codes(codes, scales.double(), dtype).t()
    monkeypatch.setattr(pyops, "_decoded_linear", None)
    *_, weight = layouts(codes, scales)
    got = pyops.linear_coded(x, *weight)
    budget = 2 * BUDGET[dtype] * want.abs().max()
    assert (got[0].double() - want).abs().max() <= budget


@pytest.mark.parametrize("dtype", BUDGET, ids=str)
@pytest.mark.parametrize("rows", [1, 25, 130, 515])
@pytest.mark.parametrize("shape", [(1, 1), (16, 2), (80, 512), (48, 531), (647, 258)], ids=str)
def test_panels_of_dense_weights(shape: tuple[int, int], rows: int, dtype: torch.dtype) -> None:
    """As a chunk's rows are multiplied, of any sizes."""
    (n, k), w, x = shape, torch.randn(shape).to(dtype), torch.randn(rows, shape[1]).to(dtype)
    y = torch.full((rows + 1, n), 7.0, dtype=dtype)
    operands = (w.data_ptr(), x.data_ptr(), y.data_ptr(), pyops.DTYPES[dtype])
    assert not pyops.kernel("linear_chunk")(*operands, rows, n, k, 2)
    want = x.double() @ w.double().t()
    assert (y[:rows].double() - want).abs().max() <= 2 * BUDGET[dtype] * want.abs().max()
    assert (y[rows] == 7).all()


@pytest.mark.parametrize("dtype", BUDGET, ids=str)
@pytest.mark.parametrize("form", CODED)
def test_decoded_codes_are_the_definition(dtype: torch.dtype, form: str) -> None:
    """Bit for bit, for every code there is."""
    if form == "int4":
        codes = torch.arange(256, dtype=torch.uint8).view(4, 64)
    elif FORMATS[form].block_values > 2 and form != "int6":  # all bytes are codes
        size = FORMATS[form].elements_for(2048) * ITEMSIZE[FORMATS[form].codes]
        raw = torch.randint(0, 256, (16, size), dtype=torch.uint8)
        if form == "fp4":  # without scales that are no number
            raw.unflatten(1, (-1, 36))[..., 32:] &= 0xFE
        codes = raw.view(torch_dtype(FORMATS[form].codes))
    elif form == "int6":  # every number with every integer
        numbers = torch.arange(-32, 32).repeat(256).view(16, 1024)
        integers = torch.arange(-128, 128, dtype=torch.int8).repeat_interleave(4).view(16, 64)
        codes = pack_codes(numbers, form, integers.view(torch.uint8))
    else:
        codes = torch.arange(256, dtype=torch.uint8).view(torch.int8).view(2, 128)
    if form == "fp8":  # without the two that are no number
        codes = codes.view(torch.float8_e4m3fn)
        codes = torch.where(codes.float().isnan(), torch.zeros(()), codes.float()).to(codes.dtype)
    for groups, part, scale in ((1, 1, "bf16"), (2, 0.75, "f32"), (6, 0.75, "f16")):
        some = codes[:, : int(codes.shape[1] * part)].contiguous()
        groups *= FORMATS[form].scales
        scales = (torch.rand(codes.shape[0], groups) * 2**-6).to(torch_dtype(scale))
        for at in (some, some.repeat(16, 1)):
            weight = at, scales.repeat(len(at) // len(some), 1)
            for *parts, tiled in layouts(*weight):
                got = pyops.decoded(*parts, dtype, tiled)
                assert torch.equal(got, dequantize_codes(*weight, dtype))


def test_long_rows_of_int8() -> None:
    """Sums of integers would not hold them."""
    x, w = torch.full((2, 66_048), 0.75).bfloat16(), torch.full((3, 66_048), -2.0)
    codes, scales = QUANTIZE(w, form="int8", group=0, scale="bf16")
    exact = x.double() @ dequantize_codes(codes, scales.double(), torch.bfloat16).double().t()
    assert torch.equal(pyops.linear_coded(x, codes, scales), exact.bfloat16())


@pytest.mark.parametrize("dtype", BUDGET, ids=str)
@pytest.mark.parametrize(("form", "group", "scale"), GROUPS)
@pytest.mark.parametrize(
    ("n", "k"), [(1, 64), (7, 96), (5, 40), (37, 704), (48, 704), (16, 12288), (130, 1024)]
)
def test_codes(dtype: torch.dtype, form: str, group: int, scale: str, n: int, k: int) -> None:
    """Of rows with outliers (coded_products.py): what is lost
    of them is 2^-13 of the largest product of their block, less than its rounding to bf16. Rows of
    no whole blocks go another way, and so do many: a part of the weight is made first, rounded."""
    x, codes, scales, exact = with_outliers(40, n, k, (form, group, scale), dtype)
    want, size = x.double() @ exact.t(), x.double().square() @ exact.square().t()
    blocks = [pad(t.double(), (0, -t.shape[1] % 32)).unflatten(1, (-1, 32)) for t in (x, exact)]
    largest, each = blocks[0].square().amax(2), blocks[1].square().sum(2)
    lost = 2.0**-13 * (largest @ each.t()).sqrt() * (dtype != torch.float32)
    # A difference of a scaled code and a minimum is rounded by the size of both.
    lost += 2.0**-22 * x.double().abs().sum(1)[:, None] * exact.abs().amax(1)
    budget = BUDGET[dtype] * (want.abs() + size.sqrt() / 8) + lost
    for weight, rows in itertools.product(layouts(codes, scales), (1, 2, 3, 4, 5, 8, 9, 40)):
        got = pyops.linear_coded(x[None, :rows], *weight)
        assert got.dtype == dtype and got.shape == (1, rows, n)
        most = 1 if rows <= 8 and k % 32 == 0 else 16
        assert ((got[0].double() - want[:rows]).abs() <= most * budget[:rows]).all(), rows


PRODUCTS = (pyops.linear_coded, pyops.linear_rounded)


@pytest.mark.parametrize("product", PRODUCTS)
@pytest.mark.parametrize("form", CODED)
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_what_is_no_number_stays_none(form: str, bad: float, product: Any) -> None:
    parts = QUANTIZE(torch.randn(16, 768), form=form, group=CODED[form][0], scale="bf16")
    for weight, dtype in itertools.product(layouts(*parts), BUDGET):
        x = torch.ones(2, 768, dtype=dtype)
        x[0, 77] = bad
        got = product(x, *weight)
        assert not got[0].isfinite().any() and got[1].isfinite().all()


def test_codes_of_an_unknown_dtype_are_made_dense() -> None:
    w, x = torch.randn(8, 64), torch.randn(2, 64).half()
    codes, scales = QUANTIZE(w, form="int8", group=0, scale="f16")
    got = pyops.linear_coded(x, codes, scales)
    torch.testing.assert_close(got, x @ dequantize_codes(codes, scales, torch.float16).t())


@pytest.mark.parametrize("tokens", [1, 7])
@pytest.mark.parametrize("form", CODED)
def test_experts_of_codes(form: str, tokens: int) -> None:
    g = torch.Generator().manual_seed(tokens)
    x = torch.randn(1, tokens, 256, generator=g)
    weights = torch.rand(1, tokens, 2, generator=g)
    index = torch.stack([torch.randperm(4, generator=g)[:2] for _ in range(tokens)])[None]
    gate_up, down = torch.randn(4, 512, 256, generator=g), torch.randn(4, 256, 256, generator=g)
    parts = [QUANTIZE(w, form=form, group=CODED[form][0], scale="f32") for w in (gate_up, down)]
    dense = [dequantize_codes(*p, torch.float32) for p in parts]
    want = experts_op.reference(x, weights, index, *dense, act="silu")
    got = pyops.experts_coded(x, weights, index, *parts[0], *parts[1], "silu")
    assert (got - want).abs().max() <= 1e-5 * want.abs().max()


def test_special_values() -> None:
    """Infinities and NaN survive the rounding to bf16; ties go to even."""
    w = torch.eye(4, 32, dtype=torch.bfloat16)
    x = torch.zeros(1, 32, dtype=torch.bfloat16)
    x[0, :3] = torch.tensor([float("inf"), float("nan"), -1.5])
    assert pyops.linear(x, w).isnan().any()
    exact = torch.tensor([[1.0, 2**-8] + [0.0] * 30]).bfloat16()  # 1 + 2^-8 lies between two
    ones = torch.ones(1, 32, dtype=torch.bfloat16)
    assert float(pyops.linear(exact, ones)) == 1.0


@pytest.mark.parametrize("dtype", BUDGET, ids=str)
@pytest.mark.parametrize(("n", "k"), [(5, 127), (37, 9216)])
def test_linear_on_other_cpus(other_cpu: None, dtype: torch.dtype, n: int, k: int) -> None:
    check_linear(dtype, n, k, (*range(1, 9), 24))


@pytest.mark.parametrize("dtype", BUDGET, ids=str)
@pytest.mark.parametrize(("form", "group", "scale"), GROUPS)
def test_codes_on_other_cpus(
    other_cpu: None, dtype: torch.dtype, form: str, group: int, scale: str
) -> None:
    test_codes(dtype, form, group, scale, 48, 704)
    test_decoded_codes_are_the_definition(dtype, form)
    for bad, product in itertools.product((float("nan"), -float("inf")), PRODUCTS):
        test_what_is_no_number_stays_none(form, bad, product)


@pytest.mark.parametrize("form", CODED)
def test_prompts_on_other_cpus(other_cpu: None, form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    test_panels_of_tiles(form, 130, torch.bfloat16, monkeypatch)
    test_panels_of_dense_weights((48, 531), 130, torch.bfloat16)


INTEGERS = {*CODED} - {"fp8"}
WITHOUT_INTEGERS, WITH_FP8 = {"v2", "neon"}, {"avx512_bf16", "amx"}


@pytest.mark.parametrize("isa_set", SETS, ids=lambda s: s.name)
def test_integers_by_set(monkeypatch: pytest.MonkeyPatch, isa_set: InstructionSet) -> None:
    monkeypatch.setattr(isa, "instruction_set", lambda: isa_set)
    wanted = set() if isa_set.name in WITHOUT_INTEGERS else INTEGERS
    wanted = wanted | ({"fp8"} if isa_set.name in WITH_FP8 else set())
    assert {form for form in CODED if isa.multiplies_integers(form)} == wanted


@pytest.mark.parametrize("form", CODED)
@pytest.mark.parametrize(("rows", "tiled"), [(16, True), (17, False)])
def test_tiled_weights(form: str, rows: int, tiled: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """On every processor, where whole tiles fit."""
    monkeypatch.setattr(tiles, "FROM", 1)
    b = Builder()
    types = OPS["quantize"].infer(Type("f32", (rows, 256)), form=form, group=0, scale="f32")
    parts = [b.param(f"w.{part}", t) for part, t in zip(("codes", "scales"), types)]
    w = b.emit("dequantize", *parts, to="bf16")
    y = b.emit("linear", b.input("x", Type("bf16", (1, 1, 256))), w)
    g = tiles.in_tiles(Program({"decode": b.graph(y)})).graphs["decode"]
    ops = [n.op for n in g.nodes if n.op.startswith("dequantize")]
    assert ops == ["dequantize_tiles" if tiled else "dequantize"]


@pytest.mark.parametrize("product", PRODUCTS)
@pytest.mark.parametrize("form", CODED)
def test_a_row_is_the_same_beside_any_others(form: str, product: Any) -> None:
    """Bit for bit, whatever instructions multiply so many rows: of tiles."""
    x, w = torch.randn(8, 1024).bfloat16(), torch.randn(80, 1024)
    codes, scales = QUANTIZE(w, form=form, group=CODED[form][0], scale="f16")
    weight = to_tiles(codes), to_tiles(scales), True
    alone = torch.cat([product(row[None], *weight) for row in x])
    for rows in range(2, 9):
        assert torch.equal(product(x[:rows], *weight), alone[:rows]), rows


@pytest.mark.parametrize("form", CODED)
def test_what_isa_says_the_kernels_do(form: str) -> None:
    codes, scales = QUANTIZE(torch.randn(48, 1024), form=form, group=CODED[form][0], scale="f16")
    shape = 1, pyops.DTYPES[torch.bfloat16], 1, 1024, scales.shape[-1]
    takes = pyops.kernel("takes_codes")(pyops.FORMAT_IDS[codes.dtype], *shape)
    assert bool(takes) == isa.multiplies_integers(form)


@pytest.mark.parametrize("form", CODED)
def test_tiles_on_other_cpus(other_cpu: str, form: str) -> None:
    """Sums of integers are equal bit for bit, but for bf16's of fp8; others round."""
    test_what_isa_says_the_kernels_do(form)
    g = torch.Generator().manual_seed(len(form))
    x, w = torch.randn(8, 1024, generator=g).bfloat16(), torch.randn(48, 1024, generator=g)
    # the largest digits and codes: AVX2 adds some products in 16 bits
    x[:2], w[:32] = torch.tensor([[253.0], [-253.0]]), torch.tensor([[1.0], [-1.0]]).repeat(16, 1)
    codes, scales = QUANTIZE(w, form=form, group=CODED[form][0], scale="f16")
    weight = to_tiles(codes), to_tiles(scales), True
    # AVX2 has no integers of fp8: rows that are rounded become bf16 once more
    products = PRODUCTS[:1] if form == "fp8" else PRODUCTS

    def made() -> list[torch.Tensor]:
        return [p(x[:rows], *weight) for p in products for rows in range(1, 9)]

    other, integers = made(), isa.multiplies_integers(form)
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv(ISA)
        patch.setattr(pyops, "_kernels", {})
        pyops.load_kernels()
        best, integers = made(), integers and isa.multiplies_integers(form)
    near = 0 if integers and form != "fp8" else 2**-7
    for one, two in zip(best, other, strict=True):
        assert (one - two).abs().amax() <= near * one.abs().amax()


def test_other_threads_run_meanwhile() -> None:
    """A product takes Python's lock from no thread."""
    x, w = torch.randn(1, 4096), torch.randn(8192, 4096)
    ticks, stop = [0], Event()

    def tick() -> None:
        while not stop.wait(1e-4):
            ticks[0] += 1

    other = Thread(target=tick)
    other.start()
    before = sys.getswitchinterval()
    sys.setswitchinterval(60)  # nobody is asked to give the lock away
    try:
        seen = 0
        for _ in range(5):
            started = ticks[0]
            made = pyops.linear(x, w)
            seen += ticks[0] - started
    finally:
        sys.setswitchinterval(before)
        stop.set()
        other.join()
    assert seen
    torch.testing.assert_close(made, x @ w.t(), rtol=1e-4, atol=1e-3)
