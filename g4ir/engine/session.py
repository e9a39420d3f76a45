"""A session: tokens in, logits out, with the KV cache of a batch."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Any

import torch

from g4ir.backends.base import GraphRun
from g4ir.errors import InputError
from g4ir.media.merge import Piece, TokenBatch
from g4ir.media.soft import Soft
from g4ir.model.decoder import BLOCKS, HIDDEN, VERIFY
from g4ir.model.draft import DRAFT, NEXT_HIDDEN, TOKEN
from g4ir.weights.lora import ADAPTERS

from .hidden_states import HiddenStates
from .inputs import SessionInputs
from .parts import EngineParts


@dataclass(frozen=True)
class Snapshot:
    """A copy of a session: lengths int64 [batch], `written` (`Session._written`), the used part of
    each KV cache (a CacheSnapshot; None if all rows are empty), and hidden states."""

    length: torch.Tensor
    written: torch.Tensor
    caches: Any
    hidden: HiddenStates


class Session:
    """KV caches of a batch: `batch` rows, one per sequence, each with its length. Not
    thread-safe."""

    def __init__(self, engine: EngineParts, batch: int = 1, adapter: str = "") -> None:
        limit = engine.limits.max_batch
        if not 1 <= batch <= limit:
            raise InputError(f"batch {batch}: this engine was built for 1 to {limit} sequences")
        self.engine, self.batch = engine, batch
        self._inputs = SessionInputs(engine, batch)
        self.state = engine.runtime.new_state(batch)
        #: int64 [batch]: number of tokens in each row's KV cache
        self.length = torch.zeros(batch, dtype=torch.int64)
        #: maximum length of each row since it was last empty (tokens written to its rings)
        self._written = torch.zeros(batch, dtype=torch.int64)
        self.hidden = HiddenStates(batch)
        if adapter:
            self.state.adapters[:] = engine.loaded_adapters(adapter).use(adapter, self)[0].slot

    def __repr__(self) -> str:
        return f"<Session of {self.engine!r}: {self.length.tolist()} tokens cached>"

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
        0, which is unchanged), or [batch, S, vocab] with `all_logits` (zeros after a row's last).
        `soft` tokens replace the placeholders of their kind, row by row; images, videos and audio
        are encoded here and follow them. Placeholders of a kind that the engine does not support
        are ordinary tokens.

        InputError, and nothing is appended, for a token outside the vocabulary, a row that would
        pass max_seq, media of another kind or number, and an image that fits no chunk.
        """
        if all_logits and not self.engine.all_logits:
            raise InputError(
                "all_logits: this engine was built without --all-logits; build it again with it"
            )
        media = {"images": images, "videos": videos, "audio": audio}
        prompt = self._inputs.prompt(self.length, tokens, lengths, soft, **media)
        if not all_logits:
            return self._last_logits(prompt)
        out = self._zeros(prompt.tokens.shape[1])
        for piece, _, logits in self._chunks(prompt, None, all_logits=True):
            assert logits is not None
            starts, counts, rows = piece.start.tolist(), piece.count.tolist(), logits.float().cpu()
            for row, (start, count) in enumerate(zip(starts, counts, strict=True)):
                out[row, start : start + count] = rows[row, :count]
        return out

    def prefill_steps(self, tokens: Any, lengths: Any = None) -> Iterator[torch.Tensor | None]:
        """Prefill like `prefill`, one chunk per value of the iterator: None until a row has ended,
        then the logits [B, vocab] on the engine's device and in its dtype, valid until the next
        step. Raises InputError at once, as `prefill`. Append nothing else before the last chunk;
        the iterator may be closed early."""
        return self._steps(self._inputs.prompt(self.length, tokens, lengths, ()))

    def prefill_piece(
        self,
        prompt: TokenBatch,
        piece: Piece,
        on_logits: Callable[[torch.Tensor], None] | None = None,
    ) -> torch.Tensor | None:
        """Append the next piece (at most a chunk) of a checked prompt to a one-row session. Return
        None, or with the last piece the logits [1, vocab] as `prefill_steps`. on_logits: callback
        for the logits of all tokens [1, S, vocab]; needs an engine with all_logits."""
        (logits,) = self._steps(prompt, (piece,), on_logits)
        return logits

    def decode(self, next_tokens: Any, active: Any = None) -> torch.Tensor:
        """Append one token a row, int64 [batch]; return float32 [batch, vocab]. Rows where `active`
        (bool [batch]) is False are left untouched and yield zeros. A placeholder is embedded as the
        padding token."""
        return self._last_logits(self._inputs.single(self.length, next_tokens, active))

    def verify(self, tokens: Any, lengths: Any = None) -> torch.Tensor:
        """Append a token to each row, followed by up to --draft-tokens draft tokens: int64
        [batch, S], of which row b's first lengths[b] are valid (default: all). Return the logits
        after each, [batch, S, vocab], as `prefill_steps`; those after a row's last are undefined.
        `truncate` then drops rejected tokens. InputError as `prefill`, and for too many tokens."""
        tokens, lengths = self._inputs.drafted(self.length, tokens, lengths)
        phase = VERIFY if tokens.shape[1] > 1 else "decode"
        logits = self._run(phase, tokens, lengths)
        assert logits is not None
        return logits

    def draft(self, newest: Mapping[int, int], counts: Mapping[int, int]) -> dict[int, list[int]]:
        """Return up to counts[row] draft tokens for each row, from the draft model. `newest`: each
        row's newest token, which is not in the KV cache yet. A row gets none if the hidden state of
        its last cached token is not available, which can happen after `truncate` or a device
        loop."""
        available = self.hidden.available(self.length)
        counts = {row: count if available[row] else 0 for row, count in counts.items()}
        tokens = torch.zeros(self.batch, dtype=torch.int64)
        tokens[[*newest]] = torch.tensor([*newest.values()])
        steps = [*self._draft_steps(tokens, max(counts.values(), default=0))]
        drafts = {row: [step[row] for step in steps[:count]] for row, count in counts.items()}
        ids = self.engine.spec.text.readable_ids
        return {row: [*takewhile(lambda t: t < ids, ahead)] for row, ahead in drafts.items()}

    def extend(self, counts: torch.Tensor) -> None:
        """Count tokens that a device loop has appended to the KV cache: int64 [batch]."""
        self.length = self.length + counts
        self._written = torch.maximum(self._written, self.length)
        self.hidden.forget()

    def truncate(self, n: Any) -> None:
        """Keep the first n tokens (an int or int64 [batch]) of each row. InputError, without a
        change, if a ring no longer has the window of the next token. If the cut is within an
        image with bidirectional attention, its remaining tokens have attended to dropped ones."""
        lengths = self._inputs.keep_lengths(self.length, n)
        for window, slots in self.engine.rings:
            # The next query sees the window - 1 tokens before it; a ring has the newest `slots`.
            first_seen = (lengths - window + 1).clamp(min=0)
            lost = (lengths > 0) & (first_seen < self._written - slots)
            if bool(lost.any()):
                row = int(lost.nonzero()[0, 0])
                min_tokens = int(self._written[row]) - slots + window - 1
                raise InputError(
                    f"truncate row {row} to {int(lengths[row])}: its ring of {slots} slots no "
                    f"longer has the window of the next token; keep at least {min_tokens} tokens, "
                    f"or reset the row and prefill again"
                )
        self.length = lengths
        self._written = torch.where(lengths == 0, lengths, self._written)

    def reset(self, rows: Any = None, zero: bool = False) -> None:
        """Empty the given rows (ints), or all. `zero` also overwrites their caches with zeros: NaN
        in a masked slot would still make the attention sum NaN."""
        index = torch.arange(self.batch) if rows is None else self._inputs.rows(rows, "reset")
        if zero:
            for row in index.tolist():
                self.state.clear(row, self.engine.limits.max_seq)
        self.length[index] = 0
        self._written[index] = 0
        self.hidden.forget(index)

    def copy_row(self, source: Session, start: int, row: int) -> None:
        """Copy row `start` of a session of the same engine, of any number of rows, to row `row`."""
        self._inputs.rows(row, "copy to")
        source._inputs.rows(start, "copy from")
        if source.engine is not self.engine:
            engines = f"from a session of {source.engine!r} to one of {self.engine!r}"
            raise InputError(f"copy_row: {engines}; expected one engine")
        length = int(source.length[start])
        if length and (source is not self or start != row):
            self.state.copy(source.state, start, row, length)
        self.hidden.copy_row(source.hidden, start, row, source.length)
        if self.engine.adapters:
            self.state.adapters[row] = source.state.adapters[start]
        self.length[row], self._written[row] = length, source._written[start]

    def snapshot(self) -> Snapshot:
        """Copy all rows, for `restore`, which also brings back overwritten ring slots."""
        max_length, length = int(self.length.max()), self.length.clone()
        caches = self.state.snapshot(max_length) if max_length else None
        return Snapshot(length, self._written.clone(), caches, self.hidden.copy(length))

    def restore(self, snapshot: Snapshot) -> None:
        """Set lengths, KV cache and hidden states to those of a snapshot. InputError if it has
        another number of rows, or caches of other dtypes or shapes."""
        if snapshot.length.shape != self.length.shape:
            raise InputError(
                f"restore: the snapshot has {len(snapshot.length)} rows, the session {self.batch}"
            )
        if snapshot.caches:
            views, tensors = self.state.views(snapshot.caches.context), snapshot.caches.tensors
            if {n: (t.dtype, t.shape) for n, t in views.items()} != {
                n: (t.dtype, t.shape) for n, t in tensors.items()
            }:
                why = "the snapshot's KV caches have other shapes or dtypes than those of"
                raise InputError(f"restore: {why} {self.engine.label}")
            self.state.restore(snapshot.caches)
        self.length, self._written = snapshot.length.clone(), snapshot.written.clone()
        self.hidden = snapshot.hidden.copy(snapshot.length)

    def nbytes(self, num_tokens: int | None = None) -> int:
        """Return the bytes of the KV cache, or of its copy in a snapshot whose longest row has
        num_tokens."""
        if num_tokens is None:
            return int(self.state.nbytes())
        return sum(t.nbytes for t in self.state.views(num_tokens).values()) if num_tokens else 0

    def _last_logits(self, prompt: TokenBatch) -> torch.Tensor:
        """Return a float32 CPU copy of the logits [B, vocab] of each row's last token."""
        logits: torch.Tensor | None = None
        for step in self._steps(prompt):
            logits = step
        return self._zeros() if logits is None else logits.to("cpu", torch.float32, copy=True)

    def _steps(
        self,
        prompt: TokenBatch,
        pieces: Sequence[Piece] | None = None,
        on_logits: Callable[[torch.Tensor], None] | None = None,
    ) -> Iterator[torch.Tensor | None]:
        """Yield after each piece (default: the prompt's chunks) the logits [B, vocab] of the last
        tokens of the rows that have ended, zeros for the others; None before any has ended."""
        logits_of_rows: torch.Tensor | None = None
        for piece, ends, logits in self._chunks(prompt, pieces, on_logits is not None):
            if logits is not None and on_logits:
                on_logits(logits[:, : piece.width])
            if logits is not None and bool(ends.any()):
                rows = logits[:, 0]
                if logits.shape[1] > 1:
                    rows = logits[torch.arange(self.batch), (piece.count - 1).clamp(min=0)]
                if not bool(ends.all()):
                    before = torch.zeros_like(rows) if logits_of_rows is None else logits_of_rows
                    rows = torch.where(ends.to(rows.device)[:, None], rows, before)
                logits_of_rows = rows
            yield logits_of_rows

    def _chunks(
        self, prompt: TokenBatch, pieces: Sequence[Piece] | None, all_logits: bool
    ) -> Iterator[tuple[Piece, torch.Tensor, torch.Tensor | None]]:
        """Yield each piece, the rows that end in it (bool [B]), and its logits (of all tokens, or
        of the last; None if they are not needed). A piece of one token is a decode step."""
        for piece in pieces or prompt.pieces(self.engine.limits.prefill_chunk):
            ends = (piece.count > 0) & (piece.start + piece.count == prompt.lengths)
            need_logits = all_logits or bool(ends.any())
            phase = "decode" if piece.width == 1 else "prefill"
            tokens = piece.take(prompt.tokens, 0)
            yield piece, ends, self._run(phase, tokens, piece.count, need_logits, (prompt, piece))

    def _run(
        self,
        phase: str,
        tokens: torch.Tensor,
        count: torch.Tensor,
        need_logits: bool = True,
        media: tuple[TokenBatch, Piece] | None = None,
    ) -> torch.Tensor | None:
        """Run a graph that appends `count` of the tokens [B, S] to each row (int64 [B]); return its
        logits if needed."""
        positions, after = self.length[:, None], self.length + count
        if tokens.shape[1] > 1:
            positions = positions + torch.arange(tokens.shape[1])
        feeds = self.engine.embed_tokens(tokens) | {"positions": positions, "lengths": count}
        if self.engine.adapters:
            feeds[ADAPTERS] = self.state.adapters
        if media:
            prompt, piece = media
            prompt.put_soft(feeds["embeds"], piece)
            ids = prompt.blocks(piece) if piece.width > 1 else None
            if ids is not None:
                phase, feeds["block_ids"] = BLOCKS, ids
        if self.engine.device != "cpu":
            feeds = {name: t.to(self.engine.device) for name, t in feeds.items()}
        step = GraphRun(phase, feeds, int(after.max()), need_logits)
        outputs = self.engine.runtime.run(step, self.state)
        self.hidden.take(outputs.get(HIDDEN) if outputs else None, self.length, after)
        self.length = after
        self._written = torch.maximum(self._written, after)
        return outputs["logits"] if outputs else None

    def _draft_steps(self, tokens: torch.Tensor, count: int) -> Iterator[list[int]]:
        """Yield the draft model's next token of each row, `count` times."""
        engine, hidden = self.engine, self.hidden.of(self.length)
        assert engine.drafter and engine.drafter.drafter
        last = (self.length - 1).clamp(min=0)
        position = self.length if engine.drafter.drafter.position == "next" else last
        args = {"positions": position[:, None], "last": last[:, None], "written": self.length}
        feeds = {name: t.to(engine.device) for name, t in args.items()}
        max_length = int(self.length.max())
        for _ in range(count):
            assert hidden is not None
            feeds |= {"embeds": engine.embed_tokens(tokens[:, None])["embeds"], HIDDEN: hidden}
            outputs = engine.runtime.run(GraphRun(DRAFT, feeds, max_length), self.state)
            assert outputs
            hidden, tokens = outputs[NEXT_HIDDEN].clone(), outputs[TOKEN].cpu()
            yield tokens.tolist()

    def _zeros(self, *width: int) -> torch.Tensor:
        return torch.zeros(self.batch, *width, self.engine.spec.text.vocab_size)
