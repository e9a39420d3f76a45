"""The part of a model's weights that one rank of several has."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from g4ir.spec.record import Spec

from .table import part_of


@dataclass(frozen=True)
class Share:
    """Weights of rank `rank` of `ranks`."""

    spec: Spec
    rank: int
    ranks: int

    def cuts(self, param: str) -> bool:
        """Whether ranks have different parts of a param."""
        return self.ranks > 1 and part_of(self.spec, param) is not None

    def source(self, param: str) -> str:
        """Return the param of the whole model that a param of a rank is cut from."""
        part = part_of(self.spec, param) if self.ranks > 1 else None
        return part.source if part else param

    def cut(self, param: str, tensor: Any) -> Any:
        """Return the rank's part of the tensor of `source`."""
        part = part_of(self.spec, param) if self.ranks > 1 else None
        return part.cut(tensor, self.rank, self.ranks).contiguous() if part else tensor
