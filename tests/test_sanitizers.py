"""The kernels' tests with the compiler's sanitizers in them, for each instruction set of this
CPU."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from g4ir.ui.processor import ISA, SETS, architecture, cpu_flags

#: what reads and writes at the edges of sizes: products, codes, attention, steps
FILES = ("kernels", "attention_kernels", "fused_kernels", "step_program")
HERE = [s.name for s in SETS if s.machine == architecture() and s.flags <= {*cpu_flags()}]


@pytest.mark.full
@pytest.mark.parametrize("name", HERE)
@pytest.mark.parametrize("kinds", ["address,undefined", "thread"])
def test_kernels_under_sanitizers(name: str, kinds: str) -> None:
    """Addresses and undefined behaviour; threads that read what others write."""
    words = ["-x", "-k", "not other_cpus and not test_other_threads"]
    words += [f"tests/test_{file}.py" for file in FILES]
    command = [sys.executable, "-m", "tests.sanitized", kinds, *words]
    done = subprocess.run(command, env=os.environ | {ISA: name}, capture_output=True, text=True)
    assert not done.returncode, done.stdout[-3000:] + done.stderr[-3000:]
