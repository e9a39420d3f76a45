"""The kernels' tests with the compiler's sanitizers in them, for each instruction set of this
CPU."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from g4ir.ui.processor import ISA, SETS, architecture, cpu_flags

#: what reads and writes at the edges of sizes: products, codes, attention, steps
TESTS = (
    *("tests/test_kernels.py", "tests/test_attention_kernels.py", "tests/test_fused_kernels.py"),
    "tests/test_step_program.py",
)
HERE = [s.name for s in SETS if s.machine == architecture() and s.flags <= {*cpu_flags()}]


@pytest.mark.full
@pytest.mark.parametrize("name", HERE)
def test_kernels_under_sanitizers(name: str) -> None:
    """Addresses and undefined behaviour."""
    words = [sys.executable, "-m", "tests.sanitized", "address,undefined", *TESTS, "-x"]
    words += ["-k", "not other_cpus and not test_other_threads"]
    done = subprocess.run(words, env=os.environ | {ISA: name}, capture_output=True, text=True)
    assert not done.returncode, done.stdout[-3000:] + done.stderr[-3000:]
