"""Chunked prefill of one prompt after another, in a session of batch size 1, with a prefix cache.

    prefiller = Prefiller(engine)
    for logits in prefiller.chunks(Request((2, 5, 7)), lambda start: start + 128):
        ...                                   # None, and logits [1, vocab] with the last chunk
    batch.put(prefiller.session, [sequence])

So a chunk is computed for its prompt alone, not for every slot of the batch, and other sequences
decode between chunks.
Several short prompts are prefilled in one chunk of a larger session: `count_batchable` returns how
many, `prefill_batch` computes them.
"""

from __future__ import annotations

import hashlib
import threading
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
from .prefix_disk import Keys, PrefixDisk
from .requests import Request
from .session import Session, Snapshot

#: min and max default size of the prefix cache, which may pass the max to hold MIN_PROMPTS prompts
#: of LONG tokens, memory permitting: agents resend 10,000 to 20,000 tokens with each step
MIN_BYTES, MAX_BYTES, MIN_PROMPTS, LONG = 256 << 20, 8 << 30, 4, 8192
#: the part that a prompt shares with the one before is cached if it is at least this many tokens
#: longer than the longest cached prefix
MIN_FORK = 64
#: (request, its prompt's keys in the prefix cache, slot of its adapter)
Prompt = tuple[Request, Keys, int]
#: bytes of one key in the prefix cache, in addition to the snapshot
KEY_BYTES = 40
#: maximum logits of one chunk (128 MiB in f32) when logits of all tokens are read
CHUNK_LOGITS = 1 << 25
#: yields None per chunk of a prompt, logits with the last
Chunks = Generator[torch.Tensor | None, None, None]


def prompt_keys(
    tokens: Sequence[int],
    soft: Sequence[Soft],
    placeholder_ids: Mapping[str, int],
    blocks: Sequence[tuple[int, int]] = (),
) -> Keys:
    """Return a prompt's keys for the prefix cache, one per token: the token id, or for soft tokens
    (equal ids of different pixels) negative numbers from a digest of their medium. Keys of a block
    come from a digest of the full block, since each of its tokens attends to all others: prefixes
    that end within a block match only if the full block is equal. placeholder_ids: by kind of
    media; blocks: (start, stop) of spans with bidirectional attention."""
    by_kind: dict[int, list[int]] = {}
    for s in soft:
        by_kind.setdefault(placeholder_ids[s.kind], []).extend(_token_keys(_digest(s), s.count))
    queues = {token: iter(keys) for token, keys in by_kind.items()}
    keys = [next(queues[t]) if t in queues else t for t in tokens]
    for start, stop in blocks:
        digest = hashlib.sha256(repr(keys[start:stop]).encode()).digest()
        keys[start:stop] = _token_keys(digest, stop - start)
    return tuple(keys)


def _token_keys(digest: bytes, count: int) -> range:
    """Return `count` consecutive negative keys from a digest."""
    first = -int.from_bytes(digest[:16], "little") - 1
    return range(first, first - count, -1)


def _digest(soft: Soft) -> bytes:
    h = hashlib.sha256(soft.kind.encode())
    for piece in soft.pieces:
        h.update(f"{piece.dtype} {[*piece.shape]}".encode())
        h.update(piece.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes())
    return h.digest()


def shared_length(a: Keys, b: Keys) -> int:
    """Return the length of the common prefix."""
    if a[: len(b)] == b[: len(a)]:
        return min(len(a), len(b))
    return next(i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y)


class PrefixCache:
    """LRU cache of one-row session snapshots, by salt and prompt keys (`prompt_keys`), optionally
    backed by a cache on disk. `lookup` is thread-safe."""

    def __init__(self, max_bytes: int, disk: PrefixDisk | None = None) -> None:
        self.max_bytes, self.nbytes, self.disk = max_bytes, 0, disk
        #: number of snapshots larger than max_bytes, which were not stored in memory
        self.too_large = 0
        self._entries: OrderedDict[tuple[str, Keys], tuple[Snapshot, int]] = OrderedDict()
        self._lock = threading.RLock()

    def __len__(self) -> int:
        return len(self._entries)

    def store(self, salt: str, keys: Keys, session: Session) -> bool:
        """Store a snapshot of the session, whose tokens have these keys; return False if it exceeds
        max_bytes (it may still be written to disk)."""
        key = (salt, keys)
        if key in self._entries:
            self._entries.move_to_end(key)
            return True
        size = session.nbytes(int(session.length.max())) + KEY_BYTES * len(keys)
        fits = size <= self.max_bytes
        if not fits:
            self.too_large += 1
            if not self.disk:
                return False
        snapshot = session.snapshot()
        self.used(salt, keys, snapshot)
        with self._lock:
            while fits and self.nbytes + size > self.max_bytes:
                self.nbytes -= self._entries.popitem(last=False)[1][1]
            if fits:
                self._entries[key] = snapshot, size
                self.nbytes += size
        return fits

    def used(self, salt: str, keys: Keys, snapshot: Snapshot) -> None:
        """Pass a new or used snapshot to the cache on disk, if there is one, which writes it in the
        background, or renews the mtime of its file."""
        if self.disk:
            self.disk.store(salt, keys, snapshot)

    def lookup(self, salt: str, keys: Keys) -> tuple[int, Snapshot | None]:
        """Return length and snapshot of the longest cached prefix of `keys`; (0, None) if there is
        none. Prefixes in memory are shorter than `keys`, one on disk may be all of them."""
        with self._lock:
            prefixes = (k for s, k in self._entries if s == salt and len(k) < len(keys))
            match = max((k for k in prefixes if keys[: len(k)] == k), key=len, default=())
            snapshot = self._entries[salt, match][0] if match else None
            if match:
                self._entries.move_to_end((salt, match))
        if self.disk and len(match) < len(keys) - 1:
            length, stored = self.disk.lookup(salt, keys, len(match))
            if stored:
                return length, stored
        return len(match), snapshot

    def clear(self) -> None:
        with self._lock:
            self._entries.clear()
            self.nbytes = 0
        if self.disk:
            self.disk.close()


class Prefiller:
    """A one-row session for prefill, and the prefix cache."""

    def __init__(
        self, engine: EngineParts, prefix_bytes: int | None = None, disk_bytes: int = 0
    ) -> None:
        self.engine = engine
        self.placeholder_ids = placeholders(engine.spec.tokens, engine.media.kinds)
        #: tokens of the current prompt that were reused, not computed
        self.num_cached = 0
        #: number of prompts that started from a snapshot
        self.restored = 0
        self._session: Session | None = None
        #: salt and keys of the session's prompt, of which it has `num_computed` tokens; no keys if
        #: the next prompt must not reuse them
        self._reusable: tuple[str, Keys] = ("", ())
        disk = PrefixDisk(engine, disk_bytes) if disk_bytes else None
        max_bytes = self._default_bytes() if prefix_bytes is None else prefix_bytes
        self.prefixes = PrefixCache(max_bytes, disk)

    def _default_bytes(self) -> int:
        """Return the cache's default size: a quarter of the memory that is free after the KV caches
        of two buckets, but at most MAX_BYTES; more for MIN_PROMPTS long prompts, up to half of the
        free memory; at least MIN_BYTES."""
        rows = 2 * self.engine.limits.max_batch * self.session.nbytes()  # two buckets
        free = max(free_on(self.engine.device) - rows, 0)
        requested = max(MIN_BYTES, MIN_PROMPTS * self.prompt_bytes, min(free // 4, MAX_BYTES))
        return min(requested, max(free // 2, MIN_BYTES))

    @property
    def _long_prompt(self) -> int:
        return min(LONG, self.engine.limits.max_seq)

    @property
    def prompt_bytes(self) -> int:
        """Prefix-cache bytes of a prompt of LONG tokens (at most max_seq)."""
        return self.session.nbytes(self._long_prompt) + KEY_BYTES * self._long_prompt

    def capacity(self) -> str:
        """Return log lines: the prefix cache's size and how many long prompts fit."""
        disk = f"\n{self.prefixes.disk.capacity()}" if self.prefixes.disk else ""
        max_bytes, one = self.prefixes.max_bytes, size_text(self.prompt_bytes)
        if not max_bytes:
            return f"prefix cache: off{disk}"
        count, long = max_bytes // self.prompt_bytes, f"{self._long_prompt} tokens"
        fits = f"room for {count} prompts of {long} ({one} each)"
        if not count:
            fits = f"too small for a prompt of {long}, which takes {one}"
        return f"prefix cache: {size_text(max_bytes)}, {fits}{disk}"

    @property
    def session(self) -> Session:
        """The one-row session; after the last chunk it holds the full prompt."""
        if self._session is None:
            self._session = Session(self.engine, 1)
        return self._session

    @property
    def num_computed(self) -> int:
        """Number of tokens of the current prompt in the KV cache, reused ones included."""
        return int(self._session.length[0]) if self._session else 0

    def keys(self, prompt: Request) -> Keys:
        """Return a prompt's keys for the prefix cache."""
        soft = prompt.soft
        spans = row_prompt(self.engine, prompt.tokens, soft).spans if soft else ()
        return prompt_keys(prompt.tokens, soft, self.placeholder_ids, spans)

    def chunks(
        self,
        request: Request,
        until: Callable[[int], int],
        keys: Keys | None = None,
        on_logits: Callable[[torch.Tensor], None] | None = None,
        adapter_slot: int = -1,
    ) -> Chunks:
        """Restore the longest cached prefix, and return an iterator that computes one chunk per
        value: None, and logits [1, vocab] with the last. until(start) returns where a chunk
        should end; it may end sooner (for example at a mark), later only to complete a block that
        starts it (`piece_ends`). The iterator may be closed early: the next prompt can reuse what
        was computed. After an exception call `drop_session`. on_logits: callback for the logits of
        all computed tokens, at most CHUNK_LOGITS values per chunk."""
        keys = self.keys(request) if keys is None else keys
        prompt, marks = self._restore_prefix(request, keys, adapter_slot)
        return self._run_chunks(request, prompt, until, keys, marks, on_logits)

    def _restore_prefix(
        self, request: Request, keys: Keys, adapter_slot: int
    ) -> tuple[TokenBatch, set[int]]:
        """Restore the reusable prefix; return the prompt, and the lengths at which to cache it."""
        if self.engine.adapters:
            self.session.state.adapters[0] = adapter_slot
        prompt = row_prompt(self.engine, request.tokens, request.soft)
        self.num_cached, fork = self._reuse_prefix(request, prompt, keys)
        self._reusable = (request.salt, keys if request.reuse else ())
        return prompt, {prompt.boundary(m) for m in (*request.marks, fork) if m < len(keys)}

    def count_batchable(
        self, prompts: Iterable[Prompt], sizes: Sequence[int], max_tokens: int
    ) -> int:
        """Return how many of the first prompts to prefill in one chunk, one per row: one of
        `sizes`, or 0. The padded chunk has at most max_tokens, at least half of them valid."""
        count, lengths, earlier = 0, list[int](), list[Keys]()
        for request, keys, _ in prompts if sizes else ():
            num_cached = self.prefixes.lookup(request.salt, keys)[0] if request.reuse else 0
            num_cached = min(num_cached, len(keys) - 1)
            if request.reuse and any(
                shared_length(keys, k) >= num_cached + MIN_FORK for k in earlier
            ):
                break  # once an earlier one is computed, it can reuse that one's prefix
            lengths.append(len(keys) - num_cached)
            earlier.append(keys)
            padded_tokens = len(lengths) * max(lengths)
            if padded_tokens > max_tokens:
                break
            if len(lengths) in sizes and 2 * sum(lengths) >= padded_tokens:
                count = len(lengths)
        return count

    def prefill_batch(
        self, session: Session, prompts: Sequence[Prompt]
    ) -> tuple[torch.Tensor, list[int]]:
        """Prefill prompts without media, counted by `count_batchable`, one per row of an empty
        session. Return the logits of their last tokens, [rows, vocab], and the number of cached
        tokens of each. A prompt is cut only where it is to be cached itself."""
        num_cached, stops_by_row, logits = list[int](), list[list[int]](), dict[int, torch.Tensor]()
        for row, (request, keys, adapter_slot) in enumerate(prompts):
            marks = sorted(self._restore_prefix(request, keys, adapter_slot)[1])
            session.copy_row(self.session, 0, row)
            num_cached.append(self.num_cached)
            stops_by_row.append([*(m for m in marks if m > self.num_cached), len(keys)])
        for stops in zip_longest(*stops_by_row):
            spans = [
                prompt[0].tokens[start : end or start]
                for prompt, start, end in zip(prompts, session.length.tolist(), stops, strict=True)
            ]
            (last,) = session.prefill_steps(*padded(dict(enumerate(spans)), len(prompts)))
            for row, (end, (request, keys, _)) in enumerate(zip(stops, prompts, strict=True)):
                if end == len(keys) and last is not None:
                    logits[row] = last[row].clone()
                elif end and request.reuse:
                    self.session.copy_row(session, row, 0)
                    self._reusable = (request.salt, keys)
                    self.prefixes.store(request.salt, keys[:end], self.session)
        return torch.stack([logits[row] for row in range(len(prompts))]), num_cached

    def _run_chunks(
        self,
        request: Request,
        prompt: TokenBatch,
        until: Callable[[int], int],
        keys: Keys,
        marks: set[int],
        on_logits: Callable[[torch.Tensor], None] | None,
    ) -> Chunks:
        start, limit = self.num_cached, self.engine.limits.prefill_chunk
        if on_logits:
            limit = min(limit, max(1, CHUNK_LOGITS // self.engine.spec.text.vocab_size))
        while start < len(keys):
            stop = min(max(until(start), start + 1), start + limit, len(keys))
            piece = prompt.piece(start, min(m for m in (stop, *marks) if m > start))
            logits = self.session.prefill_piece(prompt, piece, on_logits)
            start = self.num_computed
            ends = start == len(keys) and self.prefixes.disk and not request.marks
            if request.reuse and (start in marks or ends):
                self.prefixes.store(request.salt, keys[:start], self.session)
            yield logits

    def _reuse_prefix(self, request: Request, prompt: TokenBatch, keys: Keys) -> tuple[int, int]:
        """Reuse the longest known prefix of a prompt, without its last token: of the session's
        tokens or from the prefix cache. Return its length, and where the prompt forks from the one
        before if that is worth caching (a third prompt is likely to fork there too), or 0."""
        salt, reusable = self._reusable
        if not request.reuse:
            self.session.reset()
            return 0, 0
        before = reusable[: self.num_computed] if salt == request.salt else ()
        common = prompt.boundary(min(shared_length(before, keys), len(keys) - 1))
        length, snapshot = self.prefixes.lookup(request.salt, keys)
        if common and common >= min(length, len(keys) - 1):
            with suppress(InputError):  # the ring no longer has the next token's window
                self.session.truncate(common)
                return common, 0
        self.session.reset()
        if snapshot:
            length = self._restore(request, prompt, keys[:length], snapshot)
        return length, common if common >= length + MIN_FORK else 0

    def _restore(self, request: Request, prompt: TokenBatch, keys: Keys, snapshot: Snapshot) -> int:
        """Restore a snapshot of these keys, without the prompt's last token; return the number of
        tokens restored, 0 if that is not possible."""
        length = prompt.boundary(min(len(keys), len(request.tokens) - 1))
        try:
            self.session.restore(snapshot)
            self.session.truncate(length)
        except InputError:  # other shapes, or a ring no longer has the next token's window
            self.session.reset()
            return 0
        self.restored += 1
        self.prefixes.used(request.salt, keys, snapshot)
        return length

    def borrow_session(self, batch: Batch[Any]) -> None:
        """Take over the batch's one-row session, if it has an unused one and this has none yet."""
        if self._session is None:
            self._session = batch.release()

    def drop_session(self) -> None:
        """Drop the session, and what the next prompt could reuse of it."""
        self._session, self._reusable = None, ("", ())

    def close(self) -> None:
        """Release all KV caches."""
        self.drop_session()
        self.prefixes.clear()
