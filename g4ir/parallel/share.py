"""The part of a model's weights that one rank of several has."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from g4ir.ir.graph import Value
from g4ir.spec.record import Spec

from .table import FIRST, AxisShard, first_expert, part_of


@dataclass(frozen=True)
class Share:
    """Weights of rank `rank` of `ranks`; with `ep` it has some of the experts."""

    spec: Spec
    rank: int
    ranks: int
    ep: bool = False

    def cuts(self, param: str) -> bool:
        """Whether ranks have different parts of a param."""
        return self.ranks > 1 and (param == FIRST or self._part(param) is not None)

    def source(self, param: str) -> str | None:
        """Return the param of the whole model that a param of a rank is cut from; None: it is a
        rank's own."""
        if param == FIRST:
            return None
        part = self._part(param)
        return part.source if part else param

    def own(self, param: str, read: Callable[[str], Any]) -> Any:
        """Return the rank's part of a param; `read` gives those of the whole model."""
        if param == FIRST:
            import torch

            return torch.tensor([first_expert(self.spec, self.rank, self.ranks)])
        part = self._part(param)
        made = read(part.source if part else param)
        return part.cut(made, self.rank, self.ranks).contiguous() if part else made

    def joined(self, v: Value, read: Callable[[int, Value], Any]) -> Any:
        """Return a weight of the whole model, of what the ranks have; `read` gives a rank's."""
        part = self._part(v.name)
        if part is None:
            return read(0, v)
        own = Value(v.name, part.cut_type(v.type, self.ranks))
        parts = [read(rank, own) for rank in range(self.ranks)]
        return part.joined(parts, int(v.type.shape[part.axis]))

    def _part(self, param: str) -> AxisShard | None:
        return part_of(self.spec, param, self.ep) if self.ranks > 1 else None
