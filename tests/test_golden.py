"""What the command line prints of plans, costs, kernels, ops and variants, word for word.

A file of tests/golden is a transcript: each `$ g4ir ...` is followed by what it prints. With
`--rewrite-golden` the files are written anew; read the difference, and derive one number of it by
hand, before you keep it. Numbers from first principles are in test_plan.py and test_cost.py.
"""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from tests.cli_tools import g4ir

GOLDEN = Path(__file__).with_name("golden")
FILES = sorted(path.stem for path in GOLDEN.glob("*.txt"))


def commands(text: str) -> list[str]:
    """The commands of a transcript, in order."""
    return re.findall(r"^\$ g4ir (.*)$", text, re.M)


def transcript(lines: list[str]) -> str:
    """The commands again, each with what it prints now."""
    out = ""
    for line in lines:
        outcome = g4ir(*shlex.split(line))
        assert outcome.code == 0 and not outcome.err, outcome
        out += f"$ g4ir {line}\n{outcome.out}"
    return out


@pytest.mark.parametrize("name", FILES)
def test_transcript(name: str, rewrite_golden: bool) -> None:
    path = GOLDEN / f"{name}.txt"
    text = path.read_text()
    found = transcript(commands(text))
    if rewrite_golden:
        path.write_text(found)
    assert found == text or rewrite_golden
    assert commands(text)
