"""Soft tokens: outputs of the towers, which replace a prompt's placeholders."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from g4ir.errors import InputError
from g4ir.ops.types import torch


@dataclass(frozen=True, eq=False)
class Soft:
    """The soft tokens of one medium, in the order of its placeholders.

    `pieces` are [n, hidden] each: one of an image or audio clip, one per frame of a video. `times`:
    minutes and seconds of a video's frames; empty for other kinds, and if the model takes none."""

    kind: str  # image, video or audio
    pieces: tuple[torch.Tensor, ...]
    times: tuple[str, ...] = ()

    @property
    def count(self) -> int:
        """Number of soft tokens, and so of placeholders in the expanded prompt."""
        return sum(len(p) for p in self.pieces)


def counts(softs: Sequence[Soft]) -> dict[str, int]:
    """Return the number of soft tokens of each kind of media."""
    out: dict[str, int] = {}
    for s in softs:
        out[s.kind] = out.get(s.kind, 0) + s.count
    return out


def count_error(
    kind: str,
    holder: int | None,
    placeholders: int,
    media: int,
    soft: int | None = None,
    fix: str = "put one for each medium, or one for each soft token",
) -> InputError:
    """Return the error for a prompt whose placeholders (token id `holder`; None: the engine has
    none) of a kind match neither its media nor their soft tokens; `soft` None: the media are not
    encoded yet."""
    if holder is None:
        return InputError(f"{kind}: {media} given, but the engine has no placeholder; leave it out")
    size = "" if soft is None else f" with {soft} soft tokens"
    count = f"the prompt has {placeholders} placeholders (id {holder})"
    fix = fix if media else "pass the media, or leave the placeholders out"
    return InputError(f"{kind}: {count} for {media} media{size}; {fix}")
