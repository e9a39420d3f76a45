"""`--calibrate`: second moments against transformers, the search that they weight, refusals."""

from __future__ import annotations

import shlex
import shutil
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import g4ir
from g4ir.artefact.directory import rebuild
from g4ir.backends.cpu.packing import KERNELS
from g4ir.builder import calibration
from g4ir.builder.build import prepare
from g4ir.builder.calibration import InputProducts, Stages, calibrate
from g4ir.check.hf import hf_model
from g4ir.errors import G4Error
from g4ir.model.names import checkpoint_name
from g4ir.ops.codecs import dequantize_codes
from g4ir.ops.quant import quantize
from g4ir.plan.options import BuildOptions
from g4ir.quant import compensation
from g4ir.quant.recipe import SCHEMES
from g4ir.quant.rewrite import weights_of
from g4ir.ui.paths import cache_root
from g4ir.ui.progress import no_progress
from g4ir.weights.origin import find_origin
from g4ir.weights.pack import MadeParams
from tests.cases import TABLES
from tests.cli_tools import g4ir as command
from tests.cli_tools import text_checkpoint, tokenizer
from tests.engines import random_checkpoint, rewrite
from tests.spies import spy

TEXT = "ab w3 a€ w7 w12\nw9 ab a w3\n" * 20


def made(w: torch.Tensor, group: int, moments: torch.Tensor | None) -> torch.Tensor:
    parts = quantize.reference(w, form="int4", group=group, scale="bf16", moments=moments)
    return dequantize_codes(*parts, torch.float32)


def column_weights(size: int, random: torch.Generator) -> torch.Tensor:
    return torch.randn(1, size, generator=random).pow(4) + 1e-3


@given(st.integers(0, 10**6), st.sampled_from([16, 32, 96]), st.floats(0, 30))
def test_no_group_gets_worse(seed: int, group: int, outlier: float) -> None:
    """By the weighted error of each group, zeros and outliers among them."""
    random = torch.Generator().manual_seed(seed)
    w, moments = torch.randn(7, 96, generator=random), column_weights(96, random)
    w[2, :32] = 0
    w[:, 5] *= outlier
    w[3] = torch.randint(-8, 8, (96,), generator=random)  # as trained for 4 bits: no error at all
    w[3, ::16] = -8
    errors = [
        ((made(w, group, m) - w).square() * moments).unflatten(-1, (-1, group)).sum(-1)
        for m in (moments, None)
    ]
    assert bool((errors[0] <= errors[1] * (1 + 1e-5)).all())


def test_weighted_error_is_less() -> None:
    """And each expert's by its own moments."""
    random = torch.Generator().manual_seed(0)
    w = torch.randn(3, 64, 512, generator=random)
    moments = torch.stack([column_weights(512, random) for _ in w])
    found, plain = (((made(w, 32, m) - w).square() * moments).sum((1, 2)) for m in (moments, None))
    assert bool((found < 0.9 * plain).all())
    alone = torch.stack([made(e, 32, m) for e, m in zip(w, moments)])
    assert torch.equal(made(w, 32, moments), alone)


@pytest.mark.parametrize("form", ["int4", "nl3"])
def test_errors_of_correlated_inputs(form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Columns that follow make up for errors, and a descent over the columns reduces the rest."""
    random = torch.Generator().manual_seed(2)
    x, w = (torch.randn(rows, 256, generator=random) for rows in (512, 24))
    x = x @ torch.randn(256, 256, generator=random)
    inputs, scheme = compensation.Inputs((x.T @ x)[None]), SCHEMES[form]

    def error(codes: tuple[Any, ...]) -> float:
        return float(inputs.errors(dequantize_codes(*codes, torch.float32) - w).sum())

    nearest = quantize.reference(w, **scheme.attrs("bf16"), moments=inputs.moments)
    descended, by_kernel = (
        compensation.calibrated(w, inputs, scheme, "bf16", kernels)
        for kernels in (compensation.Kernels(), KERNELS)
    )
    assert error(by_kernel) == pytest.approx(error(descended), rel=0.01)
    monkeypatch.setattr(compensation, "COLUMNS", 100)
    parts = x.T @ x, compensation.column_parts(x)
    apart = compensation.Inputs(parts[1].mT @ parts[1])
    assert torch.equal(apart.products[1], parts[0][64:128, 64:128])
    in_parts = compensation.calibrated(w, apart, scheme, "bf16")
    original = compensation._pass_over
    monkeypatch.setattr(compensation, "_pass_over", lambda *a: a[2] and original(*a))
    passed_on = compensation.calibrated(w, inputs, scheme, "bf16")
    assert error(descended) < 0.97 * error(passed_on) < 0.8 * error(nearest)
    assert error(descended) < error(in_parts) < error(nearest)


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Checkpoints with a tokenizer, dense and of experts, and a text."""
    folder = tmp_path_factory.mktemp("calibration")
    text_checkpoint(folder / "tiny-ple")
    for name in ("tiny-moe", "tiny-dense"):
        random_checkpoint(folder / name, name)
    tokenizer().save(str(folder / "tiny-moe" / "tokenizer.json"))
    (folder / "text.txt").write_text(TEXT)
    return folder


OPTIONS: dict[str, Any] = TABLES["calibrated engines"]


def products_of(p: Any) -> InputProducts:
    """What calibration sums of the inputs of all matrices."""
    c = p.config
    products = InputProducts(weights_of(c.spec))
    stages = Stages(c.spec, c.dtype, p.source, p.calibration.windows(c.spec.tokens.bos))
    for layer in range(len(stages.layers)):
        stages.run(layer, products)
    assert all(
        not env.keys() - {"positions", "lengths", stages.head[0]["x"].name}
        for env in stages.windows
    )
    return products


@pytest.mark.parametrize("name", ["tiny-ple", "tiny-moe"])
def test_products(files: Path, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the inputs of every matrix of a layer, of each expert, on two windows of a text."""
    given = {"checkpoint": files / name, "calibrate": files / "text.txt", **OPTIONS}
    monkeypatch.setattr(calibration, "MAX_TOKENS", 40)
    monkeypatch.setattr(calibration, "MIN_TOKENS", 40)
    monkeypatch.setattr(calibration, "WINDOW", 25)
    p = prepare(None, BuildOptions(**given))
    text, found = p.calibration, products_of(p)
    with g4ir.build(None, tmp_path / "e", **{**given, "quant": None, "calibrate": ()}) as engine:
        model = hf_model(engine, find_origin(files / name))
    if engine.spec.text.moe:
        model.set_experts_implementation("eager")
    sums: dict[int, torch.Tensor] = {}

    def counted(x: torch.Tensor, w: torch.Tensor, *bias: Any) -> None:
        rows = x.double().flatten(0, -2)
        sums[w.data_ptr()] = sums.get(w.data_ptr(), 0) + rows.T @ rows

    spy(monkeypatch, torch.nn.functional, "linear", counted)
    with torch.no_grad():
        for ids in (text.ids[:25], text.ids[25:]):
            model(input_ids=torch.tensor([[2, *ids]]))
    theirs = dict(model.named_parameters(remove_duplicate=False))
    assert len(text.ids) == 40 and len(found.keys) > 8
    for param in found.keys:
        ours = [inputs.products[0] for inputs in found.of(param)]
        (w,) = (t for n, t in theirs.items() if n.endswith(f".{checkpoint_name(param)}"))
        each = list(w) if w.ndim == 3 else [w]
        seen = [e for e, part in enumerate(each) if part.data_ptr() in sums]
        wanted = [sums[each[e].data_ptr()] for e in seen]
        if param.endswith("moe.gate_up"):  # one for all experts, as each token has as many of them
            wanted, ours = [sum(wanted)], [engine.spec.text.moe.top_k_experts * ours[0]]
            seen = [0]
        for e, right in zip(seen, wanted, strict=True):
            torch.testing.assert_close(ours[e].double(), right, rtol=1e-3, atol=1e-3)


def test_a_calibrated_engine(files: Path, own_home: Path, tmp_path: Path) -> None:
    """Its manifest names the texts; what it computes with errs less, on the text."""
    text = files / "text.txt"
    given = {"checkpoint": files / "tiny-ple", **OPTIONS, "quant": "int4-mixed"}
    p = prepare(None, BuildOptions(**given, calibrate=text))
    products = products_of(p)
    names = ("L0.mlp.w_gate", "L1.attn.wo", "L2.mlp.w_down", "L0.attn.wv")
    errors = []
    for texts in ([text, "default"], ()):
        out = tmp_path / f"{bool(texts)}"
        with g4ir.build(None, out, calibrate=texts, **given) as engine:
            assert engine.generate([2, 5, 7], max_new_tokens=2)
            made = [engine.param(n) - p.source.tensor(checkpoint_name(n)) for n in names]
            notes = engine.manifest["notes"]["calibration"]
            told = command("inspect", out).out
            words = shlex.split(rebuild(out, engine.facts))
        errors.append([products.of(n)[0].errors(e).sum() for e, n in zip(made, names)])
        if texts:
            digest = sha256(text.read_bytes()).hexdigest()
            assert notes[0] == {
                "path": str(text),
                "sha256": digest,
                "tokens": len(p.calibration.ids),
            }
            assert notes[1]["path"] == "default" and notes[1]["tokens"] > 10_000
            assert words[words.index("--calibrate") + 1] == str(text)
            assert f"{notes[0]['tokens']:,} tokens of {text} (SHA-256 {digest[:12]}" in told
        else:
            assert not notes and "--calibrate" not in words
    assert all(a < b for a, b in zip(*errors, strict=True))
    assert not [*(cache_root() / calibration.FOLDER).iterdir()]


def test_interrupted(files: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Layers that are done are not quantised again, and the engine is the same."""
    given = {"checkpoint": files / "tiny-ple", **OPTIONS, "calibrate": files / "text.txt"}
    calls, original = [0], compensation.calibrated

    def counted(w: torch.Tensor, *more: Any) -> Any:
        calls[-1] += 1
        if len(calls) == 2 and calls[-1] == 20:
            raise KeyboardInterrupt
        return original(w, *more)

    def param() -> torch.Tensor:
        with g4ir.build(None, tmp_path / f"e{len(calls)}", **given) as engine:
            return engine.param("L3.mlp.w_up")

    monkeypatch.setattr(compensation, "calibrated", counted)
    whole = param()
    calls.append(0)
    with pytest.raises(KeyboardInterrupt):
        param()
    calls.append(0)
    assert torch.equal(param(), whole)
    assert calls[1] == 20 and calls[0] - 20 <= calls[2] < calls[0]


def test_inputs_that_are_no_number(files: Path, tmp_path: Path) -> None:
    source = shutil.copytree(files / "tiny-moe", tmp_path / "c")
    rewrite(source, lambda t: t["model.layers.1.input_layernorm.weight"].fill_(float("nan")))
    given = {"checkpoint": source, **OPTIONS, "calibrate": files / "text.txt"}
    with pytest.raises(G4Error, match=r"inputs of L1\.attn\.wq are NaN or infinite"):
        g4ir.build(None, tmp_path / "e", **given)
    assert not (tmp_path / "e").exists()


def test_ranks_use_their_part(files: Path, tmp_path: Path) -> None:
    """A matrix cut by columns has its part of the whole's codes."""
    recipe = tmp_path / "r.yaml"
    recipe.write_text("rules: [{tensors: [L*.mlp.w_down], form: int4, group: 16}]")
    options = {**OPTIONS, "quant": recipe, "calibrate": files / "text.txt"}
    given = {"checkpoint": files / "tiny-ple", **options}
    one = prepare(None, BuildOptions(**given))
    two = prepare(None, BuildOptions(**{**given, "backend": "torch", "tp": 2}))
    (made, folder), name = calibrate(one, no_progress), "L0.mlp.w_down"
    codes = next(v for v in two.packing.program.params() if v.startswith(f"{name}.codes"))
    parts = [MadeParams(two.packing, two.source, two.share(r), made) for r in range(2)]
    whole = MadeParams(one.packing, one.source, None, made).tensor(f"{name}.codes")
    assert torch.equal(torch.cat([p.tensor(codes) for p in parts], -1), whole)
    shutil.rmtree(folder)


REFUSED = TABLES["calibration"]


@pytest.mark.parametrize("case", REFUSED)
def test_refused(files: Path, case: str, tmp_path: Path) -> None:
    row, file, out = REFUSED[case], tmp_path / "t.txt", tmp_path / "e"
    if case != "missing":
        file.write_text(row.get("text", "") * row.get("times", 1), row.get("encoding"))
    more = row.get("words", [])
    weights = [w.format(files) for w in row.get("weights", ["--checkpoint", "{}/tiny-ple"])]
    options = ["--backend", "reference", "--quant", "int4", "--calibrate", file, *more]
    outcome = command("build", *weights, *options, "--out", out)
    assert outcome.code == 2 and row["says"] in outcome.err and str(file) in outcome.err
    assert outcome.err.count("error") == 1 and not out.exists()


@pytest.mark.parametrize(
    "weights", [["--variant", "tiny-ple", "--random-weights", "0"], ["--checkpoint", "tiny-dense"]]
)
def test_weights_without_a_tokenizer(files: Path, weights: list[str], tmp_path: Path) -> None:
    given = [str(files / w) if w == "tiny-dense" else w for w in weights]
    options = ["--backend", "reference", "--quant", "int4", "--calibrate", files / "text.txt"]
    outcome = command("build", *given, *options, "--out", tmp_path / "e", "--dry-run", "--json")
    assert outcome.code == 2 and "without tokenizer.json" in outcome.err
