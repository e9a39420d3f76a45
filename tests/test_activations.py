"""Rows that are rounded before products with weights in codes: the grid, the graphs, the kernels,
and engines beside a transformers model that rounds what its products take.

Caches in fewer bits than the model's dtype: the rows, the graphs, sessions, plans, refusals. What
an engine computes with them is held against transformers whose caches round K and V the same way
(check/hf.py): in fp32 both give the same logits, but where a number lies so near the middle of two
that they take different ones.
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
from g4ir import Engine, Graph, build_graph, build_program, load_spec
from g4ir.backends.cuda.schedule import schedule
from g4ir.backends.inductor.target import Target
from g4ir.check.logits import verify_engine
from g4ir.check.passes import verify_each_pass
from g4ir.check.peers import EnginePeer, find_peer
from g4ir.check.tokens import Turns
from g4ir.ir.distance import QUANT_ERRORS
from g4ir.ops import OPS
from g4ir.ops.codecs import ACTIVATIONS, fake_quantize_values
from g4ir.ops.kv_quant import GROUP, NARROW, dequantize_rows
from g4ir.passes import PassOptions, run_passes
from g4ir.passes.latent_kv import LatentOptions
from g4ir.passes.narrow_kv import NarrowOptions
from g4ir.passes.quantize_activations import ActivationOptions
from g4ir.plan.formats import KV_NAMES
from g4ir.plan.plan import PLANNED, make_plan
from g4ir.plan.resolve import pass_options
from g4ir.quant.recipe import find_quant_config
from g4ir.quant.rewrite import quantise
from g4ir.ui.progress import no_progress
from g4ir.weights.checkpoint import Checkpoint
from tests.cases import TABLES
from tests.configs import short
from tests.oracle import relative
from tests.test_ops import rand

# --- the grid ----------------------------------------------------------------------------------


def test_int8_by_hand() -> None:
    """127 steps to the largest of 32 numbers; the last group has the numbers that are left."""
    x = torch.zeros(1, 40)
    x[0, :4] = torch.tensor([127.0, 1.4, -1.6, 0.2])
    x[0, 32:] = torch.tensor([-254.0, 3.0, 2.9, 1.0, 0.9, 0.0, 0.0, 0.0])
    want = x.clone()
    want[0, :4] = torch.tensor([127.0, 1.0, -2.0, 0.0])
    want[0, 32:37] = torch.tensor([-254.0, 4.0, 2.0, 0.0, 0.0])  # 1.5 goes to the even code
    assert torch.equal(fake_quantize_values(x, "int8"), want)


def test_fp8_by_hand() -> None:
    """The largest number of a row is 448 steps; below it three bits after the first."""
    x = torch.tensor([[448.0, 17.0, 0.0, -1.0625], [-224.0, 8.5, 0.5, 101.0]])
    want = torch.tensor([[448.0, 16.0, 0.0, -1.0], [-224.0, 8.0, 0.5, 104.0]])
    assert torch.equal(fake_quantize_values(x, "fp8"), want)


@pytest.mark.parametrize("form", ACTIVATIONS)
def test_any_row(form: str) -> None:
    """Zeros stay zeros, what is no number makes its group none, and the grid is as fine as it
    should be."""
    x = torch.randn(64, 512, generator=torch.Generator().manual_seed(0))
    x[3], x[4, 7], x[5, 40] = 0, float("nan"), float("inf")
    made = fake_quantize_values(x, form)
    assert torch.equal(made[3], x[3])
    assert made[4, :32].isnan().all() and not made[5, 32:64].isfinite().any()
    error = (made - x)[8:].square().mean().sqrt()
    assert {"int8": 0.005, "fp8": 0.02}[form] < error < {"int8": 0.0062, "fp8": 0.03}[form]
    wide = fake_quantize_values(x.double(), form)
    assert wide.dtype == torch.float64
    torch.testing.assert_close(wide[8:].float(), made[8:], rtol=1e-6, atol=0)


# --- graphs ------------------------------------------------------------------------------------


def coded(name: str, recipe: str = "int8", phase: str = "decode") -> Graph:
    spec = load_spec(name)
    return quantise(build_program(spec), spec, find_quant_config(recipe), spec.dtype).graphs[phase]


@pytest.mark.parametrize(
    "name",
    short("tiny-moe", "tiny-ple", of=("tiny-dense", "tiny-moe", "tiny-ple", "e2b", "26b-a4b")),
)
def test_each_product_with_codes_takes_rounded_rows(name: str) -> None:
    """Once for all that take the same; a router, attention and routed experts are left."""
    g = run_passes(coded(name), options=pass_options("off", "off", "int8"))
    plain = run_passes(coded(name))
    made = {n.out.name: n for n in g.find("fake_quantize")}
    assert len({n["x"].name for n in made.values()}) == len(made)
    products = list(g.find("linear", "linear_glu"))
    in_codes = {n.out.name for n in g.find("dequantize")}
    assert products and all((n["x"].name in made) == (n["w"].name in in_codes) for n in products)
    readers = {u.op for name in made for u in g.users[name]}
    assert readers == {"linear", "linear_glu"}
    experts = list(g.find("experts"))
    assert len(experts) == len(list(plain.find("moe_mlp")))
    assert not any(v.name in made for n in experts for v in n.inputs)


def test_without_codes_nothing_is_rounded() -> None:
    g = build_program(load_spec("tiny-ple")).graphs["prefill"]
    assert run_passes(g, options=pass_options("off", "off", "int8")) == run_passes(g)
    with pytest.raises(Exception, match="quantize_activations: to 'int4': expected one of off, in"):
        run_passes(g, options=PassOptions((ActivationOptions("int4"),)))


# --- engines -----------------------------------------------------------------------------------

#: several chunks, more than two windows
IDS = range(3, 31)
CASES = [
    ("tiny-ple", "int4", "int8", "float32"),
    ("tiny-ple", "int8", "int8", "bfloat16"),
    pytest.param("tiny-moe", "int8", "fp8", "float32", marks=pytest.mark.full),
    pytest.param("tiny-dense", "fp8", "fp8", "float32", marks=pytest.mark.full),
    pytest.param("tiny-moe", "int4", "int8", "float32", marks=pytest.mark.full),
]


def build(out: Path, name: str, quant: str, to: str | None, **options: Any) -> Engine:
    options = TABLES["narrow"]["options"] | options
    return g4ir.build(name, out, quant=quant, quant_activations=to, **options)


@pytest.mark.parametrize(("name", "quant", "to", "dtype"), CASES)
def test_verify(name: str, quant: str, to: str, dtype: str, tmp_path: Path) -> None:
    """Transformers that rounds the same rows gives the same logits, to the last bits where both
    compute in float64: no value is close enough to the middle of two codes to be rounded to another
    one. Every pass keeps what the one before it computes."""
    engine = build(tmp_path / "engine", name, quant, to, dtype=dtype)
    report = verify_engine(engine, "hf", IDS)
    assert report.ok and (report.float64 is None or report.float64[0] < 1e-6), report.text()
    peer, turns = find_peer(engine, "hf", None, no_progress), Turns(torch.tensor(IDS), [28], True)
    exact = EnginePeer(engine).in_float64(turns), peer.in_float64(turns)
    assert (exact[0] - exact[1]).abs().max() < 1e-6
    stages = verify_each_pass(engine, IDS)
    assert stages.ok and "as asked: not compared" in stages.text()


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


def test_int8_rows_by_hand() -> None:
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


def build_narrow(folder: Path, spec: str = "tiny-ple", **options: Any) -> Engine:
    return g4ir.build(spec, folder, **{**SMALL, **options})


#: spec, bits and form of the short run
SHORT = (
    ("tiny-ple", "int8", "off"),
    ("tiny-moe", "float8", "value"),
    ("tiny-dense", "int8", "value"),
)
NARROW_CASES = [
    pytest.param(case, marks=() if case in SHORT else pytest.mark.full, id="-".join(case))
    for case in itertools.product(SPECS, BITS8, FORMS)
]


@pytest.fixture(scope="module", params=NARROW_CASES)
def engine(request: pytest.FixtureRequest, tmp_path_factory: Any) -> Iterator[Engine]:
    spec, kv, form = request.param
    folder = tmp_path_factory.mktemp("narrow") / "engine"
    built = build_narrow(folder, spec, kv_dtype=kv, latent_kv=form)
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


def test_verify_narrow_caches(engine: Engine) -> None:
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
    plain = build_narrow(tmp_path / "a", dtype="bfloat16")
    same = build_narrow(tmp_path / "b", dtype="bfloat16", kv_dtype="bfloat16")
    assert plain.manifest["options"] == same.manifest["options"]
    assert plain.manifest["files"] == same.manifest["files"]
    assert plain.manifest["options"]["narrow_kv"] == {"to": "off"}


def test_k_beyond_the_range_is_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """sqrt(32) * 100 is more than 448: the layer is named, and the engine still computes."""
    build_narrow(tmp_path / "fine", kv_dtype="float8")
    assert not caplog.records
    real = Checkpoint.tensor

    def loud(self: Any, name: str) -> torch.Tensor:
        t = real(self, name)
        return t * 100 if name == "layers.2.self_attn.k_norm.weight" else t

    monkeypatch.setattr(Checkpoint, "tensor", loud)
    engine = build_narrow(tmp_path / "loud", kv_dtype="float8")
    assert engine.session(1).prefill(tokens(1, 9)).isfinite().all()
    build_narrow(tmp_path / "int8", kv_dtype="int8")
    (told,) = caplog.messages
    assert "in L2.attn.norm_k" in told and "beyond 448" in told
