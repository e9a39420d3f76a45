"""Old words do not come back: tests/glossary.yaml says which, what stands for them, and where each
may stand in another meaning."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[1]
WORDS: list[dict[str, Any]] = yaml.safe_load((ROOT / "tests" / "glossary.yaml").read_text())
SUFFIXES = {".py", ".md", ".yaml", ".c", ".h", ".js", ".html"}


def lines() -> Iterator[tuple[str, int, str]]:
    """Every line of the product and its documentation, except the glossary itself."""
    for part in ("g4ir", "passes", "backends", "docs", "README.md"):
        for path in (ROOT / part, *sorted((ROOT / part).rglob("*"))):
            name = path.relative_to(ROOT).as_posix()
            if path.suffix in SUFFIXES and path.is_file() and name != "docs/glossary.md":
                for number, line in enumerate(path.read_text().splitlines(), 1):
                    yield name, number, line


LINES = [*lines()]


@pytest.mark.parametrize("word", WORDS, ids=lambda word: word["now"])
def test_an_old_word_stands_only_where_it_may(word: dict[str, Any]) -> None:
    old, may = re.compile(word["old"]), tuple(word.get("may", ()))
    found = [
        f"{name}:{number}: {line.strip()}"
        for name, number, line in LINES
        if old.search(line) and not name.startswith(may)
    ]
    assert not found, f"write {word['now']}:\n" + "\n".join(found)
