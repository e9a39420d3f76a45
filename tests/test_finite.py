"""Values that a dtype cannot hold: no token is drawn from them, and checks name the first."""

from __future__ import annotations

import io
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from g4ir.builder.build import build
from g4ir.builder.load import load_engine
from g4ir.check.logits import verify_engine
from g4ir.check.passes import verify_each_pass
from g4ir.engine.engine import Engine
from g4ir.errors import CheckError, WeightsError
from g4ir.generate.offline import Failure, OfflineEngine, Result
from g4ir.ir.distance import row_errors
from g4ir.spec.record import load_spec
from g4ir.weights.random import RandomCheckpoint
from g4ir.weights.write import write_checkpoint
from tests.cli_tools import g4ir, tokenizer
from tests.uncompiled import uncompiled

NORM = "layers.2.post_feedforward_layernorm.weight"
ADVICE = "float16 holds numbers up to 65504; build with --dtype bfloat16"


def large_checkpoint(folder: Path, value: float, also: str = "", much: float = 0.0) -> Path:
    """One norm's weight is large, as norms of trained models may be: what it makes is up to a few
    times as large. So is another weight, `also`."""
    spec = load_spec("tiny-dense")
    write_checkpoint(folder, spec, RandomCheckpoint(spec, 0, torch.float32))
    (file,) = folder.glob("*.safetensors")
    tensors = load_file(file)
    name = f"model.{NORM}"
    tensors[name] = torch.full_like(tensors[name], value)
    if also:
        tensors[f"model.{also}"].fill_(much)
    save_file(tensors, file, metadata={"format": "pt"})
    return folder


def built(folder: Path, dtype: str, value: float = 60_000.0) -> Engine:
    options = {"backend": "reference", "dtype": dtype, "max_seq": 64, "prefill_chunk": 16}
    checkpoint = large_checkpoint(folder / "checkpoint", value)
    return build(load_spec("tiny-dense"), folder / dtype, checkpoint=checkpoint, **options)


@pytest.fixture(scope="module")
def narrow(tmp_path_factory: pytest.TempPathFactory) -> Engine:
    """Its weights fit float16, what layer 2 adds up does not."""
    return built(tmp_path_factory.mktemp("narrow"), "float16")


def test_bf16_has_the_range(tmp_path: Path) -> None:
    engine = built(tmp_path, "bfloat16")
    assert len(engine.generate([2, 5, 7], max_new_tokens=4)) == 4
    assert verify_engine(engine).ok and verify_each_pass(engine).ok


def test_no_token_is_drawn_from_nan(narrow: Engine) -> None:
    with pytest.raises(CheckError, match=r"logits after 3 tokens: NaN or infinite") as refused:
        narrow.generate([2, 5, 7], max_new_tokens=4)
    assert ADVICE in str(refused.value) and str(narrow.path) in str(refused.value)
    done = g4ir("run", narrow.path, "--tokens", "2,5,7")
    assert done.code == 1 and ADVICE in done.message and not done.out


#: a build that has the range
WIDE: dict[str, Any] = {"backend": "reference", "dtype": "float32", "max_seq": 64}
WIDE |= {"prefill_chunk": 16, "all_logits": True}


def float16_build(
    folder: Path, value: float, also: str = "", much: float = 0.0, **more: Any
) -> Path:
    """Build in float16 from a checkpoint with a tokenizer; return the engine's path."""
    checkpoint = large_checkpoint(folder / "checkpoint", value, also, much)
    tokenizer().save(str(checkpoint / "tokenizer.json"))
    options = WIDE | {"dtype": "float16"}
    build(None, folder / "engine", checkpoint=checkpoint, **options | more).close()
    return folder / "engine"


@pytest.mark.parametrize("more", [{"link_weights": True}, {"quant": "int8"}], ids=str)
def test_a_build_is_refused_whose_values_leave_the_range(
    tmp_path: Path, more: dict[str, Any]
) -> None:
    """Before anything is compiled; nothing is left of it."""
    with pytest.raises(WeightsError, match=r"%L2\.\S+ \(layer 2\): NaN or infinite") as refused:
        float16_build(tmp_path, 60_000.0, **more)
    assert ADVICE in str(refused.value)
    assert [p.name for p in tmp_path.iterdir()] == ["checkpoint"]


@pytest.mark.parametrize("scale, more", [(1, {"quant": "int8"}), (2, {})], ids=str)
def test_a_refusal_names_the_residual_scale_that_would_do(
    tmp_path: Path, scale: int, more: dict[str, Any]
) -> None:
    """The smallest that leaves a factor of two, whatever the scale that was too small."""
    with pytest.raises(WeightsError, match=r"or --residual-scale 8: .* reaches 22\d{4}$"):
        float16_build(tmp_path, 60_000.0, residual_scale=scale, **more)


@pytest.mark.parametrize(
    "also, much", [("layers.2.layer_scalar", 16.0), ("layers.3.input_layernorm.weight", 60_000.0)]
)
def test_what_no_scale_keeps_in_range_is_for_bf16(tmp_path: Path, also: str, much: float) -> None:
    """A stream too large for every scale, and a value outside of the stream."""
    with pytest.raises(WeightsError, match=r"build with --dtype bfloat16$"):
        float16_build(tmp_path, 60_000.0, also, much)


@pytest.mark.parametrize("more", [{"quant": "int8"}, {"backend": "torch"}], ids=str)
def test_a_residual_scale_keeps_the_stream_in_range(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, full: bool, more: dict[str, Any]
) -> None:
    """Finite, as far from float64 as the interpreter in float16 is, and near an engine in float32,
    which scales nothing."""
    wide, ids = {**WIDE, "quant": more.get("quant")}, torch.arange(2, 34)[None]
    with nullcontext() if full else uncompiled():
        path = float16_build(tmp_path, 60_000.0, residual_scale=8, **more)
        engine = load_engine(path, trust=True)
        assert "float16:" not in caplog.text
        assert engine.manifest["options"]["scale_residual"] == {"divisor": 8}
        report = verify_engine(engine)
        assert report.ok, report.text()
        assert verify_each_pass(engine).ok
        got = engine.session().prefill(ids, all_logits=True)[0].float()
    plain = build(None, tmp_path / "wide", checkpoint=tmp_path / "checkpoint", **wide)
    want = plain.session().prefill(ids, all_logits=True)[0].float()
    assert float(row_errors(got, want).relative.max()) < 0.1


@pytest.mark.parametrize(
    ("spec", "more"),
    [("tiny-ple", {}), ("tiny-moe", {"quant": "int8", "latent_kv": "value"})],
    ids=str,
)
def test_a_residual_scale_changes_no_bit_in_float32(
    make_engine: Any, spec: str, more: dict[str, Any]
) -> None:
    given, ids = {"max_seq": 64, "prefill_chunk": 16, **more}, torch.arange(2, 34)[None]
    one, other = (make_engine(spec, residual_scale=n, **given) for n in (1, 16))
    assert torch.equal(one.session().prefill(ids), other.session().prefill(ids))


@pytest.mark.parametrize(("value", "warned"), [(1.0, False), (12_000.0, True)])
def test_a_build_warns_near_the_end_of_the_range(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, value: float, warned: bool
) -> None:
    float16_build(tmp_path, value)
    assert ("float16: %L2." in caplog.text) is warned
    assert "no text was tried" not in caplog.text


def test_a_build_without_tokenizer_says_that_nothing_was_tried(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    built(tmp_path, "float16").close()
    assert "no text was tried: the checkpoint has no tokenizer.json" in caplog.text


def test_a_build_tells(tmp_path: Path) -> None:
    words = ("build", "--variant", "tiny-dense", "--backend", "reference", "--random-weights", "0")
    for dtype in ("float16", "bfloat16"):
        told = g4ir(*words, "--dtype", dtype, "--out", tmp_path / dtype).err
        assert (ADVICE.partition(";")[0] in told) is (dtype == "float16")
        dry = g4ir(*words, "--dtype", dtype, "--out", tmp_path / "dry", "--dry-run").err
        assert ("a dry run tries no text" in dry) is (dtype == "float16")


def test_verify_fails_and_names_the_value(narrow: Engine) -> None:
    """Though the interpreter, on the same weights, makes the same."""
    report = verify_engine(narrow)
    assert not report.ok and not any(p.ok for p in report.positions)
    assert report.first_difference is not None
    assert report.first_difference.startswith("%L2.out (layer 2) in the chunk at token 0: NaN or")
    assert ADVICE in report.text() and report.text().endswith("FAILED")


def test_no_pass_is_blamed(narrow: Engine) -> None:
    with pytest.raises(CheckError, match=r"%L2\.out \(layer 2\).*NaN or infinite"):
        verify_each_pass(narrow)


def answered(offline: OfflineEngine) -> Result | Failure:
    (answer,) = offline.answer_lines(io.BytesIO(b'{"tokens": [2, 5, 7], "max_new_tokens": 2}'), "x")
    return answer


def test_others_are_answered(narrow: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    offline, run = OfflineEngine(narrow), narrow.runtime.run
    failed = answered(offline)
    assert isinstance(failed, Failure) and ADVICE in failed.error

    def finite(*args: Any) -> Any:
        made = run(*args)
        return made and {name: t.nan_to_num() for name, t in made.items()}

    monkeypatch.setattr(narrow.runtime, "run", finite)
    assert isinstance(answered(offline), Result)


def test_weight_that_does_not_fit(tmp_path: Path) -> None:
    with pytest.raises(WeightsError) as refused:
        built(tmp_path, "float16", 1e6)
    assert str(refused.value).startswith(f"{NORM}: 1e+06 does not fit; {ADVICE}")
    assert not (tmp_path / "float16").exists()


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_rows_that_are_not_finite_are_never_equal(value: float) -> None:
    rows = torch.randn(3, 8)
    rows[1, 2] = value
    errors = row_errors(rows, rows.clone())
    for found in (errors.absolute, errors.relative, errors.cosine):
        assert found[1].isnan()
