"""Chunked prefill of one prompt after another, in a session of one row, with a prefix cache.

    prefiller = Prefiller(engine)
    for logits in prefiller.chunks(PrefillInput((2, 5, 7)), lambda start: start + 128):
        ...                                   # None, and logits [1, vocab] with the last chunk
    batch.put(prefiller.session, [holder])

So a prompt does not cost a chunk of every row, and sequences decode between two of its chunks.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping
from contextlib import suppress
from dataclasses import dataclass

import torch

from g4ir.errors import InputError
from g4ir.media.soft import Soft
from g4ir.model.media import placeholders
from g4ir.ui.memory import free_on
from g4ir.ui.units import size_text

from .parts import EngineParts
from .prefix_cache import KEY_BYTES, Keys, PrefixCache, prompt_keys, shared
from .session import Session

#: bounds of the default size of the prefix cache, and how many prompts of LONG tokens it holds at
#: least, memory permitting: agents send 10 to 20 thousand tokens again with each step
LEAST_BYTES, MOST_BYTES, LEAST_PROMPTS, LONG = 256 << 20, 8 << 30, 4, 8192
#: fewest tokens that a prompt shares with the one before for their end to be remembered too
PARTED = 64


@dataclass(frozen=True)
class PrefillInput:
    """A prompt: all that is computed before the first token is drawn.

    `soft` stand for the placeholders, as in `Session.prefill`. `marks` are numbers of tokens after
    which what was computed is remembered for other prompts that begin in the same way and have the
    same `salt`; without `reuse` nothing is remembered and nothing remembered is used.
    """

    tokens: tuple[int, ...]
    soft: tuple[Soft, ...] = ()
    marks: tuple[int, ...] = ()
    reuse: bool = True
    salt: str = ""


#: number of tokens that are computed -> how many may be after the next chunk
Until = Callable[[int], int]


class Prefiller:
    """A session of one row, what it holds, and beginnings of prompts that are remembered."""

    def __init__(self, engine: EngineParts, prefix_bytes: int | None = None) -> None:
        self.engine = engine
        self.holders = placeholders(engine.spec.tokens, engine.media.kinds)
        #: tokens of the prompt at hand that were known when it began
        self.known = 0
        #: prompts that began with something remembered
        self.restored = 0
        self._session: Session | None = None
        #: what the session was given, as far as it is known and may be used again
        self._given: tuple[str, Keys] = ("", ())
        self.prefixes = PrefixCache(self._default_bytes() if prefix_bytes is None else prefix_bytes)

    def _default_bytes(self) -> int:
        """Return the size of the prefix cache: a quarter of what is free once all rows have their
        caches, but room for LEAST_PROMPTS long prompts unless that is more than half of it."""
        rows = 2 * self.engine.limits.max_batch * self.session.nbytes()  # two sizes of a batch
        free = max(free_on(self.engine.device) - rows, 0)
        wanted = max(LEAST_BYTES, LEAST_PROMPTS * self.prompt_bytes, min(free // 4, MOST_BYTES))
        return min(wanted, max(free // 2, LEAST_BYTES))

    @property
    def prompt_bytes(self) -> int:
        """Bytes in the prefix cache of a prompt of LONG tokens, or of as many as the engine
        holds."""
        tokens = min(LONG, self.engine.limits.max_seq)
        return self.session.nbytes(tokens) + KEY_BYTES * tokens

    def capacity(self) -> str:
        """Return in words how many prompts the prefix cache holds."""
        most, tokens = self.prefixes.most_bytes, min(LONG, self.engine.limits.max_seq)
        one = self.prompt_bytes
        if not most:
            return "prefix cache: off"
        fits = f"room for {most // one} prompts of {tokens} tokens ({size_text(one)} each)"
        if most < one:
            fits = f"too small for a prompt of {tokens} tokens, which takes {size_text(one)}"
        return f"prefix cache: {size_text(most)}, {fits}"

    @property
    def session(self) -> Session:
        """The session, which holds a prompt after its last chunk."""
        if self._session is None:
            self._session = Session(self.engine, 1)
        return self._session

    @property
    def held(self) -> int:
        """Number of tokens of the prompt at hand that are computed or known."""
        return int(self._session.length[0]) if self._session else 0

    def keys(self, prompt: PrefillInput) -> Keys:
        """Return what a prompt is known by."""
        return prompt_keys(prompt.tokens, prompt.soft, self.holders)

    def chunks(
        self, prompt: PrefillInput, until: Until, keys: Keys | None = None
    ) -> Generator[torch.Tensor | None, None, None]:
        """Begin a prompt with what is known of it, and return an iterator that computes a chunk for
        each value: None, and logits with the last. A chunk ends where `until` says, or sooner; in a
        medium sessions cut themselves. It may be closed before its end: what was computed is known
        to the next prompt. After an exception: `forget`."""
        keys = self.keys(prompt) if keys is None else keys
        parted = self._begin(prompt, keys)
        marks = {
            m
            for m in (*prompt.marks, parted)
            if self.known < m < len(keys) and not self._cuts_medium(prompt, m)
        }
        return self._computed(prompt, until, keys, marks)

    def _computed(
        self, prompt: PrefillInput, until: Until, keys: Keys, marks: set[int]
    ) -> Generator[torch.Tensor | None, None, None]:
        """Yield as `chunks` does."""
        soft, start = _SoftRows(prompt, self.holders), self.known
        while start < len(keys):
            end = min((m for m in marks if m > start), default=len(keys))
            stop = self._stop(prompt, min(max(until(start), start + 1), end), end)
            tokens, last = torch.tensor([prompt.tokens[start:stop]]), stop == len(keys)
            for logits in self.session.prefill_steps(tokens, None, soft.between(start, stop), last):
                start = self.held
                if start in marks and prompt.reuse:
                    self.prefixes.keep(prompt.salt, keys[:start], self.session)
                yield logits

    def _stop(self, prompt: PrefillInput, stop: int, end: int) -> int:
        """Return where the next part of a prompt ends: never in a medium."""
        while stop < end and self._cuts_medium(prompt, stop):
            stop += 1
        return stop

    def _begin(self, prompt: PrefillInput, keys: Keys) -> int:
        """Hold as much of a prompt as is known, but its last token. Return where it parts from the
        one before, if that is worth a mark: where two prompts part, a third is likely to."""
        self.known, parted = self._found(prompt, keys)
        self._given = (prompt.salt, keys if prompt.reuse else ())
        return parted

    def _found(self, prompt: PrefillInput, keys: Keys) -> tuple[int, int]:
        """Restore what is known of a prompt; return how much that is, and where it parts."""
        salt, held = self._given
        if not prompt.reuse:
            self.session.reset()
            return 0, 0
        before = held[: self.held] if salt == prompt.salt else ()
        here = min(shared(before, keys), len(keys) - 1)
        while here and self._cuts_medium(prompt, here):
            here -= 1
        length, kept = self.prefixes.longest(prompt.salt, keys)
        if here and here >= length:
            with suppress(InputError):  # a ring has written over what the next token sees
                self.session.truncate(here)
                return here, 0
        self.session.reset()
        if kept:
            self.session.restore(kept)
            self.restored += 1
        return length, here if here >= length + PARTED else 0

    def _cuts_medium(self, prompt: PrefillInput, at: int) -> bool:
        """Whether soft tokens stand on both sides of a place: a cut might be in a picture."""
        ids = self.holders.values()
        return bool(prompt.soft) and prompt.tokens[at - 1] in ids and prompt.tokens[at] in ids

    def lend(self, session: Session | None) -> None:
        """Take a session to work in, if there is none."""
        self._session = self._session or session

    def forget(self) -> None:
        """Drop the session: a failed step leaves it undefined, or it has a new owner."""
        self._session, self._given = None, ("", ())

    def close(self) -> None:
        """Let go of all caches."""
        self.forget()
        self.prefixes.clear()


class _SoftRows:
    """The soft tokens of a prompt, of which each part of it takes some."""

    def __init__(self, prompt: PrefillInput, holders: Mapping[str, int]) -> None:
        self.tokens, self.holders = prompt.tokens, holders
        self.rows = {
            kind: torch.cat([p for s in prompt.soft if s.kind == kind for p in s.pieces])
            for kind in dict.fromkeys(s.kind for s in prompt.soft)
        }

    def between(self, start: int, end: int) -> list[Soft]:
        """Return those of the placeholders among tokens start to end."""
        out: list[Soft] = []
        for kind, rows in self.rows.items():
            holder = self.holders[kind]
            first = self.tokens[:start].count(holder)
            count = self.tokens[start:end].count(holder)
            if count:
                out.append(Soft(kind, (rows[first : first + count],)))
        return out
