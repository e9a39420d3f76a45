"""What a build with TensorRT needs of its environment, and dry runs, which need no GPU."""

from __future__ import annotations

import json
import subprocess
import sys
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch

from g4ir.backends.trt import dry_run as dry
from g4ir.backends.trt import host, runtime
from g4ir.backends.trt.target import RTX, TARGETS
from g4ir.builder.build import prepare
from g4ir.errors import MissingError
from g4ir.plan.options import BuildOptions
from g4ir.spec.record import load_spec
from g4ir.ui.progress import no_progress
from tests.configs import VARIANTS, short

# --- what the environment lacks ---------------------------------------------------------------


def test_tensorrt_without_its_libraries() -> None:
    """Bindings alone cannot be imported."""
    load = Mock(side_effect=OSError("libnvinfer.so.11: cannot open shared object file"))
    with pytest.raises(MissingError, match=r"libnvinfer\.so\.11.*the bindings alone"):
        host.require_library(load=load)


@pytest.mark.parametrize("version", ["8.6.1", "10.16.1", "12.0.0", "9", "x.y"])
def test_unsupported_versions(version: str) -> None:
    with pytest.raises(MissingError, match=r"not supported: `pip install 'tensorrt>=11,<12'`"):
        host.probe(SimpleNamespace(__version__=version))


def test_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """None, another architecture, and the target."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(MissingError, match="no CUDA device"):
        host.require_gpu()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA A100-SXM4-80GB")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (8, 0))
    with pytest.raises(MissingError, match=r"capability 9\.0 .*A100.*has 8\.0"):
        host.require_gpu()
    assert host.Host().architecture() == "sm_80"
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    host.require_gpu()
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA H200")
    host.require_gpu(TARGETS["h200"])
    with pytest.raises(MissingError, match=r"9\.0 \(H100\).*NVIDIA H200"):
        host.require_gpu(TARGETS["h100"])


# --- sizes ------------------------------------------------------------------------------------


@pytest.mark.parametrize("most", [1, 100, 256, 1000, 8192, 262144])
def test_slots_of_a_step(most: int) -> None:
    """Enough, never more than there are, few sizes, and no more than half beyond what is held."""
    counts = [*range(1, min(most, 3000) + 1), most]
    sizes = [runtime.step_slots(n, most) for n in counts]
    assert all(n <= size <= most for n, size in zip(counts, sizes, strict=True))
    assert all(size <= max(256, 1.5 * n) for n, size in zip(counts, sizes, strict=True))
    assert all(a <= b for a, b in pairwise(sizes)) and len(set(sizes)) < 25


# --- dry runs ---------------------------------------------------------------------------------


@pytest.mark.parametrize("variant", short("tiny-media", of=("tiny-media", *VARIANTS)))
def test_dry_run(variant: str, tmp_path: Path) -> None:
    """Without a GPU or weights; of a whole variant within a minute and 4 GiB."""
    words = f"build --variant {variant} --backend trt --drafter default --dry-run --json --out"
    argv = [sys.executable, "-m", "g4ir.cli", *words.split(), str(tmp_path / "engine")]
    done = subprocess.run(argv, capture_output=True, text=True)
    plan = json.loads(done.stdout)
    assert done.returncode == bool(plan["short"]), done.stderr
    nodes = int(plan["network"].removesuffix(" nodes"))
    assert plan["dry_run_s"] < 60 and nodes > 500
    if host.installed(RTX):
        assert int(plan["parsed"].split()[0]) > nodes / 2
        assert "compiled" not in plan or int(plan["compiled"][0].split()[1]) < nodes / 3
    assert plan["draft"].endswith(" nodes") and "hidden" in plan["outputs"]
    assert any(n.startswith("vision_") for n in plan["towers"])
    assert plan["inputs"]["positions"] == "i64[B,S]"
    assert plan["outputs"]["logits"].split(",")[1] == "R"
    assert "GiB of host memory" in plan["builder"]
    assert plan["peak_bytes"] < 4 << 30


def test_dry_run_of_what_is_made_dense() -> None:
    """The report says which weights a network does not hold in codes."""
    options = BuildOptions(backend="trt", quant="int8", media="none", dtype="float32")
    p = prepare(load_spec("tiny-ple"), options, dry=True)
    notes = dry.full_size(p)["notes"]
    assert "8 quantised weights are made dense at build: gates of per-layer" in str(notes)


def test_dry_run_without_a_library(monkeypatch: pytest.MonkeyPatch) -> None:
    p = prepare(load_spec("tiny-dense"), BuildOptions(backend="trt"), dry=True)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None if name == "onnx" else name)
    said = r"--backend trt needs the library onnx: `pip install 'g4ir\[onnx\]'`"
    with pytest.raises(MissingError, match=said):
        dry.dry_run(p, no_progress)
