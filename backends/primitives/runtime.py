"""Shared by the ONNX and TensorRT runtimes: a session's KV caches."""

from __future__ import annotations

from collections.abc import Collection, Mapping

import torch

from g4ir.backends.base import State
from g4ir.backends.kv_cache import CaptureCache
from g4ir.ops.types import Type, zeros
from g4ir.plan.engine_limits import Limits
from g4ir.plan.formats import context_slots

from .network import TURNED, as_in_ir, full_slots, turn


class NetworkCaches(State):
    """A session's KV caches in the network's layout [B, heads, slots, head_dim], zeroed, and the
    rotation of its ring caches, i64[B]."""

    def __init__(
        self,
        types: Mapping[str, Type],
        rings: Collection[str],
        batch: int,
        limits: Limits,
        device: str = "cpu",
    ) -> None:
        bound = {name: t.bind({"B": batch}) for name, t in types.items()}
        self.caches = {name: zeros(t, device) for name, t in bound.items()}
        self.rings, self.capacity = frozenset(rings), full_slots(limits)
        self.turned = torch.zeros(batch, dtype=torch.int64, device=device)
        self.captured = CaptureCache()

    @property
    def tensors(self) -> dict[str, torch.Tensor]:
        """The caches, [slots, B, n, d], with position p in slot p mod slots: views, writable."""
        return as_in_ir(self.caches, self.rings, self.turned)

    def turn(self, positions: torch.Tensor) -> None:
        """Rotate ring caches so that this chunk does not wrap (network.py)."""
        turn(positions, self.turned, [self.caches[name] for name in self.rings])

    def slots(self, context: int) -> int:
        return context_slots(context, self.capacity)

    def views(self, context: int) -> dict[str, torch.Tensor]:
        slots = self.slots(context)
        parts = {n: t if n in self.rings else t[:, :, :slots] for n, t in self.caches.items()}
        return parts | {TURNED: self.turned}

    def row(self, index: int, context: int) -> dict[str, torch.Tensor]:
        return {name: t[index] for name, t in self.views(context).items()}

    def nbytes(self) -> int:
        return sum(t.nbytes for t in self.caches.values())

    def zero(self) -> None:
        for t in (*self.caches.values(), self.turned):
            t.zero_()
