"""The first contact with TensorRT (bench/gpu/test_trt.py): tests/trt/fake.py stands for it."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench.gpu import test_trt as trt
from bench.gpu.conftest import read_results
from g4ir.backends.trt.lowerings import SETTINGS
from tests.test_bench_gpu import run

FILE = Path(trt.__file__)


def test_a_dry_run_in_part(tmp_path: Path) -> None:
    """At full width, but of a tiny variant: what is built, measured, compared and kept."""
    words = ("--dry-run", "--variants", "tiny-dense", "-k", "test_full")
    code, text = run(tmp_path, *words, at=FILE)
    assert code == 0, text
    (found,) = read_results(tmp_path / "results.jsonl").values()
    assert found["engine"]["plan_mb"] >= 0 and found["compared"]["ok"]
    assert found["decode c32"]["step_ms"]["p50"] > 0 and "refused" in found["trtexec"]
    kept = {p.name for p in (tmp_path / "engines" / "tiny-dense").iterdir()}
    assert {"trt.log", "manifest.json", "engine.io.json"} <= kept
    assert not (tmp_path / "work" / "tiny-dense").exists()


@pytest.mark.full
def test_a_dry_run(tmp_path: Path) -> None:
    code, text = run(tmp_path, "--dry-run", at=FILE)
    assert code == 0, text
    found = read_results(tmp_path / "results.jsonl").values()
    assert {n for v in found for n, c in v.items() if "refused" in c} == {"trtexec"}


def test_tiny_engines_have_every_form() -> None:
    """Each choice of each setting."""
    given = {(k, v) for f in trt.FORMS for k, v in (f.settings or {}).items()}
    chosen = {(k, v) for k, s in SETTINGS.items() for v in s.choices}
    left = {(k, s.default) for k, s in SETTINGS.items()}
    assert chosen - given == left and given <= chosen
    assert len({f.name for f in trt.FORMS}) == len(trt.FORMS)
