"""The KV caches of a session: allocated once at full size; a step gets views of the slots in
use."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from math import prod
from typing import Any, TypeVar

import torch

from g4ir.ir.graph import Program
from g4ir.ops.types import zeros
from g4ir.plan.formats import cache_types, capacity, context_slots

from .base import State

T = TypeVar("T")


class CaptureCache:
    """CUDA graphs, step programs and decode loops that hold addresses of a session's caches, and
    the arenas of step programs; freed with the session."""

    def __init__(self) -> None:
        self._entries: dict[tuple[type, Hashable], Any] = {}

    def get(self, kind: type[T], key: Hashable, make: Callable[[], T]) -> T:
        """Return the object of this class and key; `make` creates it at the first call."""
        if (kind, key) not in self._entries:
            self._entries[kind, key] = make()
        return self._entries[kind, key]

    def keys(self, kind: type) -> set[Hashable]:
        return {key for cls, key in self._entries if cls is kind}


class Caches(State):
    """KV caches [slots, B, n, d], zero at first. `views` cuts full-length ones (`linear`) to the
    slots in use; ring caches of sliding windows stay whole."""

    def __init__(self, program: Program, batch: int, max_seq: int, device: str) -> None:
        self.capacity, self.adapters = capacity(max_seq), torch.full((batch,), -1)
        self.types = cache_types(program, batch, max_seq)
        self.linear = {n for n, v in program.state().items() if v.type.shape[0] == "C"}
        self.tensors = {name: zeros(t, device) for name, t in self.types.items()}
        self._views: dict[int, Mapping[str, torch.Tensor]] = {}
        self.captured = CaptureCache()

    def views(self, context: int) -> Mapping[str, torch.Tensor]:
        slots = context_slots(context, self.capacity)
        if slots not in self._views:
            self._views[slots] = {
                n: t[:slots] if n in self.linear else t for n, t in self.tensors.items()
            }
        return self._views[slots]

    def row(self, index: int, context: int) -> dict[str, torch.Tensor]:
        return {name: t[:, index] for name, t in self.views(context).items()}

    def nbytes(self) -> int:
        return sum(prod(t.shape) * t.element_size() for t in self.tensors.values())

    def zero(self) -> None:
        for t in self.tensors.values():
            t.zero_()
