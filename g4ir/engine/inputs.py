"""Validation of a session's inputs, and their conversion to tensors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from g4ir.errors import InputError
from g4ir.media.merge import TokenBatch, check_softs, merged
from g4ir.media.soft import Soft
from g4ir.model.decoder import BLOCKS
from g4ir.model.media import check_list, check_supported, list_media, placeholders

from .multimodal import encode
from .parts import EngineParts


@dataclass(frozen=True)
class SessionInputs:
    """Checks of one session's inputs, which raise InputError."""

    engine: EngineParts
    batch: int

    def prompt(
        self,
        length: torch.Tensor,
        tokens: Any,
        lengths: Any,
        soft: Sequence[Soft],
        **lists: Sequence[Any],
    ) -> TokenBatch:
        """Return tokens [batch, S] with their media; length: tokens in each row's KV cache."""
        tokens, lengths = self.tokens("prefill", length, tokens, lengths)
        check_list("soft", soft)
        engine = self.engine
        items = list_media(engine.media, engine.spec, **lists)
        softs = [*soft, *(encode(engine, kind, item) for kind, item in items)]
        check_softs(softs, engine.spec.text.hidden_size)
        for s in softs:
            check_supported(s.kind, engine.media, engine.spec)
        return merged(tokens, lengths, softs, _media(engine), BLOCKS in engine.program.graphs)

    def single(self, length: torch.Tensor, next_tokens: Any, active: Any) -> TokenBatch:
        """Return the batch of one token per row, from int64 [batch]; rows that are not `active`
        (bool [batch]) have none."""
        tokens, lengths = _tensor(next_tokens, "decode: tokens"), None
        if tokens.shape != (self.batch,) or tokens.dtype != torch.int64:
            found = f"found {str(tokens.dtype).removeprefix('torch.')} {list(tokens.shape)}"
            raise InputError(f"decode: expected int64 tokens [{self.batch}], {found}")
        if active is not None:
            lengths = _tensor(active, "decode: active")
            if lengths.shape != (self.batch,) or lengths.dtype != torch.bool:
                raise InputError(
                    f"decode: expected {self.batch} booleans as active, found {lengths.tolist()}"
                )
        return TokenBatch(*self.tokens("decode", length, tokens[:, None], lengths))

    def drafted(
        self, length: torch.Tensor, tokens: Any, lengths: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return tokens int64 [batch, S] to verify, S at most --draft-tokens + 1, and valid counts
        [batch]."""
        tokens, lengths = self.tokens("verify", length, tokens, lengths)
        width, max_tokens = tokens.shape[1], self.engine.draft_tokens + 1
        if width > 1 and max_tokens == 1:
            fix = "build the engine again with --draft-tokens K"
            raise InputError(f"{self.engine.label}: it verifies no drafted tokens; {fix}")
        if width > max_tokens:
            built = f"an engine of --draft-tokens {max_tokens - 1}"
            raise InputError(f"verify: {width} tokens; {built} takes {max_tokens} at most")
        return tokens, lengths

    def keep_lengths(self, length: torch.Tensor, n: Any) -> torch.Tensor:
        """Return the number of tokens each row keeps, int64 [batch]; at most `length`."""
        keep = _integers(n, "truncate")
        if keep.shape not in ((), (self.batch,)):
            expected = f"expected one length for all rows, or one for each of {self.batch} rows"
            raise InputError(f"truncate to {keep.tolist()}: {expected}")
        keep = keep.expand(self.batch).clone()
        if bool((keep < 0).any()) or bool((keep > length).any()):
            expected = f"expected 0 to the lengths of the rows, {length.tolist()}"
            raise InputError(f"truncate to {keep.tolist()}: {expected}")
        return keep

    def rows(self, rows: Any, call: str) -> torch.Tensor:
        """Return row indices as int64 [n]; InputError, which names the `call`, for one out of
        range."""
        index = _integers(rows, f"{call} rows").reshape(-1)
        if bool((index < 0).any()) or bool((index >= self.batch).any()):
            raise InputError(f"{call} rows {index.tolist()}: the session has {self.batch} rows")
        return index

    def tokens(
        self, call: str, length: torch.Tensor, tokens: Any, lengths: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return tokens int64 [batch, S], zero after a row's last, and valid counts [batch].
        `call`: the method, which errors name."""
        tokens = _tensor(tokens, f"{call}: tokens")
        if tokens.dim() != 2 or tokens.shape[0] != self.batch or tokens.dtype != torch.int64:
            raise InputError(
                f"{call}: expected int64 tokens [{self.batch}, S], "
                f"found {str(tokens.dtype).removeprefix('torch.')} {list(tokens.shape)}"
            )
        width, limit = tokens.shape[1], self.engine.limits.max_seq
        lengths = torch.full((self.batch,), width) if lengths is None else lengths
        lengths = _integers(lengths, f"{call}: lengths")
        same = lengths.shape == (self.batch,)
        if not same or int(lengths.min()) < 0 or int(lengths.max()) > width:
            raise InputError(
                f"{call}: expected {self.batch} lengths of 0 to {width}, found {lengths.tolist()}"
            )
        tokens = tokens.where(torch.arange(width) < lengths[:, None], 0)
        _check_ids(self.engine, tokens)
        after = length + lengths
        if int(after.max()) > limit:
            row = int(after.argmax())
            raise InputError(
                f"{call}: row {row} would have {int(after[row])} tokens ({int(length[row])} cached "
                f"and {int(lengths[row])} new); the engine was built with --max-seq {limit}"
            )
        return tokens, lengths


def row_prompt(engine: EngineParts, tokens: Sequence[int], soft: Sequence[Soft] = ()) -> TokenBatch:
    """Return the prompt for an empty session of one row; InputError if the session would refuse
    it."""
    prompt = SessionInputs(engine, 1).prompt(torch.tensor([0]), [tokens], None, soft)
    prompt.pieces(engine.limits.prefill_chunk)  # raises for a block longer than a chunk
    return prompt


def _media(engine: EngineParts) -> Mapping[str, int]:
    return placeholders(engine.spec.tokens, engine.media.kinds)


def _check_ids(engine: EngineParts, tokens: torch.Tensor) -> None:
    text = engine.spec.text
    for i in _media(engine).values():  # placeholders are not looked up in embedding tables
        tokens = tokens.masked_fill(tokens == i, 0)
    if tokens.numel() and not 0 <= int(tokens.min()) <= int(tokens.max()) < text.readable_ids:
        row, at = ((tokens < 0) | (tokens >= text.readable_ids)).nonzero()[0].tolist()
        why = f"is outside the vocabulary of {text.vocab_size}"
        if 0 <= int(tokens[row, at]) < text.vocab_size:
            why = f"has no row in the per-layer embedding table of {text.readable_ids}"
        raise InputError(f"token {int(tokens[row, at])} (row {row}, index {at}) {why}")


def padded(tokens: Mapping[int, Sequence[int]], batch: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return tokens by row as int64 [batch, S], right-padded with 0, and valid counts int64
    [batch]."""
    width = max(map(len, tokens.values()))
    rows, lengths = [[0] * width for _ in range(batch)], [0] * batch
    for row, ids in tokens.items():
        rows[row][: len(ids)] = ids
        lengths[row] = len(ids)
    return torch.tensor(rows), torch.tensor(lengths)


def _tensor(value: Any, name: str) -> torch.Tensor:
    try:
        return torch.as_tensor(value)
    except (TypeError, ValueError, RuntimeError) as e:
        found = str(value)[:80]
        raise InputError(f"{name}: expected a tensor or lists of numbers, found {found!r}") from e


def _integers(value: Any, name: str) -> torch.Tensor:
    t = _tensor(value, name)
    if t.numel() and (t.is_floating_point() or t.is_complex()):
        raise InputError(f"{name}: expected integers, found {t.tolist()}")
    return t.to(torch.int64)
