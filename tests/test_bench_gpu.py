"""Measurements on a GPU (bench/gpu): as far as a CPU goes;
tests/trt/fake.py stands for TensorRT."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from bench.gpu import test_trt as trt
from bench.gpu.conftest import read_results
from g4ir.backends.trt.lowerings import SETTINGS
from g4ir.bench import roof

ROOT = Path(__file__).parents[1]


def run(out: Path, *words: str, at: Path = ROOT / "bench" / "gpu") -> tuple[int, str]:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(at)]
    done = subprocess.run(
        [*command, "--out", str(out), *words], capture_output=True, text=True, cwd=ROOT
    )
    return done.returncode, done.stdout + done.stderr


def test_options_refused(tmp_path: Path) -> None:
    code, text = run(tmp_path, "--variants", "e3b", "--collect-only")
    assert code and "--variants e3b: " in text


@pytest.mark.full
def test_a_dry_run_in_part(tmp_path: Path) -> None:
    """What is measured and kept of one tiny variant with one row."""
    some = "test_preflight or (1 and (built or transformers or _decode))"
    code, text = run(tmp_path, "--dry-run", "--variants", "tiny-moe", "-k", some)
    assert code == 0, text
    found = read_results(tmp_path / "results.jsonl")
    gaps = {n: v for n, v in found["test_preflight.py::test_preflight"].items() if "gap" in n}
    assert len(gaps) == 1 and all(v["us_best"] > 0 for v in gaps.values())
    assert (tmp_path / "engines" / "tiny-moe-b1").is_dir()
    decode = found["test_decode.py::test_decode[tiny-moe-1]"]
    assert {*decode} == {"decode c32", "agreement", "prefill 24"}
    assert decode["agreement"]["cosine"] > 0.9999
    made = found["test_peers.py::test_transformers[tiny-moe-1]"]
    assert made["hf-static c32"]["cosine"] > 0.9999
    assert "prefill 24" in (tmp_path / "report.md").read_text()


def test_a_gpu_is_timed_by_its_own_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """Many passes between two events; the median of what they say."""
    clock = [0.0]

    class Event:
        def __init__(self, enable_timing: bool) -> None:
            assert enable_timing

        def record(self) -> None:
            self.at = clock[0]

        def synchronize(self) -> None:
            pass

        def elapsed_time(self, end: Event) -> float:
            return end.at - self.at

    def run() -> None:
        clock[0] += 4.0  # milliseconds

    monkeypatch.setattr(torch.cuda, "Event", Event)
    assert roof.passes_seconds(run, 5) == pytest.approx(4e-3)
    meter = roof.Meter.__new__(roof.Meter)
    meter.device = "cuda"
    assert meter._typical(run, 3) == pytest.approx(4e-3)
    assert clock[0] == 4.0 * (5 + 3 * roof.REPEATS)


FILE = Path(trt.__file__)


def test_a_dry_run_of_tensorrt(tmp_path: Path) -> None:
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
