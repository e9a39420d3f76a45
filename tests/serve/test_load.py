"""The load script against a served tiny engine."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

from tests.serve.running import Running

ROOT = Path(__file__).parents[2]


def load(*words: str) -> str:
    command = [sys.executable, str(ROOT / "bench" / "load.py"), *words]
    return subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT).stdout


def test_every_request_is_answered_and_counted(served: Running) -> None:
    lengths = ("--input", "4-40", "--output", "3-6")
    text = load(served.url, "--requests", "9", "--rate", "0", *lengths)
    assert re.match(r"9 requests in [\d.]+ s \(9 x 200\)\n", text)
    found = re.search(r"([\d.]+) rows decoded at a time \((\d+) steps\)", text)
    assert found and 1 < float(found[1]) <= 4 and int(found[2]) >= 6
    for line in ("first text", "between texts", "whole answer"):
        assert re.search(rf"{line} +\d+ +\d+ +\d+", text), text
