"""Kernels whose programs work together, in orders that a GPU may choose; and that these orders find
what is wrong in none."""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl

from g4ir.backends.cuda.kernels import decode_attention_triton as module
from g4ir.backends.cuda.kernels.decode_attention_triton import decode_attention
from g4ir.ops.attention import attention

from .orders import LIVE, interleaved, poisoned
from .test_moe import routed


@triton.jit
def _count(word, out):
    before = tl.atomic_add(word, 1)
    tl.store(out + before, tl.program_id(0))


@triton.jit
def _fail(word):
    if tl.atomic_add(word, 1) == LIVE:
        tl.static_assert(False, "on purpose")


@triton.jit
def _last_without_an_atomic(word, size):
    before = tl.load(word)
    tl.store(word, before + 1)
    return before == size - 1


@triton.jit
def _counts_before_it_stores(sums, out, work, split, used, pair, GROUP, D, SPLITS, STAGES):
    """`_finish`, in which the last to count adds up what others have yet to store."""
    o, top, total = sums
    parts, stats, arrivals = work
    out += pair * (GROUP * D)
    parts += pair * (SPLITS * GROUP * D)
    stats += pair * (SPLITS * GROUP * 2)
    last = module.is_last(arrivals + pair, used)
    module._put(parts, stats, split, o, top, total, GROUP, D)
    if last:
        o1, total1 = module._merge(parts, stats, used, GROUP, D, o.shape[1], STAGES)
        module._write(out, o1, total1, GROUP, D)
        tl.store(arrivals + pair, 0)


def decode(splits: int) -> float:
    """The largest difference from the reference, of two rows over 70 and 9 keys."""
    g = torch.Generator().manual_seed(0)
    q, (k, v) = torch.randn(2, 1, 4, 16, generator=g), torch.randn(2, 80, 2, 2, 16, generator=g)
    end, arrivals = torch.tensor([70, 9]), torch.zeros(2, 2, dtype=torch.int64)
    attrs = {"window": 0, "scale": 0.25, "softcap": 0.0}
    got = decode_attention(
        q,
        end,
        None,
        [k, v],
        arrivals,
        **attrs,
        splits=splits,
        block_n=4,
        warps=4,
        stages=2,
    )
    assert not arrivals.any()
    want = attention.reference(q, end[:, None] - 1, end, k, v, **attrs)
    return float((got - want).abs().max())


@pytest.mark.parametrize("splits", [3, 16])
def test_shares_of_attention(splits: int) -> None:
    """Added by whoever is last."""
    with interleaved(0), poisoned():
        assert decode(splits) < 1e-5


@pytest.mark.parametrize(
    ("name", "broken"),
    [("is_last", _last_without_an_atomic), ("_finish", _counts_before_it_stores)],
)
def test_a_race_is_found(monkeypatch: pytest.MonkeyPatch, name: str, broken: object) -> None:
    """Both are right one program after the other, and wrong in some order on a GPU."""
    monkeypatch.setattr(module, name, broken)
    assert decode(3) < 1e-5
    assert any(is_wrong(seed) for seed in range(8))


def is_wrong(seed: int) -> bool:
    with interleaved(seed), poisoned():
        try:
            return not decode(3) < 1e-5
        except AssertionError:  # a counter was left behind
            return True


def test_the_choice_of_experts() -> None:
    g = torch.Generator().manual_seed(0)
    scores, factor = torch.randn(5, 1, 8, generator=g), torch.ones(8)
    want = routed(scores, factor, 2)
    with interleaved(1), poisoned():
        got = routed(scores, factor, 2)
    assert all(map(torch.equal, got, want))


def test_each_program_runs_once() -> None:
    """More of them than live at a time, in another order than their numbers'."""
    word, out = torch.zeros(1, dtype=torch.int32), torch.full((40,), -1, dtype=torch.int32)
    with interleaved(0):
        _count[(40,)](word, out)
    assert int(word) == 40 and out.tolist() != sorted(out.tolist())
    assert sorted(out.tolist()) == list(range(40))


def test_a_program_that_fails_ends_all() -> None:
    word = torch.zeros(1, dtype=torch.int32)
    with interleaved(0), pytest.raises(AssertionError, match="on purpose"):
        _fail[(20,)](word)
    assert int(word) <= LIVE + 1
    assert decode(3) < 1e-5
