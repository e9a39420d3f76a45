"""Quantised weights: codes to the bit, graphs through all passes, engines against transformers that
hold what the codes mean."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

import onnx
import pytest
import torch
import yaml
from hypothesis import given
from hypothesis import strategies as st

import g4ir
from g4ir import Spec, build_program, interpret, load_spec, spec_names
from g4ir.backends import find_backend
from g4ir.backends.onnx_graph.export import EMBED, MODEL
from g4ir.backends.onnx_graph.runtime import open_session
from g4ir.backends.primitives.weights import by_columns
from g4ir.builder.build import prepare, write_engine
from g4ir.check.logits import verify_engine
from g4ir.errors import G4Error, WeightsError
from g4ir.ir.graph import Builder, Program
from g4ir.ir.rewrite import split_prologue
from g4ir.model.names import checkpoint_name
from g4ir.ops import OPS
from g4ir.ops.codecs import FORMATS, unpack_codes
from g4ir.ops.types import Type
from g4ir.passes import run_program
from g4ir.plan.engine_limits import Limits
from g4ir.plan.options import BuildOptions
from g4ir.quant.recipe import QuantConfig, Rule, Scheme, built_in_names, find_quant_config
from g4ir.quant.rewrite import quantise, weights_of
from g4ir.ui.progress import no_progress
from g4ir.weights.pack import split_program
from g4ir.weights.tensorfile import read_header
from tests.cases import read_table
from tests.configs import TINY, widened
from tests.engines import random_checkpoint, rewrite
from tests.oracle import Oracle, find_oracle
from tests.runner import Session, built_program, prefill_then_decode
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


def meaning(w: torch.Tensor, scheme: Scheme, dtype: str) -> torch.Tensor:
    made = OPS["quantize"].reference(w, **scheme.attrs(dtype))  # type: ignore[misc]
    return dequantize(*made, to=dtype)


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


@pytest.mark.parametrize("form", SCHEMES)
def test_a_row_of_zeros(form: str) -> None:
    w = rand(3, 64)
    w[1] = 0
    made = dequantize(*quantize(w, form))
    assert made[1].eq(0).all() and made.isfinite().all()


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


def logits(program: Program, oracle: Oracle, tensors: Any = None) -> torch.Tensor:
    session = Session(program, tensors or oracle.tensors, 2, 7, 128, True)
    return prefill_then_decode(session, oracle.tokens, oracle.prompt)


@pytest.mark.covering
@pytest.mark.parametrize("name", spec_names())
def test_every_matrix_of_a_spec_is_in_one_rule_of_each_recipe(name: str) -> None:
    """Of the weights of products and tables: a router is none. `schemes` raises for a weight in two
    rules."""
    weights = weights_of(load_spec(name))
    graphs = build_program(load_spec(name), True).graphs
    linear = {n["w"].name for g in graphs.values() for n in g.nodes if n.op == "linear"}
    assert linear <= weights.keys()
    for recipe in map(recipe_called, built_in_names()):
        assert recipe.schemes(weights).keys() == weights.keys(), recipe.name


def test_groups_leave_out_what_other_rules_name() -> None:
    weights = weights_of(load_spec("tiny-moe"))
    rules = (Rule(("layers", "head.w"), "int8"), Rule(("*.wk", "embed.table"), "fp8"))
    forms = {n: s.form for n, s in QuantConfig(rules).schemes(weights).items()}
    assert {forms[n] for n in ("L0.attn.wk", "embed.table")} == {"fp8"}
    assert {forms[n] for n in ("L0.attn.wq", "L0.moe.down")} == {"int8"}


@pytest.mark.parametrize("recipe", [*built_in_names(), "mixed"])
@pytest.mark.parametrize("name", TINY)
def test_passes_change_nothing(name: str, recipe: str) -> None:
    """Packed codes mean what the packed weights would be, bit for bit."""
    spec, rules = load_spec(name), recipe_called(recipe)
    oracle = find_oracle(spec)
    dense = dict(oracle.tensors)
    for param, scheme in rules.schemes(weights_of(spec)).items():
        key = f"model.{checkpoint_name(param)}"
        dense[key] = meaning(dense[key].float(), scheme, "f32")
    plain = run_program(build_program(spec, True, "f32"))
    got = logits(quantised_program(spec, rules), oracle)
    assert torch.equal(got, logits(plain, oracle, dense))


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
    assert "r.yaml" in str(refused.value) or "rows of" in str(refused.value)
    assert not (tmp_path / "e").exists()
