"""Plots as files, by matplotlib without a display.

    with figure(path, width, height) as axes:
        axes.plot(...)

writes PNG or SVG by the file's suffix. Raises InputError for another suffix or an absent directory,
and MissingError if matplotlib is not installed, before anything is drawn.
"""

from __future__ import annotations

import io
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from g4ir.errors import InputError, MissingError

from .files import write_file

FORMATS = {".png": "png", ".svg": "svg"}


def new_figure(width: float, height: float) -> Any:
    """Return a figure of a size in inches; MissingError without matplotlib."""
    try:
        from matplotlib.figure import Figure
    except ImportError as e:
        raise MissingError("plots need matplotlib: pip install 'g4ir[plot]'") from e
    # A figure created without pyplot has the canvas of the file format and needs no display.
    return Figure(figsize=(width, height), layout="constrained")


def check_plot(path: str | Path) -> None:
    """Raise the errors of `figure` early, before anything is measured."""
    if Path(path).suffix.lower() not in FORMATS:
        raise InputError(f"--plot {path}: expected a name that ends in {' or '.join(FORMATS)}")
    if not Path(path).absolute().parent.is_dir():
        raise InputError(f"--plot {path}: its directory does not exist")
    new_figure(1, 1)


@contextmanager
def figure(path: str | Path, width: float, height: float, columns: int = 1) -> Iterator[Any]:
    """Context with axes to draw on (for several `columns` an array of them, side by side); the file
    is written at the end, atomically. width, height: of the whole figure, in inches."""
    check_plot(path)
    canvas = new_figure(width, height)
    yield canvas.subplots(1, columns)
    buffer = io.BytesIO()
    canvas.savefig(buffer, format=FORMATS[Path(path).suffix.lower()], dpi=150)
    write_file(Path(path), [buffer.getvalue()])
