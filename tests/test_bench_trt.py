"""The first contact with TensorRT (bench/gpu/test_trt.py): the recorder stands for it."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench.gpu import test_trt as trt
from bench.gpu.conftest import read_results
from g4ir.backends.trt.lowerings import SETTINGS
from tests.recorder.bindings import WHEELS, real_api
from tests.test_bench_gpu import run

FILE = Path(trt.__file__)


def test_a_dry_run_in_part(tmp_path: Path) -> None:
    """At full width, but of a tiny variant: what is built, measured, compared and kept."""
    words = ("--dry-run", "--variants", "tiny-dense", "-k", "test_full")
    code, text = run(tmp_path, *words, at=FILE)
    assert code == 0, text
    (found,) = read_results(tmp_path / "results.jsonl").values()
    assert found["engine"]["layers"] > 100 and found["compared"]["ok"]
    assert found["decode c32"]["step_ms"]["p50"] > 0 and "refused" in found["trtexec"]
    kept = {p.name for p in (tmp_path / "engines" / "tiny-dense").iterdir()}
    assert {"trt.log", "manifest.json", "engine.io.json"} <= kept
    assert any(p.suffix == ".timing" for p in (tmp_path / "timings").iterdir())
    assert not (tmp_path / "work" / "tiny-dense").exists()


@pytest.mark.full
def test_a_dry_run(tmp_path: Path) -> None:
    code, text = run(tmp_path, "--dry-run", at=FILE)
    assert code == 0, text
    found = read_results(tmp_path / "results.jsonl").values()
    assert {n for v in found for n, c in v.items() if "refused" in c} == {"tensorrt", "trtexec"}


def test_tiny_engines_have_every_form() -> None:
    """Each choice of each setting."""
    given = {(k, v) for f in trt.FORMS for k, v in (f.settings or {}).items()}
    chosen = {(k, v) for k, s in SETTINGS.items() for v in s.choices}
    left = {(k, s.default) for k, s in SETTINGS.items()}
    assert chosen - given == left and given <= chosen
    asked = {(k, v) for row in trt.ASKED for k, v in row.items()}
    assert chosen - asked <= left
    assert len({f.name for f in trt.FORMS}) == len(trt.FORMS)


@pytest.mark.parametrize("version", WHEELS)
def test_names_are_compared_with_the_bindings(version: str) -> None:
    """As they are with the module at hand; another enum, or no such member, is listed."""
    real = real_api(version)
    cell = trt.calls("tiny-dense", {}, version, real.problems)
    assert cell["ok"] and cell["calls"] > 1000
    assert trt.enums(version, real.values)["ok"]
    wrong = trt.enums(version, lambda name: {} if name == "TopKOperation" else real.values(name))
    assert [p.partition(" ")[0] for p in wrong["problems"]] == [
        "TopKOperation.MAX",
        "TopKOperation.MIN",
    ]
    classes = {k: v for k, v in real.dump["classes"].items() if k != "ISoftMaxLayer"}
    less = type(real)({**real.dump, "classes": classes})
    cell = trt.calls("tiny-dense", {}, version, less.problems)
    assert cell["problems"] == ["ISoftMaxLayer: there is no such class"] and not cell["ok"]
