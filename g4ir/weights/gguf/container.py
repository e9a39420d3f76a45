"""Reads the container of a GGUF file: metadata and the table of tensors, never their data.

Layout (https://github.com/ggml-org/ggml/blob/master/docs/gguf.md), little endian throughout: magic,
version, counts; each key with its type and value; each tensor with its name, dims (those that lie
together first), type and offset; then the data, aligned. Every count is held against what is left
of the file before anything is made of it.
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
from g4ir.model.names import checkpoint_name
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

#: divides the frequencies of full layers: the spec's reader looks at it, no graph does
ROPE = "rope_freqs.weight"
TOWERS = ("v.", "a.", "mm.")
#: halves of a weight that some files store apart: rows of the first, then those of the second
HALVES = ("ffn_gate_exps.weight", "ffn_up_exps.weight")
TABLES: dict[str, Any] = read_table(Path(__file__).with_name("tables.yaml"))
#: what mends a value: the file was read whole, so another download has it too
CONVERT = "fix: take a file that a current llama.cpp converts from the checkpoint"
#: name of a file of a split model: its model, its number, their count
SPLIT = re.compile(r"(.+)-\d{5}-of-(\d{5})\.gguf")
KIND = "general.architecture"
TOKENS = "tokenizer.ggml.tokens"
#: stands for a space within a token
SPACE = "\u2581"
MAGIC, VERSIONS = b"GGUF", (2, 3)
ALIGNMENT, ALIGNMENT_KEY = 32, "general.alignment"
#: what a file may have at most; those that exist have a fraction of it
MOST_KEYS, MOST_TENSORS, MOST_ITEMS, MOST_DIMS = 1 << 16, 1 << 16, 1 << 21, 4
MOST_NAME, MOST_KEY, MOST_STRING = 256, 1 << 16, 1 << 24
MOST_ALIGNMENT = 1 << 16
LEAST_KEY, LEAST_TENSOR = 8 + 1 + 4 + 1, 8 + 1 + 4 + 8 + 4 + 8
NUMBERS = {kind: struct.Struct(f"<{code}") for kind, code in TABLES["numbers"].items()}
MOST_FLOAT = float.fromhex("0x1.fffffep127")
U32, F32, U64 = NUMBERS[4], NUMBERS[6], NUMBERS[10]
BOOL, STRING, ARRAY = 7, 8, 9


@dataclass(frozen=True)
class GgufType:
    """A type: its name, elements and bytes of a block; safetensors dtype of plain numbers."""

    name: str
    block: int
    nbytes: int
    dtype: str | None = None

    def __str__(self) -> str:
        return self.name


TYPES = {code: GgufType(*row) for code, row in TABLES["types"].items()}


@dataclass(frozen=True)
class Array:
    """The place of an array in a file: its items are read when asked for."""

    kind: int  # a key of NUMBERS, or STRING
    count: int
    start: int


@dataclass(frozen=True)
class Tensor:
    """A tensor: type, shape with the dims that lie together last, its bytes (in rows of blocks)."""

    stored: GgufType
    shape: tuple[int, ...]
    entry: Entry
    header: Header


@dataclass(frozen=True, eq=False)
class Container:
    """A checked file, or those of a split model, the one with the metadata first."""

    headers: tuple[Header, ...]
    values: Mapping[str, Any]
    tensors: Mapping[str, Tensor]

    @property
    def path(self) -> Path:
        return self.headers[0].path

    @property
    def name(self) -> str:
        """The name of the model: the file's, without the number of a part."""
        split = SPLIT.fullmatch(self.path.name)
        return split[1] if split else self.path.stem

    def items(self, key: str) -> list[Any]:
        found = self.values.get(key)
        if not isinstance(found, Array):
            raise self.wrong(key, "expected an array", found)
        return _Reader(self.path, map_file(self.headers[0])).items(quoted(key), found)

    @cached_property
    def vocabulary(self) -> dict[str, int]:
        """Text -> id of all tokens; none in a file without a vocabulary."""
        tokens = self.items(TOKENS) if TOKENS in self.values else []
        if not all(isinstance(t, str) for t in tokens):
            raise self.wrong(TOKENS, "expected texts", tokens[0])
        known = {*tokens}
        # llama.cpp's converter writes the spaces of user-defined tokens as they are in a text.
        texts = [t if (s := t.replace(" ", SPACE)) in known else s for t in tokens]
        ids = {text: i for i, text in enumerate(texts)}
        if len(ids) != len(tokens):
            twice = next(t for i, t in enumerate(texts) if ids[t] != i)
            raise self.wrong(TOKENS, "expected texts, each once", twice)
        return ids

    def floats(self, tensor: Tensor) -> list[float]:
        raw = map_file(tensor.header)[tensor.entry.start : tensor.entry.end]
        return [value for (value,) in F32.iter_unpack(raw)]

    def wrong(self, key: str, expected: str, found: object, fix: str = CONVERT) -> WeightsError:
        shown = "none" if found is None else quoted(found)
        return WeightsError(f"{self.path}: {key}: {expected}, found {shown}; {fix}")


def read_container(path: Path) -> Container:
    """Read and check all but the data of tensors; any file of a split model stands for all."""
    found = _read_file(path)
    count = found.values.get("split.count", 1)
    return found if count in (0, 1) else _joined(found, count)


def is_gguf(path: Path) -> bool:
    """Whether a file begins as a GGUF file does; ollama gives them names without a suffix."""
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


def _joined(part: Container, count: Any) -> Container:
    tensors: dict[str, Tensor] = {}
    parts = [part if p == part.path else _read_file(p) for p in _part_paths(part.path, count)]
    for i, own in enumerate(parts):
        for key, value in (("split.count", count), ("split.no", i)):
            if own.values.get(key) != value:
                raise own.wrong(key, f"expected {value}", own.values.get(key), DOWNLOAD)
        if twice := next((name for name in own.tensors if name in tensors), None):
            other = tensors[twice].header.path.name
            raise broken(own.path, f"tensor {quoted(twice)} is in {other} too")
        tensors |= own.tensors
    total = parts[0].values.get("split.tensors.count", len(tensors))
    if total != len(tensors):
        found = f"{len(tensors)} in all files"
        raise parts[0].wrong("split.tensors.count", f"expected {quoted(total)}", found, DOWNLOAD)
    return Container(tuple(h for own in parts for h in own.headers), parts[0].values, tensors)


def _part_paths(path: Path, count: Any) -> list[Path]:
    split = SPLIT.fullmatch(path.name)
    if not split or int(split[2]) != count:
        fix = (
            "fix: give them the names that they were published under, NAME-00001-of-0000N.gguf and "
            "so on, in one directory, or join them with llama.cpp's `llama-gguf-split --merge`"
        )
        raise broken(path, f"split.count: one of {quoted(count)} files of a model", fix)
    paths = [path.with_name(f"{split[1]}-{i + 1:05}-of-{split[2]}.gguf") for i in range(count)]
    if missing := [p.name for p in paths if not p.is_file()]:
        absent = f"{', '.join(missing[:5])} {'is' if len(missing) == 1 else 'are'} missing"
        what = f"one of {count} files of a model, of which {absent}"
        raise broken(path, what, "fix: complete the download")
    return paths


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
        count = self._count("count of tensors", MOST_TENSORS, LEAST_TENSOR)
        values: dict[str, Any] = {}
        for _ in range(self._count("count of keys", MOST_KEYS, LEAST_KEY)):
            key = self._name("a key", MOST_KEY, values)
            values[key] = self._value(quoted(key), self._number(U32, f"type of {quoted(key)}"))
        infos: dict[str, _Info] = {}
        for _ in range(count):
            name = self._name("a tensor", MOST_NAME, infos)
            infos[name] = self._info(f"tensor {quoted(name)}")
        entries = self._placed(infos, values.get(ALIGNMENT_KEY, ALIGNMENT))
        tensors = {name: Tensor(*infos[name][:2], e, header) for name, e in entries.items()}
        return Container((header,), values, tensors)

    def _check_version(self) -> None:
        magic = self.data[: len(MAGIC)]
        if magic != MAGIC:
            self._fail(f"begins with {quoted(magic)}, expected {quoted(MAGIC)}: no GGUF file")
        self.at = len(MAGIC)
        version = self._number(U32, "version")
        if version not in VERSIONS:
            swapped = int.from_bytes(version.to_bytes(4, "little"), "big") in VERSIONS
            what = "is big endian" if swapped else f"has version {version}"
            what += f", and versions {VERSIONS[0]} and {VERSIONS[1]} in little endian are read"
            raise broken(self.path, what, "fix: take a file made by a current llama.cpp")

    def _fail(self, what: str) -> NoReturn:
        raise broken(self.path, what)

    def _take(self, count: int, what: str) -> int:
        if count > self.size - self.at:
            self._fail(f"{what}: {count} bytes at {self.at} are beyond the end, {self.size}")
        self.at += count
        return self.at - count

    def _number(self, form: struct.Struct, what: str) -> Any:
        return form.unpack_from(self.data, self._take(form.size, what))[0]

    def _count(self, what: str, most: int, least: int) -> int:
        """Read how many things follow that have at least so many bytes each."""
        count: int = self._number(U64, what)
        if count > most:
            self._fail(f"{what}: {count}, expected at most {most}")
        self.at = self._take(count * least, what)
        return count

    def _text(self, what: str, most: int) -> str:
        length = self._number(U64, what)
        if length > most:
            self._fail(f"{what}: {length} bytes of text, expected at most {most}")
        start = self._take(length, what)
        try:
            return self.data[start : self.at].decode()
        except UnicodeDecodeError as error:
            self._fail(f"{what}: not UTF-8 at byte {error.start}")

    def _name(self, what: str, most: int, others: Mapping[str, Any]) -> str:
        name = self._text(f"{what} after {len(others)}", most)
        if not name or not name.isprintable():
            self._fail(f"{what} after {len(others)}: {quoted(name)} is no name")
        if name in others:
            self._fail(f"{what}: {quoted(name)} is there twice")
        return name

    def _value(self, what: str, kind: int) -> Any:
        if kind == ARRAY:
            return self._array(what)
        if kind == STRING:
            return self._text(what, MOST_STRING)
        if kind not in NUMBERS:
            self._fail(f"{what}: unknown type {kind} of a value")
        value = self._number(NUMBERS[kind], what)
        if kind == BOOL and value > 1:
            self._fail(f"{what}: expected a bool, 0 or 1, found {value}")
        return bool(value) if kind == BOOL else value

    def _array(self, what: str) -> Array:
        kind = self._number(U32, what)
        if kind not in NUMBERS and kind != STRING:
            nested = "an array of arrays, which no key needs" if kind == ARRAY else f"type {kind}"
            self._fail(f"{what}: an array of numbers or texts expected, found {nested}")
        each = NUMBERS[kind].size if kind in NUMBERS else U64.size
        found = Array(kind, self._count(f"{what}: count of items", MOST_ITEMS, each), self.at)
        if kind == STRING:
            self._skip_strings(what, found.count)
        else:
            self.at += found.count * each
        return found

    def _skip_strings(self, what: str, count: int) -> None:
        """Skip strings without reading them: there are hundreds of thousands."""
        unpack, data, at, last = U64.unpack_from, self.data, self.at, self.size - U64.size
        for _ in range(count):
            if at > last:
                at = self.size + 1
                break
            at += U64.size + unpack(data, at)[0]
        if at > self.size:
            self._fail(f"{what}: a text of the array is beyond the end of the file, {self.size}")
        self.at = at

    def items(self, what: str, array: Array) -> list[Any]:
        if array.kind == STRING:
            return list(self._strings(what, array))
        form = NUMBERS[array.kind]
        self.at = array.start
        start = self._take(array.count * form.size, what)
        every = f"<{array.count}{form.format[1:]}"
        values = struct.unpack(every, self.data[start : self.at])
        return list(map(bool, values) if array.kind == BOOL else values)

    def _strings(self, what: str, array: Array) -> Iterator[str]:
        unpack, data, at = U64.unpack_from, self.data, array.start
        for i in range(array.count):
            try:
                end = at + U64.size + unpack(data, at)[0]
                yield data[at + U64.size : end].decode()
            except (UnicodeDecodeError, struct.error) as error:
                self._fail(f"{what}: item {i} is no UTF-8 text ({error})")
            at = end

    def _info(self, what: str) -> _Info:
        count = self._number(U32, f"{what}: count of dims")
        if not 1 <= count <= MOST_DIMS:
            self._fail(f"{what}: {count} dims, expected 1 to {MOST_DIMS}")
        dims = tuple(self._number(U64, f"{what}: dims") for _ in range(count))
        if 0 in dims:
            self._fail(f"{what}: dims {list(dims)}, expected none to be 0")
        code = self._number(U32, f"{what}: type")
        if code not in TYPES:
            self._fail(f"{what}: unknown type {code}")
        stored = TYPES[code]
        if dims[0] % stored.block:
            self._fail(f"{what}: rows of {dims[0]} are no blocks of {stored.block} of {stored}")
        return stored, dims[::-1], self._number(U64, f"{what}: offset")

    def _placed(self, infos: Mapping[str, _Info], alignment: Any) -> dict[str, Entry]:
        if type(alignment) is not int or not 8 <= alignment <= MOST_ALIGNMENT or alignment % 8:
            expected = f"expected a multiple of 8 up to {MOST_ALIGNMENT}"
            self._fail(f"{ALIGNMENT_KEY}: {expected}, found {quoted(alignment)}")
        data = -(-self.at // alignment) * alignment
        room = max(0, self.size - data)
        entries: dict[str, Entry] = {}
        for name, (stored, shape, offset) in infos.items():
            nbytes = math.prod(shape) // stored.block * stored.nbytes
            what = f"tensor {quoted(name)}"
            if offset % alignment:
                self._fail(f"{what}: offset {offset} is not aligned to {alignment}")
            if offset + nbytes > self.size - data:
                place = f"beyond the end of the data, {room} (truncated?)"
                self._fail(f"{what}: {nbytes} bytes at {offset} are {place}")
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
    """Return the shortest number that float32 holds as this one: 1e-6 is stored as 9.99999997e-07.
    What is no such number is returned as it is."""
    if not isinstance(value, float) or not math.isfinite(value):
        return value
    near = (float(f"{value:.{digits}g}") for digits in range(6, 10))
    return next(
        (x for x in near if abs(x) <= MOST_FLOAT and F32.unpack(F32.pack(x)) == (value,)), value
    )


def architecture(file: Container) -> dict[str, Any]:
    """Return how files of an architecture are read: a row of tables.yaml."""
    row: dict[str, Any] = TABLES["architectures"].get(file.values.get(KIND), {})
    return row


def known_names(layers: int) -> dict[str, str]:
    """Return name in a GGUF file -> name in a checkpoint; several names may lead to one weight."""
    names = {name: checkpoint_name(param) for name, param in TABLES["text"].items()}
    for i in range(layers):
        for name, param in TABLES["layer"].items():
            names[f"blk.{i}.{name}"] = checkpoint_name(f"L{i}.{param}")
    return names
