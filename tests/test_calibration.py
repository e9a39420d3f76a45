"""`--calibrate`: second moments against transformers, the search that they weight, refusals.
`--bits`: formats by measured sensitivity, under a budget.
"""

from __future__ import annotations

import json
import math
import shlex
import shutil
from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import g4ir
from g4ir.artefact.directory import rebuild
from g4ir.backends.cpu.packing import KERNELS
from g4ir.builder import bits as bits_module
from g4ir.builder import calibration
from g4ir.builder.bits import Measured, choose
from g4ir.builder.build import prepare
from g4ir.builder.calibration import Matmuls, Stages, calibrate
from g4ir.check.hf import hf_model
from g4ir.errors import G4Error, InputError
from g4ir.ir.names import layer_of
from g4ir.model.names import checkpoint_name
from g4ir.ops.codecs import dequantize_codes
from g4ir.ops.quant import quantize
from g4ir.plan.options import BuildOptions
from g4ir.quant import compensation
from g4ir.quant.recipe import SCHEMES, find_quant_config
from g4ir.quant.rewrite import weights_of
from g4ir.ui.paths import cache_root
from g4ir.ui.progress import no_progress
from g4ir.weights.origin import find_origin
from g4ir.weights.pack import MadeParams
from tests.cases import TABLES
from tests.cli_tools import g4ir as command
from tests.cli_tools import text_checkpoint, tokenizer
from tests.configs import widened
from tests.engines import random_checkpoint, rewrite
from tests.spies import spy

TEXT = "ab w3 a€ w7 w12\nw9 ab a w3\n" * 20


def made(w: torch.Tensor, group: int, moments: torch.Tensor | None) -> torch.Tensor:
    parts = quantize.reference(w, form="int4", group=group, scale="bf16", moments=moments)
    return dequantize_codes(*parts, torch.float32)


@given(st.integers(0, 10**6), st.sampled_from([16, 32, 96]), st.floats(0, 30))
def test_no_group_gets_worse(seed: int, group: int, outlier: float) -> None:
    """By the weighted error of each group, zeros and outliers among them."""
    random = torch.Generator().manual_seed(seed)
    w, moments = (torch.randn(n, 96, generator=random) for n in (7, 1))
    moments = moments.pow(4) + 1e-3
    w[2, :32] = 0
    w[:, 5] *= outlier
    w[3] = torch.randint(-8, 8, (96,), generator=random)  # as trained for 4 bits: no error at all
    w[3, ::16] = -8
    errors = [
        ((made(w, group, m) - w).square() * moments).unflatten(-1, (-1, group)).sum(-1)
        for m in (moments, None)
    ]
    assert bool((errors[0] <= errors[1] * (1 + 1e-5)).all())


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
    original = compensation._pass_over
    monkeypatch.setattr(compensation, "_pass_over", lambda *a: a[2] and original(*a))
    passed_on = compensation.calibrated(w, inputs, scheme, "bf16")
    assert error(descended) < 0.97 * error(passed_on) < 0.8 * error(nearest)


def test_errors_of_inputs(monkeypatch: pytest.MonkeyPatch) -> None:
    """A weight makes up for errors of its inputs, by least squares for each part of its columns."""
    random = torch.Generator().manual_seed(3)
    w, x, noise = (torch.randn(n, 256, generator=random) for n in (24, 4096, 4096))
    x = x @ torch.randn(256, 256, generator=random)
    y = x + 0.4 * noise @ torch.randn(256, 256, generator=random)
    w[3] = w[3].mul(9).round().clamp(-8, 7) * 0.30078125  # on the grid of int4, as if trained
    errors, w = [], w.bfloat16().float()
    for drift in (None, (x - y).T[None] @ y):
        inputs = compensation.Inputs((y.T @ y)[None], drift)
        codes = compensation.calibrated(w.bfloat16(), inputs, SCHEMES["int4"], "bf16", KERNELS)
        found = dequantize_codes(*codes, torch.bfloat16).float()
        errors.append(float((y @ found.T - x @ w.T)[:, :3].square().sum()))
        assert torch.equal(found[3], w[3])
    assert errors[1] < 0.85 * errors[0]
    assert torch.equal(replace(inputs, drift=torch.zeros(1, 256, 256)).corrected(w), w)
    monkeypatch.setattr(compensation, "COLUMNS", 128)
    monkeypatch.setattr(compensation, "CORRECTION_DAMPING", 0.0)
    x, y = map(compensation.column_parts, (x, y))
    halves = w.unflatten(1, (2, 128)).permute(1, 2, 0)
    nearest = torch.linalg.lstsq(y, x @ halves).solution.permute(2, 0, 1).flatten(1)
    in_parts = compensation.Inputs(y.mT @ y, (x - y).mT @ y)
    torch.testing.assert_close(in_parts.corrected(w), nearest, rtol=1e-3, atol=1e-3)
    better, nearest = (
        in_parts.errors(t - nearest)[:3].sum()
        for t in (
            dequantize_codes(
                *compensation.calibrated(w, in_parts, SCHEMES["int4"], "bf16"), torch.float32
            ),
            made(nearest, 32, None),
        )
    )
    assert better < 0.9 * nearest


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


@pytest.fixture
def inputs(monkeypatch: pytest.MonkeyPatch) -> dict[str, list[compensation.Inputs]]:
    """By weight, what calibrations sum from now on."""
    found: dict[str, list[compensation.Inputs]] = {}
    sums = calibration.input_sums

    def kept(m: Matmuls, *streams: Stages) -> list[compensation.Inputs]:
        found.update(dict.fromkeys(m.weights, sums(m, *streams)))
        return found[m.weights[0]]

    monkeypatch.setattr(calibration, "input_sums", kept)
    return found


def input_rows(
    model: Any, names: Iterable[str], windows: Sequence[Sequence[int]]
) -> dict[str, list[torch.Tensor | None]]:
    """Inputs f64 [T, K] of transformers' matmuls with these weights, for each expert if there are
    more; None: no tokens."""
    rows: dict[int, list[torch.Tensor]] = {}
    with pytest.MonkeyPatch.context() as patch, torch.no_grad():

        def kept(x: torch.Tensor, w: torch.Tensor, *bias: Any) -> None:
            rows.setdefault(w.data_ptr(), []).append(x.double().flatten(0, -2))

        spy(patch, torch.nn.functional, "linear", kept)
        for ids in windows:
            model(input_ids=torch.tensor([[2, *ids]]))
    params = dict(model.get_decoder().named_parameters())
    found = {n: params[checkpoint_name(n)] for n in names}
    each = {
        n: [rows.get(part.data_ptr()) for part in (w if w.ndim == 3 else [w])]
        for n, w in found.items()
    }
    return {n: [r and torch.cat(r) for r in parts] for n, parts in each.items()}


@pytest.mark.parametrize("name", ["tiny-ple", "tiny-moe"])
def test_products(files: Path, name: str, inputs: Any, tmp_path: Path, monkeypatch: Any) -> None:
    """Of the inputs of every matrix of a layer, of each expert, on two windows of a text: of the
    model whose earlier matrices are quantised, and its differences from the unquantised one."""
    recipe = tmp_path / "r.yaml"
    recipe.write_text("rules: [{tensors: [layers], form: int4, group: 16}]")
    given = {
        "checkpoint": files / name,
        "calibrate": files / "text.txt",
        **OPTIONS,
        "quant": recipe,
    }
    monkeypatch.setattr(calibration, "MAX_TOKENS", 40)
    monkeypatch.setattr(calibration, "MIN_TOKENS", 40)
    monkeypatch.setattr(calibration, "WINDOW", 25)
    models = []
    for options in ({"quant": None, "calibrate": ()}, {}):
        with g4ir.build(None, tmp_path / f"e{len(models)}", **{**given, **options}) as engine:
            models.append(hf_model(engine, find_origin(files / name)))
            params = dict(models[-1].get_decoder().named_parameters())
            for param in inputs:
                params[checkpoint_name(param)].data.copy_(engine.param(param))
        if engine.spec.text.moe:
            models[-1].set_experts_implementation("eager")
    ids = prepare(None, BuildOptions(**given)).calibration.ids
    rows = [input_rows(model, inputs, (ids[:25], ids[25:])) for model in models]
    every = tokenizer().encode(TEXT, add_special_tokens=False).ids[:160]  # spread
    assert len(inputs) > 8 and list(ids) == [*every[:25], *every[75:90]]
    close = partial(torch.testing.assert_close, rtol=1e-3, atol=1e-3)
    for param, each in inputs.items():
        x, y = (found[param] for found in rows)
        right = [None if t is None else t.T @ t for t in y]
        if param.endswith("moe.gate_up"):  # one for all experts: all tokens, as often
            right = [sum(t for t in right if t is not None) / engine.spec.text.moe.top_k_experts]
        for ours, wanted in zip(each, right, strict=True):
            if wanted is not None:
                close(ours.products[0].double(), wanted)
        if len(x) == 1:
            close(each[0].drift[0].double(), (x[0] - y[0]).T @ y[0])


def test_a_calibrated_engine(files: Path, inputs: Any, own_home: Path, tmp_path: Path) -> None:
    """Its manifest names the texts; what it computes with errs less, on the text."""
    text = files / "text.txt"
    given = {"checkpoint": files / "tiny-ple", **OPTIONS, "quant": "int4-mixed"}
    p = prepare(None, BuildOptions(**given, calibrate=text))
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
        errors.append([inputs[n][0].errors(e).sum() for e, n in zip(made, names)])
        if texts:
            digest, count = sha256(text.read_bytes()).hexdigest(), len(p.calibration.ids)
            assert notes[0] == {"path": str(text), "sha256": digest, "tokens": count}
            assert notes[1]["path"] == "default" and notes[1]["tokens"] > 10_000
            assert words[words.index("--calibrate") + 1] == str(text)
            assert f"{count:,} tokens of {text} (SHA-256 {digest[:12]}" in told
        else:
            assert not notes and "--calibrate" not in words
    assert all(a < b for a, b in zip(*errors, strict=True))
    assert not [*(cache_root() / calibration.FOLDER).iterdir()]


def test_interrupted(files: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Layers that are done are not quantised again, and the engine is the same."""
    given = {"checkpoint": files / "tiny-ple", **OPTIONS, "calibrate": files / "text.txt"}
    calls = [0]

    def counted(*_: Any) -> None:
        calls[-1] += 1
        if len(calls) == 2 and calls[-1] == 20:
            raise KeyboardInterrupt

    def param() -> torch.Tensor:
        with g4ir.build(None, tmp_path / f"e{len(calls)}", **given) as engine:
            return engine.param("L3.mlp.w_up")

    spy(monkeypatch, compensation, "calibrated", counted)
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
    if case == "a folder":
        file.mkdir()
    elif case != "missing":
        file.write_text(row.get("text", "") * row.get("times", 1), row.get("encoding"))
    more = row.get("words", [])
    weights = [w.format(files) for w in row.get("weights", ["--checkpoint", "{}/tiny-ple"])]
    options = ["--backend", "reference", "--quant", "int4", "--calibrate", file, *more]
    outcome = command("build", *weights, *options, "--out", out)
    assert outcome.code == 2 and row["says"] in outcome.err and str(file) in outcome.err
    assert outcome.err.count("error") == 1 and not out.exists()


LONG_TEXT = "ab w3 a€ w7 w12\nw9 ab a w3\n" * 40
BITS_OPTIONS: dict[str, Any] = {"backend": "reference", "dtype": "float32", "max_seq": 64}
BITS_OPTIONS |= {"prefill_chunk": 16, "all_logits": True}
FORMS = ("nl2", "nl3", "nl4", "int5", "int8")


@settings(max_examples=60)
@given(
    st.lists(st.tuples(st.integers(1, 50), st.floats(1e-6, 1e3)), min_size=1, max_size=12),
    st.floats(0, 1),
)
def test_choice(weights: list[tuple[int, float]], share: float) -> None:
    """The budget is kept, no other format of a weight would gain for free, and no format that all
    weights could have diverges less."""
    costs = {
        f"w{i}": [
            Measured(SCHEMES[form], size * (i + 2), sensitivity * 4.0**-i)
            for i, form in enumerate(FORMS)
        ]
        for i, (size, sensitivity) in enumerate(weights)
    }
    uniform = [[each[i] for each in costs.values()] for i in range(len(FORMS))]
    sums = [sum(m.nbytes for m in u) for u in uniform]
    budget = sums[0] + share * (sums[-1] - sums[0])
    chosen = choose(costs, budget, 4)
    made = [next(m for m in costs[n] if m.scheme == s) for n, s in chosen.items()]
    left = budget - sum(m.nbytes for m in made)
    assert left >= 0 and len(made) == len(costs)
    for m, each in zip(made, costs.values(), strict=True):
        assert not any(0 < b.nbytes - m.nbytes <= left for b in each if b.divergence < m.divergence)
    best = min(sum(m.divergence for m in u) for u, n in zip(uniform, sums) if n <= budget)
    largest = max(m.divergence for each in costs.values() for m in each)
    assert sum(m.divergence for m in made) <= best + largest
    with pytest.raises(InputError, match="--bits 4: the smallest formats take ") as refused:
        choose(costs, sums[0] * 0.99, 4)
    least = float(str(refused.value).partition("take ")[2].partition(";")[0])
    assert choose(costs, sums[0] * 0.99 * least / 4, least)


@pytest.fixture(scope="module")
def model_files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint with rows of 256 and a tokenizer, and a text."""
    folder = tmp_path_factory.mktemp("bits")
    random_checkpoint(folder / "dense", widened("tiny-dense"))
    tokenizer().save(str(folder / "dense" / "tokenizer.json"))
    (folder / "text.txt").write_text(LONG_TEXT)
    return folder


def test_an_engine_of_some_bits(
    model_files: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its config has at most so many, is in the engine as a file that builds the same one, and its
    divergence is near what was measured, once for all budgets."""
    given = {"checkpoint": model_files / "dense", **BITS_OPTIONS}
    given |= {"calibrate": model_files / "text.txt"}
    costs: dict[str, Any] = {}
    spy(monkeypatch, bits_module, "choose", lambda measured, *_: costs.update(measured))
    tokens = torch.tensor([tokenizer().encode(LONG_TEXT, add_special_tokens=False).ids[:48]])
    plain = {**given, "calibrate": ()}
    with g4ir.build(None, tmp_path / "plain", **plain) as engine:
        want = engine.session(1).prefill(tokens, all_logits=True).log_softmax(-1)
    divergences = []
    for bits in (3.5, 6.0):
        out = tmp_path / f"e{bits}"
        with g4ir.build(None, out, bits=bits, **given) as engine:
            got = engine.session(1).prefill(tokens, all_logits=True).log_softmax(-1)
            config, param = engine.facts.config.quant, engine.param("L1.mlp.w_up")
        matrices = {n: t for n, t in weights_of(engine.spec).items() if layer_of(n) is not None}
        schemes = config.schemes(weights_of(engine.spec))
        used = sum(schemes[n].nbytes(t, "f32") for n, t in matrices.items())
        assert used * 8 <= bits * sum(t.numel() for t in matrices.values())
        assert len({schemes[n].form for n in matrices}) > 1
        monkeypatch.setattr(bits_module, "_squared_gradients", None)
        divergences.append(float((want.exp() * (want - got)).sum(-1).mean()))
        expected = sum(
            next(m.divergence for m in costs[n] if m.scheme == schemes[n]) for n in matrices
        )
        assert abs(math.log(expected / divergences[-1])) < math.log(4)
        read = find_quant_config(out / "quant.yaml")
        assert read and read.schemes(weights_of(engine.spec)) == schemes
    assert divergences[1] < divergences[0] / 4
    again = {**given, "quant": out / "quant.yaml"}
    with g4ir.build(None, tmp_path / "again", **again) as engine:
        assert torch.equal(engine.param("L1.mlp.w_up"), param)


def test_an_interrupted_measurement_goes_on(
    model_files: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Layers that were measured are not measured again, and the config is that of one run."""
    text, out = tmp_path / "text.txt", tmp_path / "interrupted"
    text.write_text(f"{LONG_TEXT}w9 w3")  # of no other test
    given = {"checkpoint": model_files / "dense", "calibrate": text, "bits": 4.0, "max_seq": 64}
    given |= {"backend": "reference", "dtype": "float32"}
    calls, written, last = list[str](), set[Path](), [0]

    def counted(*_: Any) -> None:
        calls.append("one")
        if len(calls) == last[-1]:
            raise KeyboardInterrupt

    spy(monkeypatch, bits_module, "_divergences", counted)
    spy(monkeypatch, bits_module, "write_file", lambda file, *_: written.add(file))
    g4ir.build(None, tmp_path / "whole", **given).close()
    whole, (measured,) = len(calls), written
    measured.unlink()
    last.append(whole + 3 * whole // 4)
    with pytest.raises(KeyboardInterrupt):
        g4ir.build(None, out, **given)
    done = len(json.loads(measured.read_bytes()))
    calls.clear()
    g4ir.build(None, out, **given).close()
    assert len(calls) == whole - done and 0 < done < whole
    assert (out / "quant.yaml").read_text() == (tmp_path / "whole/quant.yaml").read_text()


@pytest.mark.parametrize(("words", "says"), TABLES["bits refused"])
def test_bits_refused(model_files: Path, tmp_path: Path, words: list[str], says: str) -> None:
    weights = ("--checkpoint", model_files / "dense", "--backend", "reference")
    outcome = command("build", *weights, "--out", tmp_path / "e", *words)
    assert outcome.code == 2 and says in outcome.err and not (tmp_path / "e").exists()
