"""The kernels of the MoE block: the choice of experts, and what is read of them."""

from __future__ import annotations

import pytest
import torch

from g4ir.backends.cuda.kernels.base import Kernel
from g4ir.backends.cuda.kernels.moe_order_triton import moe_sort, router_logits
from g4ir.backends.cuda.kernels.moe_triton import moe_down
from g4ir.ops.moe import router

from .samples import Try, kernel_called

BOTH = [kernel_called("moe_down"), kernel_called("moe_down_sorted")]
both = pytest.mark.parametrize("kernel", BOTH, ids=["rows", "sorted"])
dtypes = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)


def test_each_step_of_the_scores_is_rounded() -> None:
    """One feature per expert, so that no sum hides a rounding."""
    g = torch.Generator().manual_seed(0)
    x, scale = (torch.randn(*s, generator=g).bfloat16() for s in ((2, 1, 64), (64,)))
    proj, root = torch.eye(64).bfloat16(), 2816**-0.5
    got = router_logits(x, scale, proj, root, 16, 64, 4, 1)
    assert torch.equal(got, x * scale * root)
    assert not torch.equal(got, (x.float() * scale.float() * root).bfloat16())


@pytest.mark.parametrize("count, top_k", [(128, 8), (48, 5), (6, 6), (300, 8), (5, 1)])
@dtypes
def test_choice_is_the_op_s(count: int, top_k: int, dtype: torch.dtype) -> None:
    """Exactly, in rows whose first top_k + 1 scores differ: `torch.topk` orders equals at will.
    The list has the experts in use, ascending."""
    g = torch.Generator().manual_seed(40)
    x, scale, proj, factor = (
        torch.randn(*s, generator=g).to(dtype) for s in ((40, 1, 16), (16,), (count, 16), (count,))
    )
    scores = torch.nn.functional.linear(x * scale * 0.25, proj)
    weights, index, listed = moe_sort(scores, factor, top_k, 4)
    want, chosen = router.reference(x, scale, proj, factor, top_k=top_k, root=0.25)
    best = scores.float().sort(-1, descending=True)[0][..., : top_k + 1]
    distinct = (best.diff(dim=-1) < 0).all(-1)
    assert float(distinct.double().mean()) > 0.25
    assert index.dtype == torch.int64 and torch.equal(index[distinct], chosen[distinct])
    torch.testing.assert_close(weights[distinct], want[distinct].float(), rtol=2e-6, atol=0)
    used = index.unique().tolist()
    assert listed.tolist() == used + [-1] * (count - len(used))


@pytest.mark.parametrize("count, top_k", [(128, 8), (300, 16), (6, 6)])
@dtypes
def test_equals_by_lower_index(count: int, top_k: int, dtype: torch.dtype) -> None:
    g = torch.Generator().manual_seed(count)
    scores = torch.randint(-2, 3, (18, 1, count), generator=g).to(dtype) / 2
    scores[0], scores[1, 0, 0::2] = 1.5, -0.0  # all equal; zeros of both signs
    scores[1, 0, 1::2] = 0.0
    scores[2], scores[2, 0, -1] = -torch.inf, 1.0  # an expert that cannot be, before padding
    ones = torch.ones(count)
    want = scores.float().sort(dim=-1, descending=True, stable=True)[1][..., :top_k]
    weights, index, _ = moe_sort(scores, ones, top_k, 4)
    assert torch.equal(index, want)
    expected = scores.double().gather(-1, want).softmax(-1)
    torch.testing.assert_close(weights.double(), expected, rtol=2e-6, atol=0)


@both
@pytest.mark.parametrize("dtype", ["f32", "bf16"])
def test_experts_that_nobody_chose_are_not_read(kernel: Kernel, dtype: str) -> None:
    """Their weights are NaN for the kernel; all rows have negative scores for them."""
    one = Try(kernel, kernel.samples[0], dtype)
    experts = len(one.given[4])
    sign = 1 - 2 * (torch.arange(experts) >= one.node.whole("top_k"))
    one.given[2].abs_(), one.given[3].abs_()
    one.given[4].abs_().mul_(sign[:, None])
    one.ours[2:5] = one.given[2:5]
    for i in (8, 9):
        one.ours[i] = one.given[i].clone()
        one.ours[i][one.node.whole("top_k") :] = torch.nan
    one.check(one.call(one.ours))


@both
def test_slots_are_summed_in_the_order_of_rank(kernel: Kernel) -> None:
    """2^26 + 1 - 2^26 is 0 in fp32 and -2^26 + 2^26 + 1 is 1: all scores are equal, so rank is the
    index, and every weight is 1/4, so that nothing but the order decides."""
    big = 2.0**26
    values = torch.tensor([[big, 1, -big, 0], [-big, big, 1, 0], [1, big, 0, -big]])
    act, scores, factor = torch.ones(2, 5), torch.zeros(2, 1, 4), torch.ones(4)
    weights = torch.ones(3, 1), values.t()[..., None].contiguous()
    if kernel is BOTH[0]:
        given = (act, scores, factor, None, *weights, 4, 8, 16, 4, 2, 1)
    else:
        by, index, listed = moe_sort(scores, factor, 4, 4)
        given = (act, index, by, listed, *weights, 4, 16, 32, 4, 2, 0, 16)
    got = moe_down(*given)[1]
    assert torch.equal(got, torch.tensor([0, 0.25, 0]).expand(2, 1, 3))
