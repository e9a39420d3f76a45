"""Replaces placeholders by soft tokens, and cuts prompts into chunks without splitting an image.

    prompt = merged(tokens, lengths, softs, ids, blocks=True)
    for piece in prompt.pieces(chunk):
        part = piece.take(prompt.tokens, 0)     # [B, width]
        prompt.put_soft(embeds, piece)          # embeds [B, width, hidden] of part

A block is a run of adjacent placeholders of images or video frames. If a model attends to images in
both directions, all tokens of a block must be in one chunk (rule 19). Chunks, prefix-cache marks
and cached prefixes are cut by the same rule (`_before_block`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from g4ir.errors import InputError
from g4ir.model.media import PICTURES

from .soft import Soft, count_error, counts

Tensor = torch.Tensor


@dataclass(frozen=True)
class Piece:
    """The tokens that a step processes, from start[b] to start[b] + count[b] of each sequence b;
    both i64[B]. `at`: the common start of all sequences; None: they may differ."""

    start: Tensor
    count: Tensor
    at: int | None = None

    @cached_property
    def width(self) -> int:
        return int(self.count.max())

    def take(self, t: Tensor, fill: int) -> Tensor:
        """Return the piece of t [B, S] as [B, width]. After a sequence's `count` tokens it has t's
        padding, or, if `at` is None, `fill`."""
        if self.at is not None:
            return t[:, self.at : self.at + self.width]
        column = torch.arange(self.width)
        index = (self.start[:, None] + column).clamp(max=t.shape[1] - 1)
        return t.gather(1, index).where(column < self.count[:, None], fill)


@dataclass(frozen=True)
class TokenBatch:
    """Tokens i64[B,S], of which sequence b's first lengths[b] are valid. `soft_rows` i64[B,S]:
    index of each placeholder's soft token in `table` [N, hidden], else -1; `block_ids` i64[B,S]:
    index in the prompt of the first token of its block, else -1."""

    tokens: Tensor
    lengths: Tensor
    soft_rows: Tensor | None = None
    table: Tensor | None = None
    block_ids: Tensor | None = None

    def pieces(self, chunk: int) -> list[Piece]:
        """Return the pieces for successive steps, each of at most `chunk` tokens per sequence."""
        return cut(self.lengths, chunk, self.block_ids)

    def piece(self, start: int, stop: int) -> Piece:
        """Return the piece of a batch of one sequence from `start` to `stop`, or, if a cut at
        `stop` would split a block, to the end that `piece_ends` gives."""
        if self.block_ids is not None:
            at, end = torch.tensor([[start], [stop]])
            stop = int(piece_ends(at, end, self.lengths, self.block_ids)[0])
        return Piece(torch.tensor([start]), torch.tensor([stop - start]), start)

    def boundary(self, index: int) -> int:
        """Return `index`, or, if a cut there would split a block, that block's start; for one
        sequence."""
        if self.block_ids is None:
            return index
        return int(_before_block(torch.tensor([index]), self.lengths, self.block_ids)[0])

    @property
    def spans(self) -> list[tuple[int, int]]:
        """The start and stop of each block, in a batch of one sequence."""
        if self.block_ids is None:
            return []
        starts, counts = self.block_ids[self.block_ids >= 0].unique(return_counts=True)
        return [(s, s + n) for s, n in zip(starts.tolist(), counts.tolist(), strict=True)]

    def blocks(self, piece: Piece) -> Tensor | None:
        """Return the block ids of a piece, i64[B, width]; None if it has no block."""
        if self.block_ids is None:
            return None
        ids = piece.take(self.block_ids, -1)
        return ids if bool((ids >= 0).any()) else None

    def put_soft(self, embeds: Tensor, piece: Piece) -> None:
        """Overwrite the embeddings of placeholders in a piece's embeds [B, width, hidden] by their
        soft tokens, in place."""
        if self.soft_rows is None or self.table is None:
            return
        rows = piece.take(self.soft_rows, -1)
        batch, column = (rows >= 0).nonzero(as_tuple=True)
        soft = self.table[rows[batch, column].to(self.table.device)].to(embeds)
        embeds[batch.to(embeds.device), column.to(embeds.device)] = soft


# --- prompts ----------------------------------------------------------------------


def merged(
    tokens: Tensor, lengths: Tensor, softs: Sequence[Soft], ids: Mapping[str, int], blocks: bool
) -> TokenBatch:
    """Return the batch of tokens i64[B,S] and soft tokens, which passed `check_softs`. `ids`:
    placeholder id of each kind; a kind's placeholders take its soft tokens in row-major order.
    `blocks`: whether attention within an image or frame is bidirectional. InputError if the
    numbers of placeholders and soft tokens differ."""
    if not ids:
        return TokenBatch(tokens, lengths)
    valid = torch.arange(tokens.shape[1]) < lengths[:, None]
    rows, pictures = torch.full_like(tokens, -1), torch.zeros_like(valid)
    soft_counts = counts(softs)
    pieces: list[Tensor] = []
    at = 0
    for kind, holder in ids.items():
        mask, soft = (tokens == holder) & valid, soft_counts.get(kind, 0)
        of_kind = [s for s in softs if s.kind == kind]
        if (count := int(mask.sum())) != soft:
            fix = "prefill takes one for each soft token"
            raise count_error(kind, holder, count, len(of_kind), soft, fix)
        rows[mask] = torch.arange(at, at + count)
        pieces += [p for s in of_kind for p in s.pieces]
        at += count
        if kind in PICTURES:
            pictures |= mask
    seen = block_ids(pictures) if blocks and bool(pictures.any()) else None
    if not pieces:
        return TokenBatch(tokens, lengths, block_ids=seen)
    return TokenBatch(tokens, lengths, rows, torch.cat([p.to(pieces[0]) for p in pieces]), seen)


def check_softs(softs: Sequence[Any], hidden: int) -> None:
    """Raise InputError unless each is a Soft with finite floats [n, hidden]."""
    for i, soft in enumerate(softs):
        pieces = soft.pieces if isinstance(soft, Soft) else None
        if not isinstance(pieces, list | tuple) or not all(_is_rows(x, hidden) for x in pieces):
            expected = f"a Soft with a tuple of floats [n, {hidden}]"
            raise InputError(f"soft {i}: expected what Engine.encode returns, {expected}")
        if not all(bool(torch.isfinite(x).all()) for x in pieces):
            raise InputError(f"soft {i} ({soft.kind}): values are not finite: NaN or infinity")


def _is_rows(x: Any, hidden: int) -> bool:
    floats = isinstance(x, Tensor) and x.is_floating_point()
    return floats and x.dim() == 2 and x.shape[1] == hidden


def block_ids(pictures: Tensor) -> Tensor:
    """Return the block of each token, i64[B,S]: the index in the prompt of the first token of its
    run in `pictures` bool[B,S]; -1 outside of runs."""
    before = torch.nn.functional.pad(pictures, (1, 0))[:, :-1]
    index = torch.arange(pictures.shape[1]).expand(pictures.shape)
    first = index.where(pictures & ~before, 0)
    return first.cummax(1).values.where(pictures, -1)


# --- chunks -----------------------------------------------------------------------------------


def cut(lengths: Tensor, chunk: int, block_ids: Tensor | None = None) -> list[Piece]:
    """Return pieces of at most `chunk` tokens per sequence, as long as possible, cut where
    `piece_ends` allows. InputError if a block is longer than a chunk."""
    if block_ids is None:
        starts = range(0, int(lengths.max()), chunk)
        return [
            Piece(torch.full_like(lengths, at), (lengths - at).clamp(0, chunk), at) for at in starts
        ]
    _check_blocks(block_ids, chunk)
    start, pieces = torch.zeros_like(lengths), list[Piece]()
    while bool((start < lengths).any()):
        end = piece_ends(start, (start + chunk).clamp(max=lengths), lengths, block_ids)
        pieces.append(Piece(start, end - start))
        start = end
    return pieces


def piece_ends(start: Tensor, stop: Tensor, lengths: Tensor, block_ids: Tensor) -> Tensor:
    """Return the end of each sequence's piece, i64[B]: `stop`, or, if that is within a block, the
    block's start; if the piece starts there, the block's end. `start` must not be within a
    block."""
    end = _before_block(stop, lengths, block_ids)
    size = (block_ids == start[:, None]).sum(1)
    return torch.where(end > start, end, start + size)


def _before_block(end: Tensor, lengths: Tensor, block_ids: Tensor) -> Tensor:
    """Return `end` i64[B], or the start of the block that a cut there would split."""
    last = (end - 1).clamp(min=0)[:, None]
    after = end.clamp(max=block_ids.shape[1] - 1)[:, None]
    here, there = (block_ids.gather(1, i)[:, 0] for i in (last, after))
    return there.where((end < lengths) & (there >= 0) & (here == there), end)


def _check_blocks(block_ids: Tensor, chunk: int) -> None:
    rows, _ = (block_ids >= 0).nonzero(as_tuple=True)
    if not rows.numel():
        return
    pairs = torch.stack((rows, block_ids[block_ids >= 0]), 1)
    blocks, sizes = pairs.unique(dim=0, return_counts=True)
    if (longest := int(sizes.max())) > chunk:
        row, at = blocks[sizes.argmax()].tolist()
        raise InputError(
            f"sequence {row}: the {longest} soft tokens of the image or frame at index {at} attend "
            f"to each other and must be in one chunk, of at most {chunk}; build with "
            f"--prefill-chunk {longest} or more, or give it fewer soft tokens"
        )
