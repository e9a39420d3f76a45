"""Runs the tests of the kernels' numbers in a process whose triton interprets."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FOLDER = "tests/interpreted"


def test_under_the_interpreter(full: bool) -> None:
    run_pytest(ROOT, FOLDER, *(["--full"] if full else []), TRITON_INTERPRET="1")


@pytest.mark.full
def test_in_another_order() -> None:
    """Programs of a grid as a GPU may run them, in memory that is not zero."""
    # Tests of orders choose their own.
    own = f"--ignore={FOLDER}/test_orders.py"
    words = FOLDER, own, "--interleaved", "1", "--poison"
    run_pytest(ROOT, *words, TRITON_INTERPRET="1")


def run_pytest(tree: Path, *words: str, **environment: str) -> None:
    """Run tests that pass in a process of their own."""
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:xdist", "-p", "no:cacheprovider", *words],
        cwd=tree,
        text=True,
        capture_output=True,
        env={**os.environ, **environment},
    )
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
