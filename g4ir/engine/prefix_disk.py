"""Prefix cache on disk: snapshots of prompts' KV caches that outlive the process.

    ~/.cache/g4ir/prefixes/SCOPE/LENGTH-KEYS-CONTENT.safetensors

SCOPE is a digest of g4ir's version, engine, machine and salt (API key, adapter). LENGTH is the
number of a prefix's keys, one per token, KEYS a digest of them (token ids, digests of media).
CONTENT is the SHA-256 of the file, which is checked when the file is mapped. A thread of low
priority writes to a temporary file, which is renamed when complete. Processes share the folder: one
at a time writes and evicts (a file lock, if the file system has them), and reading needs no lock,
since a removed file stays mapped.
"""

from __future__ import annotations

import hashlib
import logging
import os
import re
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Iterable, Iterator
from contextlib import suppress
from itertools import chain
from pathlib import Path

import torch

from g4ir import __version__
from g4ir.artefact.digests import file_digest, has_digest
from g4ir.backends import find_backend
from g4ir.backends.background_mask import lower_priority
from g4ir.backends.base import CacheSnapshot
from g4ir.errors import MissingError, WeightsError
from g4ir.ui.files import new_version
from g4ir.ui.locks import EXCLUSIVE
from g4ir.ui.paths import cache_root, locked, private
from g4ir.ui.units import size_text
from g4ir.weights.tensorfile import FileTensor, bytes_of, file_layout, map_file, read_header, view

from .hidden_states import HiddenStates
from .parts import EngineParts
from .session import Snapshot

log = logging.getLogger(__name__)

#: prefix-cache key: token ids; for soft tokens, negative numbers from a digest of their medium or
#: of their block (`prompt_keys`)
Keys = tuple[int, ...]
NAME = re.compile(r"([0-9]{8})-([0-9a-f]{32})-([0-9a-f]{64})\.safetensors")
#: bytes of a key in the digest of keys: keys of soft tokens are negative and need 130 bits
KEY_WIDTH = 17
#: maximum bytes of a snapshot per token of its prompt: a larger one takes about as long to read as
#: the tokens take to compute
TOKEN_BYTES = 1 << 20
#: bytes of snapshots that may wait to be written; beyond them the oldest are dropped, but never the
#: newest
PENDING_BYTES = 512 << 20
#: maximum number of files that stay mapped; seconds after a folder's mtime during which its listing
#: is not cached, since a further change within a clock tick leaves the mtime as it is
MAPPED, TICK_S = 4, 0.1
#: max seconds that `close` waits for the writer
CLOSE_S = 30.0
#: tensor name of the hidden state, and prefix of the caches' names, in a file
HIDDEN, CACHE = "hidden", "cache."


class PrefixDisk:
    """Snapshots in a folder of at most `max_bytes`, found by salt and keys. Thread-safe."""

    def __init__(self, engine: EngineParts, max_bytes: int) -> None:
        if engine.ranks > 1:
            why = f"{engine.label} runs on {engine.ranks} ranks"
            raise MissingError(f"--prefix-disk: {why}, whose KV caches are not saved; leave it out")
        self.root, self.max_bytes = private(cache_root() / "prefixes"), max_bytes
        machine = find_backend(engine.config.backend).machine(engine.device)
        self._engine = f"{__version__}\0{engine.facts.digest}\0{machine}"
        #: `too_large`: number of snapshots not written, since they exceed max_bytes or TOKEN_BYTES
        #: per token
        self.too_large = 0
        #: why writing has stopped; empty: it has not
        self.failed = ""
        self._pending = deque[tuple[str, Keys, Snapshot, int]]()
        self._writer: threading.Thread | None = None
        self._changed = threading.Condition()
        self._listings: dict[Path, tuple[float, dict[tuple[int, str], Path]]] = {}
        self._mapped: OrderedDict[Path, Snapshot] = OrderedDict()

    def lookup(self, salt: str, keys: Keys, longer_than: int = 0) -> tuple[int, Snapshot | None]:
        """Return length and snapshot of the longest prefix of `keys` on disk that has more than
        `longer_than` keys, possibly all of them; (0, None) if there is none. Damaged files are
        removed."""
        entries = self._list(self._scope(salt))
        lengths = {n for n, _ in entries if longer_than < n <= len(keys)}
        matches = [(n, entries[n, d]) for n, d in key_digests(keys, lengths) if (n, d) in entries]
        for length, path in reversed(matches):
            if snapshot := self._open(path):
                return length, snapshot
        return 0, None

    def store(self, salt: str, keys: Keys, snapshot: Snapshot) -> None:
        """Queue a snapshot of `keys` for the writer, which only renews the mtime of a file that is
        on disk already; returns at once. Does nothing for snapshots that are empty or too large, or
        after writing has failed."""
        size = sum(t.nbytes for t in snapshot.caches.tensors.values()) if snapshot.caches else 0
        if not size or self.failed:
            return
        if size > min(self.max_bytes, TOKEN_BYTES * len(keys)):
            self.too_large += 1
            return
        with self._changed:
            self._pending.append((salt, keys, snapshot, size))
            while len(self._pending) > 1 and sum(p[-1] for p in self._pending) > PENDING_BYTES:
                self._pending.popleft()
            if not self._writer:
                self._writer = threading.Thread(target=self._write_pending, name="g4ir-prefixes")
                self._writer.start()

    def close(self, timeout: float = CLOSE_S) -> None:
        """Wait up to `timeout` seconds for the writer, drop what it has not begun to write, and
        unmap all files."""
        with self._changed:
            self._changed.wait_for(lambda: not self._writer, timeout)
            self._pending.clear()
            self._mapped.clear()

    def capacity(self) -> str:
        """Return a log line: the size and the folder."""
        return f"prefix cache on disk: {size_text(self.max_bytes)} in {self.root}"

    def _scope(self, salt: str) -> Path:
        return self.root / hashlib.sha256(f"{self._engine}\0{salt}".encode()).hexdigest()[:32]

    def _list(self, folder: Path) -> dict[tuple[int, str], Path]:
        """Return the files of a scope by length and digest of keys."""
        try:
            changed = folder.stat().st_mtime
        except OSError:
            return {}
        at, entries = self._listings.get(folder, (0.0, {}))
        if at != changed:
            matches = ((NAME.fullmatch(p.name), p) for p in folder.iterdir())
            entries = {(int(m[1]), m[2]): path for m, path in matches if m}
            if time.time() > changed + TICK_S:
                self._listings[folder] = changed, entries
        return entries

    def _open(self, path: Path) -> Snapshot | None:
        """Map a file whose content has the digest of its name; None if it is gone or cannot be
        used."""
        with self._changed:
            if path in self._mapped and path.exists():
                self._mapped.move_to_end(path)
                return self._mapped[path]
        try:
            snapshot = _read(path)
        except FileNotFoundError:  # removed since it was listed: evicted, or damaged
            return None
        except (OSError, WeightsError, ValueError, KeyError) as e:
            log.warning("prefix cache: %s cannot be used and is removed: %s", path, e)
            with suppress(OSError):
                path.unlink()
            return None
        with self._changed:
            self._mapped[path] = snapshot
            while len(self._mapped) > MAPPED:
                self._mapped.popitem(last=False)
        return snapshot

    def _write_pending(self) -> None:
        lower_priority(threading.get_native_id())
        while True:
            with self._changed:
                if not self._pending or self.failed:
                    self._pending.clear()
                    self._writer = None
                    self._changed.notify_all()
                    return
                salt, keys, snapshot, size = self._pending.popleft()
            try:
                self._write(self._scope(salt), keys, snapshot, size)
            except Exception as e:
                reason = e.strerror if isinstance(e, OSError) and e.strerror else e
                self.failed = str(reason) or type(e).__name__
                message = "prefix cache on disk: %s: %s; nothing more is written"
                log.warning(message, self.root, reason)

    def _write(self, scope: Path, keys: Keys, snapshot: Snapshot, size: int) -> None:
        (_, digest), *_ = key_digests(keys, {len(keys)})
        with locked(self.root, "lock", EXCLUSIVE) as alone:
            if path := self._list(scope).get((len(keys), digest)):
                with suppress(FileNotFoundError):
                    os.utime(path)  # changes the file's ctime, so its digest record is renewed
                    file_digest(path, NAME.fullmatch(path.name)[3])  # type: ignore[index]
                    return
            self._evict(size, bool(alone))
            part = private(scope) / f"{len(keys):08}-{digest}.part"
            content = _write_snapshot(part, snapshot)
            path = scope / f"{len(keys):08}-{digest}-{content}.safetensors"
            os.replace(part, path)
            file_digest(path, content)

    def _evict(self, size: int, alone: bool) -> None:
        """Remove the least recently used files until `size` more bytes fit into max_bytes; and, if
        this process holds the lock (`alone`), files of other names: temporary ones of killed
        processes."""
        files = list[tuple[float, int, Path]]()
        for path in self.root.glob("*/*"):
            with suppress(OSError):
                if NAME.fullmatch(path.name):
                    files.append((path.stat().st_mtime, path.stat().st_size, path))
                elif alone:
                    path.unlink()
        total = size + sum(nbytes for _, nbytes, _ in files)
        for _, nbytes, path in sorted(files):
            if total <= self.max_bytes:
                break
            with suppress(OSError):  # Windows does not remove mapped files
                path.unlink()
                total -= nbytes


def key_digests(keys: Keys, lengths: set[int]) -> Iterator[tuple[int, str]]:
    """Yield, for each length in ascending order, the digest of the first `length` keys."""
    digest, start = hashlib.sha256(), 0
    for length in sorted(lengths):
        digest.update(
            b"".join(k.to_bytes(KEY_WIDTH, "little", signed=True) for k in keys[start:length])
        )
        start = length
        yield length, digest.hexdigest()[:32]


def _write_snapshot(path: Path, snapshot: Snapshot) -> str:
    """Write a snapshot of one sequence; return the file's SHA-256."""
    caches: CacheSnapshot = snapshot.caches
    tensors = {f"{CACHE}{name}": t for name, t in caches.tensors.items()}
    if bool(snapshot.hidden.available(snapshot.length)):
        state = snapshot.hidden.of(snapshot.length)
        assert state is not None
        tensors[HIDDEN] = state
    counts = int(snapshot.length[0]), int(snapshot.written[0]), caches.context
    metadata = dict(zip(("length", "written", "context"), map(str, counts), strict=True))
    digest = hashlib.sha256()
    names, header, _ = file_layout({n: FileTensor.of(t) for n, t in tensors.items()}, metadata)
    with new_version(path, 0o600) as file:
        pieces: Iterable[bytes | memoryview] = (bytes_of(tensors[name]) for name in names)
        for piece in chain([header], pieces):
            digest.update(piece)
            file.write(piece)
    return digest.hexdigest()


def _read(path: Path) -> Snapshot:
    """Map the snapshot of a file; WeightsError if its content is not what its name says."""
    header = read_header(path)
    mapped = map_file(header)
    match = NAME.fullmatch(path.name)
    if not (match and has_digest(path, match[3])):
        raise WeightsError("its SHA-256 is not the one in its name")
    tensors = {name: view(mapped, entry) for name, entry in header.entries.items()}
    length, written = (torch.tensor([int(header.metadata[k])]) for k in ("length", "written"))
    hidden = HiddenStates.single(tensors.pop(HIDDEN, None), length)
    caches = {name.removeprefix(CACHE): t for name, t in tensors.items()}
    return Snapshot(length, written, CacheSnapshot(int(header.metadata["context"]), caches), hidden)
