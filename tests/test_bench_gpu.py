"""The rig that measures on a GPU: what is kept of a cell that fails, crashes or hangs."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from g4ir.backends.torch_compile.kernel_cases import all_cases
from g4ir.backends.torch_compile.step_model import read_constants
from g4ir.backends.torch_compile.target import Target
from g4ir.bench import roof
from g4ir.errors import InputError

BENCH = Path(__file__).parents[1] / "bench"


@pytest.fixture(scope="module")
def gpu() -> Iterator[ModuleType]:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(BENCH))
        import gpu

        yield gpu


@pytest.fixture
def report(gpu: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[], Any]:
    """Opens the report of a run; the next call is the next run."""
    monkeypatch.setattr(gpu, "RESULTS", tmp_path / "results")
    return lambda: gpu.Report(tmp_path / "out" / "r.json", minutes=1)


def test_a_preflight_writes_constants(gpu: ModuleType, tmp_path: Path) -> None:
    """The faster of read and copy, and the gap; nothing where one of them is not known."""
    rates = {"read": 4.2e12, "copy": 4.0e12, "matmul": 7e14}
    cells = {"gap": {"us_best": 1.85, "us_p50": 2.05}, "rates": rates}
    gpu.write_constants(cells, "h200", tmp_path)
    made = read_constants(tmp_path / "step_model-h200.yaml")
    assert made.gpus["h200"].copy == 4.2e6 and made.gap == pytest.approx((1.0, 1.2))
    gpu.write_constants({"rates": rates, "gap": {"failed": "x"}}, "h100", tmp_path)
    gpu.write_constants(cells, "sm_100", tmp_path)
    assert len([*tmp_path.iterdir()]) == 1


def kept(report: Any) -> dict[str, Any]:
    cells: dict[str, Any] = json.loads(report.path.read_text())["cells"]
    return cells


def failing(e: Exception) -> Callable[[], dict[str, Any]]:
    def measure() -> dict[str, Any]:
        raise e

    return measure


def test_one_cell_does_not_cost_the_others(report: Callable[[], Any]) -> None:
    r = report()
    r.cell("a", failing(InputError("no room")))
    r.cell("b", failing(ValueError("odd")))
    r.cell("c", failing(torch.OutOfMemoryError("full")))
    r.cell("d", lambda: {"us": 1})
    found = kept(r)
    assert [next(iter(found[k])) for k in "abcd"] == ["refused", "failed", "out_of_memory", "us"]


def test_a_crash_is_kept_before_it_ends_the_run(report: Callable[[], Any]) -> None:
    """And is not tried again by the next one."""
    r = report()
    r.cell("a", lambda: {"us": 1})
    with pytest.raises(torch.AcceleratorError):
        r.cell("b", failing(torch.AcceleratorError("an illegal memory access")))
    assert "illegal memory access" in kept(r)["b"]["crashed"]
    after = report()
    after.cell("b", failing(AssertionError("tried again")))
    after.cell("c", lambda: {"us": 2})
    assert kept(after)["c"]["us"] == 2 and "crashed" in kept(after)["b"]


def test_a_lost_device_is_a_crash_whatever_it_says_first(
    report: Callable[[], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As launchers of kernels do, which raise errors of their own."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "synchronize", failing(RuntimeError("illegal access")))
    monkeypatch.setattr("gpu.environment", lambda device: {})
    r = report()
    with pytest.raises(RuntimeError, match="launch failed"):
        r.cell("a", failing(RuntimeError("launch failed")))
    assert "launch failed" in kept(r)["a"]["crashed"]


def test_what_is_not_a_cell_is_watched_too(report: Callable[[], Any]) -> None:
    r = report()
    with pytest.raises(torch.AcceleratorError), r.watched("build"):
        raise torch.AcceleratorError("illegal memory access")
    with pytest.raises(InputError), r.watched("other"):
        raise InputError("no room")
    assert list(kept(r)) == ["build"]


def test_a_hang_is_kept_and_ends_the_process(
    report: Callable[[], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The thread that watches does it, since the main one waits."""
    r, ended, seen = report(), threading.Event(), list[Any]()

    def end(code: int) -> None:
        seen.append((code, threading.current_thread() is threading.main_thread(), kept(r)))
        ended.set()

    monkeypatch.setattr("gpu.os._exit", end)
    r.limit = 0.2
    r.cell("a", lambda: {"us": 1})
    r.cell("b", lambda: {"ended": ended.wait(60)})
    ((code, main, cells),) = seen
    assert code == 1 and not main
    assert cells["b"] == {"hung": 0.2} and cells["a"]["us"] == 1
    r.cell("c", lambda: {"ended": ended.wait(0)}, compiles=True)
    with r.watched("build", compiles=True):
        time.sleep(0.4)  # compilers take longer
    assert len(seen) == 1


def test_a_run_elsewhere_goes_on_with_the_results_here(
    gpu: ModuleType, report: Callable[[], Any]
) -> None:
    gpu.RESULTS.mkdir()
    (gpu.RESULTS / "r.json").write_text(json.dumps({"cells": {"a": {"us": 7}}}))
    r = report()
    r.cell("a", failing(AssertionError("measured again")))
    r.cell("b", lambda: {"us": 8})
    assert {k: c["us"] for k, c in kept(r).items()} == {"a": 7, "b": 8}


def test_cells_keep_their_names_beside_others(gpu: ModuleType) -> None:
    """A cell is named by what it is, and each has a name of its own."""
    targets = [Target("cpu", "h200", n) for n in (1, 3)]

    def names(*variants: str) -> list[str]:
        cases = all_cases(gpu.programs(list(variants), 1), targets, 48, 16)
        return [gpu.cell_name(c) for c in cases]

    alone, beside = names("tiny-moe"), names("tiny-dense", "tiny-moe")
    assert len(set(beside)) == len(beside) and set(alone) < set(beside)


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
