"""Reads and writes safetensors files: the library `safetensors` checks headers, this module maps
and writes files.

Layout (https://github.com/huggingface/safetensors#format): 8 bytes little-endian length N,
N bytes of JSON (name -> dtype, shape, data_offsets), then the data.
"""

from __future__ import annotations

import ctypes
import errno
import hashlib
import json
import mmap
import os
import stat
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from itertools import accumulate, pairwise
from math import prod
from pathlib import Path
from typing import IO, Any, TypeAlias, TypeVar

from safetensors import SafetensorError, safe_open

from g4ir.errors import WeightsError
from g4ir.ops.types import torch
from g4ir.spec.reader import json_object
from g4ir.ui.files import read_table, write_file
from g4ir.ui.threads import usable_cores

TABLES: dict[str, Any] = read_table(Path(__file__).with_name("tables.yaml"))
#: dtype of safetensors -> bits of an element
BITS: dict[str, int] = {name: bits for name, (bits, *_) in TABLES["dtypes"].items()}
TORCH: dict[str, str] = {name: row[1] for name, row in TABLES["dtypes"].items() if row[1:]}
#: dtypes of codes that safetensors stores as another dtype, with the name here in `__metadata__`:
#: name -> the dtype in the file, torch's name
RAW: dict[str, tuple[str, str]] = TABLES["raw"]
TORCH |= {name: torch_name for name, (_, torch_name) in RAW.items()}
#: dtypes of weights that are not quantised
FLOATS = ("BF16", "F16", "F32")
CODES = {name: code for code, name in TORCH.items()}
DOWNLOAD = "fix: download or save the file again"
LENGTH_BYTES = 8  # bytes of the header length
MAX_HEADER = 100_000_000  # bytes of a header, the library's limit
ALIGNED = 64  # bytes of a cache line: written tensors of a multiple of it are aligned to it
SHARD_BYTES = 4 << 30  # maximum bytes of a written file's tensors, if it has several
PREFETCH_BYTES = 256 << 20  # maximum bytes of tensors computed ahead of the writer
PRIVATE: dict[str, int]  # mmap arguments: copy-on-write
if sys.platform == "win32":
    PRIVATE = {"access": mmap.ACCESS_COPY}
else:
    # Not ACCESS_COPY, which cannot have MAP_NORESERVE: without it Linux refuses a private writable
    # mapping larger than RAM and swap. Python has the constant from 3.13 on; 0x4000 is Linux's
    # (uapi/asm-generic/mman.h).
    _NO_RESERVE = getattr(mmap, "MAP_NORESERVE", 0x4000 if sys.platform == "linux" else 0)
    PRIVATE = {"flags": mmap.MAP_PRIVATE | _NO_RESERVE, "prot": mmap.PROT_READ | mmap.PROT_WRITE}
#: bytes of a huge page
HUGE_PAGE = 1 << 21
#: Linux's advice for madvise (uapi/asm-generic/mman-common.h); the second from 5.14 on
MADV_HUGEPAGE, MADV_POPULATE_READ = 14, 22

_T = TypeVar("_T")


@dataclass(frozen=True)
class Entry:
    """One tensor of a file; `start` and `end` are absolute byte offsets in the file."""

    name: str
    dtype: str  # a key of BITS or RAW; CODED (formats/base.py) for a whole quantised weight
    shape: tuple[int, ...]
    start: int
    end: int

    @property
    def nbytes(self) -> int:
        return self.end - self.start


@dataclass(frozen=True)
class Header:
    """A checked header; `identity` detects a change of the file before it is mapped."""

    path: Path
    size: int
    identity: tuple[int, ...]
    entries: Mapping[str, Entry]
    metadata: Mapping[str, str]


def quoted(text: object, limit: int = 120) -> str:
    """Return `ascii(text)`, cut to `limit` characters: texts in files are untrusted."""
    literal = ascii(text)
    return literal if len(literal) <= limit else literal[:limit] + "..."


def broken(path: object, msg: str, fix: str = DOWNLOAD) -> WeightsError:
    return WeightsError(f"{path}: {msg}; {fix}")


def read_header(path: Path) -> Header:
    """Read the header of one file, without tensor data. WeightsError if the file cannot be read, or
    if the library `safetensors`, which checks it, refuses it."""
    raw = b""
    try:
        with open_regular(path) as file:
            status = os.fstat(file.fileno())
            length = int.from_bytes(file.read(LENGTH_BYTES), "little")
            raw = file.read(min(length, MAX_HEADER))
        with safe_open(path, "np"):
            pass
    except OSError as error:
        raise broken(path, f"cannot be read ({error.strerror or error})") from None
    except SafetensorError as error:
        text = str(error).removeprefix("Error while deserializing header: ")
        reason = f"{_first_faulty(raw)}{quoted(text, 200)}"
        raise broken(path, f"no complete safetensors file ({reason})") from None
    table = parse_json(path, raw)
    metadata, data = table.pop("__metadata__", None) or {}, LENGTH_BYTES + len(raw)
    entries: dict[str, Entry] = {}
    for name, fields in table.items():
        start, end = (data + at for at in fields["data_offsets"])
        # Dtypes in RAW are stored as another dtype; __metadata__ maps the tensor to the real one.
        dtype = metadata.get(name, "")
        dtype = dtype if RAW.get(dtype, ("",))[0] == fields["dtype"] else fields["dtype"]
        entries[name] = Entry(name, dtype, tuple(fields["shape"]), start, end)
    return Header(path, status.st_size, identity(status), entries, metadata)


def _first_faulty(raw: bytes) -> str:
    """Return `tensor NAME: ` for the first tensor of a header with a wrong dtype or size, or ""."""
    with suppress(ValueError):
        for name, fields in json_object(raw).items():
            try:
                bits = BITS[fields["dtype"]] * prod(fields["shape"])
                start, end = fields["data_offsets"]
                faulty = bits != 8 * (end - start)
            except (KeyError, TypeError, ValueError):
                faulty = True
            if faulty and name != "__metadata__":
                return f"tensor {quoted(name)}: "
    return ""


def open_regular(path: Path) -> IO[bytes]:
    """Open an ordinary file for reading; WeightsError for any other: a pipe could block for ever.
    OSError if there is none."""
    if not stat.S_ISREG(os.stat(path).st_mode):
        raise WeightsError(f"{path}: expected an ordinary file; fix: put the file itself there")
    return open(path, "rb")


def read_limited(path: Path, limit: int) -> bytes:
    with open_regular(path) as file:
        raw = file.read(limit + 1)
    if len(raw) > limit:
        raise broken(path, f"larger than {limit} bytes")
    return raw


def parse_json(path: Path, raw: bytes) -> dict[str, Any]:
    """Return the JSON object in `raw`; WeightsError for anything else, and for duplicate keys."""
    try:
        return json_object(raw)
    except ValueError as error:
        raise broken(path, str(error)) from None


def read_json(path: Path, limit: int = 4 << 20) -> dict[str, Any]:
    return parse_json(path, read_limited(path, limit))


def identity(status: os.stat_result) -> tuple[int, ...]:
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns


def map_file(header: Header) -> mmap.mmap:
    """Map a checked file copy-on-write: writes never reach the file. The mapping lives as long as a
    view of it. WeightsError if the file changed since its header was read, or cannot be mapped."""
    try:
        with open_regular(header.path) as file:
            if identity(os.fstat(file.fileno())) != header.identity:
                raise broken(header.path, "changed since it was opened", "fix: open it again")
            return mmap.mmap(file.fileno(), 0, **PRIVATE)
    except (OSError, ValueError) as error:
        strict = isinstance(error, OSError) and error.errno == errno.ENOMEM
        fix = "set vm.overcommit_memory to 0 or 1, or free memory" if strict else "retry"
        raise WeightsError(f"{header.path}: cannot be mapped ({error}); fix: {fix}") from None


def view(mapped: mmap.mmap, entry: Entry) -> torch.Tensor:
    """Return a tensor on the mapped bytes; unaligned data, which the format allows, is copied."""
    dtype = torch_dtype(entry)
    data = _mapped_bytes(mapped, entry)
    aligned = data if entry.start % dtype.itemsize == 0 else data.clone()
    return aligned.view(dtype).view(entry.shape)


def view_rows(mapped: mmap.mmap, entry: Entry, ids: torch.Tensor) -> torch.Tensor:
    """Return a copy of rows `ids` (1-D, in range) of a tensor: [len(ids), elements of a row]; reads
    their pages only."""
    rows = _mapped_bytes(mapped, entry).view(entry.shape[0], -1)
    return rows.index_select(0, ids).view(torch_dtype(entry))


def torch_dtype(entry: Entry) -> torch.dtype:
    return getattr(torch, TORCH[entry.dtype])


def code_of(dtype: torch.dtype) -> str:
    """Return the name of a torch dtype in files, a key of BITS or RAW."""
    return CODES[str(dtype).removeprefix("torch.")]


def _mapped_bytes(mapped: mmap.mmap, entry: Entry) -> torch.Tensor:
    if not entry.nbytes:
        return torch.empty(0, dtype=torch.uint8)
    return torch.frombuffer(mapped, dtype=torch.uint8, count=entry.nbytes, offset=entry.start)


def drop_pages(mapped: mmap.mmap, entry: Entry) -> None:
    """Release a tensor's resident pages; they are read again on access."""
    page = mmap.PAGESIZE
    first = -(-entry.start // page) * page
    length = entry.end // page * page - first
    if length > 0 and sys.platform != "win32":  # Windows drops pages itself
        mapped.madvise(mmap.MADV_DONTNEED, first, length)


def read_pages(tensor: torch.Tensor) -> None:
    """Read the missing pages of a tensor on a mapped file and map them: as huge pages, which a CPU
    reads faster, if the file system supports them (ext4 from Linux 6.16 on). Does nothing on other
    systems than Linux."""
    page = mmap.PAGESIZE
    start = tensor.data_ptr() // page * page
    length = tensor.data_ptr() + tensor.nbytes - start
    if length > 0 and sys.platform == "linux":  # unknown advice is an error without effect
        madvise = ctypes.CDLL(None).madvise
        for advice in (MADV_HUGEPAGE, MADV_POPULATE_READ):
            madvise(ctypes.c_void_p(start), ctypes.c_size_t(length), advice)


def on_huge_pages(tensor: torch.Tensor) -> torch.Tensor:
    """Return a copy of a tensor in memory of this process, on huge pages if the system has free
    ones; tensors smaller than a huge page are on ordinary pages."""
    if tensor.nbytes < HUGE_PAGE:
        return tensor.clone(memory_format=torch.contiguous_format)
    private = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    memory = mmap.mmap(-1, tensor.nbytes + HUGE_PAGE, flags=private)
    with suppress(OSError):  # a kernel without huge pages
        memory.madvise(MADV_HUGEPAGE)
    buffer = torch.frombuffer(memory, dtype=torch.uint8)
    start = -buffer.data_ptr() % HUGE_PAGE
    copy = buffer[start : start + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
    return copy.copy_(tensor)


#: a tensor, or an iterator over pieces of its rows
TensorPieces: TypeAlias = "torch.Tensor | Iterator[torch.Tensor]"


@dataclass(frozen=True)
class FileTensor:
    """A tensor to write: dtype, shape, and functions `makes` that compute consecutive parts of its
    rows: each returns one tensor, or an iterator over several. `release`: called when all rows have
    been written."""

    code: str  # a key of BITS or RAW
    shape: tuple[int, ...]
    makes: Sequence[Callable[[], TensorPieces]]
    release: Callable[[], None] = lambda: None

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * BITS[self.stored] // 8

    @property
    def stored(self) -> str:
        """The dtype in the file, a key of BITS."""
        return RAW[self.code][0] if self.code in RAW else self.code

    @classmethod
    def of(cls, t: torch.Tensor) -> FileTensor:
        """Return a FileTensor of an existing tensor."""
        return cls(code_of(t.dtype), tuple(t.shape), [lambda: t])


def write_tensors(
    path: Path, tensors: Mapping[str, FileTensor], metadata: Mapping[str, str] | None = None
) -> str:
    """Write one file under a temporary name and rename it at the end; return its SHA-256 in hex."""
    digest = hashlib.sha256()

    def digested() -> Iterator[bytes | memoryview]:
        for piece in tensor_file(tensors, metadata):
            digest.update(piece)
            yield piece

    write_file(path, digested())
    return digest.hexdigest()


def prefetched(jobs: Iterable[tuple[int, Callable[[], _T]]]) -> Iterator[_T]:
    """Yield the results of jobs (bytes of the result, function) in order. A pool of threads runs
    jobs ahead of the consumer: at most PREFETCH_BYTES of results, or one larger job, and about two
    jobs per core. An error of a job is raised in its turn."""
    threads, cores = torch.get_num_threads(), usable_cores()
    pending, nbytes = deque[tuple[int, "Future[_T]"]](), 0
    # One torch thread per worker: operators on small pieces gain nothing from more.
    pool = ThreadPoolExecutor(cores, initializer=torch.set_num_threads, initargs=(1,))
    try:
        for size, job in jobs:
            while pending and (nbytes + size > PREFETCH_BYTES or len(pending) > 2 * cores):
                nbytes -= pending[0][0]
                yield pending.popleft()[1].result()
            pending.append((size, pool.submit(job)))
            nbytes += size
        while pending:
            yield pending.popleft()[1].result()
    finally:
        pool.shutdown(cancel_futures=True)
        torch.set_num_threads(threads)  # the workers' calls changed it for threads started later


def file_layout(
    tensors: Mapping[str, FileTensor], metadata: Mapping[str, str] | None = None
) -> tuple[list[str], bytes, int]:
    """Return the names of a file's tensors in their order in the file, its first bytes (length of
    the header, and the header), and its size in bytes. Tensors of a multiple of ALIGNED bytes come
    first, so that they are aligned."""
    raw_dtypes = {name: t.code for name, t in tensors.items() if t.code in RAW}
    metadata = {**(metadata or {}), **raw_dtypes}
    header: dict[str, Any] = {"__metadata__": metadata} if metadata else {}
    names = sorted(tensors, key=lambda name: tensors[name].nbytes % ALIGNED > 0)
    ends = [0, *accumulate(tensors[name].nbytes for name in names)]
    for name, span in zip(names, pairwise(ends), strict=True):
        t = tensors[name]
        header[name] = {"dtype": t.stored, "shape": list(t.shape), "data_offsets": list(span)}
    raw = json.dumps(header, separators=(",", ":")).encode()
    raw += b" " * (-(LENGTH_BYTES + len(raw)) % ALIGNED)
    start = len(raw).to_bytes(LENGTH_BYTES, "little") + raw
    return names, start, len(start) + ends[-1]


def tensor_file(
    tensors: Mapping[str, FileTensor], metadata: Mapping[str, str] | None = None
) -> Iterator[bytes | memoryview]:
    """Yield the pieces of a file; each tensor is computed shortly before it is written, and then
    released."""
    names, header, _ = file_layout(tensors, metadata)
    yield header
    jobs = (
        (t.nbytes // len(t.makes), make)
        for t in map(tensors.__getitem__, names)
        for make in t.makes
    )
    parts = prefetched(jobs)
    for name in names:
        for _, part in zip(tensors[name].makes, parts, strict=False):
            yield from map(bytes_of, [part] if isinstance(part, torch.Tensor) else part)
        tensors[name].release()


def in_shards(tensors: Mapping[str, FileTensor]) -> list[dict[str, FileTensor]]:
    """Group tensors into files of at most SHARD_BYTES; a larger tensor gets its own file."""
    shards: list[dict[str, FileTensor]] = [{}]
    size = 0
    for name, t in tensors.items():
        if shards[-1] and size + t.nbytes > SHARD_BYTES:
            shards.append({})
            size = 0
        shards[-1][name] = t
        size += t.nbytes
    return shards


def bytes_of(tensor: torch.Tensor) -> memoryview:
    """Return a tensor's bytes; a copy unless it is contiguous on the host."""
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    return memoryview(flat.view(torch.uint8).numpy())  # type: ignore[arg-type]
