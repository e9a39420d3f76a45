"""Engines that are built on first use into the cache: of a GGUF file, a checkpoint directory, a
model of the Hugging Face hub, or a variant.

`NAME-HASH` is an engine's directory there, and `NAME-HASH.json` its record, which is also its lock:
exclusive while it is built or removed, shared while a process uses it. The record's time is that of
the last use. The hash is of the weights' identity, the options, and the versions of what compiles.
Engines whose weight files are alike have the same files on the disk, by hard links.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Set
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, fields, replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from g4ir import __version__
from g4ir.artefact.directory import (
    BUILDING,
    FORMAT,
    MANIFEST,
    PackedWeights,
    StoredFile,
    is_engine,
    read_manifest,
)
from g4ir.artefact.trust import BUILT, find_decision
from g4ir.backends import find_backend
from g4ir.backends.base import Prepared
from g4ir.engine.engine import Engine
from g4ir.errors import EngineError, G4Error, InputError, MissingError
from g4ir.plan.options import BuildOptions
from g4ir.spec.record import SUFFIXES, Spec, load_spec, spec_names
from g4ir.ui.paths import cache_root, private
from g4ir.ui.posix import fcntl
from g4ir.ui.progress import Progress, no_progress
from g4ir.weights.checkpoint import CONFIG, GGUF, sha256
from g4ir.weights.hub import Download, look_up
from g4ir.weights.origin import AbsentWeights, find_model, need_snapshot

from .build import DEFAULTS, prepare, shows_options, write_engine
from .load import load_engine

#: bytes of a file's beginning that are part of its identity
HEADER = 1 << 16
RECORD = ".json"
#: how names of packed weight files begin
PACKED = "weights-"
#: what a backend keeps beside an engine, whose name it begins with
KERNELS = ".kernels"
#: options that may name files
FILES = ("checkpoint", "mmproj", "adapter", "drafter", "quant", "calibrate")
#: whether to download, or a function that decides
Consent = bool | Callable[[Download], bool]
#: shared locks of the engines that this process uses, by path
_in_use: dict[Path, int] = {}


@dataclass(frozen=True)
class CachedEngine:
    """An engine of the cache: its bytes on disk, those of them that other engines have too, the
    model it was built from, the time of its last use (seconds since 1970), whether a process uses
    it, and why it is no longer loaded for its model (nothing if it is)."""

    path: Path
    model: str
    options: Mapping[str, Any]
    bytes: int
    shared: int
    used: float
    in_use: bool
    stale: str
    #: (device, inode) -> bytes
    files: Mapping[tuple[int, int], int] = field(default_factory=dict, repr=False)


@shows_options
def load(
    model: Spec | str | Path,
    *,
    trust: bool = False,
    engines_limit: int | None = None,
    revision: str | None = None,
    download: Consent = False,
    progress: Progress = no_progress,
    **options: Any,
) -> Engine:
    """Load an engine, which is built first unless it was before.

    model: an engine directory, a GGUF file, a checkpoint directory, a Hugging Face id or a shipped
    variant whose weights are in the local cache, or a Spec. trust: as of `load_engine`.
    engines_limit: bytes of the cache, `~/.cache/g4ir/engines`, beyond which the engines used least
    recently are removed. revision: branch, tag or commit of a model of the hub (default: main).
    download: whether to download weights that are not in the local cache, or a function that
    decides. Options of the build, which an engine directory has already:

    {options}

    Raises a G4Error for anything wrong.
    """
    return load_engine(
        find_engine(model, BuildOptions(**options), engines_limit, progress, revision, download),
        trust=trust,
        progress=progress,
    )


def find_engine(
    model: Spec | str | Path,
    options: BuildOptions = DEFAULTS,
    limit: int | None = None,
    progress: Progress = no_progress,
    revision: str | None = None,
    download: Consent = False,
    settled: Callable[[BuildOptions], BuildOptions] = lambda options: options,
) -> Path:
    """Return the engine directory of a model, built first unless it was before; one of the cache is
    in use from now on, until the process ends. What names no model is returned as it is: loading it
    says what is wrong. MissingError for weights that are not in the local cache of the hub, nor to
    be downloaded. `settled`: what options of a build become once its checkpoint is there."""
    if not isinstance(model, Spec) and is_engine(Path(model)):
        refuse_options(Path(model), {*_given(options), *(["revision"] if revision else [])})
        return Path(model)
    try:
        found = _with_weights(model, options, revision)
    except AbsentWeights as e:
        _downloaded(e, download)
        found = _with_weights(model, options, revision)
    if found is None:
        return Path(str(model))
    name, spec, options = *found[:2], settled(found[2])
    path = private(engines_root()) / f"{name}-{_hash(spec, options)}"
    _take(path, spec, options, str(model), progress)
    if limit is not None:
        keep_below(limit)
    return path


def engines_root() -> Path:
    """Return the folder of engines that were built on first use."""
    return cache_root() / "engines"


def cached_engines() -> list[CachedEngine]:
    """Return the engines of the cache, the last used first."""
    found = [_described(path) for path in engines_root().glob(f"*{RECORD}")]
    engines = sorted((e for e in found if e), key=lambda e: -e.used)
    count = Counter(file for e in engines for file in e.files)
    return [
        replace(e, shared=sum(n for file, n in e.files.items() if count[file] > 1)) for e in engines
    ]


def disk_bytes(engines: Iterable[CachedEngine]) -> int:
    """Return the bytes that engines take on the disk: files that several have count once."""
    files = {file: n for e in engines for file, n in e.files.items()}
    return sum(files.values())


def remove(path: Path) -> bool:
    """Remove an engine of the cache; False if a process uses, builds or removes it."""
    held = _open_record(path)
    try:
        fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if not _is_record(held, path):  # but one that another process has removed
            return False
        _clear(path)
        for kept in _kernels(path):
            kept.unlink(missing_ok=True)
        _record(path).unlink(missing_ok=True)
        return True
    except BlockingIOError:
        return False
    finally:
        os.close(held)


def keep_below(limit: int) -> list[Path]:
    """Remove the engines used least recently until the others take at most `limit` bytes; those in
    use stay. Return what was removed."""
    left, removed = cached_engines(), []
    for e in reversed(left[:]):
        if disk_bytes(left) > limit and remove(e.path):
            removed.append(e.path)
            left.remove(e)
    return removed


# --- which engine it is -----------------------------------------------------------------------


def _with_weights(
    model: Spec | str | Path, options: BuildOptions, revision: str | None
) -> tuple[str, Spec | None, BuildOptions] | None:
    """Return the name of a model, its spec unless its checkpoint says it, and the options of its
    build, with its weights; None if there is no such model."""
    spec = model
    if not isinstance(model, Spec) and (model in spec_names() or Path(model).suffix in SUFFIXES):
        spec = load_spec(model)
    if isinstance(spec, Spec):
        if options.random_weights is None and options.checkpoint is None:
            found = need_snapshot(spec, "--random-weights SEED", revision)
            options = replace(options, checkpoint=found)
        elif revision:
            raise InputError(f"--revision {revision} is for weights of the hub; {model} has others")
        return spec.name, spec, options
    _, path = find_model(spec, "--random-weights SEED", revision)
    for option in ("checkpoint", "random_weights"):
        if getattr(options, option) is not None:
            flag, fix = option.replace("_", "-"), "leave them out, or give a variant"
            raise InputError(f"{model} has weights, and --{flag} others: {fix}")
    if not path.is_file() and not (path / CONFIG).is_file():
        return None
    name = Path(spec).resolve().name.removesuffix(GGUF)  # of a hub id too
    return re.sub(r"[^\w.-]", "_", name), None, replace(options, checkpoint=path.absolute())


def _downloaded(absent: AbsentWeights, download: Consent) -> None:
    """Download weights, if that is wanted."""
    if download is False:
        raise MissingError(f"{absent}; --download does so on the way")
    found = look_up(absent.hub_id, absent.revision)
    if not (download is True or download(found)):
        raise MissingError(f"{absent.hub_id} is not downloaded, as was answered")
    found.fetch()


def _hash(spec: Spec | None, options: BuildOptions) -> str:
    device = options.device or find_backend(options.backend).devices[0]
    facts = {
        "spec": spec and spec.digest(),
        "options": _given(options) | {"device": device},
        "files": _files(options),
        "versions": _versions(options),
    }
    return _digest(facts)[:12]


def _digest(facts: Any) -> str:
    return hashlib.sha256(json.dumps(facts, sort_keys=True, default=str).encode()).hexdigest()


def _files(options: BuildOptions) -> list[list[Any]]:
    """Return the identity of each file that options name."""
    given = _given(options)
    named = [(name, str(v)) for name in FILES if name in given for v in _listed(given[name])]
    return [_identity(v.partition("=")[0] if n == "adapter" else v) for n, v in named]


def _versions(options: BuildOptions) -> list[Any]:
    """Return the versions of what builds and runs an engine: of g4ir, and of the packages of its
    backend alone, so that others can be installed; and the machine."""
    backend = find_backend(options.backend)
    device, machine = options.device or backend.devices[0], ""
    with suppress(G4Error, RuntimeError, AssertionError):  # no such device: the build says so
        backend = backend.aimed(options.target)
        machine = backend.machine(device)
    packages = {name: _version(name) for name in backend.packages(device)}
    return [__version__, FORMAT, machine, packages]


def _stale(facts: Mapping[str, Any]) -> str:
    """Return why a record's engine is no longer loaded for its model; nothing if it is."""
    known = {f.name for f in fields(BuildOptions)}
    given = {name: value for name, value in facts["options"].items() if name in known}
    try:
        if facts.get("versions") != _versions(BuildOptions(**given)):
            return "of other versions"
        same = all(json.loads(json.dumps(_identity(f[0]))) == f for f in facts["files"])
    except (G4Error, TypeError, IndexError):
        return "of other options"
    return "" if same else "its files changed"


def _given(options: BuildOptions) -> dict[str, Any]:
    """Return the options that are not the default."""
    values = ((f.name, getattr(options, f.name), f.default) for f in fields(options))
    return {name: value for name, value, default in values if value not in (default, [], {})}


def _listed(value: Any) -> list[Any]:
    return list(value) if isinstance(value, list | tuple) else [value]


def _identity(word: str) -> list[Any]:
    """Return path, and name, size, time of the last write and digest of the header of the file, or
    of each file of the directory; the word alone where there is none, as of `int8`."""
    path = Path(word)
    if not path.exists():
        return [word]
    files = sorted(p for p in path.iterdir() if p.is_file()) if path.is_dir() else [path]
    found: list[Any] = [str(path.absolute())]
    for file in files:
        with suppress(OSError), file.open("rb") as opened:
            facts = os.fstat(opened.fileno())
            header = hashlib.sha256(opened.read(HEADER)).hexdigest()
            found.append((file.name, facts.st_size, facts.st_mtime_ns, header))
    return found


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def refuse_options(path: Path, given: Set[str]) -> None:
    """Raise InputError if options of a build are given to an engine."""
    if given:
        flags = ", ".join(f"--{name.replace('_', '-')}" for name in sorted(given))
        belong, them = ("belong", "them") if given - {min(given)} else ("belongs", "it")
        fix = f"leave {them} out, or give the model that it was built from"
        raise InputError(f"{path} is an engine, and {flags} {belong} to its build: {fix}")


# --- builds and locks -------------------------------------------------------------------------


def _take(
    path: Path, spec: Spec | None, options: BuildOptions, model: str, progress: Progress
) -> None:
    """Have an engine of the cache in use until the process ends; build it if it is not there."""
    if path in _in_use and is_engine(path):
        return
    if path in _in_use:  # somebody deleted the directory: this process would wait for itself
        os.close(_in_use.pop(path))
    facts: dict[str, Any] = {"model": model, "options": _given(options)}
    facts |= {"versions": _versions(options), "files": _files(options)}
    while path not in _in_use:
        held = _locked(path, fcntl.LOCK_SH, progress)
        if not is_engine(path):
            os.close(held)
            held = _locked(path, fcntl.LOCK_EX, progress)
        try:
            _describe(held, facts)
            if not is_engine(path):
                _build(path, spec, options, progress, held)
            fcntl.flock(held, fcntl.LOCK_SH)
            # The exclusive lock ends before the shared one begins: in between the engine may have
            # been removed, and its record be another file.
            if _is_record(held, path) and is_engine(path):
                os.utime(held)
                _in_use[path] = held
        except BaseException:
            if not is_engine(path):
                _record(path).unlink(missing_ok=True)
            os.close(held)
            raise
        if path not in _in_use:
            os.close(held)


def _describe(held: int, facts: Mapping[str, Any]) -> None:
    """Write the facts of an engine to its record, unless they are there; EngineError if the disk
    has no room."""
    if os.fstat(held).st_size:
        return
    try:
        os.pwrite(held, json.dumps(facts, default=str).encode(), 0)
    except OSError as e:
        what = f"cannot write the record of an engine in {engines_root()}: {e.strerror}"
        raise EngineError(f"{what}; make room there, or move the cache") from None


def _build(
    path: Path, spec: Spec | None, options: BuildOptions, progress: Progress, held: int
) -> None:
    """Build an engine, whose record is open and locked exclusively; remove what killed builds
    left. Weight files that an engine of the cache has are linked."""
    _clear(path)
    for left in path.parent.glob(f".*{BUILDING}*"):
        other = path.parent / left.name[1:].partition(BUILDING)[0]
        if other == path or remove(other):
            shutil.rmtree(left, ignore_errors=True)
    progress(f"building {path.name}")
    backend = find_backend(options.backend)
    with backend.about_to_compile(options.device or backend.devices[0]):
        prepared = prepare(spec, options)
        try:
            key = _weights_key(prepared, options)
            _amend(held, {"weights": key})
            with _donor(path, key) as donor:
                write_engine(replace(prepared, donor=donor), path, progress)
        finally:
            prepared.source.close()
    if not path.name.endswith(_hash(spec, options)):
        _clear(path)
        raise EngineError(f"{options.checkpoint} changed while it was read; try again")


# --- weight files of several engines ------------------------------------------------------------


@dataclass(frozen=True)
class Donor:
    """An engine of the cache that has the weight files of one that is built, and their digests."""

    path: Path
    files: Mapping[str, StoredFile]

    def link_to(self, folder: Path) -> bool:
        """Link the files into a folder, none if one of them is not what it was; no engine's file is
        ever written in place."""
        for name, stored in self.files.items():
            if not _linked(self.path / name, folder / name, stored.sha256):
                for done in self.files:
                    (folder / done).unlink(missing_ok=True)
                return False
        return True


def _linked(file: Path, new: Path, digest: str) -> bool:
    """Link a file of this digest under another name, or copy it where the file system has no links;
    False, and nothing done, if its digest is another."""
    if sha256(file) != digest:
        return False
    try:
        os.link(file, new)
    except OSError:
        shutil.copyfile(file, new)
    return True


def _weights_key(p: Prepared, options: BuildOptions) -> str | None:
    """Return a digest of all that the weight files of an engine follow from; None without any."""
    if not isinstance(p.weights, PackedWeights):
        return None
    params = p.packing.program.params().values()
    facts = {
        "version": [__version__, FORMAT],
        "files": _files(options),
        "spec": p.config.spec.digest(),
        "drafter": p.config.drafter and p.config.drafter.digest(),
        "seed": options.random_weights,
        "adapters": [str(a) for a in _listed(options.adapter)],
        "calibrated": options.calibrate and str(options.calibrate),
        "ranks": [p.config.ranks, p.config.ep],
        "params": [f"{v}: {v.type}" for v in params],
        "prologue": str(p.packing.prologue),
    }
    return _digest(facts)


@contextmanager
def _donor(path: Path, key: str | None) -> Iterator[Donor | None]:
    """A context with an engine of the cache that has the same weight files, in use meanwhile; None
    if there is none that this user built here."""
    for record in sorted(engines_root().glob(f"*{RECORD}")) if key else ():
        other = record.with_name(record.name.removesuffix(RECORD))
        if other == path or _facts_of(record).get("weights") != key:
            continue
        held = _open_record(other)
        try:
            if found := _donor_of(other, held):
                yield found
                return
        finally:
            os.close(held)
    yield None


def _donor_of(path: Path, held: int) -> Donor | None:
    """Return an engine that can give its files while its record is open; None if it cannot."""
    try:
        fcntl.flock(held, fcntl.LOCK_SH | fcntl.LOCK_NB)
        if not _is_record(held, path):
            return None
        manifest = read_manifest(path)
        if (decision := find_decision(manifest.digest)) is None or decision.why != BUILT:
            return None
    except (G4Error, OSError):
        return None
    files = {n: f for n, f in manifest.files.items() if n.startswith(PACKED)}
    return Donor(path, files) if files else None


def _clear(path: Path) -> None:
    """Remove an engine directory; a part of one is no engine."""
    (path / MANIFEST).unlink(missing_ok=True)
    shutil.rmtree(path, ignore_errors=True)


def _amend(held: int, facts: Mapping[str, Any]) -> None:
    """Add facts to a record that is locked exclusively."""
    known = json.loads(os.pread(held, os.fstat(held).st_size, 0))
    raw = json.dumps(known | facts, default=str).encode()
    os.pwrite(held, raw, 0)
    os.ftruncate(held, len(raw))


def _facts_of(record: Path) -> dict[str, Any]:
    """Return the facts of a record; none of one that is damaged, or of an earlier version."""
    with suppress(OSError, ValueError):
        found = json.loads(record.read_text())
        return found if isinstance(found, dict) else {}
    return {}


def _record(path: Path) -> Path:
    return path.with_name(f"{path.name}{RECORD}")


def _open_record(path: Path) -> int:
    return os.open(_record(path), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)


def _locked(path: Path, how: int, progress: Progress) -> int:
    """Return the record of an engine, open and locked; waits for a process that builds it."""
    while True:
        held = _open_record(path)
        try:
            fcntl.flock(held, how | fcntl.LOCK_NB)
        except BlockingIOError:
            progress(f"waiting for another process that builds {path.name}")
            fcntl.flock(held, how)
        if _is_record(held, path):
            return held
        os.close(held)  # removed meanwhile


def _is_record(held: int, path: Path) -> bool:
    with suppress(FileNotFoundError):
        return os.path.samestat(os.fstat(held), _record(path).stat())
    return False


def _described(record: Path) -> CachedEngine | None:
    path = record.with_name(record.name.removesuffix(RECORD))
    try:
        facts = json.loads(record.read_text())
        used, in_use = record.stat().st_mtime, _is_used(path)
        every = [*(f for f in path.rglob("*") if f.is_file()), *_kernels(path)]
        files = {(s.st_dev, s.st_ino): s.st_size for s in map(os.stat, every)}
    except (OSError, ValueError):  # it is removed at the moment, or its record is damaged
        return None
    if not is_engine(path):  # it is built at the moment
        return None
    return CachedEngine(
        path,
        facts["model"],
        facts["options"],
        bytes=sum(files.values()),
        shared=0,
        used=used,
        in_use=in_use,
        stale=_stale(facts),
        files=files,
    )


def _kernels(path: Path) -> list[Path]:
    """Return the files of finished kernels beside an engine, one of each rank."""
    return [*path.parent.glob(f"{path.name}*{KERNELS}")]


def _is_used(path: Path) -> bool:
    held = os.open(_record(path), os.O_RDWR | os.O_CLOEXEC)
    try:
        fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(held)
    return False
