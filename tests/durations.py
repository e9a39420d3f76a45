"""How long each test file takes, as a run with `--rewrite-durations` measured it.

Files of few tests that take long are begun first: begun last, one of them would run alone at the
end.
"""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest

FILE = Path(__file__).with_suffix(".json")
ROOT = Path(__file__).parents[1]


def file_of(nodeid: str) -> str:
    return nodeid.partition("::")[0]


def longest_first(items: list[pytest.Item]) -> None:
    """Sort by file; one that was never measured comes last."""
    seconds = json.loads(FILE.read_text())
    items.sort(key=lambda item: -seconds.get(file_of(item.nodeid), 0))


class Durations:
    """Adds up what all workers report, and keeps it. Files that did not run keep their seconds."""

    def __init__(self) -> None:
        self.seconds: Counter[str] = Counter()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.seconds[file_of(report.nodeid)] += report.duration

    def pytest_sessionfinish(self) -> None:
        known = json.loads(FILE.read_text()) if FILE.exists() else {}
        known |= {file: round(seconds) for file, seconds in self.seconds.items()}
        kept = {file: n for file, n in known.items() if n and (ROOT / file).exists()}
        ordered = dict(sorted(kept.items(), key=lambda pair: (-pair[1], pair[0])))
        FILE.write_text(json.dumps(ordered, indent=1) + "\n")
