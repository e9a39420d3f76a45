"""The script for the first contact with TensorRT: the recorder stands for it, in a process of the
script's own."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from g4ir.backends.trt.forms import SETTINGS
from tests.recorder.bindings import WHEELS, real_api

SCRIPT = Path(__file__).parents[1] / "bench" / "trt_first_run.py"


@pytest.fixture(scope="module")
def script() -> Iterator[ModuleType]:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(SCRIPT.parent))
        import trt_first_run

        yield trt_first_run


def run(out: Path, *options: str) -> tuple[int, dict[str, Any]]:
    command = [sys.executable, str(SCRIPT), "--out", str(out), "--dry-run", *options]
    done = subprocess.run(command, capture_output=True, text=True)
    return done.returncode, json.loads((out / "report.json").read_text())


def test_a_dry_run_in_part(tmp_path: Path) -> None:
    """At full width, but of a tiny variant: what is built, measured, compared and kept."""
    code, found = run(tmp_path, "--only", "full", "--variants", "tiny-dense")
    (stage,) = found.values()
    cells = {name.removeprefix("tiny-dense "): cell for name, cell in stage["cells"].items()}
    assert code == 0 and stage["state"] == "done", cells
    assert cells["engine"]["layers"] > 100 and cells["compared"]["ok"]
    assert cells["decode c32"]["step_ms"]["p50"] > 0 and "refused" in cells["trtexec"]
    kept = {p.name for p in (tmp_path / "engines" / "tiny-dense").iterdir()}
    assert {"trt.log", "manifest.json", "engine.io.json"} <= kept
    assert any(p.suffix == ".timing" for p in (tmp_path / "timings").iterdir())


@pytest.mark.full
def test_a_dry_run(tmp_path: Path) -> None:
    code, found = run(tmp_path)
    assert code == 0 and {b["state"] for b in found.values()} == {"done"}
    refused = {n for b in found.values() for n, c in b["cells"].items() if "refused" in c}
    assert refused == {"tensorrt", *(n for n in refused if n.endswith(" trtexec"))}


def test_tiny_engines_have_every_form(script: ModuleType) -> None:
    """Each choice of each setting, but `auto`, which is one of the others."""
    given = {(k, v) for f in script.FORMS for k, v in (f.settings or {}).items()}
    chosen = {(k, v) for k, s in SETTINGS.items() for v in s.choices}
    left = {(k, s.default) for k, s in SETTINGS.items()}
    assert chosen - given <= left and given <= chosen
    asked = {(k, v) for row in script.SETTINGS for k, v in row.items()}
    assert chosen - asked <= left
    assert len({f.name for f in script.FORMS}) == len(script.FORMS)


@pytest.mark.parametrize("version", WHEELS)
def test_names_are_compared_with_the_bindings(script: ModuleType, version: str) -> None:
    """As they are with the module at hand; another enum, or no such member, is listed."""
    real = real_api(version)
    cell = script.calls_cell("tiny-dense", {}, version, real.problems)
    assert cell["ok"] and cell["calls"] > 1000
    assert script.enums_cell(version, real.values)["ok"]
    wrong = script.enums_cell(
        version, lambda name: {} if name == "TopKOperation" else real.values(name)
    )
    assert [p.partition(" ")[0] for p in wrong["problems"]] == [
        "TopKOperation.MAX",
        "TopKOperation.MIN",
    ]
    classes = {k: v for k, v in real.dump["classes"].items() if k != "ISoftMaxLayer"}
    less = type(real)({**real.dump, "classes": classes})
    cell = script.calls_cell("tiny-dense", {}, version, less.problems)
    assert cell["problems"] == ["ISoftMaxLayer: there is no such class"] and not cell["ok"]
