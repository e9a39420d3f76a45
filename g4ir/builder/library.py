"""Cache of engines built on first use, from a GGUF file, a checkpoint directory, a Hugging Face
model, a variant or a spec.

`NAME-HASH` is an engine directory, and `NAME-HASH.json` its record, which is also its lock file: it
is locked exclusively while the engine is built or removed, shared while a process uses it. The
record's mtime is the last use. The hash covers spec, weights' identity, options, the versions of
g4ir and of the backend's packages, and the machine. Engines with equal weight files share them by
hard links.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
import shutil
import sys
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, fields, replace
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from g4ir import __version__
from g4ir.artefact.directory import (
    BUILDING,
    FORMAT,
    LABELS,
    MANIFEST,
    engine_label,
    is_engine,
    read_manifest,
    refuse_options,
)
from g4ir.backends import find_backend
from g4ir.engine.engine import Engine
from g4ir.errors import EngineError, G4Error, InputError, MissingError
from g4ir.plan.options import BuildConfig, BuildOptions, flag_of
from g4ir.plan.resolve import DEFAULT, NO_DRAFTER
from g4ir.spec.record import SUFFIXES, Spec, load_spec, spec_names
from g4ir.ui.locks import AT_ONCE, EXCLUSIVE, SHARED, flock
from g4ir.ui.paths import cache_root, private
from g4ir.ui.progress import Progress, no_progress
from g4ir.weights import origin
from g4ir.weights.checkpoint import CONFIG, GGUF, sha256
from g4ir.weights.hub import Download, look_up

from .build import DEFAULTS, prepare, shows_options, write_engine
from .load import load_engine
from .sources import shipped_variant

log = logging.getLogger(__name__)

#: bytes at a file's start whose digest identifies it, with its name, size and mtime
HEADER = 1 << 16
RECORD = ".json"
#: prefix of the names of packed weight files
PACKED = "weights-"
#: suffix of a backend's kernel cache next to an engine
KERNELS = ".kernels"
#: options whose values may be files
FILES = ("checkpoint", "mmproj", "adapter", "drafter", "quant", "calibrate")
#: whether to download missing weights, or a function that decides
Consent = bool | Callable[[Download], bool]
#: engine directory -> descriptor of its record, with the shared lock of this process
_in_use: dict[Path, int] = {}


@dataclass(frozen=True)
class CachedEngine:
    """An engine of the cache: its bytes on disk, the model it was built from and its options that
    are not the default, the time of its last use (seconds since 1970), and whether a process uses
    it."""

    path: Path
    model: str
    options: Mapping[str, Any]
    #: (device, inode) -> bytes
    files: Mapping[tuple[int, int], int] = field(repr=False)
    used: float
    in_use: bool

    @property
    def bytes(self) -> int:
        return sum(self.files.values())


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
    """Load an engine, building it first if it is not cached.

    model: an engine directory, a GGUF file, a checkpoint directory, a Hugging Face id, a shipped
    variant, a spec file or a Spec. trust: as of `load_engine`. engines_limit: bytes of the cache,
    `~/.cache/g4ir/engines`, beyond which the engines used least recently are removed (None: no
    limit). revision: branch, tag or commit of a model of the hub (default: main).
    download: whether to download weights that are not in the local hub cache, or a function that
    decides. Build options (not for an engine directory): {options}

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
    check: Callable[[BuildConfig], None] = lambda config: None,
) -> Path:
    """Return the engine directory of a model, building it first if it is not cached; a cached
    engine is locked as in use until the process ends. A path without a model is returned
    unchanged: loading it raises the error. MissingError for weights that are not in the hub's local
    cache and may not be downloaded. `settled`: callback that completes the build options; they have
    the checkpoint, if there is one. `check`: callback that may refuse a model before it is
    built."""
    if not isinstance(model, Spec) and is_engine(Path(origin.given_model(model))):
        changed = [*_changed_options(options), *(["revision"] if revision else [])]
        refuse_options(Path(model), [*map(flag_of, changed)])
        return Path(model)
    try:
        model_build = _with_weights(model, options, revision)
    except origin.AbsentWeights as e:
        _downloaded(e, download)
        model_build = _with_weights(model, options, revision)
    if model_build is None:
        return Path(str(model))
    name, spec, options = *model_build[:2], settled(model_build[2])
    if options.drafter in NO_DRAFTER:
        options = replace(options, drafter=None)
    path = private(engines_root()) / f"{name}-{_hash(spec, options)}"
    LABELS[path] = model.name if isinstance(model, Spec) else str(model)
    build = partial(_build, path, spec, options, check, progress)
    _take(path, _changed_options(options), build, progress)
    if limit is not None:
        keep_below(limit)
    return path


def engines_root() -> Path:
    """Return the folder of engines that were built on first use."""
    return cache_root() / "engines"


def cached_engines() -> list[CachedEngine]:
    """Return the cached engines, most recently used first."""
    engines = map(_described, engines_root().glob(f"*{RECORD}"))
    return sorted((e for e in engines if e), key=lambda e: -e.used)


def disk_bytes(engines: Iterable[CachedEngine]) -> int:
    """Return the bytes of engines on disk; shared files count once."""
    return sum({file: n for e in engines for file, n in e.files.items()}.values())


def remove(path: Path) -> bool:
    """Remove an engine of the cache; False if a process uses, builds or removes it."""
    if (record := _locked_at_once(path)) is None:
        return False
    try:
        _clear(path)
        for kernels in _kernels(path):
            kernels.unlink(missing_ok=True)
        _forget(path)
        return True
    finally:
        os.close(record)


def keep_below(limit: int) -> list[Path]:
    """Remove the least recently used engines until the cache is at most `limit` bytes; engines in
    use stay. Return the removed paths."""
    engines, removed = cached_engines(), []
    for e in reversed(engines[:]):
        if disk_bytes(engines) > limit and remove(e.path):
            removed.append(e.path)
            engines.remove(e)
    return removed


# --- identity of an engine -----------------------------------------------------------------------


def _with_weights(
    model: Spec | str | Path, options: BuildOptions, revision: str | None
) -> tuple[str, Spec | None, BuildOptions] | None:
    """Return a model's name, its spec (None: take it from the checkpoint), and its build options,
    with the checkpoint unless weights are random; None if there is no model at the path."""
    spec = model
    if not isinstance(model, Spec) and (model in spec_names() or Path(model).suffix in SUFFIXES):
        spec = load_spec(model)
    if isinstance(spec, Spec):
        if options.random_weights is None and options.checkpoint is None:
            snapshot = origin.need_snapshot(spec, "--random-weights SEED", revision)
            options = replace(options, checkpoint=snapshot)
        elif revision:
            raise InputError(f"--revision {revision} excludes --checkpoint and --random-weights")
        return spec.name, spec, options
    _, path = origin.find_model(spec, "--random-weights SEED", revision)
    folder = origin.read_folder(path)
    if not path.is_file() and not (path / CONFIG).is_file() and not folder:
        return None
    for option in ("checkpoint", "random_weights"):
        if getattr(options, option) is not None:
            why = f"{flag_of(option)} is for a variant or a spec file, and {model} is neither"
            raise InputError(f"{why}: give one of these, or leave {flag_of(option)} out")
    name = Path(spec).resolve().name.removesuffix(GGUF)  # for a hub id: the part after the slash
    name = re.sub(r"[^\w.-]", "_", name)
    if folder:
        return name, *_of_folder(folder, options)
    if options.drafter == DEFAULT and (drafter := origin.adjacent_drafter(path)):
        options = replace(options, drafter=drafter)
    return name, None, replace(options, checkpoint=path.absolute())


def _of_folder(
    folder: origin.ModelFolder, options: BuildOptions
) -> tuple[Spec | None, BuildOptions]:
    """Return the spec of the shipped variant that has the folder's towers (None: no towers are
    taken), and the build options completed with the folder's files: the text model, and towers and
    draft model unless the options exclude them or name others."""
    options = replace(options, checkpoint=folder.model.absolute())
    if options.drafter in (None, DEFAULT) and (drafter := folder.one(origin.DRAFTER_FILE)):
        options = replace(options, drafter=drafter.absolute())
    wants_towers = options.mmproj is None and options.media != "none"
    towers = folder.one(origin.TOWERS_FILE) if wants_towers else None
    if not towers:
        return None, options
    spec = shipped_variant(origin.find_origin(folder.model))
    if spec is None:
        why = f"no single shipped variant has the text model of {folder.model.name}"
        log.warning("%s: left out: %s; build with --spec and --mmproj", towers, why)
        return None, options
    return spec, replace(options, mmproj=towers.absolute())


def _downloaded(absent: origin.AbsentWeights, download: Consent) -> None:
    """Download weights if the user agrees, else raise MissingError."""
    if download is False:
        raise MissingError(f"{absent}; or let g4ir do it: --download (in Python download=True)")
    model_download = look_up(absent.hub_id, absent.revision)
    if not (download is True or download(model_download)):
        raise MissingError(f"{absent.hub_id} is not in the hub cache; its download was declined")
    model_download.fetch()


def _hash(spec: Spec | None, options: BuildOptions) -> str:
    facts = {
        "spec": spec and spec.digest(),
        "options": _changed_options(options) | {"device": _device(options)},
        "files": _files(options),
        "versions": _versions(options),
    }
    text = json.dumps(facts, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def _device(options: BuildOptions) -> str:
    return options.device or find_backend(options.backend).devices[0]


def _files(options: BuildOptions) -> list[list[Any]]:
    """Return the identity of each file among the options."""
    changed = _changed_options(options)
    listed = {k: v if isinstance(v, list | tuple) else [v] for k, v in changed.items()}
    named = [(name, str(v)) for name in FILES for v in listed.get(name, ())]
    return [_identity(v.partition("=")[0] if n == "adapter" else v) for n, v in named]


def _versions(options: BuildOptions) -> list[Any]:
    """Return the versions that an engine depends on: g4ir, the packages of its backend only (others
    may be upgraded), and the machine."""
    backend, device, machine = find_backend(options.backend), _device(options), ""
    with suppress(G4Error, RuntimeError, AssertionError):  # no such device: the build raises
        backend = backend.aimed(options.target)
        machine = backend.machine(device)
    packages = {name: version_of(name) for name in backend.packages(device)}
    return [__version__, FORMAT, machine, packages]


def _changed_options(options: BuildOptions) -> dict[str, Any]:
    """Return the options that are not the default."""
    values = ((f.name, getattr(options, f.name), f.default) for f in fields(options))
    return {name: value for name, value, default in values if value not in (default, [], {})}


def _identity(word: str) -> list[Any]:
    """Return the path, and name, size, mtime and header digest of the file or of each file of the
    directory; the option's text itself, such as `int8`, if there is no such path."""
    path = Path(word)
    if not path.exists():
        return [word]
    files = sorted(p for p in path.iterdir() if p.is_file()) if path.is_dir() else [path]
    identity: list[Any] = [str(path.absolute())]
    for file in files:
        with suppress(OSError), file.open("rb") as opened:
            facts = os.fstat(opened.fileno())
            header = hashlib.sha256(opened.read(HEADER)).hexdigest()
            identity.append((file.name, facts.st_size, facts.st_mtime_ns, header))
    return identity


def version_of(package: str) -> str | None:
    """Return the version of an installed package, or None."""
    with suppress(PackageNotFoundError):
        return version(package)
    return None


# --- builds and locks -------------------------------------------------------------------------


def _take(
    path: Path, options: Mapping[str, Any], build: Callable[[], None], progress: Progress
) -> None:
    """Lock an engine of the cache as in use until the process ends; build it if it is missing."""
    if path in _in_use and is_engine(path):
        return
    if path in _in_use:  # directory deleted: do not wait for our own lock
        os.close(_in_use.pop(path))
    while path not in _in_use:
        record = _locked(path, SHARED, progress)
        if is_engine(path) and os.fstat(record).st_size:
            os.utime(_record(path))  # by path: Windows cannot set times of a descriptor
            _in_use[path] = record
            return
        os.close(record)
        record = _locked(path, EXCLUSIVE, progress)
        try:
            _describe(record, {"model": engine_label(path), "options": options})
            if not is_engine(path):
                build()
        except BaseException:
            if not is_engine(path):
                _forget(path)
            raise
        finally:  # a lock cannot be converted: until it is taken again others may remove the engine
            os.close(record)


def _describe(record: int, facts: Mapping[str, Any]) -> None:
    """Write an engine's record, the JSON of `facts`; EngineError if it cannot be written."""
    try:
        os.lseek(record, 0, os.SEEK_SET)
        os.ftruncate(record, os.write(record, json.dumps(facts, default=str).encode()))
    except OSError as e:
        problem = f"cannot write the record of an engine in {engines_root()}: {e.strerror}"
        raise EngineError(f"{problem}; make room there, or set XDG_CACHE_HOME") from None


def _build(
    path: Path,
    spec: Spec | None,
    options: BuildOptions,
    check: Callable[[BuildConfig], None],
    progress: Progress,
) -> None:
    """Build an engine whose record this process has locked exclusively; also remove what killed
    builds left behind."""
    _clear(path)
    for folder in path.parent.glob(f".*{BUILDING}*"):
        other = path.parent / folder.name[1:].partition(BUILDING)[0]
        if other == path or remove(other):
            shutil.rmtree(folder, ignore_errors=True)
    progress(f"building {path.name}")
    prepared = prepare(spec, options)
    try:
        check(prepared.config)
        write_engine(prepared, path, progress)
    finally:
        prepared.source.close()
    if not path.name.endswith(_hash(spec, options)):
        _clear(path)
        raise EngineError(f"{engine_label(path)}: its inputs changed during the build; try again")
    _share_weights(path)


def _share_weights(path: Path) -> None:
    """Replace weight files of a new engine by hard links to equal files of other cached engines, if
    the file system has links. Engine files are never written in place."""
    weights = {n: f for n, f in read_manifest(path).files.items() if n.startswith(PACKED)}
    for manifest in engines_root().glob(f"[!.]*/{MANIFEST}"):
        other = manifest.parent
        with (
            suppress(G4Error, OSError),  # damaged, or being removed
            TemporaryDirectory(dir=path.parent, prefix=f".{path.name}{BUILDING}") as folder,
        ):
            candidates = read_manifest(other).files if weights and other != path else {}
            for name in [n for n, f in weights.items() if candidates.get(n) == f]:
                os.link(other / name, Path(folder, name))
                if sha256(Path(folder, name)) == weights[name].sha256:
                    os.replace(Path(folder, name), path / name)
                    del weights[name]


def _clear(path: Path) -> None:
    """Remove an engine directory, its manifest first."""
    (path / MANIFEST).unlink(missing_ok=True)
    shutil.rmtree(path, ignore_errors=True)


def _record(path: Path) -> Path:
    return path.with_name(f"{path.name}{RECORD}")


def _forget(path: Path) -> None:
    """Remove an engine's open record; on Windows an open file cannot be removed, and stays without
    its engine."""
    try:
        _record(path).unlink(missing_ok=True)
    except PermissionError:
        if sys.platform != "win32":
            raise


def _open_record(path: Path) -> int:
    return os.open(_record(path), os.O_RDWR | os.O_CREAT, 0o600)


def _locked(path: Path, how: int, progress: Progress) -> int:
    """Return the descriptor of an engine's record, locked as `how` (SHARED or EXCLUSIVE); waits for
    a process that builds or removes the engine, if EXCLUSIVE also for those that use it."""
    while True:
        record = _open_record(path)
        try:
            flock(record, how | AT_ONCE)
        except BlockingIOError:
            progress(f"waiting for {path.name}, which is being built, removed or used")
            flock(record, how)
        if _is_record(record, path):
            return record
        os.close(record)  # removed while this process waited


def _locked_at_once(path: Path) -> int | None:
    """Return the descriptor of an engine's record, locked exclusively; None if a process uses,
    builds or removes the engine."""
    record = _open_record(path)
    with suppress(BlockingIOError):
        flock(record, EXCLUSIVE | AT_ONCE)
        if _is_record(record, path):
            return record
    os.close(record)
    return None


def _is_record(record: int, path: Path) -> bool:
    with suppress(FileNotFoundError):
        return os.path.samestat(os.fstat(record), _record(path).stat())
    return False


def _described(record: Path) -> CachedEngine | None:
    path = record.with_name(record.name.removesuffix(RECORD))
    if not is_engine(path):  # being built or removed
        return None
    try:
        facts = json.loads(record.read_text())
        every = [*(f for f in path.rglob("*") if f.is_file()), *_kernels(path)]
        files = {(s.st_dev, s.st_ino): s.st_size for s in map(os.stat, every)}
        used = record.stat().st_mtime
        return CachedEngine(path, facts["model"], facts["options"], files, used, _is_used(path))
    except (OSError, ValueError):  # being removed, or its record is damaged
        return None


def _kernels(path: Path) -> list[Path]:
    """Return the kernel cache files next to an engine directory, one per rank."""
    return [*path.parent.glob(f"{path.name}*{KERNELS}")]


def _is_used(path: Path) -> bool:
    if (record := _locked_at_once(path)) is not None:
        os.close(record)
    return record is None
