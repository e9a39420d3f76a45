"""The part that all formats share: names of tensors as transformers has them, quantised weights,
stored tensors by name, scales of blocks as scales of rows, experts that are stored one by one."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TypeVar

from g4ir.errors import WeightsError
from g4ir.model.names import CODES, SCALES
from g4ir.ops.codecs import dequantized
from g4ir.ops.types import torch_dtype
from g4ir.quant.recipe import Scheme
from g4ir.spec.reader import Length
from g4ir.weights import tensorfile
from g4ir.weights.tensorfile import Entry, Header, quoted

if TYPE_CHECKING:
    import mmap

    import torch

Found = tuple[Header, Entry]
KEY = "quantization_config"
FIX = f"fix: correct {KEY} of config.json, or download the checkpoint again"
#: a list of modules
NameList = Annotated[tuple[Annotated[str, Length(1, 500)], ...], Length(0, 2000)]
#: dtype of an entry that stands for codes and scales
CODED = "codes"
#: dtypes of scales in files -> in the IR; powers of two become f32
FILE_SCALES = {"BF16": "bf16", "F16": "f16", "F32": "f32", "F8_E8M0": "f32"}
#: numbers that share a scale at least, where blocks do not divide rows
LEAST_GROUP = 16
#: elements that are looked at together
PIECE = 1 << 24
MODULES = ("gate_proj", "up_proj", "down_proj")
_EXPERT = re.compile(rf"(.*\.experts)\.(\d{{1,5}})\.({'|'.join(MODULES)})\.weight")
STACKED = re.compile(r".*\.experts\.(gate_up_proj|down_proj)")


# ---- names that other tools give a tensor -----------------------------------------------------

T = TypeVar("T")
#: part of a name -> what stands there in transformers' names
RENAMED = tuple(
    (re.compile(pattern), to)
    for pattern, to in (
        (r"(?:^|(?<=\.))_orig_mod\.", ""),  # torch.compile, of the model or of a part of it
        (r"^(?:module|base_model\.model)\.", ""),  # DistributedDataParallel, PEFT
        (r"^(?:model\.)?language_model\.model\.", "language_model."),  # MLX
        (r"^(?:model\.)?(?:language_model\.)?lm_head\.", "lm_head."),  # MLX, older transformers
    )
)


def plain_name(name: str) -> str:
    """Return the name, or prefix of names, that transformers gives the same tensor."""
    before = ""
    while before != name:  # one tool may wrap what another has wrapped
        before = name
        for pattern, to in RENAMED:
            name = pattern.sub(to, name)
    return name


def by_plain_name(place: Path, names: Iterable[tuple[str, T]]) -> Mapping[str, T]:
    """Return tensors by their plain names; WeightsError for two of one name."""
    out: dict[str, T] = {}
    stored: dict[str, str] = {}
    for name, found in names:
        plain = plain_name(name)
        if plain in out:
            what = f"{quoted(stored[plain])} and {quoted(name)} are the same tensor"
            raise tensorfile.broken(place, what)
        out[plain], stored[plain] = found, name
    return out


# ---- weights ------------------------------------------------------------------------------

#: rows -> codes or scales of these rows of a table, in canonical form; None: of the whole weight
Part = Callable[["torch.Tensor | None"], "torch.Tensor"]


@dataclass(frozen=True, eq=False)
class CodedWeight:
    """A weight of `shape` in a scheme. `rows` i64[n] are of a table, [rows, columns]; `release`
    gives back the pages of what was read; `fault`: why it may not be used."""

    scheme: Scheme
    shape: tuple[int, ...]
    codes: Part
    scales: Part
    release: Callable[[], None] = lambda: None
    fault: str = ""
    #: dtype of the engine, which scales have where the scheme says none
    dtype: str = "f32"

    def part(self, suffix: str, rows: torch.Tensor | None = None) -> torch.Tensor:
        """Return codes or scales, by the suffix of their name; f32 numbers where it has none."""
        if suffix:
            return {CODES: self.codes, SCALES: self.scales}[suffix](rows)
        import torch

        scales = self.scales(rows).to(torch_dtype(self.scheme.scale or self.dtype))
        return dequantized(self.codes(rows), scales, torch.float32)


@dataclass(frozen=True, eq=False)
class MadeWeight:
    """A weight of `shape` that a file holds in a form with no codes times scales: `numbers` makes
    it, or rows of it, as CodedWeight's parts are made."""

    shape: tuple[int, ...]
    numbers: Part
    release: Callable[[], None] = lambda: None

    def part(self, suffix: str, rows: torch.Tensor | None = None) -> torch.Tensor:
        return self.numbers(rows)


# ---- stored tensors ---------------------------------------------------------------------------


@dataclass
class Files:
    """Tensors by their name in the files, mapped on first use. `of_text` says whether a name is of
    the text model, `closed` that all reads have ended."""

    directory: Path
    names: Mapping[str, Found]
    of_text: Callable[[str], bool] = lambda name: True
    closed: bool = False
    _maps: dict[Path, mmap.mmap] = field(default_factory=dict)

    def map(self, header: Header) -> mmap.mmap:
        if self.closed:
            raise WeightsError(f"{self.directory}: the checkpoint is closed; fix: open it again")
        if header.path not in self._maps:
            self._maps[header.path] = tensorfile.map_file(header)
        return self._maps[header.path]

    def tensor(self, found: Found) -> torch.Tensor:
        return tensorfile.view(self.map(found[0]), found[1])

    def rows(self, found: Found, ids: torch.Tensor | None) -> torch.Tensor:
        """Return rows of a stored tensor: [len(ids), ...]; a view of all for None."""
        if ids is None:
            return self.tensor(found)
        made = tensorfile.view_rows(self.map(found[0]), found[1], ids)
        return made.view(len(ids), *found[1].shape[1:])

    def release(self, found: Iterable[Found]) -> None:
        for header, entry in found:
            if header.path in self._maps:
                tensorfile.drop_pages(self._maps[header.path], entry)

    def close(self) -> None:
        self._maps.clear()
        self.closed = True


@dataclass(frozen=True)
class QuantisedTensors:
    """A checkpoint's tensors with one entry in the place of codes and scales: `weights` by that
    entry. `ignored` tensors -> why."""

    names: Mapping[str, Found]
    weights: Mapping[Entry, CodedWeight | MadeWeight]
    ignored: Mapping[str, str]


@dataclass
class Modules:
    """The tensors of a checkpoint by module, taken out as they are understood."""

    files: Files
    suffixes: tuple[str, ...]
    plain: dict[str, Found] = field(default_factory=dict)
    parts: dict[str, dict[str, Found]] = field(default_factory=dict)
    weights: dict[str, tuple[Found, CodedWeight]] = field(default_factory=dict)
    ignored: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name, found in self.files.names.items():
            if len(name) > MOST_NAME:
                what = f"a name of {len(name)} characters, at most {MOST_NAME} are read"
                raise wrong(found, what)
            suffix = next((s for s in self.suffixes if name.endswith(s)), None)
            if suffix is None:
                self.plain[name] = found
            else:
                self.parts.setdefault(name.removesuffix(suffix), {})[suffix] = found

    def named(self, parts: Mapping[str, Found]) -> Found:
        """Return the tensor that stands for a module in messages."""
        return next(parts[s] for s in self.suffixes if s in parts)

    def add(self, module: str, found: Found, weight: CodedWeight) -> None:
        """Take a module's weight, of which `found` is one tensor."""
        name = module if STACKED.fullmatch(module) else f"{module}.weight"
        self.weights[name] = found, weight

    def done(self) -> QuantisedTensors:
        entries = dict(self.plain)
        weights: dict[Entry, CodedWeight | MadeWeight] = {}
        for name, ((header, entry), weight) in stacked(self.weights).items():
            stand_in = replace(entry, dtype=CODED, shape=weight.shape)
            entries[name], weights[stand_in] = (header, stand_in), weight
        return QuantisedTensors(entries, weights, self.ignored)


def wrong(found: Found, what: str, fix: str = tensorfile.DOWNLOAD) -> WeightsError:
    """Return the error of a stored tensor."""
    header, entry = found
    return WeightsError(f"{header.path}: tensor {quoted(entry.name)}: {what}; {fix}")


def shown(found: Found) -> str:
    """Return dtype and shape of a stored tensor as text."""
    return f"{found[1].dtype} {list(found[1].shape)}"


def require(found: Found, dtypes: Iterable[str], shape: tuple[int, ...] | None = None) -> None:
    """Raise WeightsError unless a stored tensor has one of the dtypes, and the shape."""
    dtypes = tuple(dtypes)
    if found[1].dtype not in dtypes or (shape is not None and found[1].shape != shape):
        want = " or ".join(dtypes) + (f" {list(shape)}" if shape is not None else "")
        raise wrong(found, f"expected {want}, found {shown(found)}")


# ---- scales -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class ScaleBlocks:
    """Scales of blocks of a weight [.., N, K]: each of `rows` x `columns` numbers, those at the end
    may be cut; of all of it where both are 0."""

    rows: int
    columns: int

    def shape(self, weight: tuple[int, ...]) -> tuple[int, ...]:
        n, k = weight[-2:]
        rows, columns = self.block(weight)
        return (*weight[:-2], -(-n // rows), -(-k // columns))

    def block(self, weight: tuple[int, ...]) -> tuple[int, int]:
        return min(self.rows or weight[-2], weight[-2]), min(self.columns or weight[-1], weight[-1])

    def group(self, weight: tuple[int, ...]) -> int:
        """Return the numbers of a row that share a scale, such that they divide rows and blocks."""
        return math.gcd(self.block(weight)[1], weight[-1])

    def spread(
        self, scales: torch.Tensor, weight: tuple[int, ...], ids: torch.Tensor | None
    ) -> torch.Tensor:
        """Return scales of blocks as scales of rows [.., N, G]; of rows `ids` alone where given."""
        import torch

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


@dataclass(frozen=True)
class _Scales:
    files: Files
    found: Found
    shape: tuple[int, ...]
    grid: ScaleBlocks

    @property
    def flat(self) -> bool:
        """Whether one number, which is no matrix, serves all of the weight."""
        return math.prod(self.grid.shape(self.shape)) == 1 and self.found[1].shape in ((), (1,))

    def check(self) -> None:
        shape = self.found[1].shape if self.flat else self.grid.shape(self.shape)
        require(self.found, FILE_SCALES, shape)

    def read(self, ids: torch.Tensor | None) -> torch.Tensor:
        entry = self.found[1]
        one_by_one = self.grid.block(self.shape)[0] == 1 and not self.flat
        stored = self.files.rows(self.found, ids) if one_by_one else self.files.tensor(self.found)
        stored = stored.float() if entry.dtype == "F8_E8M0" else stored
        good = (stored.float() > 0) & stored.isfinite()
        if not bool(good.all()):
            what = f"a scale is {float(stored[~good].flatten()[0]):g}"
            fix = "fix: download the file again"
            raise wrong(self.found, f"{what}, expected positive and finite numbers", fix)
        shape = (len(stored), *self.shape[1:]) if one_by_one else self.shape
        return self.grid.spread(stored, shape, None if one_by_one else ids)


def as_it_is(t: torch.Tensor) -> torch.Tensor:
    """Return codes that are canonical in the file."""
    return t


def coded_weight(
    files: Files,
    form: str,
    shape: tuple[int, ...],
    codes: Found,
    scales: Found,
    grid: ScaleBlocks,
    convert: Callable[[torch.Tensor], torch.Tensor] = as_it_is,
    dtype: str | None = "",
) -> CodedWeight:
    """Make a weight [.., N, K] of stored codes and scales, these in `dtype`, else the file's."""
    if len(shape) < 2 or not all(shape):
        raise wrong(codes, f"expected a matrix, found {shown(codes)}")
    group = grid.group(shape)
    if group < min(LEAST_GROUP, shape[-1]):
        raise wrong(codes, f"blocks of {grid.columns} columns do not divide rows of {shape[-1]}")
    stored = _Scales(files, scales, shape, grid)
    stored.check()
    kept = FILE_SCALES[scales[1].dtype] if dtype == "" else dtype
    return CodedWeight(
        Scheme(form, 0 if group == shape[-1] else group, kept),
        shape,
        lambda ids: convert(files.rows(codes, ids)),
        stored.read,
        lambda: files.release((codes, scales)),
    )


def e4m3(found: Found) -> Callable[[torch.Tensor], torch.Tensor]:
    """Return what looks at e4m3 codes of a stored tensor: WeightsError for NaN."""

    def convert(codes: torch.Tensor) -> torch.Tensor:
        import torch

        for piece in codes.view(torch.uint8).flatten().split(PIECE):
            if bool((piece & 127 == 127).any()):
                raise wrong(found, "a code is NaN, which stands for no number")
        return codes

    return convert


# ---- experts one by one -----------------------------------------------------------------------

Weights = dict[str, tuple[Found, CodedWeight]]


def stacked(weights: Weights) -> Weights:
    """Return weights with those of single experts joined: `experts.E.gate_proj.weight` and
    `up_proj` to `experts.gate_up_proj` [E, 2I, D], `down_proj` to `experts.down_proj` [E, D, I]."""
    out: Weights = {}
    layers: dict[str, dict[tuple[int, str], tuple[Found, CodedWeight]]] = {}
    for name, weight in weights.items():
        if match := _EXPERT.fullmatch(name):
            layers.setdefault(match[1], {})[int(match[2]), match[3]] = weight
        else:
            out[name] = weight
    for prefix, found in layers.items():
        count = 1 + max(e for e, _ in found)
        for e, module in product(range(count), MODULES):
            if (e, module) not in found:
                first = next(iter(found.values()))[0]
                raise wrong(first, f"{prefix}.{e}.{module} is not in codes, but other experts are")
        out[f"{prefix}.gate_up_proj"] = _stack(
            [found[e, m] for e in range(count) for m in MODULES[:2]], 2
        )
        out[f"{prefix}.down_proj"] = _stack([found[e, MODULES[2]] for e in range(count)], 1)
    return out


def _stack(parts: list[tuple[Found, CodedWeight]], each: int) -> tuple[Found, CodedWeight]:
    found, first = parts[0]
    for other, weight in parts:
        if (weight.scheme, weight.shape) != (first.scheme, first.shape):
            expected = f"expected {list(first.shape)} in {first.scheme}, as of expert 0"
            raise wrong(other, f"{expected}, found {list(weight.shape)} in {weight.scheme}")
    n, k = first.shape

    def join(read: Callable[[CodedWeight], torch.Tensor]) -> torch.Tensor:
        import torch

        made = torch.stack([read(w) for _, w in parts])
        return made.view(len(parts) // each, each * n, -1)

    def release() -> None:
        for _, w in parts:
            w.release()

    return found, CodedWeight(
        first.scheme,
        (len(parts) // each, each * n, k),
        lambda ids: join(lambda w: w.codes(None)),
        lambda ids: join(lambda w: w.scales(None)),
        release,
        next((w.fault for _, w in parts if w.fault), ""),
    )


# ---- patterns of strangers: regular expressions that cannot run for ever ------------------------

#: characters of a pattern and of a tensor's name; patterns of a list
MOST_LENGTH, MOST_NAME, MOST_PATTERNS = 400, 200, 1000
#: repetitions, each of which may multiply the cost by the length of a name; ways to take
#: alternatives and optional parts, fewer by a factor for each repetition
MOST_REPEATS, MOST_WAYS, FEWER = 3, 4096, 8
#: an escaped character, or a class of characters
_ONE = re.compile(r"\\.|\[\^?\]?(?:\\.|[^]\\])*\]", re.DOTALL)
#: what begins a group; comments and the flag x, in which others read another pattern, are not taken
_GROUP, _COMMENT = re.compile(r"\(\?"), re.compile(r"\(\?(#|[a-zA-Z-]*x)")
#: a repeated group, whose cost may double with each character
_NESTED, _REPEATS = re.compile(r"\)[*+{]"), re.compile(r"[*+{]")
_INNER = re.compile(r"\(([^()]*)\)")


def _ways(plain: str) -> int:
    """Return how many ways there are, at most, to take alternatives and optional parts."""
    plain = _GROUP.sub("(", plain)
    ways: int = 1 << plain.count("?")
    while inner := _INNER.search(plain):
        ways *= inner[1].count("|") + 1
        plain = plain[: inner.start()] + plain[inner.end() :]
    return ways * (plain.count("|") + 1)


def _is_slow(pattern: str) -> bool:
    if len(pattern) > MOST_LENGTH or _COMMENT.search(pattern):
        return True
    plain = _ONE.sub("x", pattern)
    repeats = len(_REPEATS.findall(plain))
    many = repeats > MOST_REPEATS or _ways(plain) * FEWER**repeats > MOST_WAYS
    return many or _NESTED.search(plain) is not None


@lru_cache(maxsize=4096)
def compiled(pattern: str, where: str) -> re.Pattern[str]:
    """Compile a pattern; WeightsError if it is no regular expression or a slow one."""
    if _is_slow(pattern):
        raise WeightsError(
            f"{where}: pattern {quoted(pattern)} may take for ever; write a simpler one"
        )
    try:
        return re.compile(pattern)
    except (re.error, OverflowError, RecursionError) as e:
        raise WeightsError(f"{where}: pattern {quoted(pattern)}: {e}; correct it") from None


@dataclass(frozen=True)
class Names:
    """Modules by name or class, and by patterns, which are marked `re:`."""

    exact: frozenset[str]
    patterns: tuple[re.Pattern[str], ...]

    @classmethod
    def of(cls, names: Iterable[str], where: str) -> Names:
        """Return a list of `where`; WeightsError for a pattern that is not taken."""
        names = tuple(names)
        found = [n.removeprefix("re:") for n in names if n.startswith("re:")]
        if len(found) > MOST_PATTERNS:
            raise WeightsError(
                f"{where}: {len(found)} patterns, at most {MOST_PATTERNS}; name modules"
            )
        return cls(frozenset(names), tuple(compiled(p, where) for p in found))

    def hold(self, module: str, kind: str) -> bool:
        known = module in self.exact or kind in self.exact
        return known or any(p.match(module) for p in self.patterns)


def excluded(module: str, names: Iterable[str], where: str) -> bool:
    """Whether a module is excluded: by a pattern of its beginning, or by its end."""
    return any(compiled(n, where).match(module) or module.endswith(n) for n in names)
