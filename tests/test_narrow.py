"""Caches in fewer bits than the model's dtype: the rows, the graphs, sessions, plans, refusals.

What an engine computes with them is held against transformers whose caches round K and V the same
way (check/hf.py): in fp32 both give the same logits, but where a number lies so near
the middle of two that they take different ones.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import g4ir
from g4ir.backends.cuda.schedule import schedule
from g4ir.backends.inductor.target import Target
from g4ir.check.logits import verify_engine
from g4ir.check.passes import verify_each_pass
from g4ir.engine.engine import Engine
from g4ir.ir.distance import QUANT_ERRORS
from g4ir.model.text import build_graph
from g4ir.ops import OPS
from g4ir.ops.kv_quant import (
    GROUP,
    NARROW,
    dequantize_rows,
)
from g4ir.passes import PassOptions, run_passes
from g4ir.passes.latent_kv import LatentOptions
from g4ir.passes.narrow_kv import NarrowOptions
from g4ir.plan.formats import KV_NAMES
from g4ir.plan.plan import PLANNED, make_plan
from g4ir.spec.record import load_spec
from g4ir.weights.checkpoint import Checkpoint
from tests.cases import TABLES
from tests.oracle import relative
from tests.test_ops import rand

BITS8 = ("float8", "int8")
FORMS = ("off", "value")


def row(x: torch.Tensor, to: str) -> torch.Tensor:
    out: torch.Tensor = OPS["narrow_row"].reference(x, to=to)  # type: ignore[misc]
    return out


# --- rows -------------------------------------------------------------------------------------


def test_e4m3_by_hand() -> None:
    """Three bits of mantissa, ties to even, subnormals of 2^-9; beyond the range its end."""
    given = [1.0, 1.0625, 1.1875, 17.0, 0.3, 2**-9, 2**-11, 460.0, -1e9, float("inf"), -0.0]
    want = [1.0, 1.0, 1.25, 16.0, 0.3125, 2**-9, 0.0, 448.0, -448.0, 448.0, -0.0]
    assert dequantize_rows(row(torch.tensor(given), "f8e4m3")).tolist() == want
    assert dequantize_rows(row(torch.tensor([float("nan")]), "f8e4m3")).isnan().all()


def test_int8_by_hand() -> None:
    """Each group of 32 has a scale of its own, in bf16 behind the codes, low byte first."""
    x = torch.zeros(40)
    x[:3], x[32:34] = torch.tensor([254.0, -127.0, 1.0]), torch.tensor([-0.5, 0.25])
    made = row(x, "i8")
    small = float(torch.tensor(0.5 / 127).to(torch.bfloat16))
    bits = torch.tensor([2.0, small]).to(torch.bfloat16).view(torch.int16)
    assert made[:3].tolist() == [127, -64, 0] and made[32:34].tolist() == [-127, 64]
    assert made[40:].tolist() == bits.view(torch.int8).tolist()
    said = dequantize_rows(made)
    assert said[:3].tolist() == [254.0, -128.0, 0.0]
    assert said[32:34].tolist() == [-127 * small, 64 * small]


@pytest.mark.parametrize("width", [1, 31, 32, 33, 64, 80])
@pytest.mark.parametrize("to", NARROW)
def test_rows_lie_on_their_grid_and_near(to: str, width: int) -> None:
    """Within half a step; rounded again nothing changes; of zeros zeros come; float64 is alike."""
    x = rand(5, width) * torch.tensor([1e-3, 1.0, 20.0, 1.0, 0.0])[:, None]
    x[3, :1] = 30.0  # an outlier coarsens its own group alone
    said = dequantize_rows(row(x, to))
    groups = torch.nn.functional.pad(x, (0, -width % GROUP)).unflatten(-1, (-1, GROUP))
    spread = groups.abs().amax(-1)[..., None].expand_as(groups).flatten(-2)[:, :width]
    step = {
        "bf16": x.abs() * 2**-8,
        "f8e4m3": (x.abs() * 2**-4).clamp(min=2**-10),
        "i8": spread * (1 + 2**-7) / 254 + 1e-12,
    }[to]
    assert ((said - x).abs() <= step).all()
    assert torch.equal(dequantize_rows(row(said, to)), said) and not said[4].any()
    assert torch.equal(dequantize_rows(row(x.double(), to), torch.float64), said.double())
    assert torch.equal(dequantize_rows(row(x, to), torch.bfloat16), said.to(torch.bfloat16))


# --- engines ----------------------------------------------------------------------------------

#: windows of 8 and shared caches; experts; K = V
SPECS = ("tiny-ple", "tiny-moe", "tiny-dense")
SMALL: dict[str, Any] = TABLES["narrow"]["options"]


def build(folder: Path, spec: str = "tiny-ple", **options: Any) -> Engine:
    return g4ir.build(spec, folder, **{**SMALL, **options})


#: spec, bits and form of the short run
SHORT = (
    ("tiny-ple", "int8", "off"),
    ("tiny-moe", "float8", "value"),
    ("tiny-dense", "int8", "value"),
)
CASES = [
    pytest.param(case, marks=() if case in SHORT else pytest.mark.full, id="-".join(case))
    for case in itertools.product(SPECS, BITS8, FORMS)
]


@pytest.fixture(scope="module", params=CASES)
def engine(request: pytest.FixtureRequest, tmp_path_factory: Any) -> Iterator[Engine]:
    spec, kv, form = request.param
    folder = tmp_path_factory.mktemp("narrow") / "engine"
    built = build(folder, spec, kv_dtype=kv, latent_kv=form)
    yield built
    built.close()


def tokens(rows: int, count: int) -> torch.Tensor:
    return torch.randint(0, 100, (rows, count), generator=torch.Generator().manual_seed(0))


def test_truncate_restore_and_bytes(engine: Engine) -> None:
    """What is dropped is not seen; a snapshot brings rings back, bit for bit; the bytes are those
    that are allocated, and those of the plan."""
    ids = tokens(1, 20)
    session = engine.session(1)
    session.prefill(ids[:, :6])
    session.truncate(3)
    again = session.prefill(ids[:, 6:9])
    fresh = engine.session(1).prefill(torch.cat((ids[:, :3], ids[:, 6:9]), 1))
    # A row after a number that fell to the other side lies as far away as `verify` allows.
    assert (
        relative(again, fresh).max() < QUANT_ERRORS[engine.manifest["options"]["narrow_kv"]["to"]]
    )
    kept = session.snapshot()
    first = session.prefill(ids[:, 9:])
    session.restore(kept)
    assert torch.equal(session.prefill(ids[:, 9:]), first)
    options = engine.manifest["options"]
    forms = {"kv_dtype": KV_NAMES[options["narrow_kv"]["to"]]}
    forms |= {"latent_kv": options["latent_kv"]["form"]}
    asked = replace(PLANNED, dtype="float32", device="cpu", **forms)
    planned = make_plan(engine.spec, asked, ctx=64).rows[0]
    state = session.state.tensors.values()
    assert session.nbytes() == planned.planned == sum(t.untyped_storage().nbytes() for t in state)
    assert {t.dtype for t in state} <= {torch.float8_e4m3fn, torch.int8}


# --- against transformers ---------------------------------------------------------------------

#: several chunks, more than two windows
IDS = range(3, 31)


def test_verify(engine: Engine) -> None:
    """Transformers with caches of the same rows gives the same logits, far below what is allowed;
    and every pass keeps what the one before it computes."""
    to = engine.manifest["options"]["narrow_kv"]["to"]
    report = verify_engine(engine, "hf", IDS)
    assert report.ok and max(p.relative for p in report.positions) < QUANT_ERRORS[to] / 10
    stages = verify_each_pass(engine, IDS)
    assert stages.ok and "as asked: not compared" in stages.text()


# --- the torch backend ------------------------------------------------------------------------


@pytest.mark.parametrize("phase", ["decode", "prefill"])
def test_gpu_kernels_of_narrowed_rows(phase: str) -> None:
    """A step reads them as they are, of codes whole groups; prompts are left to the library."""
    spec = load_spec("31b")
    text = replace(spec.text, num_hidden_layers=6)
    plain = build_graph(replace(spec, text=text), phase, dtype="bf16")
    for to in ("off", "f8e4m3", "i8"):
        for form in FORMS:
            options = PassOptions((NarrowOptions(to), LatentOptions(form)))
            s = schedule(run_passes(plain, options=options), Target("cuda", "h100", 1))
            readers = [n for n in s.graph.nodes if n.definition.cache_range]
            assert readers
            for n in readers:  # the last layers of a prompt have one token too
                assert (s.find(n) is not None) == (to == "off" or not n.chunk)
    odd = replace(text, sliding=replace(text.sliding, head_dim=80))
    tiny = build_graph(replace(spec, text=odd), "decode", dtype="bf16")
    g = run_passes(tiny, options=PassOptions((NarrowOptions("i8"),)))
    s = schedule(g, Target("cuda", "h100", 1))
    of = {int(n["q"].type.shape[-1]): s.find(n) for n in s.graph.nodes if n.definition.cache_range}
    assert {d: choice is not None for d, choice in of.items()} == {80: False, 512: True}


# --- options and refusals ---------------------------------------------------------------------


def test_the_dtype_itself_changes_nothing(tmp_path: Path) -> None:
    plain = build(tmp_path / "a", dtype="bfloat16")
    same = build(tmp_path / "b", dtype="bfloat16", kv_dtype="bfloat16")
    assert plain.manifest["options"] == same.manifest["options"]
    assert plain.manifest["files"] == same.manifest["files"]
    assert plain.manifest["options"]["narrow_kv"] == {"to": "off"}


def test_k_beyond_the_range_is_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """sqrt(32) * 100 is more than 448: the layer is named, and the engine still computes."""
    build(tmp_path / "fine", kv_dtype="float8")
    assert not caplog.records
    real = Checkpoint.tensor

    def loud(self: Any, name: str) -> torch.Tensor:
        t = real(self, name)
        return t * 100 if name == "layers.2.self_attn.k_norm.weight" else t

    monkeypatch.setattr(Checkpoint, "tensor", loud)
    engine = build(tmp_path / "loud", kv_dtype="float8")
    assert engine.session(1).prefill(tokens(1, 9)).isfinite().all()
    build(tmp_path / "int8", kv_dtype="int8")
    (told,) = caplog.messages
    assert "in L2.attn.norm_k" in told and "beyond 448" in told
