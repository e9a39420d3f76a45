"""Shows what the ranks of an engine compute to the first of them, which may write over it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from g4ir.backends.base import Watch
from g4ir.parallel.group import Group

#: is shown a rank's tensor by its name, and may write over it
See = Callable[[int, str, torch.Tensor], None]


def shown(group: Group, see: See | None = None) -> Watch:
    """Return what shows a rank's values to the first, which has `see`."""

    def watch(name: str, t: torch.Tensor) -> None:
        group.shown(t, see and (lambda rank, x: see(rank, name, x)))

    return watch


def watch_slots(state: Any, name: str, held: range, watch: Watch) -> None:
    """Show what a rank's cache has at these positions."""
    cache = state.tensors[name]
    slots = slots_of(held, cache)
    seen = cache[slots]
    watch(name, seen)
    cache[slots] = seen


def slots_of(held: range, cache: torch.Tensor) -> list[int]:
    """Return where positions lie: p in slot p mod as many as there are."""
    return [p % len(cache) for p in held]
