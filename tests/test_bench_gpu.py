"""The script that measures on a GPU: its stages as far as a CPU goes."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from g4ir.backends.torch_compile import compile as compiler
from g4ir.backends.torch_compile.kernel_cases import all_cases
from g4ir.backends.torch_compile.step_model import read_constants
from g4ir.backends.torch_compile.target import Target
from g4ir.bench import roof
from tests.small_bench import small_bench

BENCH = Path(__file__).parents[1] / "bench"


@pytest.fixture(scope="module")
def gpu() -> Iterator[ModuleType]:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(BENCH))
        import gpu

        yield gpu


def test_a_preflight_writes_constants(gpu: ModuleType, tmp_path: Path) -> None:
    """The faster of read and copy, and the gaps; nothing where one of them is not known."""
    cells = {
        "gap": {"us_best": 1.85, "us_p50": 2.05, "ok": True},
        "early gap": {"us_best": 0.8, "us_p50": 1.1, "ok": True},
        "rates": {"read": 4.2e12, "copy": 4.0e12, "matmul": 7e14},
    }
    path = tmp_path / "made.yaml"
    gpu.write_constants(cells, "h200", path)
    made = read_constants(path)
    assert made.gpus["h200"].copy == 4.2e6 and made.gap == pytest.approx((1.0, 1.2))
    assert made.early.gap == pytest.approx((0.3, 0.6))
    other = tmp_path / "other.yaml"
    gpu.write_constants({**cells, "gap": {"failed": "x"}}, "h100", other)
    gpu.write_constants({**cells, "early gap": {**cells["gap"], "ok": False}}, "h100", other)
    gpu.write_constants(cells, "sm_100", other)
    assert not other.exists()


def test_kernels_are_started_as_an_engine_starts_them(
    gpu: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A kernel for Hopper, its one operand, and whether it may begin early."""
    told = list[Any]()

    class Driver:
        def load(self, cubin: bytes, name: str, shared: int) -> str:
            told.append((cubin[:4], name))
            return name

        def start(self, *words: Any) -> None:
            told.append(words)

    monkeypatch.setattr(gpu, "CudaDriver", Driver)
    counted = torch.zeros(1, dtype=torch.int32)
    for early in (False, True):
        gpu.starter(counted, early)()
    (elf, name), first, _, second = told
    assert elf == b"\x7fELF" and name == "_count"
    function, grid, threads, shared, values, _ = first
    assert (function, grid, threads, shared) == ("_count", (1, 1, 1), 32, 0)
    assert [v.value for v in values] == [counted.data_ptr()]
    assert (first[-1], second[-1]) == (False, True)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--variants", "e3b"], "--variants e3b: "),
        (["--carry", "/nowhere"], "--carry /nowhere: there is no such folder"),
        (["--only", "sped"], "no stage sped: there are preflight, "),
        (["--run", "decode"], "no stage decode: there are preflight, "),
    ],
)
def test_options_refused(
    gpu: ModuleType,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    options: list[str],
    said: str,
) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "0")  # which a dry run sets
    monkeypatch.setattr(sys, "argv", ["gpu.py", "--out", str(tmp_path), "--dry-run", *options])
    try:
        code = gpu.main()
    except SystemExit as e:
        code = e.code
    assert code == 2 and said in capsys.readouterr().err


def test_the_most_useful_comes_first(gpu: ModuleType) -> None:
    """Each stage once, and engines before what runs them, wherever a budget ends."""
    args = argparse.Namespace(variants=["a", "b", "c", "d"], tune=True)
    names = [s.name for s in gpu.stages(args)]
    assert len(set(names)) == len(names) and {n.split("-")[0] for n in names} == {*gpu.KINDS}
    assert names[:4] == ["preflight", "kernels-a-b1", "build-a+b+c-b1", "decode-a-b1"]
    for i, stage in enumerate(gpu.stages(args)):
        if stage.kind in ("decode", "peers"):
            made = [s.args for s in gpu.stages(args)[:i] if s.kind == "build"]
            fitting = [a for a in made if a["rows"] == stage.args["rows"]]
            assert any(stage.args["variant"] in a["variants"].split(",") for a in fitting)


def test_a_dry_run_in_one_process(
    gpu: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All but kernels, which are interpreted in processes of their own."""
    from stages import common_parser, run_here

    small_bench(monkeypatch)
    monkeypatch.setattr(gpu, "ROWS", (1,))
    parser = common_parser("")
    given = {"variants": ["tiny-moe"], "tune": False}
    args = argparse.Namespace(
        **vars(parser.parse_args(["--out", str(tmp_path), "--dry-run"])) | given
    )
    found: dict[str, dict[str, Any]] = {}
    script = gpu.Script(BENCH / "gpu.py", gpu.KINDS, gpu.stages, gpu.about)
    names = ("preflight", "build-tiny-moe-b1", "decode-tiny-moe-b1", "peers-tiny-moe-b1", "predict")
    by_name = {s.name: s for s in gpu.stages(args)}
    for name in names:
        run_here(script, by_name[name], args)
        body = json.loads((tmp_path / f"{name}.json").read_text())
        assert body["state"] == "done" and "torch" in body["about"]
        found[name] = body["cells"]
    assert all(cell["us_best"] > 0 for n, cell in found["preflight"].items() if "gap" in n)
    assert (tmp_path / "step_model-h200.yaml").exists()
    assert (tmp_path / "engines" / "tiny-moe-b1").is_dir()
    assert {*found[names[2]]} == {"load", "decode c32", "agreement", "prefill 24"}
    assert found[names[2]]["agreement"]["cosine"] > 0.9999
    assert found[names[3]]["hf-static c32"]["cosine"] > 0.9999
    (predicted,) = found["predict"].values()
    assert 0 < predicted["roof_us"] < predicted["us"]["fast"] < predicted["us"]["slow"]


@pytest.mark.full
def test_a_dry_run(tmp_path: Path) -> None:
    """The command as it is given, every stage."""
    command = [sys.executable, str(BENCH / "gpu.py"), "--out", str(tmp_path), "--dry-run"]
    done = subprocess.run(command, capture_output=True, text=True)
    whole = json.loads((tmp_path / "report.json").read_text())
    assert done.returncode == 0, done.stdout
    assert {b["state"] for b in whole.values()} == {"done"}
    refused = {n: c for b in whole.values() for n, c in b["cells"].items() if "refused" in c}
    assert not refused


def test_programs_are_carried(
    gpu: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are taken as if they had been compiled here."""
    for name in ("CACHE", "STATE"):
        monkeypatch.setenv(f"XDG_{name}_HOME", str(tmp_path / name))
    program = tmp_path / "carried" / "engines" / "e2b-b1" / "programs" / f"{'0' * 24}.pt2"
    program.parent.mkdir(parents=True)
    program.write_bytes(b"compiled")
    gpu.take_carried(tmp_path / "carried")
    (out := tmp_path / "out").mkdir()
    assert compiler._from_cache(program.name, out)
    assert (out / program.name).read_bytes() == b"compiled"
    gpu.take_carried(None)


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
