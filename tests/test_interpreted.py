"""Runs the tests of the kernels' numbers in a process whose triton interprets."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
FOLDERS = ("tests/interpreted", "tests/trt/interpreted")


def test_under_the_interpreter(full: bool) -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist"]
    done = subprocess.run(
        [*command, *FOLDERS, *(["--full"] if full else [])], cwd=ROOT, text=True,
        capture_output=True, env={**os.environ, "TRITON_INTERPRET": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
