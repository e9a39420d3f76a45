"""The CUDA programs of real engines, built without a GPU: the parts of that tool, and, at length,
what it finds."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tests.cases import TABLES
from tests.cuda_programs.build import Built, Kernel, Program, entry_name, line, wide_numbers

ROOT = Path(__file__).parents[1]
PYTHON = ROOT / "build" / "cuda-env" / "bin" / "python"

PTX = TABLES["cuda programs"]["ptx"]


def test_operands_in_fp64_are_counted() -> None:
    """Those of the kernel, not what it computes with."""
    assert entry_name(PTX) == "_decode" and wide_numbers(PTX) == 0
    assert wide_numbers(PTX.replace(".param .f32", ".param .f64")) == 1


@pytest.mark.parametrize(
    ("kernels", "error", "said"),
    [
        ((), "torch: a segment does not compile", "FAILED"),
        ((Kernel("fine", 40, 0, 0), Kernel("spills", 255, 16, 0)), "", "FAILED spills"),
        ((Kernel("wide", 40, 0, 2),), "", "FAILED wide"),
        ((Kernel("fine", 40, 0, 0),), "", "ok"),
    ],
)
def test_what_a_line_says(kernels: tuple[Kernel, ...], error: str, said: str) -> None:
    built = Built(Program("e2b", "decode", 1, "0 linear", ""), kernels, error, 1.0)
    first, *rest = line(built).splitlines()
    assert first.endswith(said) and built.ok == (said == "ok")
    assert [x.strip() for x in rest] == ([error] if error else [])


@pytest.mark.full
@pytest.mark.skipif(not PYTHON.exists(), reason="`make cuda-programs` makes its environment")
@pytest.mark.parametrize("rows", ["1", "8"])
@pytest.mark.parametrize("name", ["e2b", "e4b", "12b", "26b-a4b", "31b"])
def test_programs_compile_for_hopper(name: str, rows: str) -> None:
    """Whole programs, in the torch that GPU machines have, to a library that links; no kernel
    spills or is given a number as fp64."""
    command = [PYTHON, "-m", "tests.cuda_programs.build", "--variants", name, "--rows", rows]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
