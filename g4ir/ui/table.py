"""Tables as text."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

Line = Sequence[str]
#: heading -> key of a row, and how its value is printed
Columns = Mapping[str, tuple[str, Callable[[Any], str]]]


def cells(columns: Columns, rows: Iterable[Mapping[str, Any]]) -> list[list[str]]:
    """Return the headings, and the cells of each row; `-` for None."""
    values = ([(row[key], text_of) for key, text_of in columns.values()] for row in rows)
    lines = (["-" if x is None else text_of(x) for x, text_of in row] for row in values)
    return [[*columns], *lines]


def aligned(lines: Iterable[Line], indent: int = 2, left: int = 1) -> str:
    """Return lines of text in columns: the first `left` to the left, the others to the right."""
    table = [list(line) for line in lines]
    width = max(map(len, table))
    table = [line + [""] * (width - len(line)) for line in table]
    widths = [max(len(line[i]) for line in table) for i in range(width)]
    rows = (
        "  ".join(
            c.ljust(w) if i < left else c.rjust(w) for i, (c, w) in enumerate(zip(line, widths))
        )
        for line in table
    )
    return "".join(f"{' ' * indent}{row.rstrip()}\n" for row in rows)


def markdown_table(lines: Iterable[Line]) -> str:
    """Return lines, the first of which is the head, as a Markdown table; numbers to the right."""
    head, *rows = lines
    table = [head, ["---", *["---:"] * (len(head) - 1)], *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in table)
