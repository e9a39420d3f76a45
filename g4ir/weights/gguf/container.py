"""Reads the container of a GGUF file: metadata and the table of tensors; `floats` reads data too.

Layout (https://github.com/ggml-org/ggml/blob/master/docs/gguf.md), little endian throughout: magic,
version, counts; each key with its type and value; each tensor with its name, dims (innermost
first), type and offset; then the data, aligned. Every count is checked against the remaining bytes
of the file before anything is allocated for it.
"""

from __future__ import annotations

import math
import mmap
import os
import re
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any, NoReturn

from g4ir.errors import WeightsError
from g4ir.model.names import DRAFTER_PREFIX, checkpoint_name
from g4ir.ui.files import read_table
from g4ir.weights.tensorfile import (
    DOWNLOAD,
    Entry,
    Header,
    broken,
    identity,
    map_file,
    open_regular,
    quoted,
)

#: tensor of frequency divisors of full layers: read for the spec, unused by graphs
ROPE = "rope_freqs.weight"
#: prefixes of the names of towers' tensors
TOWERS = ("v.", "a.", "mm.")
#: the two tensors in which some files store one weight, concatenated by rows in this order
HALVES = ("ffn_gate_exps.weight", "ffn_up_exps.weight")
TABLES: dict[str, Any] = read_table(Path(__file__).with_name("tables.yaml"))
#: advice for a wrong value: the file is complete, so downloading it again would not help
CONVERT = "fix: take a file that a current llama.cpp converts from the checkpoint"
#: file name of a split model; groups: the model's name, the number of files
SPLIT = re.compile(r"(.+)-\d{5}-of-(\d{5})\.gguf")
KIND = "general.architecture"
IMATRIX = "an importance matrix of llama.cpp (imatrix)"
#: architecture of a file of towers (mmproj)
CLIP = "clip"
TOKENS = "tokenizer.ggml.tokens"
#: a space within a token
SPACE = "\u2581"
MAGIC, VERSIONS = b"GGUF", (2, 3)
ALIGNMENT, ALIGNMENT_KEY = 32, "general.alignment"
#: limits on untrusted files; published files have a fraction of these, but up to four dims
MAX_KEYS, MAX_TENSORS, MAX_ITEMS, MAX_DIMS = 1 << 16, 1 << 16, 1 << 21, 4
MAX_NAME, MAX_KEY, MAX_STRING = 256, 1 << 16, 1 << 24
MAX_ALIGNMENT = 1 << 16
#: minimum bytes of a key with its value, and of a tensor's row in the table
MIN_KEY, MIN_TENSOR = 8 + 1 + 4 + 1, 8 + 1 + 4 + 8 + 4 + 8
SCALARS = {kind: struct.Struct(f"<{code}") for kind, code in TABLES["numbers"].items()}
MAX_FLOAT = float.fromhex("0x1.fffffep127")
U32, F32, U64 = SCALARS[4], SCALARS[6], SCALARS[10]
BOOL, STRING, ARRAY = 7, 8, 9


@dataclass(frozen=True)
class GgufType:
    """A tensor type: name, elements and bytes of a block; safetensors dtype if it is not
    quantised."""

    name: str
    block: int
    nbytes: int
    dtype: str | None = None

    def __str__(self) -> str:
        return self.name


TYPES = {code: GgufType(*row) for code, row in TABLES["types"].items()}


@dataclass(frozen=True)
class Array:
    """The position of an array in a file; its items are read on demand."""

    kind: int  # a key of SCALARS, or STRING
    count: int
    start: int


@dataclass(frozen=True)
class Tensor:
    """A tensor: type, shape (innermost dim last), its bytes (in rows of blocks). `factor`: a tensor
    of one number, or one per expert, that multiplies its values."""

    stored: GgufType
    shape: tuple[int, ...]
    entry: Entry
    header: Header
    factor: Tensor | None = None


@dataclass(frozen=True, eq=False)
class Container:
    """A checked file, or the files of a split model, the one with the metadata first."""

    headers: tuple[Header, ...]
    values: Mapping[str, Any]
    tensors: Mapping[str, Tensor]

    @property
    def path(self) -> Path:
        return self.headers[0].path

    @property
    def name(self) -> str:
        """The model's name: the file name without suffix and split number."""
        split = SPLIT.fullmatch(self.path.name)
        return split[1] if split else self.path.stem

    def items(self, key: str) -> list[Any]:
        array = self.values.get(key)
        if not isinstance(array, Array):
            raise self.error(key, "expected an array", array)
        return _Reader(self.path, map_file(self.headers[0])).items(quoted(key), array)

    @cached_property
    def vocabulary(self) -> dict[str, int]:
        """Token text -> id; empty in a file without a vocabulary."""
        tokens = self.items(TOKENS) if TOKENS in self.values else []
        if not all(isinstance(t, str) for t in tokens):
            raise self.error(TOKENS, "expected texts", tokens[0])
        token_set = {*tokens}
        # llama.cpp's converter writes spaces of user-defined tokens as U+0020, others as U+2581.
        texts = [t if (s := t.replace(" ", SPACE)) in token_set else s for t in tokens]
        ids = {text: i for i, text in enumerate(texts)}
        if len(ids) != len(tokens):
            twice = next(t for i, t in enumerate(texts) if ids[t] != i)
            raise self.error(TOKENS, "expected no text twice", twice)
        return ids

    def floats(self, tensor: Tensor) -> list[float]:
        raw = map_file(tensor.header)[tensor.entry.start : tensor.entry.end]
        return [value for (value,) in F32.iter_unpack(raw)]

    def error(self, key: str, expected: str, actual: object, fix: str = CONVERT) -> WeightsError:
        text = "none" if actual is None else quoted(actual)
        return WeightsError(f"{self.path}: {key}: {expected}, found {text}; {fix}")


def read_container(path: Path) -> Container:
    """Read and check everything but tensor data; of a split model, `path` may be any file, and all
    are read. WeightsError for an invalid or missing file."""
    file = _read_file(path)
    count = file.values.get("split.count", 1)
    return file if count in (0, 1) else _join_files(file, count)


def is_gguf(path: Path) -> bool:
    """Whether a file has the GGUF magic; ollama's blobs have names without a suffix."""
    with open_regular(path) as file:
        return file.read(len(MAGIC)) == MAGIC


def _read_file(path: Path) -> Container:
    try:
        with open_regular(path) as file:
            status = os.fstat(file.fileno())
    except OSError as error:
        raise broken(path, f"cannot be read ({error.strerror or error})") from None
    if status.st_size < len(MAGIC):
        raise broken(path, f"{status.st_size} bytes are no GGUF file")
    header = Header(path, status.st_size, identity(status), {}, {})
    return _Reader(path, map_file(header)).read(header)


def _join_files(part: Container, count: Any) -> Container:
    tensors: dict[str, Tensor] = {}
    parts = [part if p == part.path else _read_file(p) for p in _shard_paths(part.path, count)]
    for i, file in enumerate(parts):
        for key, value in (("split.count", count), ("split.no", i)):
            if file.values.get(key) != value:
                raise file.error(key, f"expected {value}", file.values.get(key), DOWNLOAD)
        if twice := next((name for name in file.tensors if name in tensors), None):
            other = tensors[twice].header.path.name
            raise broken(file.path, f"tensor {quoted(twice)} is in {other} too")
        tensors |= file.tensors
    total = parts[0].values.get("split.tensors.count", len(tensors))
    if total != len(tensors):
        actual = f"{len(tensors)} in all files"
        raise parts[0].error("split.tensors.count", f"expected {quoted(total)}", actual, DOWNLOAD)
    return Container(tuple(h for file in parts for h in file.headers), parts[0].values, tensors)


def _shard_paths(path: Path, count: Any) -> list[Path]:
    split = SPLIT.fullmatch(path.name)
    if not split or int(split[2]) != count:
        fix = (
            "fix: give them the names that they were published under, NAME-00001-of-0000N.gguf and "
            "so on, in one directory, or join them with llama.cpp's `llama-gguf-split --merge`"
        )
        msg = f"is one of {quoted(count)} files of a model (split.count), but its name is not"
        raise broken(path, f"{msg} NAME-0000I-of-0000N.gguf with that N", fix)
    paths = [path.with_name(f"{split[1]}-{i + 1:05}-of-{split[2]}.gguf") for i in range(count)]
    if missing := [p.name for p in paths if not p.is_file()]:
        absent = f"{', '.join(missing[:5])} {'is' if len(missing) == 1 else 'are'} missing"
        msg = f"is one of {count} files of a model, of which {absent}"
        raise broken(path, msg, "fix: complete the download")
    return paths


#: a tensor's type, shape (innermost dim last), and offset in the data
_Info = tuple[GgufType, tuple[int, ...], int]


@dataclass
class _Reader:
    path: Path
    data: mmap.mmap
    at: int = 0

    @cached_property
    def size(self) -> int:
        return len(self.data)

    def read(self, header: Header) -> Container:
        self._check_version()
        count = self._count("count of tensors", MAX_TENSORS, MIN_TENSOR)
        values: dict[str, Any] = {}
        for _ in range(self._count("count of keys", MAX_KEYS, MIN_KEY)):
            key = self._name("a key", MAX_KEY, values)
            values[key] = self._value(quoted(key), self._number(U32, f"type of {quoted(key)}"))
        infos: dict[str, _Info] = {}
        for _ in range(count):
            name = self._name("a tensor", MAX_NAME, infos)
            infos[name] = self._info(f"tensor {quoted(name)}")
        entries = self._locate(infos, values.get(ALIGNMENT_KEY, ALIGNMENT))
        tensors = {name: Tensor(*infos[name][:2], e, header) for name, e in entries.items()}
        return Container((header,), values, tensors)

    def _check_version(self) -> None:
        magic = self.data[: len(MAGIC)]
        if magic != MAGIC:
            self._fail(f"begins with {quoted(magic)}, expected {quoted(MAGIC)}: no GGUF file")
        self.at = len(MAGIC)
        version = self._number(U32, "version")
        if version not in VERSIONS:
            msg = f"has version {version}, expected 2 or 3 (little endian)"
            raise broken(self.path, msg, "fix: take a file made by a current llama.cpp")

    def _fail(self, msg: str) -> NoReturn:
        raise broken(self.path, msg)

    def _take(self, count: int, label: str) -> int:
        if count > self.size - self.at:
            self._fail(f"{label}: {count} bytes at {self.at} are beyond the end, {self.size}")
        self.at += count
        return self.at - count

    def _number(self, scalar: struct.Struct, label: str) -> Any:
        return scalar.unpack_from(self.data, self._take(scalar.size, label))[0]

    def _count(self, label: str, max_count: int, min_bytes: int) -> int:
        """Read a count of items that have at least `min_bytes` each."""
        count: int = self._number(U64, label)
        if count > max_count:
            self._fail(f"{label}: {count}, expected at most {max_count}")
        self.at = self._take(count * min_bytes, label)
        return count

    def _text(self, label: str, max_bytes: int) -> str:
        length = self._number(U64, label)
        if length > max_bytes:
            self._fail(f"{label}: {length} bytes of text, expected at most {max_bytes}")
        start = self._take(length, label)
        try:
            return self.data[start : self.at].decode()
        except UnicodeDecodeError as error:
            self._fail(f"{label}: not UTF-8 at byte {error.start}")

    def _name(self, label: str, max_bytes: int, names: Mapping[str, Any]) -> str:
        name = self._text(f"{label} after {len(names)}", max_bytes)
        if not name or not name.isprintable():
            self._fail(f"{label} after {len(names)}: {quoted(name)} is no name")
        if name in names:
            self._fail(f"{label}: {quoted(name)} is there twice")
        return name

    def _value(self, label: str, kind: int) -> Any:
        if kind == ARRAY:
            return self._array(label)
        if kind == STRING:
            return self._text(label, MAX_STRING)
        if kind not in SCALARS:
            self._fail(f"{label}: unknown type {kind} of a value")
        value = self._number(SCALARS[kind], label)
        if kind == BOOL and value > 1:
            self._fail(f"{label}: expected a bool, 0 or 1, found {value}")
        return bool(value) if kind == BOOL else value

    def _array(self, label: str) -> Array:
        kind = self._number(U32, label)
        if kind not in SCALARS and kind != STRING:
            nested = "an array of arrays, which no key needs" if kind == ARRAY else f"type {kind}"
            self._fail(f"{label}: an array of numbers or texts expected, found {nested}")
        nbytes = SCALARS[kind].size if kind in SCALARS else U64.size
        array = Array(kind, self._count(f"{label}: count of items", MAX_ITEMS, nbytes), self.at)
        if kind == STRING:
            self._skip_strings(label, array.count)
        else:
            self.at += array.count * nbytes
        return array

    def _skip_strings(self, label: str, count: int) -> None:
        """Skip strings without reading them: there are hundreds of thousands."""
        unpack, data, at, last = U64.unpack_from, self.data, self.at, self.size - U64.size
        for _ in range(count):
            if at > last:
                at = self.size + 1
                break
            at += U64.size + unpack(data, at)[0]
        if at > self.size:
            self._fail(f"{label}: a text of the array is beyond the end of the file, {self.size}")
        self.at = at

    def items(self, label: str, array: Array) -> list[Any]:
        if array.kind == STRING:
            return list(self._strings(label, array))
        scalar = SCALARS[array.kind]
        self.at = array.start
        start = self._take(array.count * scalar.size, label)
        layout = f"<{array.count}{scalar.format[1:]}"
        values = struct.unpack(layout, self.data[start : self.at])
        return list(map(bool, values) if array.kind == BOOL else values)

    def _strings(self, label: str, array: Array) -> Iterator[str]:
        unpack, data, at = U64.unpack_from, self.data, array.start
        for i in range(array.count):
            try:
                end = at + U64.size + unpack(data, at)[0]
                yield data[at + U64.size : end].decode()
            except (UnicodeDecodeError, struct.error) as error:
                self._fail(f"{label}: item {i} is no UTF-8 text ({error})")
            at = end

    def _info(self, label: str) -> _Info:
        count = self._number(U32, f"{label}: count of dims")
        if not 1 <= count <= MAX_DIMS:
            self._fail(f"{label}: {count} dims, expected 1 to {MAX_DIMS}")
        dims = tuple(self._number(U64, f"{label}: dims") for _ in range(count))
        if 0 in dims:
            self._fail(f"{label}: dims {list(dims)}, expected none to be 0")
        code = self._number(U32, f"{label}: type")
        if code not in TYPES:
            self._fail(f"{label}: unknown type {code}")
        stored = TYPES[code]
        if dims[0] % stored.block:
            whole = f"whole blocks of {stored.block} ({stored})"
            self._fail(f"{label}: rows of {dims[0]} are not {whole}")
        return stored, dims[::-1], self._number(U64, f"{label}: offset")

    def _locate(self, infos: Mapping[str, _Info], alignment: Any) -> dict[str, Entry]:
        if type(alignment) is not int or not 8 <= alignment <= MAX_ALIGNMENT or alignment % 8:
            expected = f"expected a multiple of 8 up to {MAX_ALIGNMENT}"
            self._fail(f"{ALIGNMENT_KEY}: {expected}, found {quoted(alignment)}")
        data = -(-self.at // alignment) * alignment
        capacity = max(0, self.size - data)
        entries: dict[str, Entry] = {}
        for name, (stored, shape, offset) in infos.items():
            nbytes = math.prod(shape) // stored.block * stored.nbytes
            label = f"tensor {quoted(name)}"
            if offset % alignment:
                self._fail(f"{label}: offset {offset} is not aligned to {alignment}")
            if offset + nbytes > self.size - data:
                limit = f"beyond the end of the data, {capacity} (truncated?)"
                self._fail(f"{label}: {nbytes} bytes at {offset} are {limit}")
            if not stored.dtype:
                shape = (*shape[:-1], shape[-1] // stored.block * stored.nbytes)
            start = data + offset
            entries[name] = Entry(name, stored.dtype or "U8", shape, start, start + nbytes)
        for one, two in pairwise(sorted(entries.values(), key=lambda e: (e.start, e.end, e.name))):
            if two.start < one.end:
                names = f"{quoted(one.name)} and {quoted(two.name)}"
                self._fail(f"tensors {names} overlap at byte {two.start}")
        return entries


def shortest(value: Any) -> Any:
    """Return the shortest decimal of the same float32: 1e-6 is stored as 9.99999997e-07. Other
    values are returned unchanged."""
    if not isinstance(value, float) or not math.isfinite(value):
        return value
    near = (float(f"{value:.{digits}g}") for digits in range(6, 10))
    return next(
        (x for x in near if abs(x) <= MAX_FLOAT and F32.unpack(F32.pack(x)) == (value,)), value
    )


def architecture(file: Container) -> dict[str, Any]:
    """Return the rules of a file's architecture, a row of tables.yaml; empty if unknown."""
    return TABLES["architectures"].get(file.values.get(KIND), {})


def checkpoint_names(layers: int, rules: Mapping[str, Any]) -> dict[str, str]:
    """Map tensor names in a GGUF file to names in a checkpoint; several may map to one weight.
    `rules`: those of its architecture."""
    other = rules.get("names", {})
    text, layer = (
        {name: other.get(name, param) for name, param in TABLES[part].items()}
        for part in ("text", "layer")
    )
    names = {
        name: checkpoint_name(param).removeprefix(DRAFTER_PREFIX) for name, param in text.items()
    }
    for i in range(layers):
        for name, param in layer.items():
            names[f"blk.{i}.{name}"] = checkpoint_name(f"L{i}.{param}")
    return names
