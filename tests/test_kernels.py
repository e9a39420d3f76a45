"""The CPU kernels: products of a few rows, with and without the CPU's bf16 instructions.

Attention: few queries, chunks, masks, and in compiled programs. Fused ops: products of rounded
rows, and experts.
"""

from __future__ import annotations

import itertools
import random
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch.nn.functional import pad

from g4ir.backends.cpu import isa, pyops, tiles
from g4ir.backends.cpu.arena import Arena
from g4ir.backends.cpu.isa import multiplies_integers
from g4ir.backends.cpu.step_program import Recorder, record_step
from g4ir.backends.cuda.lowerings import grouped_experts
from g4ir.ir.graph import Builder, Program
from g4ir.ops import OPS
from g4ir.ops.attention import slot_positions, visible
from g4ir.ops.codecs import (
    FORMATS,
    dequantize_codes,
    fake_quantize_values,
    from_tiles,
    rows_from_tiles,
    to_tiles,
)
from g4ir.ops.kv_quant import dequantize_rows, quantize_rows
from g4ir.ops.moe import experts as experts_op
from g4ir.ops.types import ITEMSIZE, Type, dtype_name, torch_dtype
from g4ir.ui.processor import ISA, SETS, InstructionSet, instruction_set
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
from tests.step_ops import by_steps, linear, linear_coded, linear_rounded, takes_gemm

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
        got = linear(x[None, :rows], w)
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
def test_panels_of_tiles(form: str, rows: int, dtype: torch.dtype) -> None:
    """Prompts: units of rows, and rows that fill no panel; the largest integers and codes."""
    w, x = torch.randn(80, 512).to(dtype), torch.randn(1, rows, 512).to(dtype)
    x[:, :2], w[:16], w[16:32] = 253 * torch.tensor([[1.0], [-1.0]]), 1, -1
    group = max(size for size in CODED[form] if not size or 512 % size == 0)
    codes, scales = QUANTIZE(w, form=form, group=group, scale="f32")
    want = x[0].double() @ dequantize_codes(codes, scales.double(), dtype).t()
    *_, weight = layouts(codes, scales)
    assert takes_gemm(x, *weight[:2], False)
    got = by_steps("linear", x, weight, phase="prefill")
    assert ((got[0].double() - want).abs().amax(1) <= 2 * BUDGET[dtype] * want.abs().amax(1)).all()


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
    """Bit for bit, of random bytes."""
    size = FORMATS[form].elements_for(2048) * ITEMSIZE[FORMATS[form].codes]
    raw = torch.randint(0, 256, (16, size), dtype=torch.uint8)
    if form == "fp4":  # without scales that are no number
        raw.unflatten(1, (-1, 36))[..., 32:] &= 0xFE
    codes = raw.view(torch_dtype(FORMATS[form].codes))
    if form == "fp8":  # without the two that are no number
        codes = codes.view(torch.float8_e4m3fn)
        codes = torch.where(codes.float().isnan(), torch.zeros(()), codes.float()).to(codes.dtype)
    for groups, part, scale in ((1, 1, "bf16"), (2, 0.75, "f32"), (6, 0.75, "f16")):
        some = codes[:, : int(codes.shape[1] * part)].contiguous()
        groups *= FORMATS[form].scales
        if not pyops.takes_width(some, groups):
            continue
        scales = (torch.rand(codes.shape[0], groups) * 2**-6).to(torch_dtype(scale))
        for at in (some, some.repeat(16, 1)):
            weight = at, scales.repeat(len(at) // len(some), 1)
            for *parts, tiled in layouts(*weight):
                ids, op = torch.arange(len(at))[None], "embedding_quantized"
                op = "embedding_tiles" if tiled else op
                got = by_steps(op, *parts, ids, to=dtype_name(dtype), scale=1.0)
                assert torch.equal(got[0], dequantize_codes(*weight, dtype))


def test_long_rows_of_int8() -> None:
    """Sums of integers would not hold them."""
    x, w = torch.full((2, 66_048), 0.75).bfloat16(), torch.full((3, 66_048), -2.0)
    codes, scales = QUANTIZE(w, form="int8", group=0, scale="bf16")
    exact = x.double() @ dequantize_codes(codes, scales.double(), torch.bfloat16).double().t()
    assert torch.equal(linear_coded(x, codes, scales), exact.bfloat16())


@pytest.mark.parametrize("dtype", BUDGET, ids=str)
@pytest.mark.parametrize(("form", "group", "scale"), GROUPS)
def test_codes(dtype: torch.dtype, form: str, group: int, scale: str) -> None:
    for n, k in ((1, 64), (7, 96), (5, 40), (37, 704), (48, 704), (16, 12288), (130, 1024)):
        check_codes(dtype, (form, group, scale), n, k)


def check_codes(dtype: torch.dtype, form: tuple[str, int, str], n: int, k: int) -> None:
    """Of rows with outliers (coded_products.py): what is lost
    of them is 2^-13 of the largest product of their block, less than its rounding to bf16."""
    x, codes, scales, exact = with_outliers(40, n, k, form, dtype)
    if not pyops.takes_width(codes, scales.shape[1]):
        return
    want, size = x.double() @ exact.t(), x.double().square() @ exact.square().t()
    blocks = [pad(t.double(), (0, -t.shape[1] % 32)).unflatten(1, (-1, 32)) for t in (x, exact)]
    largest, each = blocks[0].square().amax(2), blocks[1].square().sum(2)
    lost = 2.0**-13 * (largest @ each.t()).sqrt() * (dtype != torch.float32)
    # A difference of a scaled code and a minimum is rounded by the size of both.
    lost += 2.0**-22 * x.double().abs().sum(1)[:, None] * exact.abs().amax(1)
    budget = BUDGET[dtype] * (want.abs() + size.sqrt() / 8) + lost
    for weight, rows in itertools.product(layouts(codes, scales), (1, 2, 3, 4, 5, 8, 9, 40)):
        got = linear_coded(x[None, :rows], *weight)
        assert got.dtype == dtype and got.shape == (1, rows, n)
        most = 1 if rows <= 8 and k % 32 == 0 else 16
        assert ((got[0].double() - want[:rows]).abs() <= most * budget[:rows]).all(), (n, k, rows)


PRODUCTS = (linear_coded, linear_rounded)


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


@pytest.mark.parametrize("tokens", [1, 7])
@pytest.mark.parametrize("form", CODED)
@pytest.mark.parametrize("first", [0, 1])
def test_experts_of_codes(form: str, tokens: int, first: int) -> None:
    """Of all experts, and of a rank that has two of four."""
    g = torch.Generator().manual_seed(tokens)
    x = torch.randn(1, tokens, 256, generator=g)
    weights = torch.rand(1, tokens, 2, generator=g)
    index = torch.stack([torch.randperm(4, generator=g)[:2] for _ in range(tokens)])[None]
    gate_up, down = torch.randn(4, 512, 256, generator=g), torch.randn(4, 256, 256, generator=g)
    parts = [QUANTIZE(w, form=form, group=CODED[form][0], scale="f32") for w in (gate_up, down)]
    dense = [dequantize_codes(*p, torch.float32) for p in parts]
    if first:
        parts, dense = [[t[1:3] for t in p] for p in parts], [d[1:3] for d in dense]
    rank = (torch.tensor([first]),) if first else ()
    more: dict[str, Any] = {"act": "silu"} | ({"total": 4} if first else {})
    want = experts_op.reference(x, weights, index, *dense, *rank, **more)
    stacks = ((*p, False) for p in parts)
    got = by_steps("experts", x, weights, index, *stacks, *rank, **more)
    assert (got - want).abs().max() <= 1e-5 * want.abs().max()


def test_special_values() -> None:
    """Infinities and NaN survive the rounding to bf16; ties go to even."""
    x, w = torch.tensor([[torch.nan, 1.0] + [0.0] * 30]).bfloat16(), torch.eye(4, 32).bfloat16()
    assert linear(x, w).isnan().any()
    exact = torch.tensor([[1.0, 2**-8] + [0.0] * 30]).bfloat16()  # 1 + 2^-8 lies between two
    ones = torch.ones(1, 32, dtype=torch.bfloat16)
    assert float(linear(exact, ones)) == 1.0


@pytest.mark.parametrize("dtype", BUDGET, ids=str)
@pytest.mark.parametrize(("n", "k"), [(5, 127), (37, 9216)])
def test_linear_on_other_cpus(other_cpu: None, dtype: torch.dtype, n: int, k: int) -> None:
    check_linear(dtype, n, k, (*range(1, 9), 24))


@pytest.mark.parametrize("dtype", BUDGET, ids=str)
@pytest.mark.parametrize(("form", "group", "scale"), GROUPS)
def test_codes_on_other_cpus(
    other_cpu: None, dtype: torch.dtype, form: str, group: int, scale: str
) -> None:
    check_codes(dtype, (form, group, scale), 48, 704)
    test_decoded_codes_are_the_definition(dtype, form)
    for bad, product in itertools.product((float("nan"), -float("inf")), PRODUCTS):
        test_what_is_no_number_stays_none(form, bad, product)


@pytest.mark.parametrize("form", CODED)
def test_prompts_on_other_cpus(other_cpu: None, form: str) -> None:
    test_panels_of_tiles(form, 130, torch.bfloat16)
    test_panels_of_dense_weights((48, 531), 130, torch.bfloat16)


INTEGERS = {*CODED} - {"fp8"}
WITHOUT_INTEGERS, WITH_FP8 = {"neon"}, {"avx512_bf16", "amx"}


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
def test_the_argmax_of_rounded_rows(form: str) -> None:
    """Is that of exact logits: of equal ones, all at the softcap, without ids that are never
    chosen, of zeros and NaN; where that is faster, logits of other ids are those of int8."""
    w, x = torch.rand(1040, 1024) - 0.01, torch.randn(9, 1024)
    w[1000:1002], x[0], x[1], x[2, 5] = w[100], w[100], -1, 300
    logits, group = torch.zeros(2, 9, 1, 1040, dtype=torch.bfloat16), CODED[form][0]
    weight = [*map(to_tiles, QUANTIZE(w, form=form, group=group, scale="f16"))]

    def chosen(exact: int, cap: float) -> tuple[torch.Tensor, ...]:
        r, never = Recorder(Arena("cpu")), torch.tensor([100, 7])
        n = pyops.FORMAT_IDS[weight[0].dtype], True, False, False
        y = r.emit("linear_coded", x[:, None].bfloat16(), *weight, logits[exact], n=n)
        y = r.emit("softcap", y, y.clone(), f=cap) if cap else y
        r.screen_logits(never, torch.tensor([exact]))
        results = r.greedy(y, never)
        r.code(()).run()
        return results

    halves = form != "fp8" and instruction_set().name in ("avx512_vnni", "avx512_bf16")
    for x[3], cap in itertools.product((0.0, torch.nan), (0.0, 30.0, 0.05)):
        assert all(map(torch.equal, chosen(0, cap), chosen(1, cap)))
        assert not halves or not torch.equal(*logits)


@pytest.mark.parametrize("form", CODED)
def test_what_isa_says_the_kernels_do(form: str) -> None:
    codes, scales = QUANTIZE(torch.randn(48, 1024), form=form, group=CODED[form][0], scale="f16")
    shape = 1, pyops.DTYPES[torch.bfloat16], 1, 1024, scales.shape[-1]
    takes = pyops.kernel("takes_codes")(pyops.FORMAT_IDS[codes.dtype], *shape)
    assert bool(takes) == isa.multiplies_integers(form)


@pytest.mark.parametrize("form", CODED)
def test_tiles_on_other_cpus(other_cpu: str, form: str) -> None:
    """Equal bit for bit where integers are summed, but for fp8 and SSE (v2), which has no FMA."""
    test_what_isa_says_the_kernels_do(form)
    test_the_argmax_of_rounded_rows(form)
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
    near = 0 if integers and form != "fp8" and other_cpu != "v2" else 2**-7
    for one, two in zip(best, other, strict=True):
        assert (one - two).abs().amax() <= near * one.abs().amax()


def test_other_threads_run_meanwhile() -> None:
    """A product takes Python's lock from no thread."""
    x, w = torch.randn(1, 4096), torch.randn(8192, 4096)
    before, ticks = sys.getswitchinterval(), 0
    sys.setswitchinterval(60)  # nobody is asked to give the lock away
    try:
        with ThreadPoolExecutor(1) as pool:
            products = pool.submit(lambda: [linear(x, w) for _ in range(8)])
            while not products.done():
                time.sleep(1e-4)
                ticks += 1
    finally:
        sys.setswitchinterval(before)
    assert ticks > 24
    torch.testing.assert_close(products.result()[0], x @ w.t(), rtol=1e-4, atol=1e-3)


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
        got = by_steps("attention", q, positions, written, k, v, **attrs, softcap=0.0)
        assert got.dtype == dtype and got.shape == q.shape
        assert (got.double() - want).abs().max() <= 2 * BUDGET[dtype] * want.abs().max()


@pytest.mark.parametrize("dtype", BUDGET, ids=str)
@pytest.mark.parametrize("shape", QUERIES, ids=str)
@pytest.mark.parametrize("d", [8, 40, 64, 256, 512])
def test_attention_of_few(dtype: torch.dtype, shape: tuple[int, int, int, int], d: int) -> None:
    check_attention(dtype, dtype, shape, d, d + sum(shape))


@pytest.mark.parametrize("dtype", BUDGET, ids=str)
@pytest.mark.parametrize("held", [torch.bfloat16, *BITS8], ids=str)
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
        exact = [dequantize_rows(rows, dtype).double() for rows in kept]
        if held == dtype:
            for rows in kept[:2]:
                rows[slot_positions(written, slots) < 0] = float("nan")
        given = (*exact, ids) if blocks else exact
        attrs = {"window": window, "scale": 0.75}
        want = ATTENTION(q.double(), positions, written, *given, **attrs, softcap=0.0)
        rows = (*kept, ids) if blocks else kept
        attrs |= {"phase": "prefill", "softcap": 0.0}
        got = by_steps("attention", q, positions, written, *rows, **attrs)
        assert got.dtype == q.dtype and got.shape == q.shape
        assert (got.double() - want).abs().max() <= 2**-7 * want.abs().max()


@pytest.mark.parametrize("name", ["q", "k"])
def test_a_chunk_keeps_what_is_no_number(name: str) -> None:
    """Queries that see it, of its head."""
    q, k, v = (torch.ones(1, 70, heads, 64).bfloat16() for heads in (4, 2, 2))
    {"q": q[:, 60, 2], "k": k[:, 60, 1]}[name].fill_(float("nan"))
    cache, positions = torch.zeros(16, 1, 2, 64).bfloat16(), torch.arange(70)[None]
    written = torch.tensor([0])
    operands, attrs = (q, positions, written, cache, cache, k, v), {"window": 5, "scale": 1.0}
    got = by_steps("attention", *operands, phase="prefill", **attrs, softcap=0.0)
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
    attrs = {"window": 0, "scale": 1.0, "softcap": 0.0}
    got = by_steps("attention", q, positions, written, k, v, **attrs)
    lost = got.isnan().all(-1).nonzero().tolist()
    assert lost == [[1, 0, 2], [1, 0, 3]] and got.isnan().sum() == 2 * 64


#: format -> values that share a scale
ROUNDED = {"int8": 32, "int6": 128, "uint5": 256, "int4": 32, "int5": 64, "uint4": 256, "nl4": 128}
ROUNDED |= {"int3": 32, "int2": 96, "fp4": 64}
#: for what a product makes: `SUM` of its terms' size
SUM = 2.0**-8
#: largest difference, relative to the rms of the result: fp32 sums in another order; bf16 rounds
#: each product once, to 2^-9 of its own size
BUDGETS = {torch.float32: 1e-5, torch.bfloat16: 3e-2}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize(("form", "group", "scale"), GROUPS)
def test_rounded_rows(dtype: torch.dtype, form: str, group: int, scale: str) -> None:
    """The grid's own numbers, not rounded to x's dtype; those of many rows are, and the weight,
    where the CPU multiplies no such codes."""
    for n, k in ((37, 704), (48, 704), (16, 12288), (128, 64)):
        check_rounded_rows(dtype, (form, group, scale), n, k)


def check_rounded_rows(dtype: torch.dtype, form: tuple[str, int, str], n: int, k: int) -> None:
    x, codes, scales, exact = with_outliers(37, n, k, form, dtype)
    if not pyops.takes_width(codes, scales.shape[1]):
        return
    rows = fake_quantize_values(x.double(), "int8")
    # A difference of a scaled code and a minimum is rounded by the size of both.
    lost = 2.0**-22 * rows.abs().sum(1)[:, None] * exact.abs().amax(1)
    want, size = rows @ exact.t(), (rows.square() @ exact.square().t()).sqrt()
    counts = (1, 2, 3, 4, 8, 9, *[37] * (dtype == torch.bfloat16))
    for (*weight, tiled), count in itertools.product(layouts(codes, scales), counts):
        got = linear_rounded(x[None, :count], *weight, tiled)[0].double()
        exactly = tiled and (count <= 8 or takes_gemm(x[:count], *weight, True))
        unit = SUM * (2 - exactly) if dtype == torch.bfloat16 else 1e-5
        budget = unit * (want.abs() + 2 * size) + lost
        assert ((got - want[:count]).abs() <= budget[:count]).all(), (n, k, count)


@pytest.mark.parametrize(
    ("form", "group"), [*ROUNDED.items(), ("int8", 768), ("int4", 256), ("int2", 768)]
)
def test_many_rounded_rows_are_multiplied_as_codes(form: str, group: int) -> None:
    """Each row has the same bits beside any others, more than a unit of them too; of a block that
    is no number, none are."""
    g = torch.Generator().manual_seed(len(form))
    x, w = torch.randn(600, 768, generator=g).bfloat16(), torch.randn(304, 768, generator=g)
    parts = QUANTIZE(w, form=form, group=group, scale="f16")
    codes, scales = map(to_tiles, parts)
    if not multiplies_integers(form):
        assert not takes_gemm(x, codes, scales, True)
        return
    assert takes_gemm(x, codes, scales, True)
    x[:, 32:64] *= 1000  # codes of +-127, all of one sign: the largest sums
    x[1, 64:96], x[2, 64:96] = 3.0, -3.0
    x[3, 5] = float("nan")
    every = linear_rounded(x, codes, scales, True)
    rows = fake_quantize_values(x.float(), "int8").double()
    exact = dequantize_codes(*parts, torch.float64)
    want = rows @ exact.t()
    near = SUM * (want.abs() + 2 * (rows.square() @ exact.square().t()).sqrt())
    good = torch.arange(600) != 3
    assert ((every.double() - want).abs() <= near)[good].all() and every[3].isnan().all()
    some = linear_rounded(x[4:49], codes, scales, True)
    assert torch.equal(some, every[4:49])


def close(got: torch.Tensor, want: torch.Tensor, budget: float) -> None:
    got, want = got.double(), want.double()
    error = ((got - want).abs().max() / want.pow(2).mean().sqrt().clamp(min=1e-30)).item()
    assert got.shape == want.shape and error <= budget, f"{error:.1e}, budget {budget:.0e}"


INDICES: dict[str, list[list[int]]] = TABLES["chosen experts"]


@pytest.mark.parametrize("dtype", BUDGETS, ids=str)
@pytest.mark.parametrize("case", INDICES)
@pytest.mark.parametrize("first", [None, 0, 3, 6])
def test_experts(case: str, dtype: torch.dtype, first: int | None) -> None:
    """The lowering of GPUs against the op's reference; with and without leading dims, and of two
    experts that a rank has."""
    index = torch.tensor(INDICES[case])
    g = torch.Generator().manual_seed(3)
    x = torch.randn(len(index), 64, generator=g).to(dtype)
    weights = torch.rand(index.shape, generator=g)
    gate_up = (torch.randn(8, 96, 64, generator=g) / 8).to(dtype)
    down = (torch.randn(8, 64, 48, generator=g) / 7).to(dtype)
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
    got = grouped_experts(act, x, weights, index, gate_up, down, *part)
    assert got.dtype == dtype
    close(got, want, BUDGETS[dtype])
    lead = grouped_experts(act, x[None], weights[None], index[None], gate_up, down, *part)
    assert lead.shape == (1, *x.shape)
    close(lead[0], want, BUDGETS[dtype])


@pytest.mark.parametrize("seed", range(8))
def test_rows_of_several_instructions(seed: int) -> None:
    """Threads run instructions together, some rows at a time, unless one reads or writes a row as
    another row: values as of one instruction after the other."""
    r, b, g = random.Random(seed), Builder("prefill"), torch.Generator().manual_seed(seed)
    feeds = {f"x{n}": torch.randn(1, 512, n, generator=g).bfloat16() for n in (128, 64)}
    weights = {f"w{n}": torch.rand(n, generator=g).bfloat16() + 0.5 for n in (128, 64, 32)}
    weights |= {f"table{i}": torch.randn(1, 512, 32, generator=g).bfloat16() for i in range(2)}
    params = {name: b.param(name, Type("bf16", tuple(t.shape))) for name, t in weights.items()}
    values = {n: [b.input(f"x{n}", Type("bf16", (1, 512, n)))] for n in (128, 64)}
    outputs = []
    for op in r.choices(
        ["rms_norm", "by_head", "stack_layers", "rope", "add", "mul", "scale"], k=24
    ):
        width = r.choice((128, 64))
        x, other = r.choices(values[width][-2:], k=2)
        by_head = b.emit("heads", x, n=width // 32)
        if op == "by_head":
            w = [params["w32"]] * r.randint(0, 1)
            y = b.emit("merge_heads", b.emit("rms_norm", by_head, *w, eps=1e-6))
        elif op == "rope":
            y = b.emit("merge_heads", b.emit("rope", by_head, params["table0"], params["table1"]))
        elif op == "stack_layers":
            outputs.append(b.emit(op, b.emit("scale", by_head, value=0.5)))
            continue
        elif op == "scale":
            y = b.emit("scale", x, value=0.75)
        else:
            more = {"eps": 1e-6} if op == "rms_norm" else {}
            y = b.emit(op, x, other if op == "add" else params[f"w{width}"], **more)
        values[width].append(y)
    outputs += [each[-1] for each in values.values()]
    program = record_step(b.graph(*outputs), weights, {}, dict(feeds), Arena("cpu"))
    want = {name: t.clone() for name, t in program.run(feeds).items()}
    for starts in ([0], range(len(program.code.instructions))):
        for t in (*program.outputs.values(), *program.code.buffers):
            t.fill_(0)
        for name, x in feeds.items():
            program.feeds[name].copy_(x)
        for i, end in itertools.pairwise([*starts, len(program.code.instructions)]):
            program.code.run((i, 0), (end, 0), threads=2)
        assert all(torch.equal(program.outputs[y], t) for y, t in want.items())


def test_copies_of_operands_stay_until_they_are_read() -> None:
    """q, k and v are columns of one product, of the same size: attention copies all three, and
    writes to none."""
    b, x = Builder("encode"), torch.randn(1, 40, 3 * 64, generator=torch.Generator().manual_seed(3))
    qkv = b.input("qkv", Type("bf16", tuple(x.shape)))
    q, k, v = (b.emit("heads", t, n=2) for t in b.emit_all("split", qkv, sizes=(64, 64, 64)))
    ends = b.input("ends", Type("i64", (2,)))
    y = b.emit("packed_attention", q, k, v, ends, window=0, scale=0.125)
    feeds = {"qkv": x.bfloat16(), "ends": torch.tensor([16, 40])}
    program = record_step(b.graph(y), {}, {}, dict(feeds), Arena("cpu"))
    q, k, v = (t.unflatten(-1, (2, 32)) for t in feeds["qkv"].split(64, -1))
    want = OPS["packed_attention"].reference(q, k, v, feeds["ends"], window=0, scale=0.125)
    close(program.run(feeds)[y.name], want, BUDGETS[torch.bfloat16])
