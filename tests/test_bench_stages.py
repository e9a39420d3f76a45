"""Scripts whose stages are processes: what is kept of a cell that fails, crashes or hangs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

SCRIPT = Path(__file__).with_name("fake_stages.py")


def run(out: Path, stages: str, *options: str) -> int:
    command = [sys.executable, str(SCRIPT), "--out", str(out), "--variants", stages, *options]
    return subprocess.run(command, capture_output=True).returncode


def body(out: Path, cells: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((out / f"fake-{cells.replace(',', '+')}.json").read_text())
    return found


def test_one_cell_does_not_cost_the_others(tmp_path: Path) -> None:
    assert run(tmp_path, "refuse,fail,wrong,right") == 1
    found = body(tmp_path, "refuse,fail,wrong,right")
    assert found["state"] == "done" and found["about"] == {"machine": "none"}
    cells = list(found["cells"].values())
    assert cells[0]["refused"] == "no room" and "odd" in cells[1]["failed"]
    assert [c["ok"] for c in cells[2:]] == [False, True]
    assert run(tmp_path / "b", "refuse,right") == 0, "what does not fit the machine is no error"


def test_a_crash_costs_its_cell(tmp_path: Path) -> None:
    """The stage goes on behind it in another process, and is not begun again by the next run."""
    assert run(tmp_path, "right,crash,right/right") == 1
    found = body(tmp_path, "right,crash,right")
    first, second, third = found["cells"].values()
    assert first["us"] == third["us"] == 1 and second["crashed"] == "SIGSEGV"
    assert "Segmentation fault" in second["said"] and found["state"] == "done"
    assert body(tmp_path, "right")["state"] == "done"
    run(tmp_path, "right,crash,right/right")
    assert body(tmp_path, "right,crash,right") == found


def test_a_hang_costs_its_cell(tmp_path: Path) -> None:
    """The log says where it was."""
    assert run(tmp_path, "hang,right") == 1
    first, second = body(tmp_path, "hang,right")["cells"].values()
    assert first["hung"] == 0.3 and second["us"] == 1
    assert "in hang" in (tmp_path / "logs" / "fake-hang+right.log").read_text()


@pytest.mark.parametrize("cells", ["crash,crash,crash,right", "right,die"])
def test_a_stage_is_given_up(tmp_path: Path, cells: str) -> None:
    """After so many crashes, or one outside of cells; the next stage is run."""
    assert run(tmp_path, f"{cells}/right") == 1
    found = body(tmp_path, cells)
    assert found["state"] == "given up" and len(found["cells"]) == (3 if "crash" in cells else 2)
    assert body(tmp_path, "right")["state"] == "done"


def test_runs_add_up(tmp_path: Path) -> None:
    """What is there is kept when the budget is over, and not measured again."""
    cells = "right,wait,wait,right"
    command = [sys.executable, str(SCRIPT), "--out", str(tmp_path), "--variants", cells]
    subprocess.run([*command, "--run", f"fake-{cells.replace(',', '+')}", "--seconds", "0.4"])
    before = body(tmp_path, cells)
    assert before["state"] == "partial" and list(before["cells"]) == ["0 right", "1 wait", "2 wait"]
    assert run(tmp_path, cells, "--budget", "0") == 0
    assert body(tmp_path, cells) == before, "no stage is begun when there is no time"
    assert run(tmp_path, cells) == 0
    after = body(tmp_path, cells)
    assert after["state"] == "done" and len(after["cells"]) == 4
    assert {k: after["cells"][k] for k in before["cells"]} == before["cells"]
    assert run(tmp_path, cells, "--again") == 0
    assert body(tmp_path, cells)["cells"]["0 right"] != after["cells"]["0 right"]


def test_all_is_said_in_one_report(tmp_path: Path) -> None:
    run(tmp_path, "right/wrong", "--only", "fake-right")
    text, whole = (tmp_path / "report.md").read_text(), tmp_path / "report.json"
    assert "- machine: none" in text and "## fake-right" in text and "0 right" in text
    assert list(json.loads(whole.read_text())) == ["fake-right"]


def test_a_folder_is_copied_as_it_grows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Newer files take the place of older ones; what somebody is writing is left."""
    monkeypatch.syspath_prepend(str(SCRIPT.parents[1] / "bench"))
    from stages import copy_folder

    source, target = tmp_path / "a", tmp_path / "b"
    (source / "inner").mkdir(parents=True)
    for name, text in (("one", "1"), ("inner/two", "2"), (".one.12ab", "half")):
        (source / name).write_text(text)
    copy_folder(source, target)
    os.utime(target / "one", (0, 0))
    (source / "one").write_text("new")
    (target / "inner" / "two").write_text("kept")
    copy_folder(source, target)
    found = {str(p.relative_to(target)): p.read_text() for p in target.rglob("*") if p.is_file()}
    assert found == {"one": "new", "inner/two": "kept"}


def test_a_lost_device_ends_the_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever is said first, as launchers of kernels do, which raise errors of their own."""
    monkeypatch.syspath_prepend(str(SCRIPT.parents[1] / "bench"))
    from stages import Cells

    def failing(e: Exception) -> Any:
        def measure() -> dict[str, Any]:
            raise e

        return measure

    cells = Cells(tmp_path / "s.json", 1.0, 60.0)
    with pytest.raises(torch.AcceleratorError):
        cells.cell("a", failing(torch.AcceleratorError("illegal memory access")))
    cells.cell("b", failing(torch.OutOfMemoryError("full")))
    cells.cell("c", failing(RuntimeError("launch failed")))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "synchronize", failing(RuntimeError("illegal access")))
    with pytest.raises(RuntimeError, match="launch failed"):
        cells.cell("d", failing(RuntimeError("launch failed")))
    kinds = [next(iter(c)) for c in json.loads((tmp_path / "s.json").read_text())["cells"].values()]
    assert kinds == ["crashed", "out_of_memory", "failed", "crashed"]
    assert cells.made("a", lambda: 1) is None and cells.made("b", lambda: 2) == 2
