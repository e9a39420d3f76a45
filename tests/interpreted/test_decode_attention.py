"""Attention of one token over plain and latent caches: lengths, rings, splits, heads, forms.

What the query does not see is NaN in the kernel's caches and 0 in the reference's.
"""

from __future__ import annotations

from contextvars import Context
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import triton
import triton.language as tl

from g4ir.backends.torch_compile.kernels import decode_attention as module
from g4ir.backends.torch_compile.kernels.base import recorded, start
from g4ir.backends.torch_compile.kernels.decode_attention import (
    _cos_sin,
    _span,
    decode_attention,
    decode_attention_latent,
    launch_decode_attention,
    launch_decode_attention_latent,
    tree,
)
from g4ir.ops.attention import attention, slot_positions, visible
from g4ir.ops.latent import attention_latent, inverse_rms, latent_row
from g4ir.ops.norm import rms_norm
from g4ir.ops.rope import inverse_frequencies, rope, rope_table
from g4ir.ops.types import dtype_name

pytestmark = pytest.mark.covering

W = 13
LENGTHS = ((0, 1, W - 1), (W, W + 1, 3 * W + 2))
#: layout of the cache -> slots, window
LAYOUTS = {"ring": (W, W), "slack": (W + 5, W), "list": (64, 0), "list, window": (64, W)}
DTYPES = (torch.float32, torch.bfloat16)
#: of the rms of the float64 result: sums in another order, exp2 and tanh of fp32
FP32 = 5e-6
#: error in bf16 over that of the reference, which rounds scores and normalised probabilities
BF16 = 1.5
#: and over bf16's rounding of the result, where the reference happens to be exact
ROUNDING = 2.0**-9
TUNING = {"block_n": 4, "warps": 4, "stages": 2}


@triton.jit
def _turn(x, cos, sin, N: tl.constexpr):
    i = tl.arange(0, N)
    c, s = _cos_sin(tl.load(x + i))
    tl.store(cos + i, c)
    tl.store(sin + i, s)


@triton.jit
def _shares(seen, used, SPLITS: tl.constexpr, N: tl.constexpr):
    i = tl.program_id(0)
    _, _, _, shares = _span(tl.load(seen + i), 1 << 30, 0, 0, SPLITS, N)
    tl.store(used + i, shares)


@dataclass
class Case:
    """One call: operands of the kernel (unseen slots NaN) and of the reference (unseen slots 0)."""

    q: torch.Tensor
    end: torch.Tensor
    caches: list[torch.Tensor]
    zeros: list[torch.Tensor]
    attrs: dict[str, Any]
    w: torch.Tensor | None = None
    form: str = ""
    rotation: dict[str, Any] | None = None

    @property
    def live(self) -> torch.Tensor:
        return self.end > 0

    def arrivals(self) -> torch.Tensor:
        return torch.zeros(*self.caches[0].shape[1:3], dtype=torch.int64)

    def freqs(self) -> torch.Tensor:
        assert self.w is not None and self.rotation
        r = self.rotation
        table = inverse_frequencies(r["kind"], r["theta"], len(self.w), r["fraction"], r["factor"])
        return torch.as_tensor(table[: self.pairs])

    @property
    def pairs(self) -> int:
        assert self.rotation
        return int(self.rotation["fraction"] * self.q.shape[-1] // 2)

    def run(self, splits: int, arrivals: torch.Tensor | None = None, **tuning: int) -> torch.Tensor:
        counts = self.arrivals() if arrivals is None else arrivals
        options: dict[str, Any] = {**self.attrs, "splits": splits, **TUNING, **tuning}
        if self.w is None:
            k, v = self.caches
            out = launch_decode_attention(self.q, self.end, k, v, counts, **options)
        else:
            out = launch_decode_attention_latent(
                self.q, self.end, self.w, self.caches, counts, self.freqs(), self.form, **options
            )
        assert not counts.any()
        return out

    def reference(self, dtype: torch.dtype) -> torch.Tensor:
        """The op's, in a dtype; the reciprocal rms stays in fp32 below float64."""
        least = torch.promote_types(dtype, torch.float32)
        held = [x.to(least if x.shape[-1] == 1 else dtype) for x in self.zeros]
        operands: list[Any] = [self.q.to(dtype), self.end[:, None] - 1, self.end]
        if self.w is None:
            return torch.as_tensor(attention.reference(*operands, *held, **self.attrs))
        options = {**self.attrs, **(self.rotation or {}), "dtype": dtype_name(dtype)}
        operands += [self.w.to(dtype), *held]
        return torch.as_tensor(attention_latent.reference(*operands, form=self.form, **options))

    def check(self, got: torch.Tensor) -> None:
        """Against float64, within the budgets; rows without tokens are finite."""
        assert got.isfinite().all() and got.dtype == self.q.dtype
        live = self.live
        want = self.reference(torch.float64)[live]
        scale = want.pow(2).mean().sqrt()
        error = (got[live].double() - want).abs()
        if got.dtype == torch.float32:
            assert error.max() <= FP32 * scale
            return
        rms = error.pow(2).mean().sqrt()
        usual = self.reference(got.dtype)[live].double().sub(want).pow(2).mean().sqrt()
        assert rms <= max(BF16 * usual, ROUNDING * scale)


def unseen(end: torch.Tensor, slots: int, window: int) -> torch.Tensor:
    """[C, B, 1, 1]: slots whose keys the query does not see."""
    seen = visible(slot_positions(end, slots), end[:, None] - 1, window)
    return ~seen[:, 0].t()[:, :, None, None]


def plain(
    lengths: tuple[int, ...],
    slots: int,
    window: int,
    dtype: torch.dtype = torch.float32,
    n: int = 2,
    group: int = 2,
    d: int = 32,
    softcap: float = 0.0,
    scale: float = 1.0,
) -> Case:
    g = torch.Generator().manual_seed(sum(lengths) + slots)
    b = len(lengths)
    end = torch.tensor(lengths)
    q = torch.randn(b, 1, n * group, d, generator=g).to(dtype)
    caches = [torch.randn(slots, b, n, d, generator=g).to(dtype) / d**0.25 for _ in "kv"]
    return hidden(Case(q / d**0.25, end, caches, [], settings(window, scale, softcap)))


def settings(window: int, scale: float, softcap: float) -> dict[str, Any]:
    return {"window": window, "scale": scale, "softcap": softcap}


def hidden(case: Case) -> Case:
    mask = unseen(case.end, case.caches[0].shape[0], case.attrs["window"])
    case.zeros = [x.masked_fill(mask, 0) for x in case.caches]
    case.caches = [x.masked_fill(mask, float("nan")) for x in case.caches]
    return case


def latent(
    form: str,
    lengths: tuple[int, ...],
    slots: int,
    window: int,
    pairs: int,
    dtype: torch.dtype = torch.float32,
    n: int = 2,
    group: int = 2,
    d: int = 32,
    softcap: float = 0.0,
) -> Case:
    """Rows as `qkv_write` leaves them: normed and rotated at the positions of their slots."""
    g = torch.Generator().manual_seed(sum(lengths) + slots + pairs)
    b = len(lengths)
    end = torch.tensor(lengths)
    q = (torch.randn(b, 1, n * group, d, generator=g) / d**0.5).to(dtype)
    w = (1 + torch.randn(d, generator=g) / 4).to(dtype)
    raw = (torch.randn(slots, b, n, d, generator=g) * 3).to(dtype)
    rotation: dict[str, Any] = {
        "kind": "proportional",
        "theta": 1e4,
        "fraction": 2 * pairs / d,
        "factor": 1.0,
    }
    if form == "raw":
        caches = [raw, inverse_rms.reference(raw, eps=1e-6)]
    else:
        position = slot_positions(end, slots)
        table = rope_table.reference(position, dim=d, dtype=dtype_name(dtype), **rotation)
        k = rope.reference(rms_norm.reference(raw, w, eps=1e-6), *table)
        caches = [latent_row.reference(rms_norm.reference(raw, eps=1e-6), k, pairs=pairs)]
    case = Case(q, end, caches, [], settings(window, 1.0, softcap), w, form, rotation)
    return hidden(case)


@pytest.mark.parametrize("splits", [1, 2, 4, 7])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_lengths(layout: str, splits: int) -> None:
    """Also more splits than blocks of keys, and more than keys."""
    for lengths in LENGTHS:
        case = plain(lengths, *LAYOUTS[layout], n=1)
        case.check(case.run(splits))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_lengths_in_bf16(layout: str) -> None:
    for lengths in LENGTHS:
        case = plain(lengths, *LAYOUTS[layout], torch.bfloat16)
        case.check(case.run(3))


@pytest.mark.parametrize("softcap", [0.0, 3.0])
@pytest.mark.parametrize("n", [1, 2])
@pytest.mark.parametrize("group", [1, 2, 4, 8])
def test_heads(group: int, n: int, softcap: float) -> None:
    for dtype in DTYPES:
        case = plain((W + 3, 5)[:n], 64, 0, dtype, n, group, softcap=softcap, scale=0.7)
        case.check(case.run(3))


@pytest.mark.parametrize("d", [24, 64])
@pytest.mark.parametrize("group", [3, 32])
def test_odd_sizes(d: int, group: int) -> None:
    case = plain((41,), 64, 0, torch.float32, 1, group, d)
    for block_n in (8, 16, 64):
        case.check(case.run(3, block_n=block_n))


def test_softcap_matters() -> None:
    case = plain((41,), 64, 0, softcap=0.5)
    capped = case.run(2)
    case.attrs["softcap"] = 0.0
    assert not torch.allclose(case.run(2), capped, atol=1e-3)


def test_large_scores() -> None:
    """The running maximum: scores of thousands, largest last."""
    case = plain((41,), 64, 0, n=1, group=1)
    case.attrs["scale"] = 1e3
    case.check(case.run(3))


@pytest.mark.parametrize("splits", [7, 12])
def test_two_steps(splits: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Partial results added by groups: same counters, and more splits than keys."""
    monkeypatch.setattr(module, "STEP", 0)
    fan, _ = tree(splits, 1)
    assert fan < splits
    for lengths, block_n in (((0, 1, 9), 2), ((17, 41, 64), 8), ((5,), 1)):
        case = plain(lengths, 64, 0, n=1)
        case.check(case.run(splits, block_n=block_n))


@pytest.mark.parametrize("step", [module.STEP, 0], ids=["one step", "two steps"])
def test_the_order_of_arrival_is_free(step: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same bits whoever comes last."""
    from triton.runtime.interpreter import InterpreterBuilder

    monkeypatch.setattr(module, "STEP", step)
    case, splits = plain((41,), 64, 0), 7
    want = case.run(splits)
    turn = InterpreterBuilder.set_grid_idx
    for order in ([6, 5, 4, 3, 2, 1, 0], [3, 6, 0, 5, 1, 4, 2]):
        monkeypatch.setattr(
            InterpreterBuilder,
            "set_grid_idx",
            lambda self, x, y, z, order=order: turn(self, order[x], y, z),
        )
        assert torch.equal(case.run(splits), want)


@pytest.mark.parametrize("form", ["", "value", "raw"])
def test_twice_with_the_same_counters(form: str) -> None:
    lengths, (slots, window) = (0, 30), LAYOUTS["list"]
    case = latent(form, lengths, slots, window, 5) if form else plain(lengths, slots, window)
    counts = case.arrivals()
    assert torch.equal(case.run(4, counts), case.run(4, counts))


def test_strides() -> None:
    """Rows and slots of a larger buffer, heads behind other heads."""
    case = plain((20, 41), 64, 0)
    want = case.run(3)
    for i, cache in enumerate(case.caches):
        room = torch.full((128, 5, 3, 40), float("nan"))[::2, 1:3, 1:, :32]
        case.caches[i] = room.copy_(cache)
    wider = torch.zeros(2, 1, 4, 48)[..., :32].copy_(case.q)
    case.q = wider
    assert torch.equal(case.run(3), want)


def test_a_late_position_in_a_ring() -> None:
    """Slots follow from positions beyond 2^31 elements' worth of tokens."""
    case = plain((100_003, 65_536), W, W)
    case.check(case.run(2))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("pairs", [0, 5, 8, "most"])
@pytest.mark.parametrize("form", ["value", "raw"])
def test_latent(form: str, pairs: int | str, dtype: torch.dtype) -> None:
    """Also all pairs of the form `raw`; some padded, some a power of two."""
    rotated = pairs if isinstance(pairs, int) else 16 if form == "raw" else 15
    case = latent(form, (W + 1, 0, 2 * W), *LAYOUTS["list"], rotated, dtype, n=1)
    case.check(case.run(3, block_n=8))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("form", ["value", "raw"])
def test_latent_lengths(form: str, layout: str) -> None:
    for lengths, splits in zip(LENGTHS, (2, 4), strict=True):
        case = latent(form, lengths, *LAYOUTS[layout], 4, n=1)
        case.check(case.run(splits))


@pytest.mark.parametrize("softcap", [0.0, 3.0])
@pytest.mark.parametrize("group", [1, 4, 8])
@pytest.mark.parametrize("form", ["value", "raw"])
def test_latent_heads(form: str, group: int, softcap: float) -> None:
    for n, d in ((1, 32), (2, 24)):
        case = latent(form, (W + 3, 5)[:n], 64, 0, 4, torch.float32, n, group, d, softcap)
        case.check(case.run(3))


@pytest.mark.parametrize("form", ["value", "raw"])
def test_unrotated_dims_take_the_weight(form: str) -> None:
    case = latent(form, (41,), 64, 0, 4)
    got = case.run(2)
    assert case.w is not None
    case.w = case.w * 1.1
    assert not torch.allclose(case.run(2), got, atol=1e-3)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_raw_far_from_the_start(dtype: torch.dtype) -> None:
    """Angles of 6e4: what fp32 makes of them depends on how a quarter turn is taken off."""
    case = latent("raw", (60_000, 52_345), W, W, 8, dtype)
    case.check(case.run(2))


def test_cos_sin() -> None:
    x = torch.cat((torch.linspace(0, 20, 2048), torch.rand(2048) * 65536))
    cos, sin = torch.empty_like(x), torch.empty_like(x)
    start(_turn, (1,), x, cos, sin, N=4096)
    assert (cos.double() - x.double().cos()).abs().max() < 2e-7
    assert (sin.double() - x.double().sin()).abs().max() < 2e-7


def test_shares_of_short_and_long_contexts() -> None:
    """128 shares where each has 256 keys and more; below, 64, and for a few keys a block each."""
    seen = torch.tensor([0, 1, 32, 64, 2048, 16384, 16385, 24000, 32768, 131072])
    used = torch.empty_like(seen)
    start(_shares, (len(seen),), seen, used, SPLITS=128, N=32)
    assert used.tolist() == [1, 1, 1, 2, 64, 64, 65, 94, 128, 128]


def test_many_shares_of_many_keys() -> None:
    """Counters of 11 groups are wider than an int32."""
    assert tree(128, 16384) == (12, 4)
    case = plain((700,), 1024, 0, n=1)
    case.check(case.run(128))


@pytest.mark.parametrize("size", [1, 2048, 8192, 32768])
def test_counters_fit(size: int) -> None:
    for splits in range(1, 509):
        fan, bits = tree(splits, size)
        groups = -(-splits // fan)
        if groups == 1:
            assert fan < 1 << bits <= 1 << 31
            continue
        assert fan < 1 << bits
        assert groups * bits + groups.bit_length() <= 63
        assert fan + groups < splits


@pytest.mark.parametrize("form", ["", "value", "raw"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_elsewhere_the_op_is_its_reference(form: str, dtype: torch.dtype) -> None:
    """Bit equal, and the counters are zero as the kernel leaves them."""
    case = latent(form, (3, 17), W, W, 5, dtype) if form else plain((3, 17), W, W, dtype)
    counts = case.arrivals() + 1
    options = {**case.attrs, "splits": 2, **TUNING}

    def run() -> torch.Tensor:
        if case.w is None:
            return decode_attention(case.q, case.end, *case.zeros, counts, **options)
        operands = (case.q, case.end, case.w, case.zeros, counts, case.freqs(), form)
        return decode_attention_latent(*operands, **options)

    got = Context().run(run)  # where no kernel is started directly
    assert torch.equal(got, case.reference(dtype)) and not counts.any()


def test_one_split_needs_no_workspace() -> None:
    with recorded() as seen:
        plain((3,), W, W).run(1)
        plain((3,), W, W).run(2)
    sizes = [[args[i].numel() for i in (5, 6)] for _, _, args, _ in seen]
    assert sizes[0] == [0, 0] and all(sizes[1])
