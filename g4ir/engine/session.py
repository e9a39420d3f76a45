"""A session: takes tokens, returns logits, and keeps caches in between."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import TYPE_CHECKING, Any

import torch

from g4ir.errors import InputError
from g4ir.media.merge import Piece, Prompt, check_softs, merged
from g4ir.model.decoder import BLOCKS, HIDDEN, VERIFY
from g4ir.model.draft import DRAFT, NEXT_HIDDEN, TOKEN
from g4ir.model.media import check_list, check_taken, listed, placeholders
from g4ir.ops.finite import not_finite, require_finite

from .hidden_state import Hidden
from .multimodal import encode
from .parts import EngineParts

if TYPE_CHECKING:
    from g4ir.backends.sampling import Sampler
    from g4ir.backends.torch_compile.round_loop import Round
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
        #: what each row held before the tokens that may be taken back
        self._before = self.length
        #: where the engine has a drafter: what it goes on from
        self._hidden = Hidden(batch)

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

    def append(self, tokens: Any, lengths: Any = None, soft: Sequence[Soft] = ()) -> torch.Tensor:
        """Prefill, and leave the logits [B, vocab] on the engine's device, in the dtype that they
        are made in. They are the session's own: the next step may write over them."""
        return self._append(self._prompt(tokens, lengths, soft))

    def append_steps(
        self, tokens: Any, lengths: Any = None, soft: Sequence[Soft] = (), wanted: bool = True
    ) -> Iterator[torch.Tensor | None]:
        """Append as `append` does, a chunk whenever one more value is asked for: None, until a row
        has ended; then logits, if they are `wanted`. What is wrong is raised now. Nothing else may
        be appended before the last chunk, but the others may be left away."""
        return self._appended(self._prompt(tokens, lengths, soft), wanted)

    def advance(self, next_tokens: Any, active: Any = None) -> torch.Tensor:
        """Decode, and leave the logits on the device, as `append` does."""
        tokens = _tensor(next_tokens, "decode: tokens")
        if tokens.shape != (self.batch,):
            raise InputError(f"decode: expected [{self.batch}] tokens, found {list(tokens.shape)}")
        lengths = None if active is None else self._checked_active(active)
        return self._append(Prompt(*self._checked(tokens[:, None], lengths)))

    def verify(self, tokens: Any, lengths: Any = None) -> torch.Tensor:
        """Append tokens that may be taken back, int64 [batch, S], of which row b's first lengths[b]
        are valid (default: all); at most one more than the engine's --draft-tokens. Return float32
        [batch, S, vocab], what follows each (zeros behind a row's last). `truncate` then keeps as
        many of them as are right. InputError as `prefill`, and where the engine has no such step.
        """
        tokens, lengths = self._checked(tokens, lengths)
        logits = _on_host(self.judge(tokens, lengths))
        behind = torch.arange(tokens.shape[1]) >= lengths[:, None]
        return logits.masked_fill(behind[..., None], 0.0)

    def judge(self, tokens: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        """Verify, and leave the logits on the engine's device, as `append` does; those behind a
        row's last mean nothing. Tokens are right-padded with 0."""
        most, width = self.engine.draft_tokens + 1, tokens.shape[1]
        if most == 1:
            raise InputError(
                f"{self.engine.path}: it verifies no drafted tokens; build the engine again with "
                f"--draft-tokens K"
            )
        if width > most:
            built = f"an engine of --draft-tokens {most - 1}"
            raise InputError(f"verify: {width} tokens; {built} takes {most} at most")
        device = self.engine.device
        positions = self.length[:, None] + torch.arange(width)
        feeds = self.engine.embed(tokens)
        feeds |= {"positions": positions.to(device), "lengths": lengths.to(device)}
        logits = self._run(VERIFY, feeds, lengths)
        assert logits is not None
        return logits

    def judged(self, tokens: Mapping[int, Sequence[int]]) -> torch.Tensor:
        """Append tokens to some rows, and leave what follows each, [batch, S, vocab], on the
        device; `keep` then says how many of them were right."""
        rows, lengths = _in_rows(tokens, self.batch)
        self._check_ids(rows)
        self._check_room(lengths)
        self._before = self.length
        if rows.shape[1] > 1:
            return self.judge(rows, lengths)
        return self.advance(rows[:, 0], None if len(tokens) == self.batch else lengths > 0)[:, None]

    def keep(self, counts: Mapping[int, int]) -> None:
        """Keep the first tokens of those that `judged` appended last: so many of each row."""
        kept = self.length.clone()
        for row, count in counts.items():
            kept[row] = self._before[row] + count
        self.truncate(kept)

    def drafted(self, newest: Mapping[int, int], counts: Mapping[int, int]) -> dict[int, list[int]]:
        """Return for each row what the engine's drafter guesses to follow its newest token, which
        the caches do not hold yet: at most so many tokens, and none where the state that this token
        was chosen from is not known, as after `truncate`."""
        known = self._hidden.is_of(self.length)
        counts = {row: count if known[row] else 0 for row, count in counts.items()}
        steps: list[list[int]] = []
        tokens = torch.zeros(self.batch, dtype=torch.int64)
        tokens[[*newest]] = torch.tensor([*newest.values()])
        for found in self._draft_steps(tokens, max(counts.values(), default=0)):
            steps.append(found)
        made = {row: [step[row] for step in steps[:count]] for row, count in counts.items()}
        ids = self.engine.spec.text.readable_ids
        return {row: list(takewhile(lambda t: t < ids, found)) for row, found in made.items()}

    def _draft_steps(self, tokens: torch.Tensor, count: int) -> Iterator[list[int]]:
        """Yield the next token of each row, by the drafter, `count` times."""
        engine, hidden = self.engine, self._hidden.rows
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

    def decode(self, next_tokens: Any, active: Any = None) -> torch.Tensor:
        """Append one token a row, int64 [batch]; return float32 [batch, vocab]. Rows where `active`
        (bool [batch]) is False are left untouched and yield zeros. A placeholder has the rows of
        the padding token."""
        return _on_host(self.advance(next_tokens, active))

    def _append(self, prompt: Prompt) -> torch.Tensor:
        """Return logits as `append` does."""
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

    def stream(
        self, logits: torch.Tensor, count: int, sampler: Sampler, stops: Collection[int]
    ) -> Iterator[tuple[list[int], list[bool]]]:
        """Choose up to `count` tokens for each row and append all but the last, from logits
        [batch, vocab] after what the rows hold. Yields the tokens of each step and which rows go
        on: a row ends with one of `stops`, and what is yielded for it later means nothing.

        CheckError where logits are NaN or infinite. Where the device chooses, that is seen when
        the tokens are, and a step more may have been made by then.
        """
        stop = torch.tensor(sorted(stops), dtype=torch.int64)
        tokens = self._chosen(sampler, logits)
        active = ~torch.isin(tokens, stop)
        yield tokens.tolist(), active.tolist()
        if count < 2 or not active.any():
            return
        loop = self._loop(sampler, stop.tolist())
        if loop is not None:
            yield from self._looped(loop, tokens, active, count - 1, sampler)
            return
        for _ in range(count - 1):
            logits = self.advance(tokens, None if active.all() else active)
            tokens = self._chosen(sampler, logits)
            active &= ~torch.isin(tokens, stop)
            yield tokens.tolist(), active.tolist()
            if not active.any():
                return

    def _chosen(self, sampler: Sampler, logits: torch.Tensor) -> torch.Tensor:
        """Return the next token of each row, int64 [B] on the host; from a device they come with
        the word that the logits are finite, so that it is waited for once."""
        if not logits.is_cuda:
            return sampler.next(self.finite(logits))
        tokens = sampler.next(logits)
        *chosen, finite = torch.cat((tokens, logits.isfinite().all()[None])).tolist()
        if not finite:
            self.finite(logits)
        return torch.tensor(chosen)

    def finite(self, logits: torch.Tensor) -> torch.Tensor:
        """Return logits; CheckError where any is NaN or infinite."""
        return require_finite(logits, self._what(), self.engine.dtype)

    def _what(self) -> str:
        return f"{self.engine.path}: logits after {self.length.tolist()} tokens"

    def _loop(self, sampler: Sampler, stops: list[int]) -> Any:
        """Return decoding on the device, if the runtime has it and every table lies there too."""
        text = self.engine.spec.text
        if not self.engine.embeds_on_device or text.readable_ids < text.vocab_size:
            return None
        return self.engine.runtime.token_loop(
            self.engine.embed, self.state, self.batch, sampler.settings, stops
        )

    def _looped(
        self, loop: Any, tokens: torch.Tensor, active: torch.Tensor, steps: int, sampler: Sampler
    ) -> Iterator[tuple[list[int], list[bool]]]:
        self._check_ids(tokens.where(active, 0)[:, None])
        self._check_room(active * steps)
        drawing = sampler.settings.temperature > 0
        uniforms = (lambda: sampler.uniforms(self.batch)) if drawing else None
        loop.start(tokens, self.length, active)
        try:
            for chosen, running, finite in loop.run(steps, uniforms):
                if not finite:
                    self.length = loop.lengths.cpu()  # which the message names
                    raise not_finite(self._what(), self.engine.dtype)
                yield chosen, running
        finally:
            self._hidden.forget()
            self.length = loop.lengths.cpu().clone()
            self._written = torch.maximum(self._written, self.length)

    def round_loop(self, sampler: Sampler, stops: Collection[int]) -> Any:
        """Return rounds of drafting on the device, if the runtime has them, every table lies there
        too, and each row's state is known."""
        text, drafter = self.engine.spec.text, self.engine.drafter
        here = self.engine.embeds_on_device and text.readable_ids == text.vocab_size
        if not here or not drafter or not drafter.drafter:
            return None
        if not bool(self._hidden.is_of(self.length).all()):
            return None
        last = drafter.drafter.position == "last"
        loop = self.engine.runtime.round_loop
        return loop(self.engine.embed, self.state, sampler.settings, sorted(stops), last)

    def rounds(
        self,
        loop: Any,
        tokens: torch.Tensor,
        active: torch.Tensor,
        room: int,
        uniforms: torch.Tensor | None,
        count: Callable[[], int],
    ) -> Iterator[Round]:
        """Yield rounds on the device until no row runs: of rows that are `active` bool[B], whose
        newest `tokens` i64[B] the caches do not hold yet, and which may take `room` tokens more.
        `count` says how many the next round drafts."""
        self._check_ids(tokens.where(active, 0)[:, None])
        self._check_room(active * room)
        limits = self.length + room
        loop.start(tokens, self.length, limits, active, self._hidden.rows, uniforms)
        before, going = self.length, bool(active.any())
        try:
            while going:
                drafted = count()
                made = loop.run(drafted)
                if not made.finite:
                    self.length = loop.lengths.cpu()  # which the message names
                    raise not_finite(self._what(), self.engine.dtype)
                going = any(made.running)
                kept = torch.tensor([len(t) for t in made.tokens])
                fed = (limits - before).clamp(max=drafted + 1) * (kept > 0)
                self._written = torch.maximum(self._written, before + fed)
                before = before + kept
                yield made
        finally:
            self.length = loop.lengths.cpu().clone()
            self._written = torch.maximum(self._written, self.length)
            self._hidden.stand(loop.hidden.clone(), self.length)

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
        self._hidden.cut(keep)

    def reset(self, rows: Any = None) -> None:
        """Empty the given rows (ints), or all."""
        index = torch.arange(self.batch) if rows is None else self._rows(rows, "reset")
        self.length[index] = 0
        self._written[index] = 0
        self._hidden.forget(index)

    def clear(self, rows: Any = None) -> None:
        """Empty the given rows, or all, and write zeros over what their caches hold: NaN there, in
        a slot that no query sees, is NaN in its sum all the same."""
        index = torch.arange(self.batch) if rows is None else self._rows(rows, "clear")
        for row in index.tolist():
            self.state.clear(row, self.engine.limits.max_seq)
        self.reset(index)

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
        self._hidden.copy_row(source._hidden, start, row)

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
        return Snapshot(self.length.clone(), self._written.clone(), caches, self._hidden.copy())

    def restore(self, kept: Snapshot) -> None:
        """Hold again what the snapshot holds."""
        if kept.length.shape != self.length.shape:
            raise InputError(
                f"restore: a snapshot of {len(kept.length)} rows; the session has {self.batch}"
            )
        if kept.caches:
            self.state.put(kept.caches)
        self.length, self._written = kept.length.clone(), kept.written.clone()
        self._hidden = kept.hidden.copy()

    def held_bytes(self, held: int | None = None) -> int:
        """Return the bytes of a snapshot, now or of rows of `held` tokens."""
        held = int(self.length.max()) if held is None else held
        return sum(t.nbytes for t in self.state.views(held).values()) if held else 0

    def nbytes(self) -> int:
        """Return the bytes of the caches."""
        size: int = self.state.nbytes()
        return size

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
        self._hidden.take(made.get(HIDDEN) if made else None, self.length, after)
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


def _in_rows(tokens: Mapping[int, Sequence[int]], batch: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the tokens of some of `batch` rows, right-padded with 0, and how many each has."""
    width = max(map(len, tokens.values()))
    out = torch.zeros(batch, width, dtype=torch.int64)
    lengths = torch.zeros(batch, dtype=torch.int64)
    for row, ids in tokens.items():
        out[row, : len(ids)] = torch.tensor(ids)
        lengths[row] = len(ids)
    return out, lengths


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
