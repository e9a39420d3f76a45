"""A pass over a segment, as lowerings see it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from g4ir.ir.graph import Graph

from .kernels.base import Schedule

#: (run, node, *tensors) -> result
Lowering = Callable[..., Any]


@dataclass(frozen=True)
class Run:
    """One pass over a segment: lowerings read and add values by name in `env`."""

    schedule: Schedule
    env: dict[str, Any]

    @property
    def graph(self) -> Graph:
        return self.schedule.graph

    @property
    def device(self) -> str:
        return self.schedule.target.device
