"""Soft tokens: what towers make of media, and where a prompt's placeholders take them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, eq=False)
class Soft:
    """The soft tokens of one medium, in the order of its placeholders.

    `pieces` are [n, hidden] each: one of an image or a sound, one per frame of a video, whose
    `times` are the frames' minutes and seconds."""

    kind: str  # image, video or audio
    pieces: tuple[torch.Tensor, ...]
    times: tuple[str, ...] = ()

    @property
    def count(self) -> int:
        """Placeholders that it takes."""
        return sum(len(p) for p in self.pieces)


def counts(softs: Sequence[Soft]) -> dict[str, int]:
    """Soft tokens per kind."""
    out: dict[str, int] = {}
    for s in softs:
        out[s.kind] = out.get(s.kind, 0) + s.count
    return out
