"""Norm, rotation and cache write of one token: what samples cannot say."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from g4ir.backends.cuda.kernels.qkv_triton import qkv_write
from g4ir.ops.latent import keys_values
from g4ir.ops.rope import rope_table, rotated_pairs

from .samples import Try, kernel_called

EPS = 1e-6
WRITE = kernel_called("qkv_write")


@pytest.mark.parametrize(
    ("d", "slots", "start", "fraction"), [(16, 5, (3, 4, 22), 0.5), (22, 6, (2, 300_001), 1.0)]
)
def test_forms_agree(d: int, slots: int, start: tuple[int, ...], fraction: float) -> None:
    """bf16 V and the rotated dims of K in `value` are those of `plain`, bit for bit."""
    kind = "default" if fraction == 1 else "proportional"
    rotation: dict[str, Any] = {"kind": kind, "theta": 1e4, "fraction": fraction, "factor": 1.0}
    g, b, pairs = torch.Generator().manual_seed(d), len(start), rotated_pairs(kind, d, fraction)
    x = torch.randn(b, 1, 6 * d, generator=g).bfloat16()
    w = (1 + torch.randn(d, generator=g) / 2).bfloat16()
    at = torch.tensor(start)
    tables = rope_table.reference(at[:, None], dim=d, dtype="bf16", **rotation)
    widths = {"plain": (d, d), "value": (d + 2 * pairs,)}
    held = {}
    for form, many in widths.items():
        caches = [torch.zeros(slots, b, 2, n, dtype=torch.bfloat16) for n in many]
        own = pairs if form == "value" else 0
        qkv_write(x, w, w, *tables, at, at * 0 + 1, caches, 4, 2, False, form, own, EPS, 1)
        held[form] = [cache[at % slots, torch.arange(b)][:, None] for cache in caches]
    key, value = held["plain"]
    k, v = keys_values(held["value"][0], w)
    turned = [i + half for half in (0, d // 2) for i in range(pairs)]
    assert torch.equal(v, value) and torch.equal(k[..., turned], key[..., turned])


def test_places_that_lie_apart() -> None:
    one = Try(WRITE, WRITE.samples[0], "f32")
    for i in (5, 6):
        one.ours[i] = torch.stack((one.ours[i], one.ours[i]), -1)[..., 0]
        assert not one.ours[i].is_contiguous()
    one.check(one.run())


def test_query_heads_alone_are_the_same() -> None:
    """The bits that `qkv_write` makes of them."""
    for sample in WRITE.samples[::4]:
        whole = Try(WRITE, sample, "bf16")
        heads, d = sample.attrs["heads"], whole.ours[1].shape[0]
        q = whole.ours[0][..., : heads * d].unflatten(-1, (heads, d))
        queries = kernel_called("q_heads")
        text = (f"T[{len(q)},1,{heads},{d}]", *sample.inputs[1:2], *sample.inputs[3:5])
        alone = Try(queries, replace(queries.samples[0], inputs=text), "bf16")
        (got,) = alone.call([q, whole.ours[1], *whole.ours[3:5]])
        assert torch.equal(got, whole.run()[0])
