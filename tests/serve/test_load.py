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


def test_a_stream_goes_on_beside_what_takes_long(served: Running, full: bool) -> None:
    """Loosely: other work shares these cores. Gaps are compared with those of the stream alone."""
    size, half, pause = ("2000000", "200", "2") if full else ("500000", "50", "0.4")
    words = ("--bodies", size, "--half", half, "--pause", pause)
    text = load(served.url, "--beside", *words)
    found = re.findall(r"^(\w.*?) +(200|400|-) +[\d.]+ +(\d+)$", text, re.M)
    gaps = {name: float(gap) for name, _, gap in found}
    answers = {name: answer for name, answer, _ in found}
    assert len(found) == 12, text
    assert answers["first JSON"] == answers[f"{half} half heads"] == "200"
    assert {a for name, a in answers.items() if name.endswith("MB")} == {"200", "400"}
    assert max(gaps.values()) < 1500 + 4 * gaps["nothing"], text
