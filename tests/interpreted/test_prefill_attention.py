"""Attention of a chunk against the op's reference: masks, rings, groups, latent caches."""

from __future__ import annotations

from contextvars import Context
from dataclasses import dataclass, replace

import pytest
import torch
import triton
import triton.language as tl

from g4ir.backends.torch_compile.kernels.base import start
from g4ir.backends.torch_compile.kernels.prefill_attention import (
    _block,
    _is_partial,
    _runs,
    launch_prefill_attention,
    launch_prefill_attention_latent,
    prefill_attention,
    prefill_attention_latent,
)
from g4ir.ops.attention import attention, slot_positions, visible
from g4ir.ops.latent import keys_values_of_value

pytestmark = pytest.mark.covering

#: fp32: the order of sums. bf16: at most twice the reference's distance from float64, for it rounds
#: at more places; 1e-3 of the rms is far less than one rounding of the result (2^-9) and covers
#: references that happen to be almost exact.
FP32, BF16, CHANCE = 1e-5, 2.0, 1e-3


@dataclass(frozen=True)
class Case:
    """A chunk of `tokens` tokens; `written` tokens of each row are in a cache of `slots`."""

    tokens: int = 17
    written: tuple[int, ...] = (9, 0)
    slots: int = 24
    heads: int = 4
    kv_heads: int = 2
    dim: int = 32
    window: int = 0
    scale: float = 0.3
    softcap: float = 0.0
    pairs: int = 0
    dtype: torch.dtype = torch.float32
    tile: tuple[int, int] = (16, 16)  # block_m, block_n
    parts: int = 1


def _normal(seed: int, case: Case, *shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(case.dtype)


def _empty(cache: torch.Tensor, written: torch.Tensor, fill: float) -> torch.Tensor:
    """The cache [C,B,n,d] with slots that nothing was written to set to `fill`."""
    unused = slot_positions(written, cache.shape[0]) < 0
    return cache.masked_fill(unused[:, :, None, None], fill)


def _operands(case: Case, fill: float, *widths: int) -> tuple[torch.Tensor, ...]:
    """q, positions, written, then per width a cache, then per width the chunk's rows."""
    b, n = len(case.written), case.kv_heads
    written = torch.tensor(case.written)
    positions = written[:, None] + torch.arange(case.tokens)
    q = _normal(1, case, b, case.tokens, case.heads, case.dim)
    caches = [
        _empty(_normal(2 + i, case, case.slots, b, n, width), written, fill)
        for i, width in enumerate(widths)
    ]
    rows = [_normal(8 + i, case, b, case.tokens, n, width) for i, width in enumerate(widths)]
    return q, positions, written, *caches, *rows


def _close(case: Case, out: torch.Tensor, reference: torch.Tensor, truth: torch.Tensor) -> None:
    """The kernel's result against float64, in units of the truth's rms."""
    assert out.dtype == case.dtype and out.shape == truth.shape
    assert torch.isfinite(out).all()
    unit = truth.square().mean().sqrt()
    error, allowed = (out.double() - truth) / unit, (reference.double() - truth) / unit
    if case.dtype == torch.float32:
        assert error.abs().max() < FP32
    else:
        assert error.abs().max() < BF16 * allowed.abs().max() + CHANCE
        assert error.square().mean().sqrt() < BF16 * allowed.square().mean().sqrt() + CHANCE


def _check(case: Case) -> None:
    rules = {"window": case.window, "scale": case.scale, "softcap": case.softcap}
    poisoned = _operands(case, torch.nan, case.dim, case.dim)
    operands = _operands(case, 0.0, case.dim, case.dim)
    out = launch_prefill_attention(
        *poisoned, *rules.values(), *case.tile, warps=4, stages=2, parts=case.parts
    )
    wide = [x.double() if x.is_floating_point() else x for x in operands]
    _close(case, out, attention.reference(*operands, **rules), attention.reference(*wide, **rules))


def _from_latent(
    q: torch.Tensor,
    positions: torch.Tensor,
    written: torch.Tensor,
    w: torch.Tensor,
    cache: torch.Tensor,
    row: torch.Tensor,
    **rules: float,
) -> torch.Tensor:
    old, new = keys_values_of_value(cache, w), keys_values_of_value(row, w)
    out: torch.Tensor = attention.reference(q, positions, written, *old, *new, **rules)
    return out


def _check_latent(case: Case) -> None:
    rules = {"window": case.window, "scale": case.scale, "softcap": case.softcap}
    width = case.dim + 2 * case.pairs
    q, positions, written, cache, row = _operands(case, 0.0, width)
    w = 1 + _normal(20, case, case.dim) / 4
    poisoned = _empty(cache, written, torch.nan)
    out = launch_prefill_attention_latent(
        q, positions, written, w, poisoned, row, *rules.values(), *case.tile, warps=4, stages=2
    )
    operands = (q, positions, written, w, cache, row)
    wide = [x.double() if x.is_floating_point() else x for x in operands]
    _close(case, out, _from_latent(*operands, **rules), _from_latent(*wide, **rules))


LINEAR = [
    Case(tokens=1, written=(0, 30, 13), slots=32),
    Case(tokens=5, written=(16, 3), slots=40, dim=64),
    Case(tokens=17, written=(23, 0), slots=40),
    Case(tokens=40, written=(5,), slots=64, tile=(32, 16)),
    Case(tokens=9, written=(33, 32), slots=48, window=8),
    Case(tokens=24, written=(7,), slots=48, window=8, tile=(16, 32)),
]
RINGS = [
    Case(tokens=5, written=(0, 6), slots=8, window=8),
    Case(tokens=17, written=(8, 13), slots=8, window=8),
    Case(tokens=24, written=(100, 3), slots=8, window=8),
    Case(tokens=11, written=(21, 40), slots=19, window=8),
    Case(tokens=17, written=(59, 70), slots=24, window=20),
    Case(tokens=40, written=(91,), slots=40, window=33, tile=(32, 16)),
    Case(tokens=5, written=(40, 9), slots=16),  # has lost tokens that the mask would show
    Case(tokens=9, written=(31,), slots=8, window=12),
]
GROUPS = [(4, 4), (4, 2), (4, 1), (8, 1), (6, 2), (3, 1)]  # query heads, key heads
both = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["f32", "bf16"])


@both
@pytest.mark.parametrize("case", LINEAR, ids=str)
def test_linear_cache(case: Case, dtype: torch.dtype) -> None:
    _check(replace(case, dtype=dtype))


@both
@pytest.mark.parametrize("case", RINGS, ids=str)
def test_ring(case: Case, dtype: torch.dtype) -> None:
    _check(replace(case, dtype=dtype))


@both
@pytest.mark.parametrize("heads, kv_heads", GROUPS)
def test_groups(heads: int, kv_heads: int, dtype: torch.dtype) -> None:
    _check(Case(7, (11, 4), 16, heads, kv_heads, window=8, dtype=dtype))


@both
@pytest.mark.parametrize("dim", [8, 24, 48, 256])
def test_other_head_dims(dim: int, dtype: torch.dtype) -> None:
    _check(Case(6, (5, 9), 12, dim=dim, scale=dim**-0.5, dtype=dtype))


@both
@pytest.mark.parametrize("dim, parts", [(64, 2), (48, 2), (64, 4)])
def test_columns_of_v_shared_by_programs(dim: int, parts: int, dtype: torch.dtype) -> None:
    _check(Case(6, (5, 30), 12, dim=dim, parts=parts, window=9, dtype=dtype))


@both
def test_softcap(dtype: torch.dtype) -> None:
    _check(Case(10, (12, 3), 16, window=8, scale=1.0, softcap=3.0, dtype=dtype))
    _check_latent(Case(10, (12, 3), 16, scale=1.0, softcap=3.0, pairs=3, dtype=dtype))


@both
def test_large_scores(dtype: torch.dtype) -> None:
    """Scores of up to about +-100, as without a softmax scale: the running maximum holds them."""
    _check(Case(12, (20, 31), 32, scale=3.0, dtype=dtype))


@both
@pytest.mark.parametrize("pairs", [0, 4, 11, 16])
def test_latent(pairs: int, dtype: torch.dtype) -> None:
    _check_latent(Case(17, (23, 0), 40, pairs=pairs, dtype=dtype))


@both
@pytest.mark.parametrize(
    "case",
    [
        Case(5, (16, 3), 40, 8, 1, dim=64, pairs=8),
        Case(9, (30, 11), 32, 3, 1, dim=24, pairs=5),
        Case(17, (59, 70), 24, window=20, pairs=4),
        Case(1, (12,), 16, pairs=2),
    ],
    ids=str,
)
def test_latent_shapes(case: Case, dtype: torch.dtype) -> None:
    _check_latent(replace(case, dtype=dtype))


@both
def test_shapes_of_the_real_models(dtype: torch.dtype) -> None:
    """Head dims, groups, windows and tiles as on a GPU, over two tiles and a ring that wraps."""
    _check(Case(70, (1300,), 1024, 4, 2, 256, 1024, 1.0 / 16, dtype=dtype, tile=(128, 32)))
    full = Case(12, (40, 7), 64, 8, 1, 512, scale=1.0 / 22, dtype=dtype)
    _check(replace(full, tile=(64, 16), parts=2))
    _check_latent(replace(full, pairs=64, tile=(64, 32)))


def test_strided_operands() -> None:
    """K and V as columns of one projection, a q whose heads lie apart, one cache for all."""
    case = Case(9, (11, 4), 16, window=8)
    q, positions, written, cache_k, cache_v, k, v = _operands(case, 0.0, case.dim, case.dim)
    q, k, v = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k, v))
    k, v = torch.cat((k, v), -1).split(case.dim, -1)
    cache_k, cache_v = torch.stack((cache_k, cache_v), 1).unbind(1)
    operands = (q, positions.expand(2, -1), written, cache_k, cache_v, k, v)
    assert not any(x.is_contiguous() for x in (q, cache_k, cache_v, k, v))
    rules = {"window": 8, "scale": 0.3, "softcap": 0.0}
    out = launch_prefill_attention(*operands, *rules.values(), 16, 16, warps=4, stages=2)
    wide = [x.double() if x.is_floating_point() else x for x in operands]
    _close(case, out, out, attention.reference(*wide, **rules))


def test_ops() -> None:
    """Here the ops start the kernels; in a fresh context, as on a machine without a GPU, they are
    the reference."""
    case = Case(5, (7, 3), 12, dim=16, window=6, pairs=3)
    plain = (*_operands(case, 0.0, 16, 16), 6, 0.3, 0.0)
    q, positions, written, cache, row = _operands(case, 0.0, 22)
    latent = (q, positions, written, _normal(20, case, 16), cache, row, 6, 0.3, 0.0)
    tile = (16, 16, 4, 2)
    started = launch_prefill_attention(*plain, *tile)
    assert torch.equal(prefill_attention(*plain, *tile), started)
    started = launch_prefill_attention_latent(*latent, *tile)
    assert torch.equal(prefill_attention_latent(*latent, *tile), started)
    rules = {"window": 6, "scale": 0.3, "softcap": 0.0}
    out = Context().run(prefill_attention, *plain, *tile)
    assert torch.equal(out, attention.reference(*plain[:-3], **rules))
    out = Context().run(prefill_attention_latent, *latent, *tile)
    assert torch.equal(out, _from_latent(*latent[:-3], **rules))


@triton.jit
def _walk(
    counts, blocks, first, last, begin, old, slots, WINDOW: tl.constexpr, BLOCK_N: tl.constexpr
):
    """The number of blocks of a tile and, of each, what the kernel derives."""
    oldest, slot, run, wrapped, low = _runs(first, last, begin, old, slots, WINDOW)
    count = tl.cdiv(run, BLOCK_N) + tl.cdiv(wrapped, BLOCK_N) + tl.cdiv(last + 1 - low, BLOCK_N)
    tl.store(counts, count)
    for i in range(count):
        cached, row, stop, shift = _block(
            i, oldest, slot, run, wrapped, low, last + 1, begin, slots, BLOCK_N
        )
        partial = _is_partial(row, stop, shift, begin + first, begin + last, WINDOW, BLOCK_N)
        tl.store(blocks + 5 * i, cached.to(tl.int32))
        tl.store(blocks + 5 * i + 1, row)
        tl.store(blocks + 5 * i + 2, stop)
        tl.store(blocks + 5 * i + 3, shift)
        tl.store(blocks + 5 * i + 4, partial.to(tl.int32))


def _blocks(first: int, last: int, begin: int, slots: int, window: int) -> torch.Tensor:
    count, blocks = torch.zeros((), dtype=torch.int32), torch.zeros(64, 5, dtype=torch.int32)
    start(_walk, (1,), count, blocks, first, last, begin, begin, slots, WINDOW=window, BLOCK_N=16)
    return blocks[: int(count)]


WALKS = [
    # first and last query of the tile, tokens in the cache, slots, window
    (0, 7, 0, 64, 0),
    (0, 7, 40, 64, 0),
    (14, 21, 5, 64, 0),
    (16, 31, 40, 64, 0),
    (16, 20, 40, 64, 20),
    (0, 7, 70, 32, 0),
    (0, 7, 40, 64, 20),
    (24, 39, 40, 64, 20),
    (0, 7, 70, 32, 32),
    (8, 15, 70, 40, 32),
    (8, 15, 20, 40, 32),
    (40, 55, 70, 40, 32),
    (31, 31, 1000, 45, 32),
]


@pytest.mark.parametrize("first, last, begin, slots, window", WALKS)
def test_walks_over_visible_keys_only(
    first: int, last: int, begin: int, slots: int, window: int
) -> None:
    """The rows of the blocks are those that some query of the tile sees, each once, at the right
    positions; every query sees a whole block that goes unmasked; there are no more than it takes
    for three runs."""
    written, tokens = torch.tensor([begin]), torch.arange(last + 1)[:, None]
    key_pos = torch.cat((slot_positions(written, slots), begin + tokens))
    queries = begin + torch.arange(first, last + 1)[None]
    seen = visible(key_pos, queries, window)[0]  # [queries, slots + tokens]
    walked = []
    blocks = _blocks(first, last, begin, slots, window)
    for cached, row, stop, shift, partial in blocks.tolist():
        rows = torch.arange(row, min(row + 16, stop))
        index = rows if cached else rows + slots
        assert torch.equal(key_pos[index, 0], rows + shift)
        if not partial:
            assert len(rows) == 16 and seen[:, index].all()
        walked += index.tolist()
    assert sorted(walked) == seen.any(0).nonzero()[:, 0].tolist()
    assert len(blocks) <= len(walked) // 16 + 3
    if len(walked) >= 80:
        assert not blocks[:, 4].all()
