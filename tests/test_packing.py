"""Packed weights of engines; the kernel that packs 4-bit ones computes the definition's bits. Every
byte of a block has one meaning, and values come back from all layouts."""

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
from g4ir.ops.codecs import FORMATS
from g4ir.ops.layouts import LAYOUTS, unpack_dense
from g4ir.ops.quant import quantize
from g4ir.ops.types import ITEMSIZE
from g4ir.plan.options import BuildOptions
from g4ir.weights.gguf.blocks import CODED, REQUANTISED
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


@pytest.mark.usefixtures("kernel_alone")
@pytest.mark.parametrize("form", ["nl4", "nl3", "nl2"])
@pytest.mark.parametrize("kind", KINDS)
def test_the_same_nonuniform_scales(kind: str, form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    random = torch.Generator().manual_seed(1)
    w = KINDS[kind](torch.randn(39, 384, generator=random)).clamp(-4096, 4096)
    monkeypatch.setattr(packing, "quantize", quantize)
    for moments in (None, torch.randn(1, 384, generator=random).square() ** 2):
        for v in (w, w.bfloat16()):
            attrs = {"form": form, "group": 0, "scale": "bf16", "moments": moments}
            right = quantize.reference(v, **attrs)
            with monkeypatch.context() as m:
                m.setattr(packing, "fit_groups", None)
                made = packing.quantized(v, **attrs)
            made, right = ([t.view(torch.uint8) for t in pair] for pair in (made, right))
            assert all(map(torch.equal, made, right))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(("rows", "size"), [(0, 40), (1, 7), (65, 300), (513, 129)])
def test_products_of_inputs(dtype: torch.dtype, rows: int, size: int) -> None:
    """Of columns that are a part of wider rows; the same bits on any number of threads."""
    x = torch.randn(rows, size + 9, generator=torch.Generator().manual_seed(0)).to(dtype)[:, 5:-4]
    want = 1 + (x.double().T @ x.double()).triu()
    totals = []
    for threads in (1, 2):
        totals.append(torch.ones(size, size))
        with pytest.MonkeyPatch.context() as m:
            m.setattr(torch, "get_num_threads", lambda n=threads: n)
            packing.added_products(totals[-1], x)
    assert torch.equal(totals[0].triu(), totals[1].triu())
    torch.testing.assert_close(totals[0].triu(), want.triu().float(), rtol=1e-4, atol=1e-3)


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


GGUF = tuple(k for k in CODED if k not in REQUANTISED)


def random_bytes(*shape: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator)


@pytest.mark.parametrize("name", LAYOUTS)
def test_blocks_come_back(name: str) -> None:
    """Values and what they share are all of a block."""
    layout = LAYOUTS[name]
    blocks = random_bytes(900, 3, layout.nbytes)
    values = layout.read(blocks)
    parts = layout.split(blocks)
    bits = sum(layout.fields[name][1].width for name in ("low", "high") if name in parts)
    assert values.shape == (900, 3, layout.values) and values.max() == 2**bits - 1
    shared = {name: parts[name] for name in ("integers", "scales") if name in parts}
    assert torch.equal(layout.write(values, **shared), blocks)


@pytest.mark.parametrize("kind", [k for k in GGUF if k not in ("Q3_K", "MXFP4")])
def test_conversion_keeps_values(kind: str) -> None:
    own, other = FORMATS[CODED[kind].scheme.form].layout, LAYOUTS[kind]
    assert own.zero == other.zero
    blocks = random_bytes(40, other.nbytes)
    made = other.convert(blocks, own).unflatten(-1, (-1, own.nbytes))
    assert torch.equal(own.read(made).flatten(1), other.read(blocks))
    if "integers" in own.fields:
        shared = other.split(blocks)["integers"]
        assert torch.equal(own.split(made)["integers"].flatten(1), shared)


@pytest.mark.parametrize("width", range(1, 9))
@pytest.mark.parametrize("count", [8, 20, 64])
def test_dense_values(width: int, count: int) -> None:
    """Packed into words, as compressed-tensors packs rows: also where the last word is not full."""
    generator = torch.Generator().manual_seed(width)
    values = torch.randint(0, 1 << width, (3, count), generator=generator)
    numbers = [sum(v << width * i for i, v in enumerate(row)) for row in values.tolist()]
    nbytes = -(-count * width // 32) * 4
    data = torch.tensor([list(n.to_bytes(nbytes, "little")) for n in numbers], dtype=torch.uint8)
    assert torch.equal(unpack_dense(data, width)[:, :count].long(), values)
