"""Seconds of each test file, as a run with `--rewrite-durations` measured them.

Files of few tests that take long are begun first: begun last, one of them would run alone at the
end.
"""

from __future__ import annotations

import json
from collections import Counter
from math import inf
from pathlib import Path
from typing import Any

import pytest

FILE = Path(__file__).with_suffix(".json")
ROOT = Path(__file__).parents[1]


def file_of(nodeid: str) -> str:
    return nodeid.partition("::")[0]


def known_seconds() -> dict[str, float]:
    return json.loads(FILE.read_text())


def longest_first(items: list[pytest.Item]) -> None:
    """Sort by file; one that was never measured comes first, since it may be long."""
    seconds = known_seconds()
    items.sort(key=lambda item: -seconds.get(file_of(item.nodeid), inf))


class Durations:
    """Pytest plugin of the main process: adds up the seconds that tests report. Files that did not
    run keep theirs."""

    def __init__(self) -> None:
        self.seconds: Counter[str] = Counter()

    def pytest_runtest_logreport(self, report: Any) -> None:
        self.seconds[file_of(report.nodeid)] += report.duration

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if hasattr(session.config, "workerinput"):
            return
        known = known_seconds() if FILE.exists() else {}
        known |= {file: round(seconds) for file, seconds in self.seconds.items()}
        kept = {file: n for file, n in known.items() if (ROOT / file).exists()}
        ordered = dict(sorted(kept.items(), key=lambda pair: (-pair[1], pair[0])))
        FILE.write_text(json.dumps(ordered, indent=1) + "\n")
