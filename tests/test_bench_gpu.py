"""Measurements on a GPU (bench/gpu): as far as a CPU goes;
tests/trt/fake.py stands for TensorRT.

What is said of GPUs without one: which are too old, and what is missing.
"""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils import cpp_extension

from bench.gpu import test_trt as trt
from bench.gpu.conftest import read_results
from g4ir.backends.cuda.target import gpu_name
from g4ir.backends.cuda.toolkit import check_toolkit, toolchain
from g4ir.backends.inductor.target import Target
from g4ir.backends.trt.lowerings import SETTINGS
from g4ir.bench import roof
from g4ir.errors import MissingError, check_all
from tests.cases import TABLES

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

    def event(enable_timing: bool) -> Any:
        assert enable_timing
        made: Any = SimpleNamespace(synchronize=lambda: None)
        made.record = lambda: setattr(made, "at", clock[0])
        made.elapsed_time = lambda end: end.at - made.at
        return made

    def run() -> None:
        clock[0] += 4.0  # milliseconds

    monkeypatch.setattr(torch.cuda, "Event", event)
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


def test_gpus_that_are_too_old_and_what_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "Tesla V100")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (7, 0))
    with pytest.raises(MissingError, match=r"Tesla V100 .* 7\.0.*8\.0 or newer.*--device cpu"):
        check_all(*toolchain(", or build with --device cpu"))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == "triton" else find(name)
    )
    with pytest.raises(MissingError, match="pip install triton"):
        check_all(*toolchain(", or build with --device cpu"))
    monkeypatch.undo()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    for home in (None, str(tmp_path)):
        monkeypatch.setattr(cpp_extension, "CUDA_HOME", home)
        with pytest.raises(MissingError, match=f"CUDA_HOME is {home}.*install the toolkit"):
            check_toolkit()
    (tmp_path / "include").mkdir()
    (tmp_path / "include" / "cuda.h").touch()
    check_toolkit()


@pytest.mark.parametrize(("product", "capability", "name"), TABLES["gpu names"])
def test_gpu_names(product: str, capability: list[int], name: str) -> None:
    assert gpu_name(product, tuple(capability)) == name


def test_targets_differ_as_programs_do() -> None:
    hopper = [Target("cuda", "h100"), Target("cuda", "h200"), Target("cuda", "h200", 8)]
    assert len({*map(str, (Target("cpu"), Target("cuda"), *hopper))}) == 5
    assert str(Target("cuda", rows=8)) == str(Target("cuda"))
