"""What is told of long work, and to whom."""

from __future__ import annotations

from collections.abc import Callable

Progress = Callable[[str], None]


def no_progress(message: str) -> None:
    """Progress that nobody reads."""


def prefixed(progress: Progress, stage: str) -> Progress:
    """The same, where each message begins with the stage."""
    return lambda message: progress(f"{stage}: {message}")
