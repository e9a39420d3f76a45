"""Rows that are rounded before products with weights in codes: the grid, the graphs, the kernels,
and engines beside a transformers model that rounds what its products take."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import g4ir
from g4ir.check.logits import verify_engine
from g4ir.check.passes import verify_each_pass
from g4ir.check.peers import EnginePeer, find_peer
from g4ir.check.tokens import Turns
from g4ir.engine.engine import Engine
from g4ir.ir.graph import Graph
from g4ir.model.text import build_program
from g4ir.ops.codecs import ACTIVATIONS, fake_quantize_values
from g4ir.passes import PassOptions, run_passes
from g4ir.passes.quantize_activations import ActivationOptions
from g4ir.plan.resolve import pass_options
from g4ir.quant.recipe import find_quant_config
from g4ir.quant.rewrite import quantise
from g4ir.spec.record import load_spec
from g4ir.ui.progress import no_progress
from tests.cases import TABLES
from tests.configs import short

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
