"""Chunked prefill of one prompt after another, in a session of one row, with a prefix cache.

    prefiller = Prefiller(engine)
    for logits in prefiller.chunks(Request((2, 5, 7)), lambda start: start + 128):
        ...                                   # None, and logits [1, vocab] with the last chunk
    batch.put(prefiller.session, [holder])

So a prompt does not cost a chunk of every row, and sequences decode between two of its chunks.
Short prompts share a chunk of a session of several rows: `joined` says which, `together` computes
them.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import suppress
from itertools import zip_longest
from typing import Any

import torch

from g4ir.errors import InputError
from g4ir.media.merge import TokenBatch
from g4ir.media.soft import Soft
from g4ir.model.media import placeholders
from g4ir.ui.memory import free_on
from g4ir.ui.units import size_text

from .batch import Batch
from .inputs import padded, row_prompt
from .parts import EngineParts
from .requests import Request
from .session import Session, Snapshot

#: bounds of the default size of the prefix cache, and how many prompts of LONG tokens it holds at
#: least, memory permitting: agents send 10 to 20 thousand tokens again with each step
LEAST_BYTES, MOST_BYTES, LEAST_PROMPTS, LONG = 256 << 20, 8 << 30, 4, 8192
#: fewest tokens that a prompt shares with the one before for their end to be cached too
PARTED = 64
#: what a prompt is compared by: a token's id, or for a soft token a number of its medium
Keys = tuple[int, ...]
#: a prompt and its keys
Prompt = tuple[Request, Keys]
#: bytes that a key takes beside the snapshot that it finds
KEY_BYTES = 40
#: logits of one chunk, at most (128 MiB in f32), where those of all tokens are read
CHUNK_LOGITS = 1 << 25
#: None for each chunk of a prompt, and the logits with the last
Chunks = Generator[torch.Tensor | None, None, None]


def prompt_keys(
    tokens: Sequence[int],
    soft: Sequence[Soft],
    holders: Mapping[str, int],
    blocks: Sequence[tuple[int, int]] = (),
) -> Keys:
    """Return the keys of a prompt, whose placeholders are given by kind, and its blocks by start
    and stop. Keys of media are digests of their soft tokens, so that equal ids of other pixels
    differ; they are negative. Those of a block are digests of all its media, of which each token
    sees all: prefixes that end within a block differ unless the whole block is equal."""
    by_kind: dict[int, list[int]] = {}
    for s in soft:
        by_kind.setdefault(holders[s.kind], []).extend(_numbered(_digest(s), s.count))
    queues = {token: iter(keys) for token, keys in by_kind.items()}
    keys = [next(queues[t]) if t in queues else t for t in tokens]
    for start, stop in blocks:
        digest = hashlib.sha256(repr(keys[start:stop]).encode()).digest()
        keys[start:stop] = _numbered(digest, stop - start)
    return tuple(keys)


def _numbered(digest: bytes, count: int) -> range:
    """Return a negative key for each token of a medium or block."""
    first = -int.from_bytes(digest[:16], "little") - 1
    return range(first, first - count, -1)


def _digest(soft: Soft) -> bytes:
    h = hashlib.sha256(soft.kind.encode())
    for piece in soft.pieces:
        h.update(f"{piece.dtype} {[*piece.shape]}".encode())
        h.update(piece.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes())
    return h.digest()


def shared(a: Keys, b: Keys) -> int:
    """Count how many keys are equal from the first on."""
    if a[: len(b)] == b[: len(a)]:
        return min(len(a), len(b))
    return next(i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y)


class PrefixCache:
    """Snapshots of one-row sessions by salt and tokens, least recently used dropped first."""

    def __init__(self, most_bytes: int) -> None:
        self.most_bytes, self.nbytes = most_bytes, 0
        #: snapshots that were not kept because each is larger than the cache
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
            self.nbytes -= self._kept.popitem(last=False)[1][1]
        self._kept[name] = session.snapshot(), size
        self.nbytes += size
        return True

    def longest(self, salt: str, keys: Keys) -> tuple[int, Snapshot | None]:
        """Return length and snapshot of the longest kept proper prefix of `keys`; or 0, None."""
        known = (k for s, k in self._kept if s == salt and len(k) < len(keys))
        fits = [k for k in known if keys[: len(k)] == k]
        if not fits:
            return 0, None
        name = salt, max(fits, key=len)
        self._kept.move_to_end(name)
        return len(name[1]), self._kept[name][0]

    def clear(self) -> None:
        """Forget everything."""
        self._kept.clear()
        self.nbytes = 0


class Prefiller:
    """A session of one row, what it holds, and the prefix cache."""

    def __init__(self, engine: EngineParts, prefix_bytes: int | None = None) -> None:
        self.engine = engine
        self.holders = placeholders(engine.spec.tokens, engine.media.kinds)
        #: tokens of the prompt at hand that were known when it began
        self.known = 0
        #: prompts that began with a snapshot
        self.restored = 0
        self._session: Session | None = None
        #: what the session was given, as far as it is known and may be used again
        self._given: tuple[str, Keys] = ("", ())
        self.prefixes = PrefixCache(self._default_bytes() if prefix_bytes is None else prefix_bytes)

    def _default_bytes(self) -> int:
        """A quarter of the free memory, or LEAST_PROMPTS long prompts if half of it holds them."""
        rows = 2 * self.engine.limits.max_batch * self.session.nbytes()  # two sizes of a batch
        free = max(free_on(self.engine.device) - rows, 0)
        wanted = max(LEAST_BYTES, LEAST_PROMPTS * self.prompt_bytes, min(free // 4, MOST_BYTES))
        return min(wanted, max(free // 2, LEAST_BYTES))

    @property
    def _long(self) -> int:
        return min(LONG, self.engine.limits.max_seq)

    @property
    def prompt_bytes(self) -> int:
        """Bytes in the prefix cache of a prompt of LONG tokens, or as many as the engine holds."""
        return self.session.nbytes(self._long) + KEY_BYTES * self._long

    def capacity(self) -> str:
        """Return in words how many prompts the prefix cache holds."""
        most, one = self.prefixes.most_bytes, self.prompt_bytes
        if not most:
            return "prefix cache: off"
        fits = f"room for {most // one} prompts of {self._long} tokens ({size_text(one)} each)"
        if most < one:
            fits = f"too small for a prompt of {self._long} tokens, which takes {size_text(one)}"
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

    def keys(self, prompt: Request) -> Keys:
        """Return the prefix cache's keys of a prompt."""
        soft = prompt.soft
        spans = row_prompt(self.engine, prompt.tokens, soft).spans if soft else ()
        return prompt_keys(prompt.tokens, soft, self.holders, spans)

    def chunks(
        self,
        request: Request,
        until: Callable[[int], int],
        keys: Keys | None = None,
        every: Callable[[torch.Tensor], None] | None = None,
    ) -> Chunks:
        """Begin a prompt with what is known of it, and return an iterator that computes a chunk for
        each value: None, and logits with the last. A chunk ends where `until` (of the number of
        computed tokens) says, or sooner, but in no block: see `piece_ends`. The iterator may be
        left early: what was computed is known to the next prompt. After an exception: `forget`.
        `every` takes the logits of all tokens, of chunks whose logits are at most CHUNK_LOGITS."""
        keys = self.keys(request) if keys is None else keys
        prompt, marks = self._begun(request, keys)
        return self._computed(request, prompt, until, keys, marks, every)

    def _begun(self, request: Request, keys: Keys) -> tuple[TokenBatch, set[int]]:
        """Hold what is known of a prompt; return it, and where its prefixes are to be kept."""
        prompt = row_prompt(self.engine, request.tokens, request.soft)
        self.known, parted = self._found(request, prompt, keys)
        self._given = (request.salt, keys if request.reuse else ())
        return prompt, {prompt.boundary(m) for m in (*request.marks, parted) if m < len(keys)}

    def joined(self, prompts: Iterable[Prompt], sizes: Sequence[int], tokens: int) -> int:
        """Count how many of the first prompts fit into one chunk of so many tokens, each in a row
        of it, half of which are used at least: one of `sizes`, or 0."""
        fits, widths, before = 0, list[int](), list[Keys]()
        for request, keys in prompts if sizes else ():
            known = self.prefixes.longest(request.salt, keys)[0] if request.reuse else 0
            if request.reuse and any(shared(keys, k) >= known + PARTED for k in before):
                break  # it goes on from one that is computed first
            widths.append(len(keys) - known)
            before.append(keys)
            padded_to = len(widths) * max(widths)
            if padded_to > tokens:
                break
            if len(widths) in sizes and 2 * sum(widths) >= padded_to:
                fits = len(widths)
        return fits

    def together(
        self, session: Session, prompts: Sequence[Prompt]
    ) -> tuple[torch.Tensor, list[int]]:
        """Compute prompts without media, as `joined` found them, each in its row of an empty
        session. Return the logits of their last tokens, [rows, vocab], and how many tokens of each
        were known. Each is cut at its marks alone, as it would be by itself."""
        known, stops, logits = list[int](), list[list[int]](), dict[int, torch.Tensor]()
        for row, (request, keys) in enumerate(prompts):
            marks = sorted(self._begun(request, keys)[1])
            session.copy_row(self.session, 0, row)
            known.append(self.known)
            stops.append([*(m for m in marks if m > self.known), len(keys)])
        for ends in zip_longest(*stops):
            spans = [
                prompt[0].tokens[start : end or start]
                for prompt, start, end in zip(prompts, session.length.tolist(), ends, strict=True)
            ]
            (found,) = session.prefill_steps(*padded(dict(enumerate(spans)), len(prompts)))
            for row, (end, (request, keys)) in enumerate(zip(ends, prompts, strict=True)):
                if end == len(keys) and found is not None:
                    logits[row] = found[row].clone()
                elif end and request.reuse:
                    self.session.copy_row(session, row, 0)
                    self._given = (request.salt, keys)
                    self.prefixes.keep(request.salt, keys[:end], self.session)
        return torch.stack([logits[row] for row in range(len(prompts))]), known

    def _computed(
        self,
        request: Request,
        prompt: TokenBatch,
        until: Callable[[int], int],
        keys: Keys,
        marks: set[int],
        every: Callable[[torch.Tensor], None] | None,
    ) -> Chunks:
        start, limit = self.known, self.engine.limits.prefill_chunk
        if every:
            limit = min(limit, max(1, CHUNK_LOGITS // self.engine.spec.text.vocab_size))
        while start < len(keys):
            stop = min(max(until(start), start + 1), start + limit, len(keys))
            piece = prompt.piece(start, min(m for m in (stop, *marks) if m > start))
            logits = self.session.prefill_piece(prompt, piece, every)
            start = self.held
            if start in marks and request.reuse:
                self.prefixes.keep(request.salt, keys[:start], self.session)
            yield logits

    def _found(self, request: Request, prompt: TokenBatch, keys: Keys) -> tuple[int, int]:
        """Hold as much of a prompt as is known, but its last token. Return how much that is, and
        where it parts from the one before if that is worth a mark, as a third is likely to."""
        salt, held = self._given
        if not request.reuse:
            self.session.reset()
            return 0, 0
        before = held[: self.held] if salt == request.salt else ()
        here = prompt.boundary(min(shared(before, keys), len(keys) - 1))
        length, kept = self.prefixes.longest(request.salt, keys)
        if here and here >= length:
            with suppress(InputError):  # a ring has written over what the next token sees
                self.session.truncate(here)
                return here, 0
        self.session.reset()
        if kept:
            self.session.restore(kept)
            self.restored += 1
        return length, here if here >= length + PARTED else 0

    def borrow(self, batch: Batch[Any]) -> None:
        """Work in the session of one row that a batch can spare, if there is none to work in."""
        if self._session is None:
            self._session = batch.release()

    def forget(self) -> None:
        """Drop the session: a failed step leaves it undefined, or it has a new owner."""
        self._session, self._given = None, ("", ())

    def close(self) -> None:
        """Let go of all caches."""
        self.forget()
        self.prefixes.clear()
