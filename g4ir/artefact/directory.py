"""Reads an engine directory and checks that its files agree.

    manifest.json            what it is, limits, versions, digest of every file and of itself
    spec.yaml                the variant; drafter.yaml, its drafter
    graph.PHASE.g4ir         the graphs that run, and prologue.g4ir, which made their params
    weights-*.safetensors    packed params (or the manifest names a seed, or a checkpoint); those of
                             rank R of N alone in weights-rankRofN-*.safetensors
    programs/                compiled files of the backend
    tokenizer.json ...       copied from the checkpoint, or made of a GGUF file's metadata

Anybody can write a manifest with right digests, so it is read as data of strangers: every field has
its type and range, files are ordinary ones inside the directory, and what two places say must
agree. The graphs are not taken from the directory at all: they are made anew of the spec and the
options, and the stored text must be theirs.
"""

from __future__ import annotations

import hashlib
import json
import os
import shlex
import stat
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields, make_dataclass, replace
from pathlib import Path
from typing import Annotated, Any

from g4ir.backends import find_backend
from g4ir.backends.base import checked_settings
from g4ir.errors import EngineError, G4Error, InputError, SpecError
from g4ir.model.draft import check_pair, layers_read
from g4ir.model.media import Media, build_words, check_media
from g4ir.ops.types import TORCH_NAMES
from g4ir.parallel.table import check_ranks
from g4ir.passes import OPTIONS, PassOptions, find_pass
from g4ir.passes.latent_kv import LatentOptions
from g4ir.passes.match import OFF
from g4ir.passes.plan_cache import RingOptions
from g4ir.plan.engine_limits import Limits
from g4ir.plan.formats import DTYPES
from g4ir.plan.options import Resolved
from g4ir.plan.resolve import DEVICES, KV_NAMES, find_placement
from g4ir.quant.recipe import Recipe
from g4ir.quant.rewrite import weights_of
from g4ir.spec import reader
from g4ir.spec.reader import Line, OneOf, Range, Shaped, Where, fail
from g4ir.spec.record import Spec, load_spec, spec_names
from g4ir.weights import pack as packings
from g4ir.weights import tensorfile
from g4ir.weights.checkpoint import CONFIG, GGUF, sha256
from g4ir.weights.gguf.container import is_gguf
from g4ir.weights.origin import OF_DIRECTORY

FORMAT = 19
MANIFEST = "manifest.json"
SPEC, DRAFTER = "spec.yaml", "drafter.yaml"
#: part of the name of an unfinished directory
BUILDING = ".building-"
#: maximum bytes of a manifest; one of a large model with towers has some hundred thousand
LARGEST = 16 << 20
WEIGHT_FILES = ".safetensors"
#: maximum number of towers of one kind
MOST_SIZES = 64

Seed = Annotated[int, Range(0, (1 << 63) - 1)]
Count = Annotated[int, Range(0, 1 << 60)]
Digest = Annotated[str, Shaped("[0-9a-f]{64}", "64 hexadecimal digits")]
#: a file's path inside the directory, `/` between its parts
FileName = Annotated[str, Shaped(r"(?a:\w[\w.+-]*/){0,3}(?a:\w[\w.+-]*)", "programs/a.pt2")]


@dataclass(frozen=True)
class StoredFile:
    """A file of the directory."""

    sha256: Digest
    bytes: Count


@dataclass(frozen=True)
class PackedWeights:
    """Params in the directory; `seed` if they were made from one."""

    kind: Annotated[str, OneOf(("packed",))] = "packed"
    seed: Seed | None = None


@dataclass(frozen=True)
class MergedAdapter:
    """A LoRA adapter that was merged into the weights, and the user's factor."""

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
    """Params made from a seed when the engine is loaded."""

    kind: Annotated[str, OneOf(("random",))]
    seed: Seed


@dataclass(frozen=True)
class LinkedWeights:
    """Params made of a checkpoint's files, which have these digests."""

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
class Grid:
    """Groups of weights that were quantised to 4 bits, and those of them that are exact."""

    groups: Annotated[int, Range(1, 1 << 60)]
    exact: Count

    def __str__(self) -> str:
        share = self.exact / self.groups
        kind = "trained for 4 bits" if share > 0.9 else "rounded" if share < 0.1 else "mixed"
        return f"{share:.1%} of {self.groups:,} groups lie on a 4-bit grid: {kind} weights"


@dataclass(frozen=True)
class Calibration:
    """The text that scales of 4-bit weights were chosen on, and how many of its tokens."""

    path: Line
    sha256: Digest
    tokens: Annotated[int, Range(1, 1 << 60)]

    def __str__(self) -> str:
        return f"{self.tokens:,} tokens of {self.path} (SHA-256 {self.sha256[:12]}...)"


@dataclass(frozen=True)
class Notes:
    """Tensors of the checkpoint that are not used, and why; missing ones, and their value; the fit
    of 4-bit weights, and the text that they were calibrated on."""

    ignored: dict[Line, Line]
    defaults: dict[Line, str]
    grid: Grid | None
    calibration: Calibration | None


@dataclass(frozen=True)
class Manifest:
    """The fields of manifest.json, in its order; `format` and `digest` are the file's own."""

    g4ir: str
    variant: str
    spec_digest: Digest
    drafter_digest: Digest | None
    backend: str
    device: Annotated[str, OneOf(DEVICES)]
    machine: Line
    dtype: Annotated[str, OneOf(DTYPES)]
    ranks: Annotated[int, Range(1, 1 << 16)]
    #: expert parallelism: whole experts on each rank
    ep: bool
    limits: Limits
    all_logits: bool
    skipped_passes: tuple[str, ...]
    options: PassOptions
    settings: dict[str, str]
    ple_placement: str | None
    media: Media
    quant: Recipe | None
    graphs: tuple[str, ...]
    weights: Any  # one of WEIGHTS
    compiled: Any  # what the backend's `record` says
    versions: Versions
    notes: Notes
    files: dict[FileName, StoredFile]

    @property
    def seed(self) -> int | None:
        """The seed of random weights."""
        found: int | None = getattr(self.weights, "seed", None)
        return found

    @property
    def adapters(self) -> tuple[MergedAdapter, ...]:
        return self.weights.adapters if isinstance(self.weights, MergedWeights) else ()

    def to_dict(self) -> dict[str, Any]:
        """Return the values of the file without its digest."""
        return {"format": FORMAT, **asdict(self), "options": self.options.to_dict()}

    def text(self) -> str:
        """Return the content of the file."""
        return manifest_text(self.to_dict())

    @property
    def digest(self) -> str:
        """Digest of all values, and so of every byte of the engine."""
        return _digest(self.to_dict())

    def resolved(self, spec: Spec, drafter: Spec | None) -> Resolved:
        """Return the spec and options that the engine was built of."""
        held = vars(self)
        own = {f.name: held[f.name] for f in fields(Resolved) if f.name in held}
        own |= {"skip": self.skipped_passes, "recipe": self.quant}
        own |= {"layout": find_backend(self.backend).layout(self.device, self.settings)}
        return Resolved(spec=spec, drafter=drafter, **own)


@dataclass(frozen=True)
class Artefact(Resolved):
    """A checked engine directory. Loading it runs nothing of what lies there."""

    path: Path
    manifest: Manifest
    packing: packings.Packing
    #: packed params that match the graphs; a file that changes from now on is refused
    stored: packings.StoredParams | None
    #: whether digests of weight files are checked too
    whole: bool
    rank: int


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
    not checked.

    Raises EngineError that names the file, the field, and the fix.
    """
    try:
        with _schema_errors():
            m = read_manifest(path)
            _check_files(path, m.files, check_weights, rank)
            spec = load_spec(path / SPEC, alone=True)
            _check_spec(path / MANIFEST, m, spec)
            drafter = _read_drafter(path, m, spec)
            made = m.resolved(spec, drafter)
            packing = _made_again(path, m, made)
            stored = _stored_params(path, m, packing)
    except (OSError, ValueError, RecursionError) as e:
        raise EngineError(f"{path} cannot be read as an engine: {e}; build it again") from None
    own = stored[rank or 0] if stored else None
    found: dict[str, Any] = {"path": path, "manifest": m, "packing": packing, "stored": own}
    return Artefact(**vars(made), **found, whole=check_weights, rank=rank or 0)


@contextmanager
def _schema_errors() -> Iterator[None]:
    """A context in which a field that breaks its schema is an EngineError."""
    try:
        yield
    except SpecError as e:
        raise EngineError(f"{e}; build the engine again") from None


def is_engine(path: Path) -> bool:
    return (path / MANIFEST).is_file()


def _altered(place: Path, what: str) -> EngineError:
    return EngineError(f"{place}: {what}; build the engine again")


def read_manifest(path: Path) -> Manifest:
    """Return the manifest of an engine directory, every field checked."""
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
        raise EngineError(f"{file} is altered or damaged: {e}; build the engine again") from e
    values.pop("digest", None)
    # The whole text is compared, so that not even a space can change.
    if raw != manifest_text(values).encode():
        raise _altered(file, "its digest does not match its content")
    if values.get("format") != FORMAT:
        raise _altered(file, f"format {values.get('format')!r}, this g4ir reads {FORMAT}")
    with _schema_errors():
        manifest = _manifest_of(values, Where(str(file), 0))
    # What is read is what is written: no field of another type, left out, or in another order.
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
    found = "is unfinished" if unfinished else f"has no {MANIFEST}"
    return EngineError(f"{path} is no engine directory: it {found}; run g4ir build{of}")


def require_readable(m: Manifest) -> None:
    """Raise EngineError if the manifest could not be read again, as a path with a line break."""
    try:
        _manifest_of(json.loads(m.text()), Where(MANIFEST, 0))
    except SpecError as e:
        why = f"the engine could not be read again: {e}"
        raise EngineError(f"{why}; give plain names to files and folders") from None


def _manifest_of(values: Mapping[str, Any], where: Where) -> Manifest:
    given = {k: v for k, v in values.items() if k not in ("format", "digest")}
    weights = given.get("weights")
    kind = weights.get("kind") if isinstance(weights, dict) else None
    if not isinstance(kind, str) or kind not in WEIGHTS:
        raise fail(where, "weights", f"expected one of the kinds {', '.join(WEIGHTS)}")
    try:
        record = find_backend(str(given.get("backend"))).record
        own = {"weights": WEIGHTS[kind], "compiled": record, "options": _OptionsFile}
        hints = reader.hints_of(Manifest) | own
        read: Manifest = reader.build(Manifest, reader.tree_of(given, where), hints=hints)
    except InputError as e:  # of a record that checks itself
        raise fail(where, "", str(e)) from None
    found = vars(read.options)
    options = PassOptions(tuple(found[name] for name in OPTIONS))
    return replace(read, options=options)


#: the pass options as they are in the file: a record of each pass by its name
_OptionsFile = make_dataclass(
    "_OptionsFile", [(name, type(default)) for name, default in OPTIONS.items()], frozen=True
)


# --- agreement --------------------------------------------------------------------------------


def _check_files(
    path: Path, files: Mapping[str, StoredFile], weights: bool, rank: int | None
) -> None:
    """Check that every file of the manifest is there, ordinary and unchanged, and no other."""
    for place, folders, names in os.walk(path, onerror=_raised):
        for found in map(Path(place).joinpath, (*folders, *names)):
            kind, at = found.lstat().st_mode, found.relative_to(path).as_posix()
            shown = f"{path}: {tensorfile.quoted(at)}"  # a name may be anything
            if stat.S_ISDIR(kind):
                continue
            if not stat.S_ISREG(kind):
                fix = "put the file itself there, or build the engine again"
                raise EngineError(f"{shown} is a link or no ordinary file; {fix}")
            if at not in (*files, MANIFEST):
                foreign = f"{shown} is not among the files of {MANIFEST}"
                raise EngineError(f"{foreign}; remove it, or build the engine again")
    every = [path / name for name in files]
    read = {*(every if rank is None else packings.rank_files(every, rank))}
    for file, kept in zip(every, files.values(), strict=True):
        large = file.name.endswith(WEIGHT_FILES)
        if not file.is_file():
            raise EngineError(f"{file} is missing; build the engine again")
        if file.stat().st_size != kept.bytes:
            raise _altered(file, f"{file.stat().st_size} bytes, expected {kept.bytes}")
        if file not in read or (large and not weights):
            continue
        if sha256(file) != kept.sha256:
            raise _altered(file, "its SHA-256 is not the manifest's")


def _raised(error: OSError) -> None:
    """Raise the error: a folder that cannot be listed was not checked."""
    raise error


def _check_spec(file: Path, m: Manifest, spec: Spec) -> None:
    if (m.variant, m.spec_digest) != (spec.name, spec.digest()):
        raise _altered(file, f"spec_digest: is not that of {SPEC}")
    most, limits = spec.text.max_position_embeddings, m.limits
    if not limits.prefill_chunk <= limits.max_seq <= most:
        raise _altered(file, f"limits: expected prefill_chunk <= max_seq <= {most}")
    if (grid := m.notes.grid) and grid.exact > grid.groups:
        raise _altered(file, f"notes.grid.exact: expected at most groups, {grid.groups}")
    try:
        checked_settings(find_backend(m.backend), m.settings)
        check_ranks(spec, m.ranks, m.ep)
        placement = find_placement(m.ple_placement, spec, m.device)
        check_media(m.media, spec, MOST_SIZES)
        if m.quant:
            m.quant.schemes(weights_of(spec))
        for name in m.skipped_passes:
            find_pass(name)
    except G4Error as e:
        raise _altered(file, str(e)) from None
    if placement != m.ple_placement:
        raise _altered(file, "ple_placement: is missing")


def _read_drafter(path: Path, m: Manifest, spec: Spec) -> Spec | None:
    """Return the draft model's spec, if there is one; an error if it is not the manifest's, or not
    for this model."""
    if (DRAFTER in m.files) != (m.drafter_digest is not None):
        raise _altered(path / DRAFTER, "drafter_digest is not of it")
    drafter = load_spec(path / DRAFTER, alone=True) if m.drafter_digest else None
    if drafter:
        if drafter.digest() != m.drafter_digest:
            raise _altered(path / DRAFTER, f"not the drafter of {MANIFEST}")
        check_pair(spec, drafter)
        if not m.options.of(RingOptions).slack:
            raise _altered(path / MANIFEST, "options.plan_cache.slack: is missing")
    if m.options.of(LatentOptions).keep != layers_read(spec, drafter):
        raise _altered(path / MANIFEST, "options.latent_kv.keep: is not as drafted from")
    return drafter


def _made_again(path: Path, m: Manifest, made: Resolved) -> packings.Packing:
    """Make the graphs of spec and options; EngineError if the stored text differs."""
    packing = packings.make_packing(**made.of_graphs())
    if tuple(packing.program.graphs) != m.graphs:
        raise _altered(path / MANIFEST, f"graphs: expected {', '.join(packing.program.graphs)}")
    for name, text in graph_texts(packing).items():
        found, wanted = (path / name).read_bytes(), text.encode()
        if found != wanted:
            line = f"{path / name}: line {_first_difference(found, wanted)}"
            why = f"{line} is not what this g4ir makes of the engine's spec and options"
            raise EngineError(f"{why}; {rebuild(path, m, made.spec)}")
    return packing


def _first_difference(one: bytes, two: bytes) -> int:
    pairs = zip(one.split(b"\n"), two.split(b"\n"))
    return next((i for i, (a, b) in enumerate(pairs, 1) if a != b), one.count(b"\n") + 1)


def _stored_params(
    path: Path, m: Manifest, packing: packings.Packing
) -> list[packings.StoredParams]:
    """Return the packed params of each rank, if there are any; EngineError if the graphs take
    others."""
    files = [path / n for n in sorted(m.files) if n.endswith(WEIGHT_FILES)]
    packed = isinstance(m.weights, PackedWeights)
    if packed != bool(files):
        count = f"{len(files)} weight files are named"
        raise _altered(path / MANIFEST, f"weights are {m.weights.kind}, and {count}")
    found = []
    for rank in range(m.ranks if packed else 0):
        found.append(packings.StoredParams.open(packings.rank_files(files, rank)))
        if not found[-1].headers:
            raise _altered(path / MANIFEST, f"no weight file of rank {rank} is named")
        found[-1].check(packing.program)
    return found


def rebuild(path: Path, m: Manifest, spec: Spec) -> str:
    """Return the command that builds an engine again, with its own settings."""
    ring, latent, narrow, activations = (m.options.of(type(o)) for o in OPTIONS.values())
    linked = m.weights if isinstance(m.weights, LinkedWeights) else None
    drafter = path / DRAFTER if m.seed is not None else "DRAFTER"
    given = {
        "--spec": path / SPEC,
        "--backend": m.backend,
        "--device": m.device,
        "--target": m.to_dict()["compiled"].get("target") or None,
        "--dtype": TORCH_NAMES[m.dtype],
        **{f"--{name.replace('_', '-')}": size for name, size in asdict(m.limits).items()},
        "--tp": m.ranks if m.ranks > 1 else None,
        "--ep": m.ep,
        "--all-logits": m.all_logits,
        "--skip": m.skipped_passes,
        "--latent-kv": latent.form,
        "--kv-dtype": KV_NAMES.get(narrow.to),
        "--quant-activations": activations.to if activations.to != OFF else None,
        "--draft-tokens": ring.slack or None,
        "--drafter": drafter if m.drafter_digest else None,
        "--ple-placement": m.ple_placement,
        "--set": tuple(f"{key}={value}" for key, value in m.settings.items()),
        "--quant": m.quant.name if m.quant and not m.quant.held else None,
        "--calibrate": m.notes.calibration.path if m.notes.calibration else None,
        "--random-weights": m.seed,
        "--link-weights": linked is not None,
        "--checkpoint": linked.path if linked else "DIR" if m.seed is None else None,
        "--adapter": tuple(f"{a.path}={a.scale:g}" for a in m.adapters),
    }
    words = ["g4ir", "build"]
    for flag, value in given.items():
        for one in value if isinstance(value, tuple) else (value,):
            if one is not None and one is not False:
                words += [flag] if one is True else [flag, str(one)]
    words += map(str, build_words(m.media, spec))
    return f"build it again: {shlex.join(words)} --out NEW"
