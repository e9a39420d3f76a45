"""Values that are not finite: no token is drawn from them, and checks name the first."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from g4ir.builder.build import build
from g4ir.builder.export import export
from g4ir.check.logits import verify_engine
from g4ir.check.passes import verify_each_pass
from g4ir.engine.engine import Engine
from g4ir.errors import CheckError, WeightsError
from g4ir.ir.distance import row_errors
from g4ir.spec.record import load_spec
from g4ir.weights.random import random_weights
from g4ir.weights.write import write_checkpoint
from tests.cli_tools import g4ir
from tests.engines import rewrite

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
    assert verify_engine(engine).ok and verify_each_pass(engine).ok


def test_no_token_is_drawn_from_nan(overflowing: Engine, tmp_path: Path) -> None:
    with pytest.raises(CheckError, match=r"logits after 3 tokens: NaN or infinite") as refused:
        overflowing.generate([2, 5, 7], max_new_tokens=4)
    assert ADVICE in str(refused.value) and str(overflowing.path) in str(refused.value)
    done = g4ir("run", overflowing.path, "--tokens", "2,5,7")
    assert done.code == 1 and ADVICE in done.message and not done.out
    lines = tmp_path / "lines.jsonl"
    lines.write_text('{"tokens": [2, 5, 7]}\n{"tokens": []}\n')
    done = g4ir("run", overflowing.path, "--input-jsonl", lines)
    first, second = (json.loads(line)["error"] for line in done.out.splitlines())
    assert ADVICE in first and "prompt is empty" in second


def test_verify_fails_and_names_the_value(overflowing: Engine) -> None:
    """Though the interpreter, on the same weights, makes the same."""
    report = verify_engine(overflowing)
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
