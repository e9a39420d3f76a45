"""Progress: messages about long work, and the callbacks that receive them."""

from __future__ import annotations

from collections.abc import Callable

Progress = Callable[[str], None]


def no_progress(message: str) -> None:
    """Ignore the message."""


def prefixed(progress: Progress, stage: str) -> Progress:
    """Return a callback that passes messages on to `progress`, with `stage: ` before each."""
    return lambda message: progress(f"{stage}: {message}")
