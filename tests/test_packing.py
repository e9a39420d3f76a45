"""Packed weights of engines; the kernel that packs 4-bit ones computes the definition's bits."""

from __future__ import annotations

import platform
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch

import g4ir
from g4ir.backends.cpu import packing, pyops
from g4ir.builder import build
from g4ir.builder.build import prepare
from g4ir.errors import MissingError
from g4ir.model.tensors import numel, text_tensors
from g4ir.ops.quant import quantize
from g4ir.ops.types import ITEMSIZE
from g4ir.plan.options import BuildOptions
from g4ir.weights.pack import MadeParams
from tests.configs import NAMES, few, spec_called
from tests.engines import random_checkpoint
from tests.spies import spy

KINDS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "Gaussian": lambda x: x * 0.02,
    "outliers": lambda x: x**5,
    "equal magnitudes": lambda x: x.sign() * 0.7,
    "ties between codes": lambda x: (x * 6).round() / 2,
    "groups of zeros": lambda x: x * (x[:, ::32] > 0).repeat_interleave(32, -1),
    "denormals": lambda x: x * 1e-41,
    "all magnitudes": lambda x: x * 10.0 ** torch.arange(-36, x.shape[0] - 36)[:, None],
    "on a 4-bit grid": lambda x: (x * 3).round().clamp(-8, 7) * (3 / 256),
}


def definition(w: torch.Tensor, **attrs: Any) -> tuple[torch.Tensor, torch.Tensor]:
    return quantize.reference(w, form="int4", scale="bf16", **attrs)


def packed(w: torch.Tensor, **attrs: Any) -> tuple[Any, ...]:
    return packing.quantized(w, form="int4", scale="bf16", **attrs)


@pytest.fixture
def kernel_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    if (platform.system(), platform.machine()) != ("Linux", "x86_64"):
        pytest.skip("torch's sums have another order here")
    monkeypatch.setattr(packing, "quantize", None)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)


@pytest.mark.usefixtures("kernel_alone")
@pytest.mark.parametrize("group", [32, 64, 128, 0])
@pytest.mark.parametrize("kind", KINDS)
def test_the_same_codes_and_scales(kind: str, group: int) -> None:
    """195 rows: several units of work, no multiple of the groups that the kernel takes together.
    Calibrated: by moments of one matrix, by one set for all experts, and by a set each."""
    random = torch.Generator().manual_seed(group)
    x = KINDS[kind](torch.randn(39, 384, generator=random)).repeat(5, 1)
    moments = torch.randn(3, 1, 384, generator=random).square() ** 2
    moments[..., :40] = 0
    for w in map(x.to, (torch.bfloat16, torch.float32, torch.float16)):
        experts = w[:39].view(3, 13, 384)
        plain = (w, w[:32].view(2, 16, 384), w.flip(1)[:, ::3])
        calibrated = ((w, moments[0]), (experts, moments), (experts, moments[:1]))
        for v, by in (*((v, None) for v in plain), *calibrated):
            given = {"group": group, "moments": by}
            assert all(map(torch.equal, packed(v, **given), definition(v, **given)))


@pytest.mark.parametrize("value", [float("nan"), float("-inf"), 5000.0])
def test_the_definition_computes_other_weights(value: float) -> None:
    w = torch.randn(8, 64)
    w[3, 7] = value
    for made, right in zip(packed(w, group=32), definition(w, group=32), strict=True):
        assert torch.equal(made.float().nan_to_num(7), right.float().nan_to_num(7))
    assert all(map(torch.equal, packed(w[:2, :48], group=16), definition(w[:2, :48], group=16)))


def test_without_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pyops, "kernel", Mock(side_effect=MissingError("no compiler")))
    monkeypatch.setattr(packing, "_has_kernel", packing._has_kernel.__wrapped__)
    w = torch.randn(8, 64)
    assert all(map(torch.equal, packed(w, group=32), definition(w, group=32)))
    assert pyops.kernel.called


@pytest.mark.parametrize("packs", [True, False])
def test_builds_and_loads(packs: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    forms = set[str]()
    for module in (packing, build):
        spy(monkeypatch, module, "quantized", lambda w, form, **attrs: forms.add(form))
    weights: dict[str, Any] = {"random_weights": 0}
    if packs:
        weights = {"checkpoint": random_checkpoint(tmp_path / "c", "tiny-dense")}
    limits: dict[str, Any] = {"max_seq": 32, "prefill_chunk": 8, "backend": "reference"}
    engine = g4ir.build("tiny-dense", tmp_path / "e", quant="int4", **weights, **limits)
    if not packs:
        engine.session().prefill(torch.tensor([[2, 5, 7]]))
    assert "int4" in forms


@pytest.mark.parametrize("name", few(NAMES))
def test_packed_weights_have_no_padding(name: str) -> None:
    """What an engine stores is every tensor once: a layer with K=V packs Q and K alone."""
    spec = spec_called(name)
    prepared = prepare(spec, BuildOptions(random_weights=0))
    assert prepared.param_bytes() == numel(text_tensors(spec)) * ITEMSIZE[spec.dtype]


def test_codes_and_scales_are_computed_once() -> None:
    """Though threads ask for them at the same time; again for who asks again."""
    p = prepare(spec_called("tiny-dense"), BuildOptions(random_weights=0, quant="int4"))
    calls = list[torch.Size]()

    def quantized(w: torch.Tensor, **attrs: Any) -> tuple[Any, ...]:
        calls.append(w.shape)
        time.sleep(0.05)
        return quantize.reference(w, **attrs)

    params = MadeParams(p.packing, p.source, quantized=quantized)
    names = [v.name for v in p.packing.recipe("embed.table.codes").outputs]
    assert len(names) == 2
    with ThreadPoolExecutor(2) as pool:
        first = [*pool.map(params.tensor, names)]
    assert len(calls) == 1 and not params._pending
    assert all(torch.equal(t, params.tensor(n)) for t, n in zip(first, names, strict=True))
    assert torch.equal(params.tensor(names[0]), first[0])
    assert torch.equal(params.tensor(names[0]), first[0]) and len(calls) == 4
