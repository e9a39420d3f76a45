"""Quantised weights: codes to the bit, graphs through all passes, engines against transformers that
hold what the codes mean.
Rows that are rounded before products with weights in codes: the grid, the graphs, the kernels,
and engines beside a transformers model that rounds what its products take.

Caches in fewer bits than the model's dtype: the rows, the graphs, sessions, plans, refusals. What
an engine computes with them is held against transformers whose caches round K and V the same way
(check/hf.py): in fp32 both give the same logits, but where a number lies so near the middle of two
that they take different ones.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import onnx
import pytest
import torch
import yaml
from hypothesis import given
from hypothesis import strategies as st

import g4ir
from g4ir import Engine, Spec, build_graph, build_program, interpret, load_spec, spec_names
from g4ir.backends import find_backend
from g4ir.backends.cuda.schedule import schedule
from g4ir.backends.inductor.target import Target
from g4ir.backends.onnx_graph.export import EMBED, MODEL
from g4ir.backends.onnx_graph.runtime import open_session
from g4ir.backends.primitives.weights import by_columns
from g4ir.builder.build import _check_range, prepare, write_engine
from g4ir.check.logits import verify_engine
from g4ir.check.passes import verify_each_pass
from g4ir.check.peers import EnginePeer, find_peer
from g4ir.check.tokens import Turns
from g4ir.errors import G4Error, WeightsError
from g4ir.ir.distance import QUANT_ERRORS
from g4ir.ir.graph import Builder, Program
from g4ir.ir.rewrite import split_prologue
from g4ir.ops import OPS
from g4ir.ops.codecs import ACTIVATIONS, FORMATS, fake_quantize_values, unpack_codes
from g4ir.ops.kv_quant import GROUP, NARROW, dequantize_rows
from g4ir.ops.types import Type
from g4ir.passes import PassOptions, run_passes, run_program
from g4ir.passes.latent_kv import LatentOptions
from g4ir.passes.narrow_kv import NarrowOptions
from g4ir.plan.engine_limits import Limits
from g4ir.plan.formats import KV_NAMES
from g4ir.plan.options import BuildOptions
from g4ir.plan.plan import PLANNED, make_plan
from g4ir.quant.recipe import (
    ENGINE,
    QuantConfig,
    Rule,
    Scheme,
    built_in_names,
    find_quant_config,
)
from g4ir.quant.rewrite import quantise, schemes_of, weights_of
from g4ir.ui.progress import no_progress
from g4ir.weights.checkpoint import Checkpoint
from g4ir.weights.pack import split_program
from g4ir.weights.tensorfile import read_header
from tests.cases import TABLES, read_table
from tests.configs import short, widened
from tests.engines import random_checkpoint, rewrite
from tests.oracle import relative
from tests.runner import built_program
from tests.test_ops import rand

BF16, F32 = torch.bfloat16, torch.float32
SCHEMES = {"int8": (0, "bf16"), "int4": (32, "bf16"), "fp8": (0, "f32")}
MINIMA = ("uint4", "uint5")
MATRIX = read_table("quant_matrix.yaml")


def quantize(w: torch.Tensor, form: str, group: int | None = None) -> tuple[Any, Any]:
    each, scale = SCHEMES[form]
    each = each if group is None else group
    made: tuple[Any, Any] = OPS["quantize"].reference(w, form=form, group=each, scale=scale)  # type: ignore[misc]
    return made


def dequantize(codes: torch.Tensor, scales: torch.Tensor, to: str = "f32") -> torch.Tensor:
    made: torch.Tensor = OPS["dequantize"].reference(codes, scales, to=to)  # type: ignore[misc]
    return made


def test_defaults_of_rules_and_names_of_configs() -> None:
    """A rule has its format's group and scale unless it names others; `engine` is the engine's
    dtype."""
    for form, group, scale in (("int8", 0, None), ("int4", 32, "bf16"), ("int5", 32, "f16")):
        assert Rule(("*",), form).first == Scheme(form, group, scale)
    assert Rule(("*",), "int4", group=64, scale="f32").first == Scheme("int4", 64, "f32")
    assert Rule(("*",), "int4", scale=ENGINE).first.scale is None


@pytest.mark.parametrize(("form", "largest"), [("int8", 127), ("fp8", 448)])
def test_codes_by_hand(form: str, largest: int) -> None:
    w = rand(7, 96)
    codes, scales = quantize(w, form)
    s = w.float().abs().amax(1, keepdim=True) / largest
    s = s.to(BF16) if form == "int8" else s
    assert torch.equal(scales, s) and codes.dtype in (torch.int8, torch.float8_e4m3fn)
    exact = (w.float() / s.float()).clamp(-largest, largest)
    rounded = exact.round() if form == "int8" else exact.to(codes.dtype).float()
    assert torch.equal(codes.float(), rounded)


def test_value_is_rounded_once() -> None:
    codes, scales = quantize(rand(8, 64), "int4")
    exact = unpack_codes(codes).double().unflatten(-1, (2, 32)) * scales.double()[..., None]
    assert torch.equal(dequantize(codes, scales, "bf16"), exact.flatten(-2).to(BF16))
    assert torch.equal(dequantize(codes, scales).double(), exact.flatten(-2))


@pytest.mark.parametrize(("form", "most"), [("uint4", 0.076), ("uint5", 0.039)])
@pytest.mark.parametrize("group", [32, 256, 0])
def test_minima_of_small_square_error(form: str, most: float, group: int) -> None:
    """Less than of int4 on Gaussian weights, and half of that where all have one sign."""
    w = rand(64, 1024)
    w[3], w[4], w[5] = 0, 2, -3
    for x, bound in ((w, most), (w.abs(), most * 0.6), (-w.abs() - 1, most * 0.4)):
        codes, scales = OPS["quantize"].reference(x, form=form, group=group, scale="f16")  # type: ignore[misc]
        off = (dequantize(codes, scales) - x.float()).norm(dim=1)
        assert off.norm() / x.float().norm() < bound
        assert (off[3:6] <= 1e-3 * x[3:6].float().norm(dim=1)).all()


def grid(code: float, seed: int, rows: int = 64) -> tuple[torch.Tensor, torch.Tensor]:
    """Weights on a 4-bit grid whose extremum has this code, and the codes."""
    x = torch.randn(rows, 12, 32, generator=torch.Generator().manual_seed(seed))
    ends = x.gather(-1, x.abs().argmax(-1, keepdim=True))
    d = (ends / code).to(BF16).float()
    codes = (x / d).round().clamp(-8, 7)
    return (codes * d).to(BF16).flatten(1), codes.flatten(1)


@given(st.integers(0, 2**31))
def test_every_code_of_weights_trained_for_4_bits_is_recovered(seed: int) -> None:
    w, codes = grid(-8, seed)
    found, scales = quantize(w, "int4")
    assert torch.equal(unpack_codes(found).float(), codes)
    assert torch.equal(dequantize(found, scales, "bf16"), w)


@pytest.mark.parametrize("code", [7.5, -7.5, 7, -7, 8])
def test_weights_of_other_grids_are_recovered(code: float) -> None:
    w, _ = grid(code, seed=1)
    assert torch.equal(dequantize(*quantize(w, "int4"), to="bf16"), w)


def test_errors_of_gaussian_weights() -> None:
    """int4 is below Q4_0, which divides the signed extremum by -8 and rounds that to float16."""
    w = rand(512, 1536)
    groups = w.float().unflatten(-1, (-1, 32))
    d = groups.gather(-1, groups.abs().argmax(-1, keepdim=True)) / -8
    q4_0 = (groups / d + 8.5).trunc().clamp(0, 15).sub(8) * d.half().float()
    theirs = float((q4_0 - groups).pow(2).mean().sqrt() / groups.pow(2).mean().sqrt())
    assert theirs == pytest.approx(0.086, abs=1e-3)
    off = {x: dequantize(*quantize(w, x)).sub(w.float()).norm() / w.float().norm() for x in SCHEMES}
    assert off["int4"] < 0.97 * theirs and off["int8"] == pytest.approx(0.0081, abs=3e-4)
    assert off["fp8"] == pytest.approx(0.0265, abs=1e-3)


def recipe_called(name: str) -> QuantConfig:
    rows = MATRIX["schemes"].get(name, {}).get("rules", ())
    rules = tuple(Rule(**{**row, "tensors": tuple(row["tensors"])}) for row in rows)
    found = QuantConfig(rules, name) if rules else find_quant_config(name)
    assert found
    return found


def quantised_program(spec: Spec, recipe: QuantConfig) -> Program:
    return run_program(quantise(build_program(spec, True, "f32"), spec, recipe, "f32"))


@pytest.mark.covering
@pytest.mark.parametrize("name", spec_names())
def test_every_matrix_of_a_spec_is_in_one_rule_of_each_recipe(name: str) -> None:
    """Of the weights of products and tables: a router is none. `schemes` raises for a weight in two
    rules. int8 leaves the token table of an encoder, and no other."""
    spec, weights = load_spec(name), weights_of(load_spec(name))
    graphs = build_program(spec, True).graphs
    linear = {n["w"].name for g in graphs.values() for n in g.nodes if n.op == "linear"}
    assert linear <= weights.keys()
    for recipe in map(recipe_called, built_in_names()):
        kept = {"embed.table"} if spec.embedding and recipe.name == "int8" else set()
        assert schemes_of(recipe, spec).keys() == weights.keys() - kept, recipe.name


def test_groups_leave_out_what_other_rules_name() -> None:
    weights = weights_of(load_spec("tiny-moe"))
    rules = (Rule(("layers", "head.w"), "int8"), Rule(("*.wk", "embed.table"), "fp8"))
    forms = {n: s.form for n, s in QuantConfig(rules).schemes(weights).items()}
    assert {forms[n] for n in ("L0.attn.wk", "embed.table")} == {"fp8"}
    assert {forms[n] for n in ("L0.attn.wq", "L0.moe.down")} == {"int8"}


LIMITS = {"max_seq": 64, "prefill_chunk": 16}


def cases_of_the_matrix() -> Iterator[Any]:
    """Each scheme on each backend; variants in turn, the others of a pair with `--full`."""
    pairs = product(MATRIX["backends"].items(), MATRIX["schemes"].items())
    for turn, ((backend, how), (scheme, row)) in enumerate(pairs):
        names = row.get("variants", MATRIX["variants"])
        for i, name in enumerate(names):
            spare = "full" in how or i != turn % len(names)
            marks = [pytest.mark.full] * spare
            case = f"{backend}-{scheme}-{name}"
            yield pytest.param(backend, scheme, name, marks=marks, id=case)


@pytest.mark.parametrize("backend, scheme, name", [*cases_of_the_matrix()])
def test_engines_against_transformers(tmp_path: Path, backend: str, scheme: str, name: str) -> None:
    """They compute what transformers does with what the codes mean; their files hold no more than
    was planned, and codes that networks do not take are there on the others."""
    row, recipe = MATRIX["schemes"][scheme], Path(scheme)
    spec = widened(name) if "wide" in row else load_spec(name)
    if rules := row.get("rules"):
        recipe = tmp_path / "r.yaml"
        recipe.write_text(yaml.safe_dump({"rules": rules}))
    checkpoint = random_checkpoint(tmp_path / "c", spec, seed=3)
    options = BuildOptions(checkpoint, backend=backend, quant=recipe, dtype="float32", **LIMITS)
    prepared = prepare(spec, options)
    write_engine(prepared, tmp_path / "e", no_progress)
    engine = g4ir.load_engine(tmp_path / "e")
    assert verify_engine(engine, against="hf", checkpoint=checkpoint).ok
    files = (tmp_path / "e").glob("*.safetensors")
    written = sum(e.nbytes for f in files for e in read_header(f).entries.values())
    assert written == prepared.param_bytes()
    codes = {FORMATS[rule["form"]].codes for rule in rules or ()}
    held = {v.type.dtype for v in engine.program.params().values()}
    assert codes <= held or ("wide" in row and backend == "onnx" and held.isdisjoint(codes))
    if backend == "onnx":  # what a user without g4ir gathers
        tokens = torch.arange(3, 15).view(2, 6)
        rows, *_ = open_session(engine.path / EMBED).run(None, {"tokens": tokens.numpy()})
        assert torch.equal(torch.from_numpy(rows), engine.embed_tokens(tokens)["embeds"])


def test_dense_weights_of_a_gpu_are_counted() -> None:
    """Of a prompt, one node's at a time; in decode from 65 rows on, where the head is largest."""
    program = built_program(load_spec("31b"), dtype="bf16", quant="int4")

    def scratch(device: str, rows: int) -> int:
        return find_backend("torch").scratch_bytes(program, device, {})(Limits(max_batch=rows))

    gate_up, head = 2 * 21504 * 5376, 262144 * 5376
    assert scratch("cpu", 1) == 0
    assert [scratch("cuda", rows) for rows in (1, 64, 65)] == [2 * gate_up, 2 * gate_up, 2 * head]


def test_onnxruntime_multiplies_codes(tmp_path: Path) -> None:
    """It makes one product of codes of 4 and of 8 bits, and is told to
    leave the other side as it is."""
    g4ir.build(
        "tiny-dense", tmp_path / "e", backend="onnx", random_weights=3, quant="int4", **LIMITS
    )
    made = tmp_path / "e" / "made.onnx"
    open_session(tmp_path / "e" / MODEL, written=made)
    nodes = onnx.load(made, load_external_data=False).graph.node
    kinds = Counter(n.op_type for n in nodes)
    assert kinds["MatMulNBits"] == 25 and not kinds["DequantizeLinear"]
    attrs = [{a.name: a.i for a in n.attribute} for n in nodes if n.op_type == "MatMulNBits"]
    assert {(a["bits"], a["accuracy_level"]) for a in attrs} == {(4, 1), (8, 1)}


def test_codes_of_an_odd_number_of_rows() -> None:
    """Two of 4 bits lie in a byte: such a weight is made at build."""
    b = Builder()
    x, weight = b.input("x", Type("f32", (1, 1, 64))), b.param("w", Type("f32", (7, 64)))
    parts = b.emit_all("quantize", weight, form="int4", group=32, scale="f32", name=["w.c", "w.s"])
    w = b.emit("dequantize", *parts, to="f32", name="w.dense")
    prologue, main = split_prologue(by_columns(b.graph(b.emit("linear", x, w, name="y"))))
    assert [v.name for v in main.params] == ["w.dense"]
    given = torch.randn(7, 64)
    (made,) = interpret(prologue, {}, {"w": given}, {})[0].values()
    codes = OPS["quantize"].reference(given, form="int4", group=32, scale="f32")  # type: ignore[misc]
    assert torch.equal(made, dequantize(*codes))


@pytest.mark.parametrize("form", ["int6", *MINIMA])
def test_a_gpu_is_given_what_its_kernels_read(form: str) -> None:
    """Codes as they are; the table, gathered from and multiplied with, is one pair of params in
    both graphs."""
    rule = Rule(("L*.mlp.w_*", "L*.moe.*", "embed.table"), form)
    program = quantised_program(widened("tiny-moe"), QuantConfig((rule,), "r"))
    packing = split_program(find_backend("torch").stored(program, "cuda"))
    params = packing.program.params().values()
    assert FORMATS[form].codes in {v.type.dtype for v in params}
    tables = [v for g in packing.program.graphs.values() for v in g.params if "table" in v.name]
    assert len(tables) > len({*tables}) == 2


def test_weights_that_are_not_finite(tmp_path: Path) -> None:
    checkpoint = random_checkpoint(tmp_path / "c", "tiny-dense")
    rewrite(checkpoint, lambda t: t["model.layers.1.mlp.up_proj.weight"][5].fill_(float("nan")))
    with pytest.raises(WeightsError, match=r"layers.1.mlp.up_proj.weight: NaN or infinite"):
        g4ir.build(None, tmp_path / "e", backend="reference", checkpoint=checkpoint, quant="int8")
    assert not (tmp_path / "e").exists()


@pytest.mark.parametrize(("says", "text"), MATRIX["refused"].items())
def test_refused_recipes(tmp_path: Path, says: str, text: str) -> None:
    file = tmp_path / "r.yaml"
    file.write_text(f"rules:\n{text}\n" if text != "[]" else "rules: []\n")
    with pytest.raises(G4Error) as refused:
        g4ir.build("tiny-ple", tmp_path / "e", backend="reference", random_weights=0, quant=file)
    assert says in str(refused.value)
    assert "r.yaml" in str(refused.value) or " needs " in str(refused.value)
    assert not (tmp_path / "e").exists()


# --- rounded rows ------------------------------------------------------------------------------


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
    assert made[4, 32:].isnan().all() == (form == "fp8")  # of int8 its group alone
    error = (made - x)[8:].square().mean().sqrt()
    assert {"int8": 0.005, "fp8": 0.02}[form] < error < {"int8": 0.0062, "fp8": 0.03}[form]
    wide = fake_quantize_values(x.double(), form)
    assert wide.dtype == torch.float64
    torch.testing.assert_close(wide[8:].float(), made[8:], rtol=1e-6, atol=0)


# --- engines -----------------------------------------------------------------------------------

#: several chunks, more than two windows
IDS = range(3, 31)
#: spec, quantisation, activations, dtype; the short run has the first two
CASES = [(*row,) for row in TABLES["narrow"]["rounded"]]


def build(out: Path, name: str, quant: str, to: str | None, **options: Any) -> Engine:
    options = TABLES["narrow"]["options"] | options
    return g4ir.build(name, out, quant=quant, quant_activations=to, **options)


@pytest.mark.parametrize(("name", "quant", "to", "dtype"), short(*CASES[:2], of=CASES))
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
    assert stages.ok and "by design: not compared" in stages.text()


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
    assert stages.ok and "by design: not compared" in stages.text()


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


def test_k_of_norms_about_zero(caplog: pytest.LogCaptureFixture) -> None:
    """Of weights w the norm multiplies by 1 + w: sqrt(256) * 27.5 is in range, * 28.5 is not."""
    options = PassOptions((NarrowOptions("f8e4m3"),))
    config: Any = SimpleNamespace(spec=load_spec("gemma3-270m"), options=options)
    source: Any = SimpleNamespace(tensor=lambda name: torch.full((256,), 27.5))
    _check_range(config, source)
    (told,) = caplog.messages
    assert "K may reach 456 in L0.attn.norm_k" in told
