"""A session: tokens in, logits out, and the KV cache of a batch in between."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Any

import torch

from g4ir.errors import InputError
from g4ir.media.merge import Piece, TokenBatch
from g4ir.media.soft import Soft
from g4ir.model.decoder import BLOCKS, HIDDEN, VERIFY
from g4ir.model.draft import DRAFT, NEXT_HIDDEN, TOKEN

from .hidden_states import HiddenStates
from .inputs import SessionInputs
from .parts import EngineParts


@dataclass(frozen=True)
class Snapshot:
    """A copy of a session: lengths, and the part of each cache that was in use."""

    length: torch.Tensor
    written: torch.Tensor
    caches: Any
    hidden: HiddenStates


class Session:
    """`batch` rows, each with its own length. Not safe for use from several threads at once."""

    def __init__(self, engine: EngineParts, batch: int = 1) -> None:
        limit = engine.limits.max_batch
        if not 1 <= batch <= limit:
            raise InputError(f"batch {batch}: this engine was built for 1 to {limit} rows")
        self.engine, self.batch = engine, batch
        self._inputs = SessionInputs(engine, batch)
        self.state = engine.runtime.new_state(batch)
        #: int64 [batch]: tokens that each row holds
        self.length = torch.zeros(batch, dtype=torch.int64)
        #: most tokens that each row ever held since it was last empty (what rings have seen)
        self._written = torch.zeros(batch, dtype=torch.int64)
        self.hidden = HiddenStates(batch)

    def __repr__(self) -> str:
        return f"<Session of {self.engine!r}: {self.length.tolist()} tokens held>"

    def prefill(
        self,
        tokens: Any,
        lengths: Any = None,
        all_logits: bool = False,
        *,
        soft: Sequence[Soft] = (),
        images: Sequence[Any] = (),
        videos: Sequence[Any] = (),
        audio: Sequence[Any] = (),
    ) -> torch.Tensor:
        """Append tokens, int64 [batch, S]; row b's first lengths[b] are valid (default: all).

        Returns float32 [batch, vocab] at each row's last valid token (zeros for a row of length
        0, which is left untouched), or [batch, S, vocab] with `all_logits` (zeros behind a row's
        last). `soft` take the places of the placeholders of their kind, row by row; images, videos
        and audio are encoded here and come after them. Placeholders of a kind that the engine does
        not take are tokens like any other.

        InputError, and nothing is appended, for a token outside the vocabulary, a row that would
        pass max_seq, media of another kind or number, and an image that fits no chunk.
        """
        if all_logits and not self.engine.all_logits:
            raise InputError(
                "all_logits: this engine was built without --all-logits; build it with"
            )
        media = {"images": images, "videos": videos, "audio": audio}
        prompt = self._inputs.prompt(self.length, tokens, lengths, soft, **media)
        if not all_logits:
            return self._last_logits(prompt)
        out = self._zeros(prompt.tokens.shape[1])
        for piece, _, logits in self._chunks(prompt, None, every=True):
            assert logits is not None
            starts, counts, rows = piece.start.tolist(), piece.count.tolist(), logits.float().cpu()
            for row, (start, count) in enumerate(zip(starts, counts, strict=True)):
                out[row, start : start + count] = rows[row, :count]
        return out

    def prefill_steps(self, tokens: Any, lengths: Any = None) -> Iterator[torch.Tensor | None]:
        """Prefill tokens as `prefill`, a chunk for each value of the iterator: None, until a row
        has ended; then the logits [B, vocab], on the engine's device and in its dtype, which the
        next step may write over. InputError as `prefill`, at once. Nothing else may be appended
        before the last chunk, but the iterator may be left early."""
        return self._steps(self._inputs.prompt(self.length, tokens, lengths, ()))

    def prefill_piece(
        self, prompt: TokenBatch, piece: Piece, every: Callable[[torch.Tensor], None] | None = None
    ) -> torch.Tensor | None:
        """Append the next piece, of at most a chunk, of a checked prompt to the only row. Return
        None, or with the last piece the logits [1, vocab] as `prefill_steps`; `every` takes those
        of each token, [1, S, vocab], in engines with all_logits."""
        (logits,) = self._steps(prompt, (piece,), every)
        return logits

    def decode(self, next_tokens: Any, active: Any = None) -> torch.Tensor:
        """Append one token a row, int64 [batch]; return float32 [batch, vocab]. Rows where `active`
        (bool [batch]) is False are left untouched and yield zeros. A placeholder has the rows of
        the padding token."""
        return self._last_logits(self._inputs.single(self.length, next_tokens, active))

    def verify(self, tokens: Any, lengths: Any = None) -> torch.Tensor:
        """Append a token to each row, and up to --draft-tokens draft tokens behind it: int64
        [batch, S], of which row b's first lengths[b] are valid (default: all). Return the logits
        after each, [batch, S, vocab], as `prefill_steps`; those behind a row's last are undefined.
        `truncate` then drops rejected tokens. InputError as `prefill`, and for too many tokens."""
        tokens, lengths = self._inputs.drafted(self.length, tokens, lengths)
        phase = VERIFY if tokens.shape[1] > 1 else "decode"
        logits = self._run(phase, tokens, lengths)
        assert logits is not None
        return logits

    def draft(self, newest: Mapping[int, int], counts: Mapping[int, int]) -> dict[int, list[int]]:
        """Return draft tokens of the engine's draft model for each row, to follow its newest token,
        which the caches do not hold yet: at most so many, and none if the hidden state that this
        token was chosen from is not known, as after `truncate`."""
        known = self.hidden.known(self.length)
        counts = {row: count if known[row] else 0 for row, count in counts.items()}
        tokens = torch.zeros(self.batch, dtype=torch.int64)
        tokens[[*newest]] = torch.tensor([*newest.values()])
        steps = [*self._draft_steps(tokens, max(counts.values(), default=0))]
        made = {row: [step[row] for step in steps[:count]] for row, count in counts.items()}
        ids = self.engine.spec.text.readable_ids
        return {row: list(takewhile(lambda t: t < ids, found)) for row, found in made.items()}

    def extend(self, counts: torch.Tensor) -> None:
        """Take over tokens that a loop on the device has appended: so many to each row, int64
        [batch]."""
        self.length = self.length + counts
        self._written = torch.maximum(self._written, self.length)
        self.hidden.forget()

    def truncate(self, n: Any) -> None:
        """Keep the first n tokens (an int or int64 [batch]) of each row. InputError, and nothing is
        changed, where a ring no longer holds what would be seen. Cut within an image that is seen
        both ways, what is kept of it has seen what is dropped."""
        keep = self._inputs.kept(self.length, n)
        for window, slots in self.engine.rings:
            # The next query sees the window - 1 tokens before it; a ring holds the newest slots.
            first_seen = (keep - window + 1).clamp(min=0)
            lost = (keep > 0) & (first_seen < self._written - slots)
            if bool(lost.any()):
                row = int(lost.nonzero()[0, 0])
                least = int(self._written[row]) - slots + window - 1
                raise InputError(
                    f"truncate row {row} to {int(keep[row])}: its ring of {slots} slots has "
                    f"overwritten that window; keep at least {least} tokens, or reset the row and "
                    f"prefill again"
                )
        self.length = keep
        self._written = torch.where(keep == 0, keep, self._written)

    def reset(self, rows: Any = None, zero: bool = False) -> None:
        """Empty the given rows (ints), or all. `zero` also writes zeros over their caches: NaN
        there, in a slot that no query sees, is NaN in its sum all the same."""
        index = torch.arange(self.batch) if rows is None else self._inputs.rows(rows, "reset")
        if zero:
            for row in index.tolist():
                self.state.clear(row, self.engine.limits.max_seq)
        self.length[index] = 0
        self._written[index] = 0
        self.hidden.forget(index)

    def copy_row(self, source: Session, start: int, row: int) -> None:
        """Copy row `start` of a session of the same engine, of any number of rows, to a row."""
        self._inputs.rows(row, "copy to")
        source._inputs.rows(start, "copy from")
        if source.engine is not self.engine:
            raise InputError(f"copy_row: from a session of {source.engine!r} to {self.engine!r}")
        held = int(source.length[start])
        if held and (source is not self or start != row):
            self.state.copy(source.state, start, row, held)
        self.hidden.copy_row(source.hidden, start, row, source.length)
        self.length[row], self._written[row] = held, source._written[start]

    def snapshot(self) -> Snapshot:
        """Copy what every row holds, for `restore`, which also brings back what rings overwrote."""
        held, length = int(self.length.max()), self.length.clone()
        caches = self.state.snapshot(held) if held else None
        return Snapshot(length, self._written.clone(), caches, self.hidden.copy(length))

    def restore(self, kept: Snapshot) -> None:
        """Hold again what the snapshot holds."""
        if kept.length.shape != self.length.shape:
            raise InputError(
                f"restore: a snapshot of {len(kept.length)} rows; the session has {self.batch}"
            )
        if kept.caches:
            self.state.restore(kept.caches)
        self.length, self._written = kept.length.clone(), kept.written.clone()
        self.hidden = kept.hidden.copy(kept.length)

    def nbytes(self, held: int | None = None) -> int:
        """Return the bytes of the caches, or of a snapshot of rows of `held` tokens."""
        if held is None:
            return int(self.state.nbytes())
        return sum(t.nbytes for t in self.state.views(held).values()) if held else 0

    def _last_logits(self, prompt: TokenBatch) -> torch.Tensor:
        """Return the logits [B, vocab] of each row's last token: a copy for the caller to keep."""
        found: torch.Tensor | None = None
        for step in self._steps(prompt):
            found = step
        return self._zeros() if found is None else found.to("cpu", torch.float32, copy=True)

    def _steps(
        self,
        prompt: TokenBatch,
        pieces: Sequence[Piece] | None = None,
        every: Callable[[torch.Tensor], None] | None = None,
    ) -> Iterator[torch.Tensor | None]:
        """Yield after each piece (default: chunk) the logits of the rows that have ended, or
        None."""
        found: torch.Tensor | None = None
        for piece, ends, logits in self._chunks(prompt, pieces, every=every is not None):
            if logits is not None and every:
                every(logits[:, : piece.width])
            if logits is not None and bool(ends.any()):
                rows = logits[:, 0]
                if logits.shape[1] > 1:
                    rows = logits[torch.arange(self.batch), (piece.count - 1).clamp(min=0)]
                if not bool(ends.all()):
                    before = torch.zeros_like(rows) if found is None else found
                    rows = torch.where(ends.to(rows.device)[:, None], rows, before)
                found = rows
            yield found

    def _chunks(
        self, prompt: TokenBatch, pieces: Sequence[Piece] | None, every: bool
    ) -> Iterator[tuple[Piece, torch.Tensor, torch.Tensor | None]]:
        """Yield each piece, the rows that end in it, and its logits: of `every`, or the last."""
        for piece in pieces or prompt.pieces(self.engine.limits.prefill_chunk):
            ends = (piece.count > 0) & (piece.start + piece.count == prompt.lengths)
            wanted = every or bool(ends.any())
            phase = "decode" if piece.width == 1 else "prefill"
            tokens = piece.take(prompt.tokens, 0)
            yield piece, ends, self._run(phase, tokens, piece.count, wanted, (prompt, piece))

    def _run(
        self,
        phase: str,
        tokens: torch.Tensor,
        count: torch.Tensor,
        wanted: bool = True,
        media: tuple[TokenBatch, Piece] | None = None,
    ) -> torch.Tensor | None:
        """Append `count` of the tokens [B, S] to each row by a graph; return its logits, if they
        are wanted. A chunk of one token is a decode step."""
        positions, after = self.length[:, None], self.length + count
        if tokens.shape[1] > 1:
            positions = positions + torch.arange(tokens.shape[1])
        feeds = self.engine.embed(tokens) | {"positions": positions, "lengths": count}
        if media:
            prompt, piece = media
            prompt.put_soft(feeds["embeds"], piece)
            ids = prompt.blocks(piece) if piece.width > 1 else None
            if ids is not None:
                phase, feeds["block_ids"] = BLOCKS, ids
        if self.engine.device != "cpu":
            feeds = {name: t.to(self.engine.device) for name, t in feeds.items()}
        made = self.engine.runtime.run(phase, feeds, self.state, int(after.max()), wanted)
        self.hidden.take(made.get(HIDDEN) if made else None, self.length, after)
        self.length = after
        self._written = torch.maximum(self._written, after)
        return made["logits"] if made else None

    def _draft_steps(self, tokens: torch.Tensor, count: int) -> Iterator[list[int]]:
        """Yield the next token of each row, by the drafter, `count` times."""
        engine, hidden = self.engine, self.hidden.of(self.length)
        assert engine.drafter and engine.drafter.drafter
        last = (self.length - 1).clamp(min=0)
        stands = self.length if engine.drafter.drafter.position == "next" else last
        where = {"positions": stands[:, None], "last": last[:, None], "written": self.length}
        feeds = {name: t.to(engine.device) for name, t in where.items()}
        longest = int(self.length.max())
        for _ in range(count):
            assert hidden is not None
            feeds |= {"embeds": engine.embed(tokens[:, None])["embeds"], HIDDEN: hidden}
            made = engine.runtime.run(DRAFT, feeds, self.state, longest, True)
            assert made
            hidden, tokens = made[NEXT_HIDDEN].clone(), made[TOKEN].cpu()
            yield tokens.tolist()

    def _zeros(self, *width: int) -> torch.Tensor:
        return torch.zeros(self.batch, *width, self.engine.spec.text.vocab_size)
