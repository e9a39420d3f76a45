"""`verify_engine`: sound engines pass, disturbed ones fail with the value that differs. Values that
are not finite: no token is drawn from them, and checks name the first."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import g4ir
from g4ir import Engine, build, export, load_spec
from g4ir.bench.runners import hf_runner
from g4ir.check import logits as compare
from g4ir.check import peers
from g4ir.check.logits import verify_engine
from g4ir.check.passes import verify_each_pass
from g4ir.check.reference import reference_engine
from g4ir.check.stage_report import describe_value
from g4ir.check.tokens import Turns, plain_ids, random_ids
from g4ir.errors import CheckError, InputError, MissingError, SpecError, WeightsError
from g4ir.ir.distance import TOLERANCES, Tolerance, row_errors
from g4ir.weights.random import random_weights
from g4ir.weights.write import write_checkpoint
from tests.cases import TABLES
from tests.cli_tools import g4ir as command
from tests.configs import short, spec_called
from tests.engines import MAX_SEQ, random_checkpoint, rewrite, some_tokens
from tests.oracle import find_oracle
from tests.test_rounding import changed


def disturbed(engine: Engine, param: str, factor: float = 0.3) -> Engine:
    """The engine on the reference backend, with one weight changed after loading (not by a
    factor, which the next norm would take out)."""
    return changed(engine, {param: lambda t: t + factor * t.flip(0)})


@pytest.mark.covering
def test_given_tokens(engines: Any) -> None:
    report = verify_engine(engines("reference", "tiny-ple"), tokens=[*range(5, 5 + MAX_SEQ)])
    assert report.ok and sum(report.turns) == MAX_SEQ


@pytest.mark.parametrize("spec", ["tiny-ple", "tiny-moe"])
@pytest.mark.parametrize("backend", ["reference", "torch"])
@pytest.mark.parametrize("against", ["reference", "hf"])
def test_sound_engine(engines: Any, backend: str, spec: str, against: str) -> None:
    engine, said = engines(backend, spec), list[str]()
    checkpoint = engines.checkpoint(spec)
    report = verify_engine(engine, against, checkpoint=checkpoint, progress=said.append)
    assert report.ok and report.first_difference is None
    assert report.budget == TOLERANCES["f32", against]
    assert sum(report.turns) == 96 and report.turns[-24:] == (1,) * 24
    assert len(report.positions) == (96 if engine.all_logits else len(report.turns))
    assert report.greedy.equal == report.greedy.count == 16
    assert any("through the engine" in s for s in said)


@pytest.mark.parametrize(
    ("backend", "quant"), short(("onnx", "int8"), of=[("reference", "none"), ("onnx", "int8")])
)
def test_random_weights_against_hf(backend: str, quant: str, tmp_path: Path) -> None:
    """Transformers gets those of the seed, which an engine keeps that stores its weights too."""
    options: dict[str, Any] = {"backend": backend, "quant": quant, "max_seq": 32}
    engine = g4ir.build("tiny-moe", tmp_path / "e", random_weights=3, **options)
    assert engine.manifest["weights"]["seed"] == 3
    report = verify_engine(engine, "hf")
    assert report.ok, report.text()
    passes = verify_each_pass(engine)
    assert passes.ok and "--checkpoint" not in passes.text()


def test_a_config_that_transformers_refuses(make_engine: Any, monkeypatch: Any) -> None:
    """Its strict classes have errors of their own."""
    engine = make_engine("tiny-moe", max_seq=64)
    broken = {**engine.spec.to_hf(), "head_dim": 32.5}
    monkeypatch.setattr(type(engine.spec), "to_hf", lambda spec: broken)
    said = r"transformers cannot load the config of spec tiny-moe: .*head_dim"
    with pytest.raises(InputError, match=said):
        verify_engine(engine, "hf")


def test_linked_checkpoint_is_found(tmp_path: Path) -> None:
    checkpoint = random_checkpoint(tmp_path / "checkpoint", "tiny-dense")
    options: dict[str, Any] = {"checkpoint": checkpoint, "backend": "reference", "max_seq": 64}
    linked = g4ir.build(None, tmp_path / "linked", link_weights=True, **options)
    assert verify_engine(linked, "hf", tokens=[5, 6, 7]).ok
    packed = g4ir.build(None, tmp_path / "packed", **options)
    with pytest.raises(InputError, match="--checkpoint DIR"):
        verify_engine(packed, "hf")


@pytest.mark.covering
@pytest.mark.parametrize("param, value, against", TABLES["verify"]["disturbed"])
def test_disturbed_weight_is_found(engines: Any, against: str, param: str, value: str) -> None:
    engine = disturbed(engines("reference", "tiny-ple"), param)
    checkpoint, ids = engines.checkpoint("tiny-ple"), some_tokens(1, 20)[0].tolist()
    report = verify_engine(engine, against, ids, checkpoint)
    assert not report.ok
    assert report.first_difference and f"%{value}" in report.first_difference
    assert ("outside the layers" in report.first_difference) == (param == "ple.w")
    assert "FAILED" in report.text() and report.first_difference in report.text()


def test_a_wrong_product_is_named(engines: Any) -> None:
    """Step programs show what stands between layers, and are forced there: what is wrong before is
    not that of the layers behind."""
    engine = engines("torch", "tiny-moe")
    weight = engine.runtime.resident("L2.attn.wo")
    assert weight is not None
    before = weight.clone()
    weight.copy_(before + 0.3 * before.flip(0))
    try:
        report = verify_engine(engine, tokens=some_tokens(1, 20)[0].tolist())
    finally:
        weight.copy_(before)
    assert not report.ok and report.first_difference
    assert report.first_difference.startswith(
        "%L2.attn.o (layer 2) in the chunk at token 0: error "
    )


def test_a_place_is_that_of_its_layer() -> None:
    for name, layer in (("L3.out", "layer 3"), ("final.norm", "outside the layers")):
        assert describe_value(name, 7) == f"%{name} ({layer}) in the chunk at token 7"
    assert "(layer 1)" in describe_value("r0.L1.attn.o.part", 0)


def turned(engine: Engine, turned_phase: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let runs of a phase see other positions."""
    run: Callable[..., Any] = engine.runtime.run

    def faulty(phase: str, feeds: dict[str, torch.Tensor], *rest: Any) -> Any:
        moved = {**feeds, "positions": feeds["positions"] + 1}
        return run(phase, moved if phase == turned_phase else feeds, *rest)

    monkeypatch.setattr(engine.runtime, "run", faulty)


def test_a_fault_of_decoding_only(engines: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The turns end in single steps: a fault there shows, and where."""
    engine = reference_engine(engines("reference", "tiny-ple"))
    turned(engine, "decode", monkeypatch)
    report = verify_engine(engine)
    assert not report.ok
    assert next(p.at for p in report.positions if not p.ok) == 72
    assert report.first_difference and "at token 72" in report.first_difference


def test_measured_rounding(engines: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Against float64 on this very model, with sound weights; four times as much is allowed."""
    monkeypatch.setitem(TOLERANCES, ("f32", "reference"), Tolerance(relative=1e-9))
    assert not verify_engine(disturbed(engines("reference", "tiny-ple"), "L3.attn.wo", 0.01)).ok
    engine = engines("torch", "tiny-ple")
    report = verify_engine(engine)
    given = Turns(random_ids(engine, (96,)), report.turns, engine.all_logits)
    rounding = compare.rounding_error(engine, given)
    assert 1e-7 < rounding < 1e-4 and report.budget == Tolerance(relative=4 * rounding)


def test_report(engines: Any) -> None:
    report = verify_engine(engines("reference", "tiny-ple"))
    values = json.loads(json.dumps(report.to_dict()))
    assert values["ok"] is True and len(values["positions"]) == 96
    assert values["budget"] == {"relative": 1e-4, "cosine": None, "rounding": None}
    assert values["positions"][0].keys() == vars(report.positions[0]).keys()
    text = report.text()
    lines = text.splitlines()
    assert lines[0].endswith("against reference, 96 tokens in 63 + 9 + 24 single steps")
    assert lines[-1] == "ok" and len(lines) <= 10 and all(len(x) <= 100 for x in lines)
    for word in ("max abs", "relative", "cosine", "greedy", "16 of 16 equal", "1.0e-04"):
        assert word in text
    assert not replace(report, greedy=replace(report.greedy, differs=4)).ok
    worse = replace(report.positions[3], ok=False)
    assert not replace(report, positions=(*report.positions[:3], worse)).ok


class Fixed:
    """A peer that writes these tokens; the two best of its logits are 1e-3 apart, 16 times their
    rms of 0.0625 is 1."""

    def __init__(self, *tokens: int) -> None:
        self.tokens = [*tokens, *[1] * 30]

    def greedy(self, prompt: torch.Tensor, count: int, ids: torch.Tensor) -> Any:
        logits = torch.zeros(count, 512)
        logits[:, 1], logits[:, 2] = 1.0, 1.0 - 1e-3
        return self.tokens[:count], logits


@pytest.mark.parametrize("tokens, budget, equal, differs", TABLES["verify"]["close calls"])
def test_close_calls_may_go_either_way(
    tokens: list[int], budget: dict[str, float], equal: int, differs: int | None
) -> None:
    both: Any = Fixed(*tokens), Fixed()
    found = compare._compare_greedy(
        *both, torch.arange(9), 40, torch.arange(512), Tolerance(**budget)
    )
    assert (found.equal, found.differs) == (equal, differs)


def test_greedy_tokens_are_no_placeholders_of_media(make_engine: Any) -> None:
    """Their embeddings are those of media: transformers' text model has others."""
    engine = make_engine("tiny-media")
    ids, image = plain_ids(engine), engine.spec.tokens.image
    assert image not in ids.tolist() and len(ids) == engine.spec.text.readable_ids - 3
    logits = torch.arange(512.0)[None] + 1e3 * (torch.arange(512) == image)
    tokens, chosen = peers._greedy(logits, lambda token: logits, 2, ids)
    assert tokens == [int(ids[-1])] * 2 and chosen.shape == (2, len(ids))


def test_checkpoint_of_another_shape(engines: Any) -> None:
    with pytest.raises(SpecError, match=r"text\.num_hidden_layers"):
        engine = engines("reference", "tiny-moe")
        verify_engine(engine, "hf", checkpoint=engines.checkpoint("tiny-ple"))


def test_last_rows_of_layers_that_share_keys_without_per_layer_embeddings() -> None:
    """Transformers 5.24 fails there unless rows are asked for by index: verify and bench do."""
    oracle = find_oracle(spec_called("random-14"))
    text, prompt = oracle.spec.text, oracle.tokens[0, :9]
    assert text.num_kv_shared_layers and not text.ple
    tokens, _ = peers.HfPeer(oracle.model).greedy(prompt, 3, torch.arange(text.vocab_size))
    whole = oracle.run(torch.cat((prompt, torch.tensor(tokens)))[None])
    assert tokens == whole[0, len(prompt) - 1 : -1].argmax(-1).tolist()
    for mode in ("hf", "hf-static"):
        runner = hf_runner(oracle.model, 16, mode)
        assert runner.step(prompt[None]).argmax().item() == tokens[0]
        assert runner.step(torch.tensor([tokens[:1]])).argmax().item() == tokens[1]


def test_without_transformers(engines: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    engine = engines("reference", "tiny-moe")
    with pytest.raises(MissingError, match=r"pip install 'g4ir\[hf\]'"):
        verify_engine(engine, "hf", checkpoint=engines.checkpoint("tiny-moe"))
    assert verify_engine(engine, tokens=[5, 6, 7]).ok


NORM = "layers.2.post_feedforward_layernorm.weight"
ADVICE = "bfloat16 has the range of float32: look for damaged weights"


def large_checkpoint(folder: Path, value: float) -> Path:
    """One norm's weight is large: what it makes is up to a few times as large."""
    spec = load_spec("tiny-dense")
    write_checkpoint(folder, spec, random_weights(spec, 0, torch.float32))
    return rewrite(folder, lambda tensors: tensors[f"model.{NORM}"].fill_(value))


def built(folder: Path, value: float) -> Engine:
    options = {"backend": "reference", "dtype": "bfloat16", "max_seq": 64, "prefill_chunk": 16}
    checkpoint = large_checkpoint(folder / "checkpoint", value)
    return build(load_spec("tiny-dense"), folder / "engine", checkpoint=checkpoint, **options)


@pytest.fixture(scope="module")
def overflowing(tmp_path_factory: pytest.TempPathFactory) -> Engine:
    """Its weights are finite, what layer 2 adds up is not."""
    return built(tmp_path_factory.mktemp("overflowing"), 3e38)


def test_bf16_has_the_range(tmp_path: Path) -> None:
    """Of values beyond float16's, as trained models have them."""
    engine = built(tmp_path, 60_000.0)
    assert len(engine.generate([2, 5, 7], max_new_tokens=4)) == 4
    ids = some_tokens(1, 20)[0].tolist()
    assert verify_engine(engine, tokens=ids).ok and verify_each_pass(engine, ids).ok


def test_no_token_is_drawn_from_nan(overflowing: Engine, tmp_path: Path) -> None:
    with pytest.raises(CheckError, match=r"logits after 3 tokens: NaN or infinite") as refused:
        overflowing.generate([2, 5, 7], max_new_tokens=4)
    assert ADVICE in str(refused.value) and str(overflowing.path) in str(refused.value)
    done = command("run", overflowing.path, "--tokens", "2,5,7")
    assert done.code == 1 and ADVICE in done.message and not done.out
    lines = tmp_path / "lines.jsonl"
    lines.write_text('{"tokens": [2, 5, 7]}\n{"tokens": []}\n')
    done = command("run", overflowing.path, "--input-jsonl", lines)
    first, second = (json.loads(line)["error"] for line in done.out.splitlines())
    assert ADVICE in first and "prompt is empty" in second


def test_verify_fails_and_names_the_value(overflowing: Engine) -> None:
    """Though the interpreter, on the same weights, makes the same."""
    report = verify_engine(overflowing, tokens=some_tokens(1, 20)[0].tolist())
    assert not report.ok and not any(p.ok for p in report.positions)
    assert report.first_difference is not None
    assert report.first_difference.startswith("%L2.out (layer 2) in the chunk at token 0: NaN or")
    assert ADVICE in report.text() and report.text().endswith("FAILED")


def test_no_pass_is_blamed(overflowing: Engine) -> None:
    with pytest.raises(CheckError, match=r"%L2\.\S+ \(layer 2\).*NaN or infinite"):
        verify_each_pass(overflowing)


def test_float16_becomes_bfloat16(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Without --dtype, and says so; float32 is taken if asked for, and rounds nothing."""
    spec = replace(load_spec("tiny-dense"), dtype="f16")
    write_checkpoint(tmp_path / "c", spec, random_weights(spec, 0, torch.float16))
    for dtype, name in ((None, "bf16"), ("float32", "f32")):
        caplog.clear()
        options = {"backend": "reference", "max_seq": 32, "dtype": dtype}
        engine = build(None, tmp_path / name, checkpoint=tmp_path / "c", **options)
        assert engine.dtype == name and len(engine.generate([2, 5, 7], 2)) == 2
        assert ("is float16, and becomes bfloat16; --dtype float32" in caplog.text) is not dtype


def test_a_weight_that_does_not_fit_an_export(tmp_path: Path) -> None:
    checkpoint = large_checkpoint(tmp_path / "c", 1e6)
    with pytest.raises(WeightsError, match=rf"{NORM}: 1e\+06 does not fit float16.*bfloat16"):
        export(checkpoint, tmp_path / "out", dtype="float16")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_rows_that_are_not_finite_are_never_equal(value: float) -> None:
    rows = torch.randn(3, 8)
    rows[1, 2] = value
    errors = row_errors(rows, rows.clone())
    for found in (errors.absolute, errors.relative, errors.cosine):
        assert found[1].isnan()
