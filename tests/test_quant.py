"""Quantised weights: codes to the bit, graphs through all passes, engines against transformers that
hold what the codes mean."""

from __future__ import annotations

import copy
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

import g4ir
from g4ir.backends import find_backend
from g4ir.backends.torch_compile import pyops
from g4ir.backends.torch_compile.lower import SegmentModule
from g4ir.backends.torch_compile.schedule import schedule
from g4ir.backends.torch_compile.segment import graph_steps
from g4ir.backends.torch_compile.target import Target
from g4ir.check.logits import verify_engine
from g4ir.check.passes import verify_each_pass
from g4ir.errors import G4Error, WeightsError
from g4ir.ir.graph import Builder, Program, split_prologue
from g4ir.ir.interpret import interpret
from g4ir.model.names import HEAD, checkpoint_name
from g4ir.model.text import build_program
from g4ir.ops import OPS
from g4ir.ops.quant import packed, unpacked
from g4ir.ops.types import Type
from g4ir.passes import run_program
from g4ir.plan.cost import decode_costs, total
from g4ir.plan.limits import Limits
from g4ir.quant.recipe import Recipe, Rule, built_in, find_recipe
from g4ir.quant.rewrite import from_codes, quantised, weights_of
from g4ir.spec.record import Spec, load_spec
from g4ir.weights.pack import split_program
from tests.cli_tools import g4ir as command
from tests.configs import NAMES, few, spec_called
from tests.engines import random_checkpoint
from tests.oracle import Oracle, find_oracle, relative
from tests.runner import Session, built_program

BF16, F32 = torch.bfloat16, torch.float32
SCHEMES = {"int8": (0, "bf16"), "int4": (32, "bf16"), "fp8": (0, "f32")}
TINY = ("tiny-dense", "tiny-moe", "tiny-ple")


def quantize(w: torch.Tensor, form: str, group: int | None = None) -> tuple[Any, Any]:
    each, scale = SCHEMES[form]
    each = each if group is None else group
    made: tuple[Any, Any] = OPS["quantize"].reference(w, form=form, group=each, scale=scale)  # type: ignore[misc]
    return made


def dequantize(codes: torch.Tensor, scales: torch.Tensor, to: str = "f32") -> torch.Tensor:
    made: torch.Tensor = OPS["dequantize"].reference(codes, scales, to=to)  # type: ignore[misc]
    return made


def gaussian(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(BF16)


def error(w: torch.Tensor, form: str) -> float:
    """Relative rms error of a weight's value."""
    made = dequantize(*quantize(w, form))
    return float((made - w.float()).pow(2).mean().sqrt() / w.float().pow(2).mean().sqrt())


# --- numbers to codes --------------------------------------------------------------------------


def test_int8_by_hand() -> None:
    """The scale is rounded first, then codes are."""
    w = gaussian(7, 96)
    codes, scales = quantize(w, "int8")
    s = (w.float().abs().amax(1, keepdim=True) / 127).to(BF16)
    assert torch.equal(scales, s) and codes.dtype == torch.int8
    assert torch.equal(codes.float(), torch.round(w.float() / s.float()).clamp(-127, 127))


def test_fp8_by_hand() -> None:
    w = gaussian(7, 96)
    codes, scales = quantize(w, "fp8")
    s = w.float().abs().amax(1, keepdim=True) / 448
    assert torch.equal(scales, s)
    assert torch.equal(codes.float(), (w.float() / s).clamp(-448, 448).to(codes.dtype).float())


def test_value_is_rounded_once() -> None:
    codes, scales = quantize(gaussian(8, 64), "int4")
    exact = unpacked(codes).double().unflatten(-1, (2, 32)) * scales.double()[..., None]
    assert torch.equal(dequantize(codes, scales, "bf16"), exact.flatten(-2).to(BF16))
    assert torch.equal(dequantize(codes, scales).double(), exact.flatten(-2))


@given(st.lists(st.integers(-8, 7), min_size=2, max_size=64).filter(lambda c: len(c) % 2 == 0))
def test_four_bits_two_in_a_byte(codes: list[int]) -> None:
    """The even element lies in the low half, as code + 8."""
    made = packed(torch.tensor(codes, dtype=torch.int8))
    pairs = zip(codes[::2], codes[1::2], strict=True)
    assert made.tolist() == [(a + 8) | (b + 8) << 4 for a, b in pairs]
    assert unpacked(made).tolist() == codes


@pytest.mark.parametrize("form", SCHEMES)
def test_a_row_of_zeros(form: str) -> None:
    w = gaussian(3, 64)
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
    assert torch.equal(unpacked(found).float(), codes)
    assert torch.equal(dequantize(found, scales, "bf16"), w)


@pytest.mark.parametrize("code", [7.5, -7.5, 7, -7, 8])
def test_weights_of_other_grids_are_recovered(code: float) -> None:
    """With the codes of either sign."""
    w, _ = grid(code, seed=1)
    assert torch.equal(dequantize(*quantize(w, "int4"), to="bf16"), w)


def test_errors_of_gaussian_weights() -> None:
    """int4 is below Q4_0, which divides the signed extremum by -8 and rounds that to float16."""
    w = gaussian(512, 1536)
    groups = w.float().unflatten(-1, (-1, 32))
    d = groups.gather(-1, groups.abs().argmax(-1, keepdim=True)) / -8
    q4_0 = (groups / d + 8.5).trunc().clamp(0, 15).sub(8) * d.half().float()
    theirs = float((q4_0 - groups).pow(2).mean().sqrt() / groups.pow(2).mean().sqrt())
    assert theirs == pytest.approx(0.086, abs=1e-3)
    assert error(w, "int4") < 0.97 * theirs
    assert error(w, "int8") == pytest.approx(0.0081, abs=3e-4)
    assert error(w, "fp8") == pytest.approx(0.0265, abs=1e-3)


# --- graphs ------------------------------------------------------------------------------------


def mixed() -> Recipe:
    """Siblings that are held in different ways are packed with their like alone."""
    return Recipe(
        (
            Rule(("embed.table", "L*.attn.wq", "L*.mlp.w_gate"), "int8"),
            Rule(("L*.attn.wk", "L*.attn.wv", "L*.mlp.w_down"), "int4", "int8"),
            Rule(("L*.mlp.w_up",), "fp8"),
        ),
        "mixed",
    )


def recipe_called(name: str) -> Recipe:
    found = mixed() if name == "mixed" else find_recipe(name)
    assert found
    return found


def with_weights(oracle: Oracle, recipe: Recipe, dtype: str = "f32") -> Oracle:
    """The same model with what the codes of its weights mean."""
    model = copy.deepcopy(oracle.model)
    held = {k.removeprefix("model."): v for k, v in model.named_parameters()}
    held.setdefault(HEAD, model.lm_head.weight)
    weights = weights_of(oracle.spec)
    with torch.no_grad():
        for name, scheme in recipe.schemes(weights).items():
            t = held[checkpoint_name(name)]
            group, scale = {"int8": (0, dtype), "fp8": (0, dtype), "int4": (32, "bf16")}[scheme]
            reference = OPS["quantize"].reference
            assert reference
            made = reference(t.float(), form=scheme, group=group, scale=scale)
            t.copy_(dequantize(*made, to=dtype))
    return replace(oracle, model=model)


def quantised_program(spec: Spec, recipe: Recipe, passes: bool = True) -> Program:
    program = quantised(build_program(spec, True, "f32"), spec, recipe, "f32")
    return run_program(program) if passes else program


def logits(program: Program, oracle: Oracle, tensors: Any = None) -> torch.Tensor:
    session = Session(program, tensors or oracle.tensors, 2, 7, 128, True)
    outs = [session.prefill(oracle.tokens[:, : oracle.prompt], all_logits=True)]
    outs += [session.decode(t)[:, None] for t in oracle.tokens[:, oracle.prompt :].unbind(1)]
    return torch.cat(outs, 1)


@pytest.mark.covering
@pytest.mark.parametrize("recipe", [*built_in(), "mixed"])
@pytest.mark.parametrize("name", few(NAMES))
def test_transformers_with_the_dequantised_weights(name: str, recipe: str) -> None:
    spec = spec_called(name)
    oracle, rules = find_oracle(spec), recipe_called(recipe)
    peer = with_weights(oracle, rules)
    got = logits(quantised_program(spec, rules), oracle)
    assert relative(got, peer.logits).max() <= max(oracle.budget, peer.budget)


@pytest.mark.parametrize("recipe", [*built_in(), "mixed"])
@pytest.mark.parametrize("name", TINY)
def test_passes_change_nothing(name: str, recipe: str) -> None:
    """Packed codes mean what the packed weights would be, bit for bit."""
    spec, rules = load_spec(name), recipe_called(recipe)
    oracle = find_oracle(spec)
    dense = with_weights(oracle, rules)
    got = logits(quantised_program(spec, rules), oracle)
    assert torch.equal(
        got, logits(run_program(build_program(spec, True, "f32")), oracle, dense.tensors)
    )


@pytest.mark.parametrize("name", TINY)
def test_weights_are_packed_in_codes(name: str) -> None:
    spec = load_spec(name)
    rules = recipe_called("int4")
    packing = split_program(quantised_program(spec, rules))
    for g in packing.program.graphs.values():
        made = {v.name for n in g.find("dequantize") for v in n.outputs}
        read = {v.name for n in g.nodes for v in n.inputs}
        assert made <= read, "a weight that nobody takes"
        assert not [*g.find("quantize", "concat", "embedding")]
    dense = split_program(run_program(build_program(spec, True, "f32")))
    for name, g in packing.program.graphs.items():
        ops = Counter(n.op.replace("_quantized", "") for n in g.nodes if n.op != "dequantize")
        assert ops == Counter(n.op for n in dense.program.graphs[name].nodes)


def test_siblings_held_apart_are_told(capsys: pytest.CaptureFixture[str]) -> None:
    notes: list[str] = []
    spec = load_spec("tiny-dense")
    g = quantised(build_program(spec), spec, mixed(), "f32").graphs["decode"]
    from g4ir.passes import run_passes

    run_passes(g, note=lambda name, value, reason: notes.append(f"{name}: {reason}"))
    assert "fuse_gate_up: left: the weights are not held alike" in notes


def test_cost_counts_codes() -> None:
    """The bytes of a step at batch 1: those of a table of published models."""
    sizes = {}
    for name, recipe in (("e2b", "int8"), ("26b-a4b", "int4"), ("31b", "int4")):
        spec = load_spec(name)
        program = quantised(build_program(spec), spec, find_recipe(recipe), "bf16")
        plain, built = (
            total(decode_costs(p.graphs["decode"], 1)) for p in (program, run_program(program))
        )
        assert plain.weight_bytes == built.weight_bytes
        sizes[name] = round(built.weight_bytes / 1e9, 2)
    assert sizes == {"e2b": 2.28, "26b-a4b": 2.49, "31b": 17.89}


def test_an_engine_that_holds_codes_needs_no_weight() -> None:
    spec = load_spec("tiny-ple")
    program = quantised(build_program(spec), spec, find_recipe("int8"), "f32").map(from_codes)
    names = program.params().keys()
    assert "L0.attn.wq.codes" in names and "L0.attn.wq" not in names
    assert not [n for g in program.graphs.values() for n in g.find("quantize")]


# --- engines -----------------------------------------------------------------------------------


LIMITS = {"max_seq": 64, "prefill_chunk": 16}


@pytest.mark.parametrize("recipe", built_in())
@pytest.mark.parametrize("name", TINY)
def test_an_engine_against_transformers(tmp_path: Path, name: str, recipe: str) -> None:
    engine = g4ir.build(
        name, tmp_path / "e", backend="reference", random_weights=3, quant=recipe, **LIMITS
    )
    assert verify_engine(engine, against="hf").ok


def test_a_wrong_code_fails(tmp_path: Path) -> None:
    engine = g4ir.build(
        "tiny-dense", tmp_path / "e", backend="reference", random_weights=3, quant="int8", **LIMITS
    )
    # Not all of them: a norm follows.
    engine.runtime.params["L2.mlp.w_down.scales"][:8].mul_(1.05)
    assert not verify_engine(engine, against="hf").ok


@pytest.mark.parametrize("backend", ["reference", "onnx"])
def test_packed_linked_and_random_weights(tmp_path: Path, backend: str) -> None:
    """The same codes from files, from links to them, and from the seed they were made of."""
    checkpoint = random_checkpoint(tmp_path / "c", "tiny-ple", seed=3)
    ways: dict[str, dict[str, Any]] = {
        "packed": {"checkpoint": checkpoint},
        "random": {"random_weights": 3},
    }
    if backend == "reference":
        ways["linked"] = {"checkpoint": checkpoint, "link_weights": True}
    tokens, seen = torch.arange(2, 40)[None], []
    for way, given_ in ways.items():
        engine = g4ir.build(
            "tiny-ple", tmp_path / way, backend=backend, quant="int4", **LIMITS, **given_
        )
        seen.append(engine.session().prefill(tokens))
        for weight in ("L0.attn.wq", "L3.mlp.w_up", "embed.table", "ple.table", "L0.norm_in"):
            mine = engine.param(weight)
            assert mine.dtype == F32
            made = random_weight(weight)
            assert torch.equal(mine, made), (way, weight)
        assert verify_engine(engine, against="hf", checkpoint=checkpoint).ok
        held = None if backend == "reference" else checkpoint
        assert verify_each_pass(engine, [*range(5, 17)], checkpoint=held).ok
    assert all(torch.equal(s, seen[0]) for s in seen)


def random_weight(name: str) -> torch.Tensor:
    """A weight of tiny-ple as the engines above compute with it."""
    from g4ir.weights.random import RandomCheckpoint

    spec = load_spec("tiny-ple")
    w = RandomCheckpoint(spec, 3, F32).tensor(checkpoint_name(name))
    rules = recipe_called("int4")
    scheme = rules.schemes(weights_of(spec)).get(name)
    if scheme is None:
        return w
    group, scale = {"int8": (0, "f32"), "int4": (32, "bf16")}[scheme]
    reference = OPS["quantize"].reference
    assert reference
    return dequantize(*reference(w, form=scheme, group=group, scale=scale))


@pytest.mark.parametrize("form", SCHEMES)
def test_a_product_takes_codes_as_they_are(form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """On the CPU, through a fused op too; what takes no codes gets the weight."""
    b = Builder()
    x, weight = b.input("x", Type("f32", (1, 1, 64))), b.param("w", Type("f32", (96, 64)))
    parts = b.emit_all("quantize", weight, form=form, group=0, scale="f32")
    w = b.emit("dequantize", *parts, to="f32", name="w.dense")
    h = b.emit("linear_glu", x, w, act="silu", name="h")
    prologue, g = split_prologue(b.graph(h, b.emit("heads", w, n=2, name="as it is")))
    tensors = {"w": torch.randn(96, 64)}
    made = {**interpret(prologue, {}, tensors, {})[0], "x": torch.randn(1, 1, 64)}
    want, _ = interpret(g, {"x": made["x"]}, {v.name: made[v.name] for v in g.params}, {})
    asked = []

    def counted(x: torch.Tensor, codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
        asked.append(codes.dtype)
        return pyops.linear_coded(x, codes, scales)

    monkeypatch.setattr(pyops, "FROM", 1)
    monkeypatch.setattr(torch.ops.g4ir, "linear_coded", counted)
    got = SegmentModule(schedule(g, Target("cpu")))(*(made[v.name] for v in g.sources()))
    assert asked == [made[parts[0].name].dtype]
    for v, t in zip(g.outputs, got, strict=True):
        torch.testing.assert_close(t, want[v.name], rtol=1e-5, atol=1e-4)


def test_dense_weights_of_a_gpu_are_counted() -> None:
    """Of a prompt, one node's at a time; in decode from 33 rows on, where the head is largest."""
    program = built_program(load_spec("31b"), dtype="bf16", quant="int4")

    def scratch(device: str, rows: int) -> int:
        return find_backend("torch").scratch_bytes(program, Limits(max_batch=rows), device, {})

    gate_up, head = 2 * 21504 * 5376, 262144 * 5376
    assert (scratch("cpu", 1), scratch("cuda", 1)) == (0, 2 * gate_up)
    assert (scratch("cuda", 32), scratch("cuda", 33)) == (2 * gate_up, 2 * head)


@pytest.mark.parametrize("name", TINY)
def test_no_program_hands_over_a_dense_weight(name: str) -> None:
    """Codes are taken apart where the weight is used: the head's too, which is in no layer."""
    spec = spec_called(name)
    packing = split_program(quantised_program(spec, recipe_called("int4")))
    for g in packing.program.graphs.values():
        made = {n.out.name for n in g.find("dequantize")}
        assert g.name == "embed" or made
        assert made.isdisjoint(name for s in graph_steps(g) for name in (*s.inputs, *s.outputs))


def test_stages_of_a_quantised_engine_are_shown(tmp_path: Path) -> None:
    file = tmp_path / "gates.yaml"
    file.write_text("rules:\n- tensors: [L*.mlp.w_gate]\n  form: int4\n")
    g4ir.build(
        "tiny-dense", tmp_path / "e", backend="reference", random_weights=0, quant=file, **LIMITS
    )
    shown = command("show", str(tmp_path / "e"), "--why", "fuse_gate_up").out
    assert "%L0.mlp.act: left: the weights are not held alike" in shown


@pytest.mark.full
@pytest.mark.parametrize("recipe", built_in())
@pytest.mark.parametrize("name", TINY)
def test_the_torch_backend(tmp_path: Path, name: str, recipe: str) -> None:
    engine = g4ir.build(name, tmp_path / "e", random_weights=3, quant=recipe, **LIMITS)
    assert verify_engine(engine, against="hf").ok


def test_a_rule_of_ones_own(tmp_path: Path) -> None:
    file = tmp_path / "gates.yaml"
    file.write_text("rules:\n- tensors: [L*.mlp.w_gate]\n  form: int4\n")
    engine = g4ir.build(
        "tiny-dense", tmp_path / "e", backend="reference", random_weights=0, quant=file, **LIMITS
    )
    assert engine.manifest["quant"] == {
        "rules": [{"tensors": ["L*.mlp.w_gate"], "form": "int4", "otherwise": None}],
        "name": "gates.yaml",
    }
    assert verify_engine(engine, against="hf").ok
    assert verify_engine(g4ir.load_engine(tmp_path / "e"), against="reference").ok


def test_weights_that_are_not_finite(tmp_path: Path) -> None:
    checkpoint = random_checkpoint(tmp_path / "c", "tiny-dense")
    file = checkpoint / "model.safetensors"
    tensors = load_file(file)
    name = next(n for n in tensors if n.endswith("layers.1.mlp.up_proj.weight"))
    tensors[name][5, 7] = float("nan")
    save_file(tensors, file, {"format": "pt"})
    with pytest.raises(WeightsError, match=r"layers.1.mlp.up_proj.weight: NaN or infinite"):
        g4ir.build(None, tmp_path / "e", backend="reference", checkpoint=checkpoint, quant="int8")
    assert not (tmp_path / "e").exists()


REFUSED = {
    "- tensors: [L*.norm_in]\n  form: int8": "names no weight; weights are embed.table",
    "- tensors: [L*.mlp.w_up]\n  form: int8\n- tensors: [L1.*]\n  form: int4": "names L1.mlp.w_up",
    "- tensors: [L*.ple.w_proj]\n  form: int4": "rows of 16 do not divide into the groups of 32",
    "- tensors: [L*.mlp.w_up]\n  form: int5": "must be int8 or int4 or fp8",
    "- tensors: []\n  form: int8": "must have 1 to 64 items",
    "- tensors: ['L* mlp']\n  form: int8": "L* mlp",
    "- tensors: [ple.w]\n  form: int8\n  bits: 4": "unknown key",
    "[]": "must have 1 to 64 items",
}


@pytest.mark.parametrize("text", REFUSED)
def test_refused_recipes(tmp_path: Path, text: str) -> None:
    file = tmp_path / "r.yaml"
    file.write_text(f"rules:\n{text}\n" if text != "[]" else "rules: []\n")
    with pytest.raises(G4Error) as refused:
        g4ir.build("tiny-ple", tmp_path / "e", backend="reference", random_weights=0, quant=file)
    assert REFUSED[text] in str(refused.value)
    assert "r.yaml" in str(refused.value) or "rows of 16" in str(refused.value)
    assert not (tmp_path / "e").exists()
