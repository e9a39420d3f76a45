"""Tables as text."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import zip_longest
from typing import Any

Line = Sequence[str]
#: heading -> (key of a row, format function)
Columns = Mapping[str, tuple[str, Callable[[Any], str]]]


def cells(columns: Columns, rows: Iterable[Mapping[str, Any]]) -> list[list[str]]:
    """Return the headings, and the cells of each row; `-` for None."""
    values = ([(row[key], text_of) for key, text_of in columns.values()] for row in rows)
    lines = (["-" if x is None else text_of(x) for x, text_of in row] for row in values)
    return [[*columns], *lines]


def aligned(lines: Iterable[Line], indent: int = 2, left: int = 1) -> str:
    """Return lines of text in columns: the first `left` columns left-aligned, the others
    right-aligned."""
    columns = list[list[str]]()
    for i, column in enumerate(zip_longest(*lines, fillvalue="")):
        width = max(map(len, column))
        columns.append([c.ljust(width) if i < left else c.rjust(width) for c in column])
    return "".join(f"{' ' * indent}{'  '.join(row).rstrip()}\n" for row in zip(*columns))


def markdown_table(lines: Iterable[Line]) -> str:
    """Return lines, the head first, as a Markdown table; all columns but the first are
    right-aligned."""
    head, *rows = lines
    table = [head, ["---", *["---:"] * (len(head) - 1)], *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in table)
