"""Reads an engine directory and checks that its files agree.

    manifest.json            config, limits, versions, digests of all files and of the manifest
    spec.yaml                the variant; drafter.yaml: its draft model
    graph.PHASE.g4ir         the graphs that run; prologue.g4ir: the graph that packed their params
    quant.yaml               the formats that --bits chose, if it was given
    weights-*.safetensors    packed params (unless they are computed at load from a seed or a
                             checkpoint); weights-rankRofN-*.safetensors: those of rank R only
    programs/                compiled files of the backend
    tokenizer.json ...       copied from the checkpoint, or converted from a GGUF file's metadata
    tokenizer.index          hash tables that encode a short text without parsing tokenizer.json

Anybody can write a manifest with matching digests, so it is untrusted input: every field has a type
and a range, every file is a regular file inside the directory, and facts that are stored twice must
agree. Graphs are rebuilt from the spec and the options and must equal the stored text. If they were
equal before, and neither the engine nor the sources of g4ir have changed since, the text is parsed
instead, which takes a fifth of the time (digests.py).
"""

from __future__ import annotations

import hashlib
import json
import os
import shlex
import stat
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields, make_dataclass
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any

from g4ir.backends import find_backend
from g4ir.errors import EngineError, G4Error, InputError, SpecError
from g4ir.ir.graph import Graph, Program
from g4ir.ir.text import parse_graph
from g4ir.model.draft import check_pair, layers_read
from g4ir.model.media import check_media
from g4ir.passes import OPTIONS, PassOptions, find_pass
from g4ir.passes.latent_kv import LatentOptions
from g4ir.plan.backend import checked_settings
from g4ir.plan.options import BuildConfig, flags_of
from g4ir.plan.resolve import find_placement
from g4ir.quant.recipe import MEASURED, QUANT_FILE
from g4ir.quant.rewrite import schemes_of
from g4ir.spec import reader
from g4ir.spec.reader import Line, OneOf, Range, Shaped, Where, fail
from g4ir.spec.record import Spec, load_spec, spec_names
from g4ir.weights import pack as packings
from g4ir.weights import tensorfile
from g4ir.weights.checkpoint import CONFIG, GGUF
from g4ir.weights.gguf.container import is_gguf
from g4ir.weights.origin import OF_DIRECTORY

from .digests import has_digest, keep_equal, were_equal

FORMAT = 24
MANIFEST = "manifest.json"
SPEC, DRAFTER = "spec.yaml", "drafter.yaml"
#: part of the name of an unfinished directory
BUILDING = ".building-"
#: maximum bytes of a manifest; one of a large model with towers has some hundred thousand
LARGEST = 16 << 20
WEIGHT_FILES = ".safetensors"
#: maximum number of audio lengths, each of which has a tower graph
MAX_TOWERS = 64
#: directory of an engine that was built on first use -> the name by which the user gave its model
LABELS: dict[Path, str] = {}

Seed = Annotated[int, Range(0, (1 << 63) - 1)]
Count = Annotated[int, Range(0, 1 << 60)]
Digest = Annotated[str, Shaped("[0-9a-f]{64}", "64 hexadecimal digits")]
#: a file's path inside the directory, `/` between its parts
FileName = Annotated[str, Shaped(r"(?a:\w[\w.+-]*/){0,3}(?a:\w[\w.+-]*)", "programs/a.pt2")]


@dataclass(frozen=True)
class StoredFile:
    """SHA-256 and size in bytes of a file of the directory."""

    sha256: Digest
    bytes: Count


@dataclass(frozen=True)
class PackedWeights:
    """Params stored in the directory; `seed` if they are random."""

    kind: Annotated[str, OneOf(("packed",))] = "packed"
    seed: Seed | None = None


@dataclass(frozen=True)
class MergedAdapter:
    """A LoRA adapter that was merged into the weights; `scale`: the user's factor (`--adapter
    DIR=SCALE`), not the config's alpha / r."""

    path: Line
    scale: float
    sha256: Digest


@dataclass(frozen=True)
class MergedWeights(PackedWeights):
    """Params in the directory, with adapters merged."""

    kind: Annotated[str, OneOf(("merged",))] = "merged"
    adapters: tuple[MergedAdapter, ...] = ()


@dataclass(frozen=True)
class RandomWeights:
    """Params computed from a seed when the engine is loaded."""

    kind: Annotated[str, OneOf(("random",))]
    seed: Seed


@dataclass(frozen=True)
class LinkedWeights:
    """Params computed at load from a checkpoint's files, and the files' digests."""

    kind: Annotated[str, OneOf(("linked",))]
    directory: Line
    files: dict[str, Digest]

    @property
    def path(self) -> Path:
        """The checkpoint: the directory, or the (first) GGUF file in it."""
        files = sorted(name for name in self.files if not name.endswith(OF_DIRECTORY))
        return Path(self.directory, *files[:1])


WEIGHTS: dict[str, type] = {
    "packed": PackedWeights,
    "merged": MergedWeights,
    "random": RandomWeights,
    "linked": LinkedWeights,
}


@dataclass(frozen=True)
class Versions:
    torch: str
    python: str


@dataclass(frozen=True)
class Calibration:
    """Calibration text of quantised weights, and the number of its tokens that were used."""

    path: Line
    sha256: Digest
    tokens: Annotated[int, Range(1, 1 << 60)]

    def __str__(self) -> str:
        return f"{self.tokens:,} tokens of {self.path} (SHA-256 {self.sha256[:12]}...)"


@dataclass(frozen=True)
class Notes:
    """Tensors of the checkpoint that are not used, and why; missing ones, and their default value;
    the texts on which quantised weights were calibrated."""

    ignored: dict[Line, Line]
    defaults: dict[Line, str]
    calibration: tuple[Calibration, ...]


@dataclass(frozen=True)
class Manifest:
    """The record of an engine. Its file, manifest.json, has the fields of `config` in place of
    `config`, with specs as digests, and in addition `format` and `digest`."""

    g4ir: str
    config: BuildConfig
    machine: Line
    graphs: tuple[str, ...]
    weights: Any  # one of WEIGHTS
    compiled: Any  # the backend's record
    versions: Versions
    notes: Notes
    files: dict[FileName, StoredFile]

    @property
    def seed(self) -> int | None:
        """The seed of random weights; None for a checkpoint's."""
        return getattr(self.weights, "seed", None)

    @property
    def adapters(self) -> tuple[MergedAdapter, ...]:
        return self.weights.adapters if isinstance(self.weights, MergedWeights) else ()

    def to_dict(self) -> dict[str, Any]:
        """Return the values of manifest.json, except `digest`."""
        values = {k: v for k, v in asdict(self).items() if k != "config"}
        return {"format": FORMAT, "g4ir": values.pop("g4ir"), **self.config.to_dict(), **values}

    def text(self) -> str:
        """Return the content of manifest.json."""
        return manifest_text(self.to_dict())

    @cached_property
    def digest(self) -> str:
        """SHA-256 of all values; they include the digests of all files."""
        return _digest(self.to_dict())


@dataclass(frozen=True)
class Artefact:
    """A checked engine directory. Reading it executes none of its code."""

    path: Path
    manifest: Manifest
    packing: packings.Packing
    #: the rank's packed params, which match the graphs; None if params are computed at load. A file
    #: that changes after this check is refused
    stored: packings.StoredParams | None
    #: whether digests of weight files are checked too
    check_weights: bool
    rank: int

    @property
    def config(self) -> BuildConfig:
        return self.manifest.config

    @property
    def spec(self) -> Spec:
        return self.config.spec

    @property
    def label(self) -> str:
        """The engine's name in messages."""
        return engine_label(self.path)


def manifest_text(values: Mapping[str, Any]) -> str:
    """Return JSON with a digest of its own content as the last key."""
    return json.dumps({**values, "digest": _digest(values)}, indent=1) + "\n"


def _digest(values: Mapping[str, Any]) -> str:
    text = json.dumps(values, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


def graph_texts(packing: packings.Packing) -> dict[str, str]:
    """File name -> text of every graph."""
    texts = {f"graph.{name}.g4ir": str(g) for name, g in packing.program.graphs.items()}
    return {**texts, "prologue.g4ir": str(packing.prologue)}


# --- reading ----------------------------------------------------------------------------------


def open_artefact(path: Path, check_weights: bool = False, rank: int | None = None) -> Artefact:
    """Check an engine directory as far as that does not need its device: every field of the
    manifest, every file's digest (weight files on request), the graphs against the spec, the
    headers of packed params against the graphs. With `rank`, the digests of other ranks' files are
    not checked. Raises EngineError.
    """
    with _errors(path):
        m = read_manifest(path, check_weights, rank)
        _check_config(path / MANIFEST, m)
        packing = _packing_of(path, m)
        stored = _stored_params(path, m, packing)
    stored_here = stored[rank or 0] if stored else None
    return Artefact(path, m, packing, stored_here, check_weights, rank=rank or 0)


@contextmanager
def _errors(path: Path) -> Iterator[None]:
    """Context that converts read and schema errors to EngineError."""
    try:
        yield
    except SpecError as e:
        first, *_ = str(e).splitlines()
        raise EngineError(f"{first}; build the engine again") from None
    except (OSError, ValueError, RecursionError) as e:
        raise EngineError(f"{path} cannot be read as an engine: {e}; build it again") from None


def is_engine(path: Path) -> bool:
    return (path / MANIFEST).is_file()


def refuse_options(path: Path, flags: Collection[str]) -> None:
    """Raise InputError if there are build `flags` for a model, `path`, that is an engine."""
    if flags:
        belong, them = ("belong", "them") if len(flags) > 1 else ("belongs", "it")
        fix = f"leave {them} out, or give the model that it was built from"
        named = ", ".join(sorted(flags))
        raise InputError(f"{path} is an engine, and {named} {belong} to its build: {fix}")


def engine_label(path: Path) -> str:
    """Return the name of an engine in messages: the user's name of its model if it was built on
    first use, else its path."""
    return LABELS.get(path, str(path))


def _altered(path: Path, problem: str) -> EngineError:
    return EngineError(f"{path}: {problem}; build the engine again")


def read_manifest(path: Path, check_weights: bool = False, rank: int | None = None) -> Manifest:
    """Return the manifest of an engine directory: every field is checked, and every file as by
    `open_artefact`. Raises EngineError."""
    file = path / MANIFEST
    unfinished = path.resolve().name.startswith(".") and BUILDING in path.resolve().name
    if unfinished or not file.is_file():
        raise _no_engine(path, unfinished)
    try:
        with tensorfile.open_regular(file) as stream:
            raw = stream.read(LARGEST + 1)
        if len(raw) > LARGEST:
            raise EngineError(f"larger than {LARGEST} bytes")
        values = tensorfile.parse_json(file, raw)
    except (G4Error, OSError) as e:
        raise EngineError(f"{file} cannot be read: {e}; build the engine again") from e
    values.pop("digest", None)
    # The full text is compared, white space included.
    if raw != manifest_text(values).encode():
        raise _altered(file, "changed since g4ir wrote it, or written by another version")
    if values.get("format") != FORMAT:
        raise _altered(file, f"format {values.get('format')!r}, this g4ir reads {FORMAT}")
    with _errors(path):
        where = Where(str(file), 0)
        tree = reader.tree_of(values.get("files"), where)
        files = reader.convert(tree, dict[FileName, StoredFile], "files")
        _check_files(path, files, check_weights, rank)
        spec = load_spec(path / SPEC, alone=True)
        drafter = load_spec(path / DRAFTER, alone=True) if DRAFTER in files else None
        manifest = _manifest_of(values, where, spec, drafter)
    # Writing the parsed manifest must give the same bytes: this refuses values of other types,
    # missing fields, and another order.
    written = manifest.text().encode()
    if written != raw:
        raise _altered(file, f"line {_first_difference(raw, written)} is not as g4ir writes it")
    return manifest


def _no_engine(path: Path, unfinished: bool) -> EngineError:
    if str(path) in spec_names() and not path.exists():
        return EngineError(f"{path} is a variant: build it with g4ir build --variant {path}")
    files = sorted(path.glob(f"*{GGUF}")) if path.is_dir() else []
    if (path / CONFIG).is_file() or (path.is_file() and is_gguf(path)):
        files = [path]
    of = f" --checkpoint {shlex.quote(str(files[0]))}" if files else ""
    if not path.exists():
        return EngineError(f"{path}: no such file or directory")
    problem = "is unfinished" if unfinished else f"has no {MANIFEST}"
    return EngineError(f"{path} is no engine directory: it {problem}; run g4ir build{of}")


def require_readable(m: Manifest) -> None:
    """Raise EngineError if the manifest could not be read back, for example for a path with a line
    break."""
    values, where = json.loads(m.text()), Where(MANIFEST, 0)
    try:
        _manifest_of(values, where, m.config.spec, m.config.drafter)
    except SpecError as e:
        why = f"the engine could not be read again: {e}"
        raise EngineError(f"{why}; give plain names to files, folders and tensors") from None


def _manifest_of(
    values: Mapping[str, Any], where: Where, spec: Spec, drafter: Spec | None
) -> Manifest:
    record_values = {k: v for k, v in values.items() if k not in ("format", "digest")}
    weights = record_values.get("weights")
    kind = weights.get("kind") if isinstance(weights, dict) else None
    if not isinstance(kind, str) or kind not in WEIGHTS:
        raise fail(where, "weights", f"expected one of the kinds {', '.join(WEIGHTS)}")
    try:
        compiled = find_backend(str(record_values.get("backend"))).record
        backend_hints = {"weights": WEIGHTS[kind], "compiled": compiled}
        hints = reader.hints_of(_ManifestFile) | backend_hints
        read = vars(reader.build(_ManifestFile, reader.tree_of(record_values, where), hints=hints))
    except InputError as e:  # raised by a record's __post_init__
        raise fail(where, "", str(e)) from None
    options = vars(read.pop("options"))
    read |= {"options": PassOptions(tuple(options[name] for name in OPTIONS))}
    read |= {"spec": spec, "drafter": drafter}
    config = BuildConfig(**{f.name: read[f.name] for f in fields(BuildConfig)})
    if differing := [k for k, v in config.to_dict().items() if k in _NAMES and read[k] != v]:
        file = DRAFTER if differing[-1] == "drafter_digest" else SPEC
        raise fail(where, differing[-1], f"is not that of {file}")
    record = {f.name: read[f.name] for f in fields(Manifest) if f.name in read}
    return Manifest(config=config, **record)


#: fields of the file for the specs: the variant's name, and digests
_NAMES = {"variant": str, "spec_digest": Digest, "drafter_digest": Digest | None}
#: the pass options as they are in the file: a record of each pass by its name
_OptionsFile = make_dataclass(
    "_OptionsFile", [(name, type(default)) for name, default in OPTIONS.items()], frozen=True
)
_HINTS = _NAMES | reader.hints_of(BuildConfig) | {"options": _OptionsFile}
#: fields of the file between `format` and `digest`, in order
_ManifestFile = make_dataclass(
    "_ManifestFile",
    [
        ("g4ir", str),
        *((name, hint) for name, hint in _HINTS.items() if name not in ("spec", "drafter")),
        *((k, v) for k, v in reader.hints_of(Manifest).items() if k not in ("g4ir", "config")),
    ],
    frozen=True,
)


# --- agreement --------------------------------------------------------------------------------


def _check_files(
    path: Path, files: Mapping[str, StoredFile], weights: bool, rank: int | None
) -> None:
    """Raise EngineError unless exactly the manifest's files exist, regular, with its sizes and
    digests. Digests of weight files are checked if `weights`; with `rank`, no digests of other
    ranks' files."""
    for folder, folders, names in os.walk(path, onerror=_raised):
        for entry in map(Path(folder).joinpath, (*folders, *names)):
            kind, at = entry.lstat().st_mode, entry.relative_to(path).as_posix()
            label = f"{path}: {tensorfile.quoted(at)}"  # the name is untrusted
            if stat.S_ISDIR(kind):
                continue
            if not stat.S_ISREG(kind):
                named = any(f"{f}/".startswith(f"{at}/") for f in (*files, MANIFEST))
                fix = "put the file or folder itself there" if named else "remove it"
                problem = "is a link or not a regular file"
                raise EngineError(f"{label} {problem}; {fix}, or build the engine again")
            if at not in (*files, MANIFEST):
                foreign = f"{label} is not among the files of {MANIFEST}"
                raise EngineError(f"{foreign}; remove it, or build the engine again")
    every = [path / name for name in files]
    read = {*(every if rank is None else packings.rank_files(every, rank))}
    for file, stored in zip(every, files.values(), strict=True):
        large = file.name.endswith(WEIGHT_FILES)
        if not file.is_file():
            raise EngineError(f"{file} is missing; build the engine again")
        if file.stat().st_size != stored.bytes:
            raise _altered(file, f"{file.stat().st_size} bytes, expected {stored.bytes}")
        if file not in read or (large and not weights):
            continue
        if not has_digest(file, stored.sha256):
            raise _altered(file, "its SHA-256 is not the manifest's")


def _raised(error: OSError) -> None:
    """Raise the error of os.walk, which would skip the folder."""
    raise error


def _check_config(file: Path, m: Manifest) -> None:
    c, limits = m.config, m.config.limits
    max_positions = c.spec.text.max_position_embeddings
    if not limits.prefill_chunk <= limits.max_seq <= max_positions:
        raise _altered(file, f"limits: expected prefill_chunk <= max_seq <= {max_positions}")
    try:
        checked_settings(find_backend(c.backend), c.settings)
        c.sharding.check()
        placement = find_placement(c.ple_placement, c.spec, c.device)
        check_media(c.media, c.spec, MAX_TOWERS)
        schemes_of(c.quant, c.spec)
        for name in c.skip:
            find_pass(name)
        if c.drafter:
            check_pair(c.spec, c.drafter)
    except G4Error as e:
        raise _altered(file, str(e)) from None
    if placement != c.ple_placement:
        raise _altered(file, "ple_placement: is missing")
    if c.drafter and not c.draft_tokens:
        raise _altered(file, "options.plan_cache.slack: must be above 0 with a draft model")
    if c.options.of(LatentOptions).keep != (read := layers_read(c.spec, c.drafter)):
        expected = f"expected {[*read]}, the layers that a draft model reads"
        raise _altered(file, f"options.latent_kv.keep: {expected}")


def _packing_of(path: Path, m: Manifest) -> packings.Packing:
    """Return an engine's graphs, verified against its spec and options."""
    if were_equal(m.digest):
        graphs = {name: _parsed(path / f"graph.{name}.g4ir") for name in m.graphs}
        return packings.Packing(Program(graphs), _parsed(path / "prologue.g4ir"))
    packing = _rebuild_packing(path, m)
    keep_equal(m.digest)
    return packing


def _parsed(file: Path) -> Graph:
    return parse_graph(file.read_text(encoding="utf-8"))


def _rebuild_packing(path: Path, m: Manifest) -> packings.Packing:
    """Build the graphs of spec and options; EngineError if the stored text differs."""
    packing = m.config.packing(find_backend(m.config.backend))
    if tuple(packing.program.graphs) != m.graphs:
        raise _altered(path / MANIFEST, f"graphs: expected {', '.join(packing.program.graphs)}")
    for name, text in graph_texts(packing).items():
        stored, expected = (path / name).read_bytes(), text.encode()
        if stored != expected:
            line = f"{path / name}: line {_first_difference(stored, expected)}"
            why = f"{line} is not what this g4ir builds from the engine's spec and options"
            raise EngineError(f"{why}; {rebuild(path, m)}")
    return packing


def _first_difference(one: bytes, two: bytes) -> int:
    pairs = zip(one.split(b"\n"), two.split(b"\n"))
    return next((i for i, (a, b) in enumerate(pairs, 1) if a != b), one.count(b"\n") + 1)


def _stored_params(
    path: Path, m: Manifest, packing: packings.Packing
) -> list[packings.StoredParams]:
    """Return the packed params of each rank, an empty list if weights are not packed; EngineError
    if the graphs have other params."""
    files = [path / n for n in sorted(m.files) if n.endswith(WEIGHT_FILES)]
    packed = isinstance(m.weights, PackedWeights)
    if packed != bool(files):
        count = f"{len(files)} weight files are named"
        raise _altered(path / MANIFEST, f"weights are {m.weights.kind}, but {count}")
    params = []
    for rank in range(m.config.ranks if packed else 0):
        params.append(packings.StoredParams.open(packings.rank_files(files, rank)))
        if not params[-1].headers:
            raise _altered(path / MANIFEST, f"no weight file of rank {rank} is named")
        params[-1].check(packing.program)
    return params


def rebuild(path: Path, m: Manifest) -> str:
    """Return the hint of an error message, `build it again: g4ir build ... --out NEW`, with the
    settings of this engine."""
    c, seed = m.config, m.seed
    linked = m.weights if isinstance(m.weights, LinkedWeights) else None
    options = c.as_options() | {
        "checkpoint": linked.path if linked else None if seed is not None else "DIR",
        "adapter": [f"{a.path}={a.scale:g}" for a in m.adapters],
        "random_weights": seed,
        "target": m.to_dict()["compiled"].get("target"),
        "calibrate": [c.path for c in m.notes.calibration],
        "link_weights": linked is not None,
    }
    if c.drafter:
        options["drafter"] = "DRAFTER" if seed is None else path / DRAFTER
    if c.quant and c.quant.from_checkpoint:
        options["quant"] = None
    if c.quant and c.quant.name == MEASURED:
        options["quant"] = path / QUANT_FILE
    words = ["g4ir", "build", "--spec", str(path / SPEC), *flags_of(options), "--out"]
    return f"build it again: {shlex.join(words)} NEW"
