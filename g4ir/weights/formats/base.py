"""Shared by all formats: tensor names, stored weights, conversion of block scales to row scales,
joining of single experts, module patterns."""

from __future__ import annotations

import math
import mmap
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial
from itertools import product
from pathlib import Path
from typing import Annotated

from g4ir.errors import WeightsError
from g4ir.model.names import CODES, SCALES
from g4ir.ops.codecs import FORMATS, dequantize_codes, pack_integers
from g4ir.ops.layouts import unpack_dense
from g4ir.ops.types import torch, torch_dtype
from g4ir.quant.recipe import Scheme
from g4ir.spec.reader import Length
from g4ir.weights import tensorfile
from g4ir.weights.tensorfile import Entry, Header, quoted

TensorRef = tuple[Header, Entry]
TensorRefs = Mapping[str, TensorRef]
KEY = "quantization_config"
FIX = f"fix: correct {KEY} of config.json, or download the checkpoint again"
NameList = Annotated[tuple[Annotated[str, Length(1, 500)], ...], Length(0, 2000)]
#: dtype of an entry that stands for the codes and scales of a weight
CODED = "codes"
#: dtypes of scales in files -> in the IR; powers of two become f32
FILE_SCALES = {"BF16": "bf16", "F16": "f16", "F32": "f32", "F8_E8M0": "f32"}
#: minimum number of values that share a scale, unless a row is shorter
MIN_GROUP = 16
#: elements converted or checked at a time
PIECE = 1 << 24
MODULES = ("gate_proj", "up_proj", "down_proj")
_EXPERT = re.compile(rf"(.*\.experts)\.(\d{{1,5}})\.({'|'.join(MODULES)})\.weight")
STACKED = re.compile(r".*\.experts\.(gate_up_proj|down_proj)")
#: pattern in a name -> its replacement in transformers' names
RENAMED = {
    r"(?:^|(?<=\.))_orig_mod\.": "",  # torch.compile, of the model or of a part of it
    r"^(?:module|base_model\.model)\.": "",  # DistributedDataParallel, PEFT
    r"^(?:model\.)?language_model\.model\.": "language_model.",  # MLX
    r"^(?:model\.)?(?:language_model\.)?lm_head\.": "lm_head.",  # MLX, older transformers
}


def plain_name(name: str) -> str:
    """Return transformers' name of a tensor, or prefix of names, without the wrappers of other
    tools."""
    before = ""
    while before != name:  # several tools may have wrapped the model
        before = name
        for pattern, to in RENAMED.items():
            name = re.sub(pattern, to, name)
    return name


def by_plain_name(path: Path, headers: Iterable[Header]) -> TensorRefs:
    """Return tensors by their plain names; WeightsError for two of one name."""
    out: dict[str, TensorRef] = {}
    for ref in ((header, entry) for header in headers for entry in header.entries.values()):
        first = out.setdefault(plain_name(ref[1].name), ref)
        if first is not ref:
            msg = f"{quoted(first[1].name)} and {quoted(ref[1].name)} are the same tensor"
            raise tensorfile.broken(path, msg)
    return out


#: format -> keys of its config that change no weight
UNREAD: Mapping[str, list[str]] = tensorfile.TABLES["unread"]
#: function from row indices [n] to the rows' values, codes or scales; None: all rows
Part = Callable[["torch.Tensor | None"], "torch.Tensor"]


@dataclass(frozen=True, eq=False)
class StoredWeight:
    """A weight of `shape`. `parts`: readers by suffix, of its values ("") and, if it is quantised,
    of codes and scales as in ops/codecs.py; `release` drops its pages; `fault`: why it must not be
    used, or ""."""

    shape: tuple[int, ...]
    parts: Mapping[str, Part]
    release: Callable[[], None] = lambda: None
    scheme: Scheme | None = None
    fault: str = ""


def quantised_weight(
    scheme: Scheme,
    shape: tuple[int, ...],
    codes: Part,
    scales: Part,
    release: Callable[[], None],
    dtype: str = "f32",
) -> StoredWeight:
    """Return a quantised weight from readers of its codes and scales. Scales are rounded to the
    scheme's dtype, or to `dtype` (the engine's) if it has none, before values are computed."""

    def values(rows: torch.Tensor | None) -> torch.Tensor:
        rounded = scales(rows).to(torch_dtype(scheme.scale or dtype))
        return dequantize_codes(codes(rows), rounded, torch.float32)

    return StoredWeight(shape, {"": values, CODES: codes, SCALES: scales}, release, scheme)


@dataclass
class Files:
    """Tensors by plain name (`plain_name`), in files that are mapped on first use. `of_text`:
    whether a name is of the text model; `dtype`: the engine's."""

    directory: Path
    names: TensorRefs = field(default_factory=dict)
    of_text: Callable[[str], bool] = lambda name: True
    dtype: str = "f32"
    closed: bool = False
    _maps: dict[Path, mmap.mmap] = field(default_factory=dict)

    def map(self, header: Header) -> mmap.mmap:
        if self.closed:
            raise WeightsError(f"{self.directory}: its weight files are closed; fix: open it again")
        if header.path not in self._maps:
            self._maps[header.path] = tensorfile.map_file(header)
        return self._maps[header.path]

    def rows(self, ref: TensorRef, ids: torch.Tensor | None = None) -> torch.Tensor:
        """Return rows of a stored tensor: [len(ids), ...]; a view of all for None."""
        if ids is None:
            return tensorfile.view(self.map(ref[0]), ref[1])
        rows = tensorfile.view_rows(self.map(ref[0]), ref[1], ids)
        return rows.view(len(ids), *ref[1].shape[1:])

    def weight(self, ref: TensorRef) -> StoredWeight:
        """Return a weight that is not quantised."""
        release = partial(self.release, (ref,))
        return StoredWeight(ref[1].shape, {"": partial(self.rows, ref)}, release)

    def release(self, refs: Iterable[TensorRef]) -> None:
        for header, entry in refs:
            if header.path in self._maps:
                tensorfile.drop_pages(self._maps[header.path], entry)

    def close(self) -> None:
        self._maps.clear()
        self.closed = True


@dataclass(frozen=True)
class QuantisedTensors:
    """A checkpoint's tensors, with one entry per quantised weight instead of codes and scales;
    `weights`: the quantised weights by that entry; `ignored`: unused stored tensors -> why."""

    names: TensorRefs
    weights: Mapping[Entry, StoredWeight]
    ignored: Mapping[str, str]


#: a stored tensor of a quantised weight, which errors name; the weight
ModuleWeight = tuple[TensorRef, StoredWeight]


def read_modules(
    files: Files,
    suffixes: tuple[str, ...],
    take: Callable[[str, dict[str, TensorRef]], ModuleWeight | None],
    unused: Mapping[str, str],
) -> QuantisedTensors:
    """Return a checkpoint's tensors with its quantised weights. `take` returns a module's weight
    from its tensors by suffix (one of `suffixes`), None if it is not quantised; `unused`: suffixes
    of ignored tensors -> why."""
    names: dict[str, TensorRef] = {}
    modules: dict[str, dict[str, TensorRef]] = {}
    ignored: dict[str, str] = {}
    for name, ref in files.names.items():
        if len(name) > MAX_NAME:
            msg = f"its name has {len(name)} characters, expected at most {MAX_NAME}"
            raise invalid(ref, msg)
        suffix = next((s for s in (*suffixes, *unused) if name.endswith(s)), None)
        if suffix is None:
            names[name] = ref
        elif suffix in unused:
            ignored[ref[1].name] = unused[suffix]
        else:
            modules.setdefault(name.removesuffix(suffix), {})[suffix] = ref
    weights: dict[str, ModuleWeight] = {}
    for module, parts in modules.items():
        if weight := take(module, parts):
            weights[module if STACKED.fullmatch(module) else f"{module}.weight"] = weight
        else:
            names |= {f"{module}{suffix}": ref for suffix, ref in parts.items()}
    return _replaced(names, stacked(weights), ignored)


def _replaced(
    names: dict[str, TensorRef], weights: Mapping[str, ModuleWeight], ignored: Mapping[str, str]
) -> QuantisedTensors:
    by_entry: dict[Entry, StoredWeight] = {}
    for name, ((header, entry), weight) in weights.items():
        stand_in = replace(entry, dtype=CODED, shape=weight.shape)
        names[name], by_entry[stand_in] = (header, stand_in), weight
    return QuantisedTensors(names, by_entry, ignored)


def invalid(ref: TensorRef, msg: str, fix: str = tensorfile.DOWNLOAD) -> WeightsError:
    header, entry = ref
    return tensorfile.broken(header.path, f"tensor {quoted(entry.name)}: {msg}", fix)


def type_text(ref: TensorRef) -> str:
    return f"{ref[1].dtype} {list(ref[1].shape)}"


def require(ref: TensorRef, dtypes: Iterable[str], shape: tuple[int, ...] | None = None) -> None:
    """Raise WeightsError unless a stored tensor has one of the dtypes and, if given, the shape."""
    dtypes = tuple(dtypes)
    if ref[1].dtype not in dtypes or (shape is not None and ref[1].shape != shape):
        want = " or ".join(dtypes) + (f" {list(shape)}" if shape is not None else "")
        raise invalid(ref, f"expected {want}, found {type_text(ref)}")


@dataclass(frozen=True)
class ScaleBlocks:
    """Scales of blocks `rows` x `columns` of a weight [.., N, K] (partial at the ends); 0: all rows
    or columns."""

    rows: int
    columns: int

    def shape(self, weight: tuple[int, ...]) -> tuple[int, ...]:
        n, k = weight[-2:]
        rows, columns = self.block(weight)
        return (*weight[:-2], -(-n // rows), -(-k // columns))

    def block(self, weight: tuple[int, ...]) -> tuple[int, int]:
        return min(self.rows or weight[-2], weight[-2]), min(self.columns or weight[-1], weight[-1])

    def group(self, weight: tuple[int, ...]) -> int:
        """Return the values per scale within a row after `spread`: the largest number that divides
        the row and a block's columns."""
        return math.gcd(self.block(weight)[1], weight[-1])

    def spread(
        self, scales: torch.Tensor, weight: tuple[int, ...], ids: torch.Tensor | None
    ) -> torch.Tensor:
        """Expand block scales to row scales [.., N, G]; only of rows `ids`, if passed."""
        rows, columns = self.block(weight)
        scales = scales.reshape(self.shape(weight))
        group = self.group(weight)
        if group != columns:
            at = torch.arange(weight[-1] // group) * group // columns
            scales = scales.index_select(-1, at)
        if ids is not None:
            return scales.index_select(0, ids // rows)
        if rows > 1:
            scales = scales.index_select(-2, torch.arange(weight[-2]) // rows)
        return scales


def checked_scales(ref: TensorRef, stored: torch.Tensor, signed: bool = False) -> torch.Tensor:
    """Return `stored`, scales of the tensor `ref`, unchanged; WeightsError for zeros, NaN,
    infinities and, unless `signed`, negative ones."""
    values = stored.float().abs() if signed else stored.float()
    good = (values > 0) & values.isfinite()
    if not bool(good.all()):
        msg = f"a scale is {float(stored.float()[~good].flatten()[0]):g}"
        expected = "finite numbers other than 0" if signed else "positive and finite numbers"
        raise invalid(ref, f"{msg}, expected {expected}", "fix: download the file again")
    return stored


def _stored_scales(
    files: Files, ref: TensorRef, shape: tuple[int, ...], grid: ScaleBlocks, signed: bool
) -> Part:
    """Return a reader of row scales [.., n, G]; a file may have one number for the whole weight.
    `signed`: they may be negative, since codes have a larger range on one side of 0 (int4, as in
    GGUF)."""
    flat = math.prod(grid.shape(shape)) == 1 and ref[1].shape in ((), (1,))
    require(ref, FILE_SCALES, ref[1].shape if flat else grid.shape(shape))
    by_row = grid.block(shape)[0] == 1 and not flat

    def read(ids: torch.Tensor | None) -> torch.Tensor:
        stored = files.rows(ref, ids if by_row else None)
        stored = stored.float() if ref[1].dtype == "F8_E8M0" else stored
        checked_scales(ref, stored, signed)
        if by_row:
            return grid.spread(stored, (len(stored), *shape[1:]), None)
        return grid.spread(stored, shape, ids)

    return read


def packed_integers(data: torch.Tensor, bits: int, width: int, fmt: str) -> torch.Tensor:
    """Return codes of `fmt`, a result of `integer_format` or int8, from rows of `width` integers of
    `bits` bits, stored densely in words or bytes [.., n] as integer + 2^(bits-1), low bits
    first."""
    raw = data.contiguous().view(torch.uint8)
    if fmt == f"int{bits}" and bits in (2, 4):  # the same bytes
        raw = raw if raw.data_ptr() % 8 == raw.storage_offset() % 8 == 0 else raw.clone()
        return raw[..., : width * bits // 8].contiguous().view(torch_dtype(FORMATS[fmt].codes))
    values = unpack_dense(raw, bits)[..., :width] - (1 << bits - 1)  # modulo 256
    return pack_integers(values.view(torch.int8), fmt)


def subtract_zeros(codes: torch.Tensor, zeros: torch.Tensor) -> torch.Tensor:
    """Return codes [.., K] minus the zero point of their group, [.., G]."""
    return (codes.unflatten(-1, (zeros.shape[-1], -1)) - zeros[..., None]).flatten(-2)


def as_it_is(t: torch.Tensor) -> torch.Tensor:
    return t


def coded_weight(
    files: Files,
    code_format: str,
    shape: tuple[int, ...],
    codes: TensorRef,
    scales: TensorRef,
    grid: ScaleBlocks,
    convert: Callable[[torch.Tensor], torch.Tensor] = as_it_is,
    dtype: str | None = "",
) -> StoredWeight:
    """Build a weight [.., N, K] from stored codes, which `convert` turns into those of
    `code_format`, and scales. `dtype` of the scales: "" for the file's, None for the engine's."""
    if len(shape) < 2 or not all(shape):
        raise invalid(codes, f"expected a matrix, found {type_text(codes)}")
    group = grid.group(shape)
    if group < min(MIN_GROUP, shape[-1]):
        blocks = f"blocks of {grid.columns} columns in rows of {shape[-1]}"
        expected = f"expected blocks of at least {min(MIN_GROUP, shape[-1])} columns"
        why = expected if grid.columns == group else "they do not divide the rows"
        raise invalid(codes, f"{blocks}: {why}")
    read = _stored_scales(files, scales, shape, grid, code_format == "int4")
    scale_dtype = FILE_SCALES[scales[1].dtype] if dtype == "" else dtype
    return quantised_weight(
        Scheme(code_format, 0 if group == shape[-1] else group, scale_dtype),
        shape,
        lambda ids: convert(files.rows(codes, ids)),
        read,
        partial(files.release, (codes, scales)),
        files.dtype,
    )


def e4m3(ref: TensorRef) -> Callable[[torch.Tensor], torch.Tensor]:
    """Return a function that returns e4m3 codes of a stored tensor unchanged, but raises
    WeightsError for NaN."""

    def convert(codes: torch.Tensor) -> torch.Tensor:
        for piece in codes.view(torch.uint8).flatten().split(PIECE):
            if bool((piece & 127 == 127).any()):
                raise invalid(ref, "a code is NaN, expected finite numbers")
        return codes

    return convert


def stacked(weights: Mapping[str, ModuleWeight]) -> dict[str, ModuleWeight]:
    """Return weights with those of single experts joined: `experts.E.gate_proj.weight` and
    `up_proj` to `experts.gate_up_proj` [E, 2I, D], `down_proj` to `experts.down_proj` [E, D, I]."""
    out: dict[str, ModuleWeight] = {}
    layers: dict[str, dict[tuple[int, str], ModuleWeight]] = {}
    for name, weight in weights.items():
        if match := _EXPERT.fullmatch(name):
            layers.setdefault(match[1], {})[int(match[2]), match[3]] = weight
        else:
            out[name] = weight
    for prefix, experts in layers.items():
        count = 1 + max(e for e, _ in experts)
        for e, module in product(range(count), MODULES):
            if (e, module) not in experts:
                first = next(iter(experts.values()))[0]
                msg = f"{prefix}.{e}.{module} is absent or not quantised, but other weights of the"
                raise invalid(first, f"{msg} experts are quantised")
        gate_up = [experts[e, m] for e in range(count) for m in MODULES[:2]]
        out[f"{prefix}.gate_up_proj"] = _stack(gate_up, 2)
        out[f"{prefix}.down_proj"] = _stack([experts[e, MODULES[2]] for e in range(count)], 1)
    return out


def _stack(parts: list[ModuleWeight], per_expert: int) -> ModuleWeight:
    ref, first = parts[0]
    for other, weight in parts:
        if (weight.scheme, weight.shape) != (first.scheme, first.shape):
            expected = f"expected {list(first.shape)}, {first.scheme}, as {quoted(ref[1].name)} has"
            raise invalid(other, f"{expected}; found {list(weight.shape)}, {weight.scheme}")
    n, k = first.shape

    def join(suffix: str, rows: torch.Tensor | None) -> torch.Tensor:
        stacked_part = torch.stack([w.parts[suffix](None) for _, w in parts])
        return stacked_part.view(len(parts) // per_expert, per_expert * n, -1)

    def release() -> None:
        for _, w in parts:
            w.release()

    shape = (len(parts) // per_expert, per_expert * n, k)
    joined = {suffix: partial(join, suffix) for suffix in first.parts}
    fault = next((w.fault for _, w in parts if w.fault), "")
    return ref, StoredWeight(shape, joined, release, first.scheme, fault)


#: max characters of a pattern, and of a tensor's name; max patterns of a list
MAX_PATTERN, MAX_NAME, MAX_PATTERNS = 400, 200, 1000
#: max repetitions (*, +, {}) in a pattern, each of which may multiply the cost by the length of a
#: name; max combinations of alternatives and optional parts, and its divisor per repetition
MAX_REPEATS, MAX_WAYS, FEWER = 3, 4096, 8
#: an escaped character, or a class of characters
_ONE = re.compile(r"\\.|\[\^?\]?(?:\\.|[^]\\])*\]", re.DOTALL)
#: start of a group; comments and the flag x are refused, since other regex libraries read them
#: differently
_GROUP, _COMMENT = re.compile(r"\(\?"), re.compile(r"(?<!\\)(?:\\\\)*\(\?(#|[a-zA-Z-]*x)")
#: a repeated group, which is refused: its cost may double with each character; any repetition
_NESTED, _REPEATS = re.compile(r"\)[*+{]"), re.compile(r"[*+{]")
_INNER = re.compile(r"\(([^()]*)\)")


def _ways(plain: str) -> int:
    plain = _GROUP.sub("(", plain)
    ways: int = 1 << plain.count("?")
    while inner := _INNER.search(plain):
        ways *= inner[1].count("|") + 1
        plain = plain[: inner.start()] + plain[inner.end() :]
    return ways * (plain.count("|") + 1)


def _is_slow(pattern: str) -> bool:
    if len(pattern) > MAX_PATTERN:
        return True
    plain = _ONE.sub("x", pattern)
    repeats = len(_REPEATS.findall(plain))
    many = repeats > MAX_REPEATS or _ways(plain) * FEWER**repeats > MAX_WAYS
    return many or _NESTED.search(plain) is not None


@lru_cache(maxsize=4096)
def compiled(pattern: str, where: str) -> re.Pattern[str]:
    """Compile a pattern; WeightsError if it is no regular expression, or has comments, or may be
    slow."""
    if _COMMENT.search(pattern):
        msg = f"pattern {quoted(pattern)}: comments and the flag x are not supported"
        raise tensorfile.broken(where, msg, "fix: write it without them")
    if _is_slow(pattern):
        msg = f"pattern {quoted(pattern)} may be too slow to match"
        raise tensorfile.broken(where, msg, "fix: write a simpler one")
    try:
        return re.compile(pattern)
    except (re.error, OverflowError, RecursionError) as e:
        raise tensorfile.broken(
            where, f"pattern {quoted(pattern)}: {e}", "fix: correct it"
        ) from None


#: predicate of a module's name and class
Selects = Callable[[str, str], bool]


def selector(names: tuple[str, ...], where: str) -> Selects:
    """Return a predicate of a module's name and class: whether `names` has either, or a pattern,
    marked `re:`, that matches the beginning of the name. WeightsError, with `where`, for
    unsupported patterns."""
    patterns = [compiled(n.removeprefix("re:"), where) for n in names if n.startswith("re:")]
    if len(patterns) > MAX_PATTERNS:
        msg = f"{len(patterns)} patterns, expected at most {MAX_PATTERNS}"
        raise tensorfile.broken(where, msg, "fix: list names of modules instead")
    exact = frozenset(names)

    def selects(module: str, kind: str) -> bool:
        return not exact.isdisjoint((module, kind)) or any(p.match(module) for p in patterns)

    return selects


def excluded(module: str, names: Iterable[str], where: str) -> bool:
    """Whether one of `names` excludes a module: it matches the beginning of the module's name, as a
    pattern, or is the end of the name."""
    return any(compiled(n, where).match(module) or module.endswith(n) for n in names)
