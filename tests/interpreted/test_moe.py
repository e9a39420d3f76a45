"""The kernels of the MoE block: the choice of experts, and what is read of them."""

from __future__ import annotations

import pytest
import torch

from g4ir.backends.cuda.kernels.moe_triton import moe_route
from g4ir.ops.moe import router

from .samples import Try, kernel_called

KERNEL = kernel_called("moe_down")
USE = {"block_n": 16, "block_k": 64, "warps": 4}
F32, BF16 = torch.float32, torch.bfloat16


def routed(
    scores: torch.Tensor, factor: torch.Tensor, top_k: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The choice from scores [rows, 1, E]: one feature per expert, so that they are x."""
    count, counter = scores.shape[-1], torch.zeros(1, dtype=torch.int64)
    ones, eye = scores.new_ones(count), torch.eye(count).to(scores.dtype)
    found: tuple[torch.Tensor, torch.Tensor, torch.Tensor]
    found = moe_route(scores, ones, eye, factor, counter, top_k, 1.0, **USE)
    assert not counter.any()
    return found


def test_each_step_of_the_scores_is_rounded() -> None:
    """Weights of a choice of all are those of rounded scores, in order."""
    g = torch.Generator().manual_seed(0)
    x, scale = (torch.randn(*s, generator=g).bfloat16() for s in ((2, 1, 64), (64,)))
    proj, root, ones = torch.eye(64).bfloat16(), 0.37, torch.ones(64)
    given = (x, scale, proj, ones, torch.zeros(1, dtype=torch.int64), 64, root)
    got = moe_route(*given, **USE)[0]
    steps, once = x * scale * root, (x.float() * scale.float() * root).bfloat16()
    for scores, equal in ((steps, True), (once, False)):
        want = scores.float().sort(-1, descending=True)[0].softmax(-1)
        assert torch.allclose(got, want, rtol=2e-6, atol=0) == equal


@pytest.mark.parametrize(
    "count, top_k, dtype",
    [(128, 8, BF16), (48, 5, F32), (48, 5, BF16), (6, 6, BF16), (300, 8, F32), (5, 1, F32)],
)
def test_choice_is_the_op_s(count: int, top_k: int, dtype: torch.dtype) -> None:
    """Exactly, in rows whose first top_k + 1 scores differ: `torch.topk` orders equals at will.
    The list has the experts in use, ascending."""
    g = torch.Generator().manual_seed(40)
    scores = torch.randn(20, 1, count, generator=g).to(dtype)
    factor = torch.randn(count, generator=g).to(dtype)
    weights, index, listed = routed(scores, factor, top_k)
    ones, eye = scores.new_ones(count), torch.eye(count).to(dtype)
    want, chosen = router.reference(scores, ones, eye, factor, top_k=top_k, root=1.0)
    best = scores.float().sort(-1, descending=True)[0][..., : top_k + 1]
    distinct = (best.diff(dim=-1) < 0).all(-1)
    assert float(distinct.double().mean()) > 0.25
    assert index.dtype == torch.int64 and torch.equal(index[distinct], chosen[distinct])
    torch.testing.assert_close(weights[distinct], want[distinct].float(), rtol=2e-6, atol=0)
    used = index.unique().tolist()
    assert listed.tolist() == used + [-1] * (count - len(used))


@pytest.mark.parametrize("count, top_k, dtype", [(128, 8, F32), (300, 16, F32), (6, 6, BF16)])
def test_equals_by_lower_index(count: int, top_k: int, dtype: torch.dtype) -> None:
    g = torch.Generator().manual_seed(count)
    scores = torch.randint(-2, 3, (18, 1, count), generator=g).to(dtype) / 2
    scores[0], scores[1, 0, 0::2] = 1.5, -0.0  # all equal; zeros of both signs
    scores[1, 0, 1::2] = 0.0
    scores[2], scores[2, 0, -1] = -2.5, 1.0
    want = scores.float().sort(dim=-1, descending=True, stable=True)[1][..., :top_k]
    weights, index, _ = routed(scores, torch.ones(count), top_k)
    assert torch.equal(index, want)
    expected = scores.double().gather(-1, want).softmax(-1)
    torch.testing.assert_close(weights.double(), expected, rtol=2e-6, atol=0)


@pytest.mark.parametrize("dtype", ["f32", "bf16"])
def test_experts_that_nobody_chose_are_not_read(dtype: str) -> None:
    """Their weights are NaN for the kernel; all rows have negative scores for them."""
    one = Try(KERNEL, KERNEL.samples[0], dtype)
    experts = len(one.given[4])
    sign = 1 - 2 * (torch.arange(experts) >= one.node.whole("top_k"))
    one.given[2].abs_(), one.given[3].abs_()
    one.given[4].abs_().mul_(sign[:, None])
    one.ours[2:5] = one.given[2:5]
    for i in (8, 9):
        one.ours[i] = one.given[i].clone()
        one.ours[i][one.node.whole("top_k") :] = torch.nan
    one.check(one.call(one.ours))
