"""Beginnings of prompts that were computed: copies of a row, found again by tokens and media."""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Mapping, Sequence

import torch

from g4ir.media.soft import Soft

from .session import Session, Snapshot

#: what a prompt is compared by: a token's id, or for a soft token a number of its medium
Keys = tuple[int, ...]
#: bytes that a key takes beside the snapshot that it finds
KEY_BYTES = 40


def prompt_keys(tokens: Sequence[int], soft: Sequence[Soft], holders: Mapping[str, int]) -> Keys:
    """Return the keys of a prompt, whose placeholders are given by kind. Those of media follow from
    what the towers made, so that equal ids of other pixels differ; they are negative."""
    if not soft:
        return tuple(tokens)
    made = {i: iter(_media_keys(kind, soft)) for kind, i in holders.items()}
    return tuple(next(made[t]) if t in made else t for t in tokens)


def _media_keys(kind: str, soft: Sequence[Soft]) -> list[int]:
    """Return a key for each soft token of a kind."""
    out: list[int] = []
    for s in soft:
        if s.kind == kind:
            first = _digest(s)
            out += [-(first + i + 1) for i in range(s.count)]
    return out


def _digest(soft: Soft) -> int:
    """Return 128 bits of a medium's content."""
    h = hashlib.sha256(soft.kind.encode())
    for piece in soft.pieces:
        h.update(f"{piece.dtype} {[*piece.shape]}".encode())
        h.update(piece.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes())
    return int.from_bytes(h.digest()[:16], "little")


def shared(a: Keys, b: Keys) -> int:
    """Count how many keys are equal from the first on."""
    if a[: len(b)] == b[: len(a)]:
        return min(len(a), len(b))
    return next(i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y)


class PrefixCache:
    """Snapshots of one-row sessions, at most so many bytes of them: what was not used for longest
    is dropped first. What is kept under a salt is found under the same salt only."""

    def __init__(self, most_bytes: int) -> None:
        self.most_bytes, self.nbytes = most_bytes, 0
        #: snapshots that were not kept because each is larger than all the room
        self.too_large = 0
        self._kept: OrderedDict[tuple[str, Keys], tuple[Snapshot, int]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._kept)

    def keep(self, salt: str, keys: Keys, session: Session) -> bool:
        """Remember what the session holds, which `keys` are; whether there is room for it."""
        name = (salt, keys)
        if name in self._kept:
            self._kept.move_to_end(name)
            return True
        size = session.nbytes(int(session.length.max())) + KEY_BYTES * len(keys)
        if size > self.most_bytes:
            self.too_large += 1
            return False
        while self.nbytes + size > self.most_bytes:
            self._drop_oldest()
        self._kept[name] = session.snapshot(), size
        self.nbytes += size
        return True

    def _drop_oldest(self) -> None:
        _, (_, size) = self._kept.popitem(last=False)
        self.nbytes -= size

    def longest(self, salt: str, keys: Keys) -> tuple[int, Snapshot | None]:
        """Return the longest beginning of `keys` that is kept, shorter than they are: its length
        and what was held; or 0 and None."""
        fits = [
            name
            for name in self._kept
            if name[0] == salt and len(name[1]) < len(keys) and keys[: len(name[1])] == name[1]
        ]
        if not fits:
            return 0, None
        name = max(fits, key=lambda name: len(name[1]))
        self._kept.move_to_end(name)
        return len(name[1]), self._kept[name][0]

    def clear(self) -> None:
        """Forget everything."""
        self._kept.clear()
        self.nbytes = 0
