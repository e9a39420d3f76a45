"""Norm, rotation and cache write of one token: forms, rings, rows without a token, odd sizes.

A cache is a view into a larger room, of which every element is compared.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch

from g4ir.backends.torch_compile.kernels import qkv as module
from g4ir.ops import OPS
from g4ir.ops.attention import cache_write
from g4ir.ops.latent import inverse_rms, keys_values_of_raw, keys_values_of_value, latent_row
from g4ir.ops.norm import rms_norm
from g4ir.ops.rope import rope, rope_table, rotated_pairs
from g4ir.ops.types import dtype_name

pytestmark = pytest.mark.covering

Tensor = torch.Tensor
Results = tuple[Tensor, Tensor]
EPS = 1e-6
#: against float64, of the larger of a value and its head's rms: a sum in another order, a root and
#: up to six roundings of half an fp32 unit (6e-8)
FP32 = 1e-6
#: share of bf16 values that may differ from the op's: those whose norm lies within 2^-21 of a tie
#: and their partners in a rotation
SHARE = 2.0**-9
#: form of the caches, whether V has a projection of its own
FORMS = [("plain", True), ("plain", False), ("value", False), ("raw", False)]


@dataclass(frozen=True)
class Case:
    """Sizes of a layer, and the place of a token in each row."""

    heads: int
    kv: int
    d: int
    slots: int
    start: tuple[int, ...]
    lengths: tuple[int, ...]
    fraction: float = 1.0

    @property
    def rotation(self) -> dict[str, Any]:
        kind = "default" if self.fraction == 1 else "proportional"
        return {"kind": kind, "theta": 1e4, "fraction": self.fraction, "factor": 1.0}

    @property
    def pairs(self) -> int:
        return rotated_pairs(self.rotation["kind"], self.d, self.fraction)

    def widths(self, form: str) -> tuple[int, ...]:
        widths = {"plain": (self.d, self.d), "raw": (self.d, 1)}
        return widths.get(form, (self.d + 2 * self.pairs,))


CASES = {
    "ring": Case(4, 2, 16, 5, (3, 5, 23), (1, 1, 1)),
    "ring, rows without a token": Case(4, 2, 16, 5, (7, 4, 9), (0, 1, 0), 0.5),
    "list": Case(3, 3, 8, 32, (0,), (1,), 0.25),
    "list, one row empty": Case(4, 1, 32, 9, (8, 0), (1, 0), 0.25),
    "one slot": Case(2, 2, 8, 1, (0, 6), (1, 1)),
    "no token": Case(2, 1, 8, 4, (3,), (0,), 0.5),
    "nothing rotated": Case(6, 2, 16, 7, (6, 7), (1, 1), 0.0),
    "odd half": Case(4, 2, 22, 6, (2, 300_001), (1, 1), 0.5),
    "one pair": Case(2, 1, 2, 3, (2, 3), (1, 1)),
}

dtypes = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
forms = pytest.mark.parametrize(("form", "values"), FORMS)
cases = pytest.mark.parametrize("case", CASES.values(), ids=CASES)


@pytest.fixture(autouse=True)
def filled() -> Iterator[None]:
    """New memory holds NaN and the largest integers, so that what is not stored shows."""
    torch.use_deterministic_algorithms(True)
    assert int(torch.ones(1).new_empty(1, dtype=torch.int32)) != 0
    yield
    torch.use_deterministic_algorithms(False)


def inner(room: Tensor) -> Tensor:
    """The cache in a room that is one larger in every dim."""
    return room[1:, :-1, 1:, :-1]


@dataclass(frozen=True)
class Call:
    """Operands of `qkv_write`: qkv, norm_q, norm_k, cos, sin, start, lengths, and the rooms."""

    case: Case
    form: str
    values: bool
    operands: tuple[Tensor, ...]
    rooms: tuple[Tensor, ...]

    @property
    def options(self) -> tuple[Any, ...]:
        c = self.case
        return c.heads, c.kv, self.values, self.form, c.pairs, EPS, 1

    def run(self, function: Callable[..., Results]) -> tuple[Tensor, Tensor, list[Tensor]]:
        """q, arrivals and the rooms after the call; operands stay as they were."""
        rooms, held = [x.clone() for x in self.rooms], [x.clone() for x in self.operands]
        q, arrivals = function(*self.operands, [inner(x) for x in rooms], *self.options)
        assert all(map(torch.equal, self.operands, held))
        return q, arrivals, rooms

    def heads(self) -> tuple[Tensor, Tensor, Tensor]:
        """The projections of q, k and v; v is k where it has none of its own."""
        c = self.case
        x = self.operands[0].unflatten(-1, (-1, c.d))
        k, v = x[:, :, c.heads : c.heads + c.kv], x[:, :, -c.kv :]
        return x[:, :, : c.heads], k, v

    def wanted(self) -> tuple[Tensor, list[Tensor]]:
        """q and the caches after the call, by the ops in the dtype of the operands."""
        _, norm_q, norm_k, cos, sin, start, lengths = self.operands
        q, k, v = self.heads()
        q = rope.reference(rms_norm.reference(q, norm_q, eps=EPS), cos, sin)
        key = rope.reference(rms_norm.reference(k, norm_k, eps=EPS), cos, sin)
        value = rms_norm.reference(v, eps=EPS)
        rows = {
            "plain": [key, value],
            "value": [latent_row.reference(value, key, pairs=self.case.pairs)],
            "raw": [k, inverse_rms.reference(k, eps=EPS)],
        }[self.form]
        caches = [
            cache_write.reference(inner(room), row, start, lengths)
            for room, row in zip(self.rooms, rows, strict=True)
        ]
        return q, caches

    def double(self) -> Call:
        operands = (x.double() if x.is_floating_point() else x for x in self.operands)
        return replace(
            self, operands=tuple(operands), rooms=tuple(room.double() for room in self.rooms)
        )


def draw(
    case: Case, form: str, values: bool, dtype: torch.dtype, size: float = 1.0, seed: int = 0
) -> Call:
    g = torch.Generator().manual_seed(seed + case.d)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=g)

    b, total = len(case.start), case.heads + case.kv * (2 if values else 1)
    qkv = (normal(b, 1, total * case.d) * size).to(dtype)
    norms = [(1 + normal(case.d) / 2).to(dtype) for _ in "qk"]
    start = torch.tensor(case.start)
    tables = rope_table.reference(
        start[:, None], dim=case.d, dtype=dtype_name(dtype), **case.rotation
    )
    rooms = [
        normal(case.slots + 1, b + 1, case.kv + 1, width + 1).to(dtype)
        for width in case.widths(form)
    ]
    if form == "raw":
        rooms[1] = rooms[1].float()
    operands = (qkv, *norms, *tables, start, torch.tensor(case.lengths))
    return Call(case, form, values, operands, tuple(rooms))


def distance(got: Tensor, want: Tensor) -> float:
    """Largest error, each measured against the larger of the value and its row's rms."""
    want = want.double()
    rms = want.pow(2).mean(-1, keepdim=True).sqrt()
    errors = (got.double() - want).abs() / torch.maximum(want.abs(), rms).clamp(min=1e-30)
    return float(errors.max()) if errors.numel() else 0.0


def compare(got: Tensor, want: Tensor, pair: int = 2) -> None:
    """Within FP32, or the op's budget in bf16; of bf16 values few differ, `pair` or SHARE."""
    assert got.shape == want.shape
    if got.dtype == torch.float32:
        assert distance(got, want) <= FP32
    else:
        assert got.dtype == want.dtype and distance(got, want) <= OPS["norm_rope"].budget.at("bf16")
        assert int((got != want).sum()) <= max(pair, SHARE * got.numel())


def written(case: Case) -> Tensor:
    """[C, B]: slots that receive a row."""
    mask = torch.zeros(case.slots, len(case.start), dtype=torch.bool)
    for b, (start, length) in enumerate(zip(case.start, case.lengths, strict=True)):
        mask[start % case.slots, b] = length > 0
    return mask


def untouched(call: Call, rooms: list[Tensor]) -> None:
    """Nothing but the slots of this token has changed in the rooms."""
    mask = written(call.case)
    for before, after in zip(call.rooms, rooms, strict=True):
        again = after.clone()
        inner(again)[mask] = inner(before)[mask]
        assert torch.equal(again, before)


def check(call: Call, pair: int = 2) -> None:
    """The kernel against the ops: q, arrivals, and the whole rooms."""
    q, arrivals, rooms = call.run(module.launch_qkv_write)
    want_q, caches = (call if q.dtype == torch.bfloat16 else call.double()).wanted()
    assert arrivals.dtype == torch.int64 and not arrivals.any()
    assert arrivals.shape == (len(call.case.start), call.case.kv)
    compare(q, want_q, pair)
    untouched(call, rooms)
    mask = written(call.case)
    for room, cache in zip(rooms, caches, strict=True):
        compare(inner(room)[mask], cache[mask], pair)
    if call.form == "raw":
        assert torch.equal(inner(rooms[0])[mask].double(), caches[0][mask].double())


@dtypes
@forms
@cases
def test_qkv_write(case: Case, form: str, values: bool, dtype: torch.dtype) -> None:
    check(draw(case, form, values, dtype))


@dtypes
@forms
@pytest.mark.parametrize("size", [0.0, 1e-3, 1e4])
def test_small_and_large_values(size: float, form: str, values: bool, dtype: torch.dtype) -> None:
    """Also a projection of zeros: eps alone is under the root."""
    check(draw(CASES["list, one row empty"], form, values, dtype, size))


@dtypes
@forms
def test_any_table(form: str, values: bool, dtype: torch.dtype) -> None:
    """Tables that are no rotation, whose halves differ: each element is used where the op does."""
    call = draw(CASES["ring"], form, values, dtype)
    g = torch.Generator().manual_seed(1)
    tables = (torch.randn(3, 1, 16, generator=g).to(dtype) for _ in "cs")
    operands = (*call.operands[:3], *tables, *call.operands[5:])
    check(replace(call, operands=operands))


@forms
def test_real_widths(form: str, values: bool) -> None:
    """The share of bf16 values that differ, where there are enough of them to tell."""
    d = 256 if values else 512
    case = Case(4, 2, d, 3, (5, 1023), (1, 1), 1.0 if values else 0.25)
    check(draw(case, form, values, torch.bfloat16), pair=0)


def test_eps() -> None:
    call = draw(CASES["ring"], "plain", True, torch.float32)
    (x, w, _, cos, sin, *_), c = call.operands, call.case
    q, _ = module.launch_q_heads(x[..., : c.heads * c.d], w, cos, sin, c.heads, c.kv, 0.3, 1)
    normed = rms_norm.reference(call.double().heads()[0], w.double(), eps=0.3)
    compare(q, rope.reference(normed, cos.double(), sin.double()))


@dtypes
@cases
def test_q_heads(case: Case, dtype: torch.dtype) -> None:
    """The same bits as of the query heads of `qkv_write`."""
    call = draw(case, "plain", True, dtype)
    x, w, _, cos, sin, *_ = call.operands
    x = x[..., : case.heads * case.d]
    q, arrivals = module.launch_q_heads(x, w, cos, sin, case.heads, case.kv, EPS, 1)
    want, counters, _ = call.run(module.launch_qkv_write)
    assert torch.equal(q, want)
    assert torch.equal(arrivals, counters) and arrivals.dtype == counters.dtype


@pytest.mark.parametrize("name", ["ring", "list, one row empty", "odd half"])
def test_forms_agree(name: str) -> None:
    """bf16 K and V made again from `raw` are those of `plain`, bit for bit, as are V and the
    rotated dims of K in `value`."""
    case = CASES[name]
    calls = {form: draw(case, form, False, torch.bfloat16) for form in ("plain", "value", "raw")}
    mask = written(case)
    held = {
        form: [inner(room)[mask][:, None] for room in call.run(module.launch_qkv_write)[2]]
        for form, call in calls.items()
    }
    key, value = held["plain"]
    positions = torch.tensor(case.start)[torch.tensor(case.lengths) > 0][:, None]
    w = calls["raw"].operands[2]
    order = torch.tensor([s % case.slots for s in positions[:, 0].tolist()]).argsort(stable=True)
    raw, rms = held["raw"]
    remade = keys_values_of_raw(raw, rms, w, positions[order], dtype="bf16", **case.rotation)
    assert torch.equal(remade[0], key) and torch.equal(remade[1], value)
    k, v = keys_values_of_value(held["value"][0], w)
    turned = [i + half for half in (0, case.d // 2) for i in range(case.pairs)]
    assert torch.equal(v, value) and torch.equal(k[..., turned], key[..., turned])


def test_strided_operands() -> None:
    """Operands whose rows do not follow one another, as slices of larger tensors are."""
    call = draw(CASES["ring"], "plain", True, torch.float32)
    x, norm_q, norm_k, *tables = call.operands[:5]
    places = call.operands[5:]
    wide = [torch.cat((t, t), -1)[..., : t.shape[-1]] for t in (x, *tables)]
    spread = [torch.stack((t, t), -1)[..., 0] for t in places]
    assert not any(t.is_contiguous() for t in (*wide, *spread))
    check(replace(call, operands=(wide[0], norm_q, norm_k, *wide[1:], *spread)))


@pytest.mark.parametrize(
    ("form", "values", "width", "total", "message"),
    [
        ("sliced", False, 8, 3, "cache form 'sliced'"),
        ("raw", True, 8, 4, "no projection of its"),
        ("plain", False, 9, 3, "widths"),
        ("plain", False, 8, 4, "a projection of 32"),
    ],
)
def test_what_does_not_fit_is_refused(
    form: str, values: bool, width: int, total: int, message: str
) -> None:
    x, w, table = torch.ones(1, 1, total * 8), torch.ones(8), torch.ones(1, 1, 8)
    place, caches = torch.zeros(1, dtype=torch.int64), [torch.zeros(2, 1, 1, width)] * 2
    operands = (x, w, w, table, table, place, place, caches, 2, 1, values, form, 4, EPS, 1)
    for function in (module.launch_qkv_write, module.qkv_write):
        with pytest.raises(ValueError, match=message):
            function(*operands)


@dtypes
@forms
@pytest.mark.parametrize("name", ["ring, rows without a token", "odd half"])
def test_off_the_gpu(
    off_the_gpu: None, name: str, form: str, values: bool, dtype: torch.dtype
) -> None:
    """There the op computes what the ops do, bit for bit, and writes the same caches."""
    call = draw(CASES[name], form, values, dtype)
    q, arrivals, rooms = call.run(module.qkv_write)
    want, caches = call.wanted()
    assert torch.equal(q, want) and not arrivals.any()
    assert all(torch.equal(inner(room), cache) for room, cache in zip(rooms, caches, strict=True))
    untouched(call, rooms)
    c, (x, w, _, cos, sin, *_) = call.case, call.operands
    q, zeros = module.q_heads(x[..., : c.heads * c.d], w, cos, sin, c.heads, c.kv, EPS, 1)
    assert torch.equal(q, want) and torch.equal(zeros, arrivals) and zeros.dtype == torch.int64
