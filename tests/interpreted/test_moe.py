"""The kernels of the MoE block against the ops `router`, `experts`, `linear` and `glu_packed`.

Budgets. fp32 against the ops in fp64: sums of up to 100 terms in another order, 1e-5 of the rms.
bf16 against the ops in bf16, each kernel from the same inputs: a sum in another order turns a
rounding in a few of a thousand cases, and a turned gate passes through the activation and the
product, so 2 ulps (of the value or of the rms, whichever is larger) and 3 % of the values.
"""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from torch.nn.functional import linear

from g4ir.backends.torch_compile.kernels import moe
from g4ir.ops.mlp import activate
from g4ir.ops.moe import experts, router

pytestmark = pytest.mark.covering

Pair = tuple[torch.Tensor, torch.Tensor]


@dataclass(frozen=True)
class Case:
    """Sizes of an MoE block; by default none is a multiple of a block."""

    rows: int
    hidden: int = 37
    inner: int = 11
    dense: int = 29
    count: int = 6
    top_k: int = 2
    act: str = "gelu_pytorch_tanh"
    chosen: int | None = None  # all rows choose among this many experts

    @property
    def root(self) -> float:
        return self.hidden**-0.5


CASES = [
    Case(1),
    Case(2, hidden=32, inner=16, dense=48, count=8, top_k=4, act="silu"),
    Case(3, top_k=6, act="gelu"),
    Case(5, inner=16, count=5, top_k=1, act="relu"),
    Case(5, count=9, top_k=3, chosen=3),
]
MANY = [Case(16, inner=8, dense=16, chosen=1, top_k=1), Case(17, hidden=20, count=12)]


class Data:
    """Operands of a block, in fp64 but with the values of `dtype`."""

    def __init__(self, case: Case, dtype: torch.dtype) -> None:
        g = torch.Generator().manual_seed(case.rows)

        def draw(*shape: int, scale: float = 1.0) -> torch.Tensor:
            return (torch.randn(*shape, generator=g, dtype=torch.float64) * scale).to(dtype)

        d, i, n, e = case.hidden, case.inner, case.dense, case.count
        self.x, self.x_dense, self.x_moe = (draw(case.rows, 1, d) for _ in range(3))
        self.scale, self.proj = draw(d), draw(e, d)
        self.per_expert = draw(e)
        self.gate_up, self.w_dense = draw(e, 2 * i, d, scale=d**-0.5), draw(2 * n, d, scale=d**-0.5)
        self.down, self.down_dense = draw(e, d, i, scale=i**-0.5), draw(d, n, scale=n**-0.5)
        if case.chosen:  # the others have negative scores, and weights that must not be read
            self.x, self.scale = self.x.abs(), self.scale.abs()
            self.proj = self.proj.abs() * (1 - 2 * (torch.arange(e) >= case.chosen))[:, None]
            self.proj = self.proj.to(dtype)
            self.gate_up[case.chosen :], self.down[case.chosen :] = torch.nan, torch.nan

    def to(self, dtype: torch.dtype) -> Data:
        other = Data.__new__(Data)
        vars(other).update({k: v.to(dtype) for k, v in vars(self).items()})
        return other

    def scores(self, case: Case) -> torch.Tensor:
        return linear(self.x * self.scale * case.root, self.proj)

    def routing(self, case: Case) -> Pair:
        return router.reference(
            self.x, self.scale, self.proj, self.per_expert, top_k=case.top_k, root=case.root
        )  # type: ignore[no-any-return, misc]

    def expected(self, case: Case, weights: torch.Tensor, index: torch.Tensor) -> Pair:
        dense = linear(glu(linear(self.x_dense, self.w_dense), case.act), self.down_dense)
        y = experts.reference(self.x_moe, weights, index, self.gate_up, self.down, act=case.act)  # type: ignore[misc]
        return dense, y


def glu(packed: torch.Tensor, act: str) -> torch.Tensor:
    gate, up = packed.chunk(2, -1)
    return activate(gate, act) * up  # type: ignore[no-any-return]


def slots_glu(data: Data, case: Case, index: torch.Tensor) -> torch.Tensor:
    """What `moe_gate_up` has to give, one product at a time."""
    rows = []
    for x, x_dense, ids in zip(data.x_moe.flatten(0, 1), data.x_dense.flatten(0, 1), index):
        slots = [glu(linear(x, data.gate_up[e]), case.act) for e in ids.flatten()]
        rows.append(torch.cat((*slots, glu(linear(x_dense, data.w_dense), case.act))))
    return torch.stack(rows)


def gate_up(data: Data, case: Case, logits: torch.Tensor, form: str) -> torch.Tensor:
    common = data.w_dense, data.gate_up
    if form == "rows":
        return moe.launch_moe_gate_up(
            data.x_dense, data.x_moe, logits, *common, case.top_k, case.act, 8, 16, 4, 2
        )
    _, index, listed = moe.launch_moe_sort(logits, data.per_expert, case.top_k, 4)
    return moe.launch_moe_gate_up_sorted(
        data.x_dense, data.x_moe, index, listed, *common, case.act, block_m(case), 16, 32, 4, 2
    )


def down(data: Data, case: Case, act: torch.Tensor, logits: torch.Tensor, form: str) -> Pair:
    common = data.down_dense, data.down
    if form == "rows":
        return moe.launch_moe_down(act, logits, data.per_expert, *common, case.top_k, 8, 16, 4, 2)
    routing = moe.launch_moe_sort(logits, data.per_expert, case.top_k, 4)
    return moe.launch_moe_down_sorted(act, *routing, *common, block_m(case), 16, 32, 4, 2)


def block_m(case: Case) -> int:
    """As the table of tunings has it."""
    return 32 if case.rows > 16 else 16


def rms(x: torch.Tensor) -> float:
    return float(x.double().square().mean().sqrt())


def assert_fp32(got: torch.Tensor, want: torch.Tensor) -> None:
    assert got.dtype == torch.float32 and got.shape == want.shape
    assert float((got.double() - want).abs().max()) < 1e-5 * rms(want)


def assert_bf16(got: torch.Tensor, want: torch.Tensor) -> None:
    assert got.dtype == want.dtype == torch.bfloat16 and got.shape == want.shape
    ulp = want.double().abs().clamp(min=rms(want)) * 2**-7
    assert bool(((got.double() - want.double()).abs() <= 2 * ulp).all())
    assert float((got != want).double().mean()) <= 0.03


def ids(case: Case) -> str:
    return f"{case.rows}x{case.hidden}-{case.top_k}of{case.count}"


# ---- router --------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", [Case(1), Case(3, hidden=64, count=8), Case(2, count=21)], ids=ids)
def test_scores(case: Case) -> None:
    data = Data(case, torch.float32)
    launch = (case.root, 4, 32, 4, 1)
    got = moe.launch_router_logits(data.x, data.scale, data.proj, *launch)
    assert_fp32(got, data.to(torch.float64).scores(case))
    data = Data(case, torch.bfloat16)
    got = moe.launch_router_logits(data.x, data.scale, data.proj, *launch)
    assert_bf16(got, data.scores(case))


def test_each_step_of_the_scores_is_rounded() -> None:
    """One feature per expert, so that no sum hides a rounding."""
    g = torch.Generator().manual_seed(0)
    x, scale = (torch.randn(*s, generator=g).bfloat16() for s in ((2, 1, 64), (64,)))
    proj, root = torch.eye(64).bfloat16(), 2816**-0.5
    got = moe.launch_router_logits(x, scale, proj, root, 16, 64, 4, 1)
    assert torch.equal(got, x * scale * root)
    assert not torch.equal(got, (x.float() * scale.float() * root).bfloat16())


@pytest.mark.parametrize("count, top_k", [(128, 8), (48, 5), (6, 6), (300, 8), (5, 1)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_choice_is_the_op_s(count: int, top_k: int, dtype: torch.dtype) -> None:
    """Exactly, in rows whose first top_k + 1 scores differ: `torch.topk` orders equals at will."""
    case = Case(40, hidden=16, count=count, top_k=top_k)
    data = Data(case, dtype)
    scores = data.scores(case)
    weights, index = moe.launch_router_topk(scores, data.per_expert, top_k, 4)
    want, chosen = data.routing(case)
    best = scores.float().sort(-1, descending=True)[0][..., : top_k + 1]
    distinct = (best.diff(dim=-1) < 0).all(-1)
    assert float(distinct.double().mean()) > 0.25
    assert index.dtype == torch.int64 and torch.equal(index[distinct], chosen[distinct])
    torch.testing.assert_close(weights[distinct], want[distinct].float(), rtol=2e-6, atol=0)


@pytest.mark.parametrize("count, top_k", [(128, 8), (300, 16), (6, 6)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_equals_by_lower_index(count: int, top_k: int, dtype: torch.dtype) -> None:
    g = torch.Generator().manual_seed(count)
    scores = torch.randint(-2, 3, (18, 1, count), generator=g).to(dtype) / 2
    scores[0], scores[1, 0, 0::2] = 1.5, -0.0  # all equal; zeros of both signs
    scores[1, 0, 1::2] = 0.0
    scores[2], scores[2, 0, -1] = -torch.inf, 1.0  # an expert that cannot be, before padding
    ones = torch.ones(count)
    want = scores.float().sort(dim=-1, descending=True, stable=True)[1][..., :top_k]
    weights, index = moe.launch_router_topk(scores, ones, top_k, 4)
    assert torch.equal(index, want)
    expected = scores.double().gather(-1, want).softmax(-1)
    torch.testing.assert_close(weights.double(), expected, rtol=2e-6, atol=0)


@pytest.mark.parametrize("rows", [1, 16, 19])
@pytest.mark.parametrize("count, top_k", [(6, 2), (48, 3), (8, 8)])
def test_list_of_experts(rows: int, count: int, top_k: int) -> None:
    g = torch.Generator().manual_seed(rows)
    scores = torch.randn(rows, 1, count, generator=g).bfloat16()
    per_expert = torch.rand(count, generator=g).bfloat16()
    weights, index, listed = moe.launch_moe_sort(scores, per_expert, top_k, 4)
    same_weights, same_index = moe.launch_router_topk(scores, per_expert, top_k, 4)
    assert torch.equal(weights, same_weights) and torch.equal(index, same_index)
    used = index.unique()
    assert listed.tolist() == used.tolist() + [-1] * (count - used.numel())


def test_ops_off_cuda_are_the_ops(off_the_gpu: None) -> None:
    """The references behind the ops, against the definition in fp64."""
    for case in (CASES[0], CASES[1]):
        data = Data(case, torch.float64)
        logits = moe.router_logits(data.x, data.scale, data.proj, case.root, 1, 1, 1, 1)
        weights, index, listed = moe.moe_sort(logits, data.per_expert, case.top_k, 1)
        routing = data.routing(case)
        for got in ((weights, index), moe.router_topk(logits, data.per_expert, case.top_k, 1)):
            torch.testing.assert_close(got, routing)
        want = data.expected(case, *routing)
        common = data.x_dense, data.x_moe
        up = data.w_dense, data.gate_up
        act = moe.moe_gate_up(*common, logits, *up, case.top_k, case.act, 1, 1, 1, 1)
        same = moe.moe_gate_up_sorted(*common, index, listed, *up, case.act, 16, 1, 1, 1, 1)
        torch.testing.assert_close(act, same)
        lower = data.down_dense, data.down
        pair = moe.moe_down(act, logits, data.per_expert, *lower, case.top_k, 1, 1, 1, 1)
        torch.testing.assert_close(pair, want)
        pair = moe.moe_down_sorted(act, weights, index, listed, *lower, 16, 1, 1, 1, 1)
        torch.testing.assert_close(pair, want)


# ---- the block -----------------------------------------------------------------------------------


def check_fp32(case: Case, form: str) -> None:
    data = Data(case, torch.float32)
    exact = data.to(torch.float64)
    logits = moe.launch_router_logits(data.x, data.scale, data.proj, case.root, 8, 64, 4, 1)
    act = gate_up(data, case, logits, form)
    weights, index = exact.routing(case)
    assert_fp32(act, slots_glu(exact, case, index))
    for got, want in zip(down(data, case, act, logits, form), exact.expected(case, weights, index)):
        assert_fp32(got, want)


def check_bf16(case: Case, form: str) -> None:
    data = Data(case, torch.bfloat16)
    logits = data.scores(case)
    weights, index = moe.launch_router_topk(logits, data.per_expert, case.top_k, 4)
    act = slots_glu(data, case, index)
    assert_bf16(gate_up(data, case, logits, form), act)
    for got, want in zip(down(data, case, act, logits, form), data.expected(case, weights, index)):
        assert_bf16(got, want)


@pytest.mark.parametrize("form", ["rows", "sorted"])
@pytest.mark.parametrize("case", CASES, ids=ids)
def test_block(case: Case, form: str) -> None:
    check_fp32(case, form)
    check_bf16(case, form)


@pytest.mark.parametrize("case", MANY, ids=ids)
def test_block_of_many_rows(case: Case) -> None:
    check_fp32(case, "sorted")
    check_bf16(case, "sorted")


@pytest.mark.full
@pytest.mark.parametrize("form", ["rows", "sorted"])
@pytest.mark.parametrize("rows", [1, 2, 3, 5, 16, 29])
@pytest.mark.parametrize("count, top_k", [(128, 8), (12, 12), (7, 3)])
def test_block_over_rows_and_experts(rows: int, count: int, top_k: int, form: str) -> None:
    case = Case(rows, hidden=50, inner=13, dense=21, count=count, top_k=top_k)
    check_fp32(case, form)
    check_bf16(case, form)


@pytest.mark.parametrize("form", ["rows", "sorted"])
def test_slots_are_summed_in_the_order_of_rank(form: str) -> None:
    """2^26 + 1 - 2^26 is 0 in fp32 and -2^26 + 2^26 + 1 is 1: all scores are equal, so rank is the
    index, and every weight is 1/4, so that nothing but the order decides."""
    case = Case(2, hidden=3, inner=1, dense=1, count=4, top_k=4)
    data = Data(case, torch.float32)
    values = torch.tensor(
        [[2.0**26, 1, -(2.0**26), 0], [-(2.0**26), 2.0**26, 1, 0], [1, 2.0**26, 0, -(2.0**26)]]
    )
    data.per_expert[:], data.down = 1, values.t()[..., None].contiguous()
    got = down(data, case, torch.ones(2, 5), torch.zeros(2, 1, 4), form)[1]
    assert torch.equal(got, torch.tensor([0, 0.25, 0]).expand(2, 1, 3))
