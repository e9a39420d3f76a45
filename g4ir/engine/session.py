"""A session: tokens in, logits out, and the KV cache of a batch in between."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import TYPE_CHECKING, Any

import torch

from g4ir.errors import InputError
from g4ir.media.merge import Piece, Prompt, check_softs, merged
from g4ir.model.decoder import BLOCKS, HIDDEN, VERIFY
from g4ir.model.draft import DRAFT, NEXT_HIDDEN, TOKEN
from g4ir.model.media import check_list, check_taken, listed, placeholders

from .hidden_state import Hidden
from .multimodal import encode
from .parts import EngineParts

if TYPE_CHECKING:
    from g4ir.media.soft import Soft


@dataclass(frozen=True)
class Snapshot:
    """A copy of a session: lengths, and the part of each cache that was in use."""

    length: torch.Tensor
    written: torch.Tensor
    caches: Any
    hidden: Hidden


class Session:
    """`batch` rows, each with its own length. Not safe for use from several threads at once."""

    def __init__(self, engine: EngineParts, batch: int = 1) -> None:
        limit = engine.limits.max_batch
        if not 1 <= batch <= limit:
            raise InputError(f"batch {batch}: this engine was built for 1 to {limit} rows")
        self.engine, self.batch = engine, batch
        #: kind -> the id of its placeholders
        self._media = placeholders(engine.spec.tokens, engine.media.kinds)
        self._has_blocks = BLOCKS in engine.program.graphs
        self.state = engine.runtime.new_state(batch)
        #: int64 [batch]: tokens that each row holds
        self.length = torch.zeros(batch, dtype=torch.int64)
        #: most tokens that each row ever held since it was last empty (what rings have seen)
        self._written = torch.zeros(batch, dtype=torch.int64)
        #: of an engine with a draft model: its input
        self.hidden = Hidden(batch)

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
        last). Raises InputError on a token outside the vocabulary or a row that would pass
        max_seq.

        `soft` take the places of the placeholders of their kind, row by row; images, videos and
        audio are encoded here and come after them. Placeholders of a kind that the engine does not
        take are tokens like any other, with the rows that the tables have for their ids.

        InputError for media of such a kind, where there are more or fewer placeholders than soft
        tokens, or where a picture that is seen both ways does not fit a chunk. Nothing is appended
        then.
        """
        if all_logits and not self.engine.all_logits:
            raise InputError(
                "all_logits: this engine was built without --all-logits; build it with"
            )
        prompt = self._prompt(tokens, lengths, soft, images=images, videos=videos, audio=audio)
        return self._append_all(prompt) if all_logits else _on_host(self._append(prompt))

    def prefill_steps(
        self, tokens: Any, lengths: Any = None, soft: Sequence[Soft] = (), wanted: bool = True
    ) -> Iterator[torch.Tensor | None]:
        """Prefill, a chunk for each value of the iterator: None, until a row has ended; then the
        logits [B, vocab], if they are `wanted`, on the engine's device and in the dtype that they
        are computed in. They are the session's own: the next step may write over them.

        InputError as `prefill`, at once. Nothing else may be appended before the last chunk, but
        the iterator may be left early.
        """
        return self._appended(self._prompt(tokens, lengths, soft), wanted)

    def decode(self, next_tokens: Any, active: Any = None) -> torch.Tensor:
        """Append one token a row, int64 [batch]; return float32 [batch, vocab]. Rows where `active`
        (bool [batch]) is False are left untouched and yield zeros. A placeholder has the rows of
        the padding token."""
        tokens = _tensor(next_tokens, "decode: tokens")
        if tokens.shape != (self.batch,):
            raise InputError(f"decode: expected [{self.batch}] tokens, found {list(tokens.shape)}")
        lengths = None if active is None else self._checked_active(active)
        return _on_host(self._append(Prompt(*self._checked(tokens[:, None], lengths))))

    def verify(self, tokens: Any, lengths: Any = None) -> torch.Tensor:
        """Append a token to each row, and draft tokens behind it: int64 [batch, S], of which row
        b's first lengths[b] are valid (default: all); S at most one more than the engine's
        --draft-tokens. Return the logits after each, [batch, S, vocab], on the engine's device as
        in `prefill_steps`; those behind a row's last are undefined. `truncate` then drops rejected
        tokens. InputError as `prefill`, and for an engine without a verification step.
        """
        tokens, lengths = self._checked(tokens, lengths)
        width, most = tokens.shape[1], self.engine.draft_tokens + 1
        if width > 1 and most == 1:
            raise InputError(
                f"{self.engine.path}: it verifies no drafted tokens; build the engine again with "
                f"--draft-tokens K"
            )
        if width > most:
            built = f"an engine of --draft-tokens {most - 1}"
            raise InputError(f"verify: {width} tokens; {built} takes {most} at most")
        positions = self.length[:, None]
        if width > 1:
            positions = positions + torch.arange(width)
        feeds = self.engine.embed(tokens)
        feeds |= {"positions": positions, "lengths": lengths}
        if self.engine.device != "cpu":
            feeds = {name: t.to(self.engine.device) for name, t in feeds.items()}
        logits = self._run(VERIFY if width > 1 else "decode", feeds, lengths)
        assert logits is not None
        return logits

    def draft(self, newest: Mapping[int, int], counts: Mapping[int, int]) -> dict[int, list[int]]:
        """Return draft tokens of the engine's draft model for each row, to follow its newest token,
        which the caches do not hold yet: at most so many, and none if the hidden state that this
        token was chosen from is not known, as after `truncate`."""
        known = self.hidden.is_of(self.length)
        counts = {row: count if known[row] else 0 for row, count in counts.items()}
        tokens = torch.zeros(self.batch, dtype=torch.int64)
        tokens[[*newest]] = torch.tensor([*newest.values()])
        steps = [*self._draft_steps(tokens, max(counts.values(), default=0))]
        made = {row: [step[row] for step in steps[:count]] for row, count in counts.items()}
        ids = self.engine.spec.text.readable_ids
        return {row: list(takewhile(lambda t: t < ids, found)) for row, found in made.items()}

    def extend(self, counts: Any, hidden: torch.Tensor | None = None, most: Any = None) -> None:
        """Take over tokens that a loop on the device has appended: so many to each row, int64
        [batch]; `most` of them were written, rejected ones included (default: `counts`). `hidden`
        are the states of the new last tokens."""
        written = self.length + (counts if most is None else most)
        self.length = self.length + counts
        self._written = torch.maximum(self._written, written)
        if hidden is None:
            self.hidden.forget()
        else:
            self.hidden.stand(hidden, self.length)

    def _draft_steps(self, tokens: torch.Tensor, count: int) -> Iterator[list[int]]:
        """Yield the next token of each row, by the drafter, `count` times."""
        engine, hidden = self.engine, self.hidden.rows
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

    def _prompt(
        self, tokens: Any, lengths: Any, soft: Sequence[Soft], **lists: Sequence[Any]
    ) -> Prompt:
        """Check what is given and put it together."""
        tokens, lengths = self._checked(tokens, lengths)
        softs = self._softs(soft, **lists)
        return merged(tokens, lengths, softs, self._media, self._has_blocks)

    def _softs(self, soft: Sequence[Soft], **lists: Sequence[Any]) -> list[Soft]:
        """Return the soft tokens that are given and those that are encoded here, checked."""
        engine = self.engine
        check_list("soft", soft)
        items = listed(engine.media, engine.spec, **lists)
        softs = [*soft, *(encode(engine, kind, item) for kind, item in items)]
        _check_softs(engine, softs)
        return softs

    def _append(self, prompt: Prompt) -> torch.Tensor:
        """Return the logits [B, vocab] of each row's last token, on the device."""
        found: torch.Tensor | None = None
        for step in self._appended(prompt):
            found = step
        return self._zeros() if found is None else found

    def _appended(self, prompt: Prompt, wanted: bool = True) -> Iterator[torch.Tensor | None]:
        """Yield after each chunk the logits of the rows that have ended, or None."""
        found: torch.Tensor | None = None
        for piece, ends, logits in self._chunks(prompt, every=False, last=wanted):
            if logits is not None:
                rows = _last(logits, piece.count)
                if not bool(ends.all()):
                    before = torch.zeros_like(rows) if found is None else found
                    rows = torch.where(ends.to(rows.device)[:, None], rows, before)
                found = rows
            yield found

    def _append_all(self, prompt: Prompt) -> torch.Tensor:
        """Return float32 [B, S, vocab] on the host, zeros behind a row's last."""
        out = self._zeros(prompt.tokens.shape[1])
        for piece, _, logits in self._chunks(prompt, every=True):
            assert logits is not None
            starts, ends = piece.start.tolist(), (piece.start + piece.count).tolist()
            rows = logits.float().cpu()
            for row, (i, j) in enumerate(zip(starts, ends, strict=True)):
                out[row, i:j] = rows[row, : j - i]
        return out

    def _zeros(self, *width: int) -> torch.Tensor:
        return torch.zeros(self.batch, *width, self.engine.spec.text.vocab_size)

    def _chunks(
        self, prompt: Prompt, every: bool, last: bool = True
    ) -> Iterator[tuple[Piece, torch.Tensor, torch.Tensor | None]]:
        """Yield each chunk as it is run, the rows that end in it, and its logits where they are
        needed ([B, 1 or S, vocab] on the device): of `every` chunk, or of a row's `last`."""
        for piece in prompt.pieces(self.engine.limits.prefill_chunk):
            ends = (piece.count > 0) & (piece.start + piece.count == prompt.lengths)
            yield piece, ends, self._step(prompt, piece, every or (last and bool(ends.any())))

    def truncate(self, n: Any) -> None:
        """Keep the first n tokens (an int or int64 [batch]) of each row. Cut within a picture that
        is seen both ways, what is kept of it has seen what is dropped.

        Raises InputError, and changes nothing, where a ring no longer holds what would be seen.
        """
        keep = _whole(n, "truncate")
        if keep.shape not in ((), (self.batch,)):
            raise InputError(f"truncate to {keep.tolist()}: expected one number or {self.batch}")
        keep = keep.expand(self.batch).clone()
        if bool((keep < 0).any()) or bool((keep > self.length).any()):
            raise InputError(
                f"truncate to {keep.tolist()}: rows hold {self.length.tolist()} tokens"
            )
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
        self.hidden.cut(keep)

    def reset(self, rows: Any = None, zero: bool = False) -> None:
        """Empty the given rows (ints), or all. `zero` also writes zeros over their caches: NaN
        there, in a slot that no query sees, is NaN in its sum all the same."""
        index = torch.arange(self.batch) if rows is None else self._rows(rows, "reset")
        if zero:
            for row in index.tolist():
                self.state.clear(row, self.engine.limits.max_seq)
        self.length[index] = 0
        self._written[index] = 0
        self.hidden.forget(index)

    def copy_row(self, source: Session, start: int, row: int) -> None:
        """Hold in a row what row `start` of a session of the same engine holds, this one or another
        of any number of rows."""
        self._rows(row, "copy to")
        source._rows(start, "copy from")
        if source.engine is not self.engine:
            raise InputError(f"copy_row: from a session of {source.engine!r} to {self.engine!r}")
        held = int(source.length[start])
        if held and (source is not self or start != row):
            self.state.copy(source.state, start, row, held)
        self.length[row], self._written[row] = held, source._written[start]
        self.hidden.copy_row(source.hidden, start, row)

    def _rows(self, rows: Any, what: str) -> torch.Tensor:
        """Return int64 [n] of row numbers."""
        index = _whole(rows, f"{what} rows").reshape(-1)
        if bool((index < 0).any()) or bool((index >= self.batch).any()):
            raise InputError(f"{what} rows {index.tolist()}: the session has {self.batch} rows")
        return index

    def snapshot(self) -> Snapshot:
        """Return a copy of what every row holds, for `restore` on this session. Unlike `truncate`,
        which copies nothing, it also brings back what rings have overwritten since."""
        held = int(self.length.max())
        caches = self.state.kept(held) if held else None
        return Snapshot(self.length.clone(), self._written.clone(), caches, self.hidden.copy())

    def restore(self, kept: Snapshot) -> None:
        """Hold again what the snapshot holds."""
        if kept.length.shape != self.length.shape:
            raise InputError(
                f"restore: a snapshot of {len(kept.length)} rows; the session has {self.batch}"
            )
        if kept.caches:
            self.state.put(kept.caches)
        self.length, self._written = kept.length.clone(), kept.written.clone()
        self.hidden = kept.hidden.copy()

    def nbytes(self, held: int | None = None) -> int:
        """Return the bytes of the caches, or of a snapshot of rows of `held` tokens."""
        if held is None:
            return int(self.state.nbytes())
        return sum(t.nbytes for t in self.state.views(held).values()) if held else 0

    def _checked_active(self, active: Any) -> torch.Tensor:
        mask = _tensor(active, "decode: active")
        if mask.shape != (self.batch,) or mask.dtype != torch.bool:
            raise InputError(
                f"decode: expected {self.batch} booleans as active, found {mask.tolist()}"
            )
        return mask.to(torch.int64)

    def _checked(self, tokens: Any, lengths: Any) -> tuple[torch.Tensor, torch.Tensor]:
        tokens = _tensor(tokens, "prefill: expected int64 tokens")
        if tokens.dim() != 2 or tokens.shape[0] != self.batch or tokens.dtype != torch.int64:
            raise InputError(
                f"prefill: expected int64 tokens [{self.batch}, S], "
                f"found {str(tokens.dtype).removeprefix('torch.')} {list(tokens.shape)}"
            )
        width = tokens.shape[1]
        if lengths is None:
            lengths = torch.full((self.batch,), width)
        lengths = _whole(lengths, "prefill: lengths")
        fits = (
            lengths.shape == (self.batch,)
            and int(lengths.min()) >= 0
            and (int(lengths.max()) <= width)
        )
        if not fits:
            raise InputError(
                f"prefill: expected {self.batch} lengths of 0 to {width}, found {lengths.tolist()}"
            )
        valid = torch.arange(width) < lengths[:, None]
        tokens = tokens.where(valid, 0)
        self._check_ids(tokens)
        self._check_room(lengths)
        return tokens, lengths

    def _check_ids(self, tokens: torch.Tensor) -> None:
        _check_ids(tokens, self._media, self.engine.spec.text.readable_ids)

    def _check_room(self, lengths: torch.Tensor) -> None:
        after = self.length + lengths
        limit = self.engine.limits.max_seq
        if int(after.max()) > limit:
            row = int(after.argmax())
            raise InputError(
                f"row {row} would hold {int(after[row])} tokens ({int(self.length[row])} held and "
                f"{int(lengths[row])} new); the engine was built with --max-seq {limit}"
            )

    def _step(self, prompt: Prompt, piece: Piece, wanted: bool) -> torch.Tensor | None:
        """Run one chunk through the runtime. A chunk of one token is a decode step."""
        device = self.engine.device
        positions = self.length[:, None] + torch.arange(piece.width)
        feeds = self.engine.embed(piece.take(prompt.tokens, 0))
        prompt.put_soft(feeds["embeds"], piece)
        feeds |= {"positions": positions.to(device), "lengths": piece.count.to(device)}
        phase = "decode" if piece.width == 1 else "prefill"
        ids = prompt.blocks(piece) if piece.width > 1 else None
        if ids is not None:
            phase = BLOCKS
            feeds["block_ids"] = ids.to(device)
        return self._run(phase, feeds, piece.count, wanted)

    def _run(
        self, phase: str, feeds: dict[str, torch.Tensor], count: torch.Tensor, wanted: bool = True
    ) -> torch.Tensor | None:
        """Append `count` tokens to each row by a graph; return its logits, if they are wanted."""
        after = self.length + count
        made = self.engine.runtime.run(phase, feeds, self.state, int(after.max()), wanted)
        self.hidden.take(made.get(HIDDEN) if made else None, self.length, after)
        self.length = after
        self._written = torch.maximum(self._written, after)
        return made["logits"] if made else None


def check_prompt(engine: EngineParts, tokens: Sequence[int], soft: Sequence[Soft] = ()) -> None:
    """Raise InputError for what a session would refuse of one row's prompt, its length aside."""
    ids = placeholders(engine.spec.tokens, engine.media.kinds)
    rows = torch.tensor([tokens])
    check_list("soft", soft)
    _check_softs(engine, soft)
    _check_ids(rows, ids, engine.spec.text.readable_ids)
    prompt = merged(rows, torch.tensor([len(tokens)]), soft, ids, BLOCKS in engine.program.graphs)
    prompt.pieces(engine.limits.prefill_chunk)


def _check_softs(engine: EngineParts, softs: Sequence[Soft]) -> None:
    check_softs(softs, engine.spec.text.hidden_size)
    for s in softs:
        check_taken(s.kind, engine.media, engine.spec)


def _check_ids(tokens: torch.Tensor, media: Mapping[str, int], vocab: int) -> None:
    for i in media.values():  # whose rows no table is asked for
        tokens = tokens.masked_fill(tokens == i, 0)
    if tokens.numel() and not 0 <= int(tokens.min()) <= int(tokens.max()) < vocab:
        row, at = ((tokens < 0) | (tokens >= vocab)).nonzero()[0].tolist()
        raise InputError(
            f"token {int(tokens[row, at])} (row {row}, index {at}) is outside the vocabulary "
            f"of {vocab}"
        )


def padded(tokens: Mapping[int, Sequence[int]], batch: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return tokens by row as int64 [batch, S], right-padded with 0, and how many each row has."""
    width = max(map(len, tokens.values()))
    rows, lengths = [[0] * width for _ in range(batch)], [0] * batch
    for row, ids in tokens.items():
        rows[row][: len(ids)] = ids
        lengths[row] = len(ids)
    return torch.tensor(rows), torch.tensor(lengths)


def _tensor(value: Any, what: str) -> torch.Tensor:
    try:
        return torch.as_tensor(value)
    except (TypeError, ValueError, RuntimeError) as e:
        raise InputError(f"{what}: found {str(value)[:80]!r}") from e


def _whole(value: Any, what: str) -> torch.Tensor:
    """Return whole numbers as int64."""
    t = _tensor(value, what)
    if t.numel() and (t.is_floating_point() or t.is_complex()):
        raise InputError(f"{what}: expected whole numbers, found {t.tolist()}")
    return t.to(torch.int64)


def _on_host(logits: torch.Tensor) -> torch.Tensor:
    """Return a float32 copy for the caller to keep."""
    return logits.to("cpu", torch.float32, copy=True)


def _last(logits: torch.Tensor, n: torch.Tensor) -> torch.Tensor:
    """[B, 1 or S, vocab] -> [B, vocab] at each row's last valid token."""
    if logits.shape[1] == 1:
        return logits[:, 0]
    return logits[torch.arange(logits.shape[0]), (n - 1).clamp(min=0)]
