"""Identifies the model at a path (checkpoint, GGUF file), and finds snapshots in the hub's local
cache."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import Any, ClassVar, TypeVar

from g4ir.errors import InputError
from g4ir.model.tensors import text_tensors, tower_tensors
from g4ir.ops.types import ITEMSIZE
from g4ir.spec.record import Spec, load_spec, need_model, spec_names
from g4ir.ui.paths import hub_cache
from g4ir.ui.units import size_text

from .adapter import Adapter, lies_in
from .checkpoint import (
    CONFIG,
    GGUF,
    INDEX,
    TOKENIZER,
    Checkpoint,
    read_extractor,
    read_headers,
    read_side_files,
)
from .formats.base import plain_name
from .gguf.checkpoint import open_gguf, with_towers
from .gguf.container import CLIP, KIND, SPLIT, Container, architecture, read_container
from .gguf.metadata import GENERATION_KEYS, SPEC_ONLY, read_spec, side_files
from .tensorfile import quoted

#: hub id `org/name` on the command line, unless a path of this name exists
HUB_ID = re.compile(r"[\w-][\w.-]*/[\w.-]+")
#: suffixes of files within a checkpoint directory
OF_DIRECTORY = (".safetensors", ".json")


_SPEC_ONLY = ("text.moe.layers", "text.attn_logit_softcapping", "text.sliding.k_eq_v")


@dataclass(frozen=True)
class CheckpointDirectory:
    """A Hugging Face checkpoint directory."""

    path: Path
    #: spec fields that config.json cannot express: if a variant is requested, its values are used,
    #: without a comparison
    spec_only: ClassVar[tuple[str, ...]] = _SPEC_ONLY
    #: whether the spec tells which towers the model has
    says_towers: ClassVar[bool] = True
    #: key of generation_config.json -> key in the file of `stated_at`, if different
    generation_keys: ClassVar[Mapping[str, str]] = MappingProxyType({})

    @property
    def stated(self) -> Path:
        """The file from which the spec is read."""
        return self.path / CONFIG

    def spec(self) -> Spec:
        """Return the spec that config.json describes; InputError without that file, SpecError for
        an invalid one."""
        if not self.stated.is_file():
            if lies_in(self.path):
                msg = f"is an adapter of {Adapter(self.path).base}, not a model"
                fix = f"give that model (build, export: with --adapter {self.path} to merge it)"
                raise InputError(f"{self.path} {msg}; {fix}")
            files = ", ".join(sorted(p.name for p in self.path.glob(f"*{GGUF}"))[:5])
            why = "; none of its GGUF files is a whole, supported text model: "
            near = why + files if files else ""
            msg = "not a Hugging Face checkpoint directory"
            raise InputError(f"{self.path} has no {CONFIG}: {msg}{near}")
        return Spec.from_hf(self.stated)

    def published(self) -> bool:
        """Whether transformers loads exactly these weights: no tensor's name has a wrapper's prefix
        (which it would not find), and no adapter is in the directory (which it would apply too)."""
        names = (name for header in read_headers(self.path) for name in header.entries)
        return not lies_in(self.path) and all(name == plain_name(name) for name in names)

    def side_files(self) -> dict[str, bytes]:
        return read_side_files(self.path)

    def vocabulary(self) -> Mapping[str, int]:
        """Return token text -> id; empty without a tokenizer.json that has such a table."""
        model = json.loads(self.side_files().get(TOKENIZER, b"{}")).get("model")
        vocabulary = model.get("vocab") if isinstance(model, dict) else None
        return vocabulary if isinstance(vocabulary, dict) else {}

    def stated_at(self, name: str) -> Path:
        """Return the file that holds a side file's content."""
        return self.path / name

    def extractor(self) -> Mapping[str, Any] | None:
        return read_extractor(self.path)

    def kinds(self, asked: str | Sequence[str], spec: Spec) -> str | Sequence[str]:
        """Return the requested media kinds, unchecked: the spec, read from the config, says which
        towers there are."""
        return asked

    def open(self, spec: Spec, kinds: Iterable[str], dtype: str) -> Checkpoint:
        """Open the weights, for an engine of this dtype, with the towers of these media kinds;
        WeightsError if they do not fit the spec."""
        return Checkpoint.open(self.path, spec, kinds, dtype)


@dataclass(frozen=True)
class GgufFile:
    """A GGUF file: text model, tokenizer, chat template; `towers`: the file of its image and audio
    towers (mmproj), if given."""

    path: Path
    towers: Path | None = None
    spec_only: ClassVar[tuple[str, ...]] = (*_SPEC_ONLY, *SPEC_ONLY)
    says_towers: ClassVar[bool] = False
    generation_keys: ClassVar[Mapping[str, str]] = MappingProxyType(GENERATION_KEYS)

    @property
    def stated(self) -> Path:
        return self.path

    @cached_property
    def container(self) -> Container:
        return read_container(self.path)

    def spec(self) -> Spec:
        return read_spec(self.container)

    def side_files(self) -> dict[str, bytes]:
        return side_files(self.container)

    def vocabulary(self) -> Mapping[str, int]:
        return self.container.vocabulary

    def stated_at(self, name: str) -> Path:
        return self.path

    def extractor(self) -> Mapping[str, Any] | None:
        return None

    def kinds(self, asked: str | Sequence[str], spec: Spec) -> str | Sequence[str]:
        words = asked.split(",") if isinstance(asked, str) else asked
        requested = [w for w in words if w.strip() not in ("", "all", "none")]
        if requested and not self.towers:
            fix = "give the file of its towers too, --mmproj FILE, or leave the option out"
            msg = "is read as the text model alone"
            raise InputError(f"--media {','.join(requested)[:80]}: {self.path} {msg}; {fix}")
        return asked if self.towers else "none"

    def open(self, spec: Spec, kinds: Iterable[str], dtype: str) -> Checkpoint:
        text = open_gguf(self.container, spec, dtype)
        if not self.towers:
            return text
        return with_towers(text, read_container(self.towers), spec, kinds, dtype)


Origin = CheckpointDirectory | GgufFile


#: kinds of GGUF files in a folder; kind -> its description in errors
MODEL, TOWERS_FILE, DRAFTER_FILE = "model", "mmproj", "drafter"
_KINDS = {MODEL: "text model", TOWERS_FILE: "file of towers (mmproj)", DRAFTER_FILE: "draft model"}


@dataclass(frozen=True)
class ModelFolder:
    """A folder of GGUF files, by kind."""

    path: Path
    files: Mapping[str, tuple[Path, ...]]

    def one(self, kind: str) -> Path | None:
        """Return the file of a kind; None if there is none. InputError for several."""
        paths = self.files[kind]
        if len(paths) > 1:
            names = " and ".join(p.name for p in paths[:2])
            option = "the file of the model" if kind == MODEL else f"--{kind} FILE"
            fix = f"give {option}, or move one of them away"
            raise InputError(f"{self.path}: {names} are both a {_KINDS[kind]}; {fix}")
        return paths[0] if paths else None

    @property
    def model(self) -> Path:
        path = self.one(MODEL)
        assert path
        return path


def read_folder(folder: Path) -> ModelFolder | None:
    """Return the GGUF files of a folder by kind (of a split model, the first file); None if it is
    no folder, has a config.json, or has no text model."""
    if not folder.is_dir() or (folder / CONFIG).is_file():
        return None
    files: dict[str, list[Path]] = {kind: [] for kind in _KINDS}
    for path in sorted(folder.glob(f"*{GGUF}")):
        split = SPLIT.fullmatch(path.name)
        if split and not path.name.startswith(f"{split[1]}-00001-"):
            continue
        file = read_container(path)
        rules = architecture(file)
        if file.values.get(KIND) == CLIP:
            files[TOWERS_FILE].append(path)
        elif rules:
            files[DRAFTER_FILE if rules.get("drafter") else MODEL].append(path)
    by_kind = {kind: tuple(paths) for kind, paths in files.items()}
    return ModelFolder(folder, by_kind) if by_kind[MODEL] else None


def adjacent_drafter(path: Path) -> Path | None:
    """Return the draft model that `read_folder` finds in the folder of a GGUF file, or None;
    InputError for several."""
    folder = read_folder(path.parent) if path.is_file() else None
    drafter = folder.one(DRAFTER_FILE) if folder else None
    return drafter.absolute() if drafter else None


def find_origin(path: Path | str) -> Origin:
    """Return the checkpoint directory or GGUF file at a path, or the GGUF model in a folder of such
    files. InputError for one file of a checkpoint directory, several models in a folder, and a
    missing .gguf file; any other missing path counts as a directory."""
    path = Path(path)
    if path.is_file():
        if path.name.endswith(OF_DIRECTORY):
            msg = f"one file of a checkpoint; give its directory, {path.parent}"
            raise InputError(f"{path}: {msg}")
        return GgufFile(path)
    if path.suffix == GGUF and not path.is_dir():
        raise InputError(f"{path}: no such file")
    folder = read_folder(path)
    return GgufFile(folder.model) if folder else CheckpointDirectory(path)


def existing_origin(path: Path | str, mmproj: Path | str | None = None) -> Origin:
    """Return the checkpoint directory or GGUF file at a path (`find_origin`), the latter with
    `mmproj` as the file of its towers. InputError if one of the paths does not exist, or for an
    `mmproj` of a checkpoint directory."""
    origin = find_origin(path)
    if not origin.path.exists():
        raise InputError(f"{path}: no such file or directory")
    if mmproj is None:
        return origin
    if not isinstance(origin, GgufFile):
        msg = f"is for a GGUF file, and {path} is none"
        raise InputError(f"--mmproj {mmproj} {msg}; leave the option out")
    if not Path(mmproj).is_file():
        raise InputError(f"--mmproj {mmproj}: no such file")
    return replace(origin, towers=Path(mmproj))


class AbsentWeights(InputError):
    """Error: weights of the hub are not in the local cache; has the id and revision to
    download."""

    def __init__(self, message: str, hub_id: str, revision: str | None) -> None:
        super().__init__(message)
        self.hub_id, self.revision = hub_id, revision


_Name = TypeVar("_Name", bound=str | Path)


def given_model(model: _Name) -> _Name:
    """Return a model's name or path; InputError if it is empty: as a path, it would be the current
    folder."""
    if model == "":
        raise InputError("MODEL '': expected a variant, a hub id or a path")
    return model


def find_model(
    model: str | Path, alternatives: str, revision: str | None = None
) -> tuple[Spec | None, Path]:
    """Return the spec of a variant (None for other models) and the path of the weights: for a
    variant or hub id, the snapshot of this revision (default: main) in the hub's local cache; else
    `model`. InputError if the cache lacks it (the message lists `alternatives` for a variant), or
    for a revision of a path; SpecError for a plain name that is neither a variant nor a path."""
    if isinstance(model, str) and model in spec_names():
        spec = load_spec(model)
        return spec, need_snapshot(spec, alternatives, revision)
    path = Path(given_model(str(model)))
    if not path.exists() and HUB_ID.fullmatch(str(model)):
        if snapshot := hub_snapshot(str(model), revision):
            return None, snapshot
        raise AbsentWeights(
            f"{model}: no such file or directory, and no complete model of this name in the local "
            f"Hugging Face cache; download it with `{_command(str(model), revision)}`",
            str(model),
            revision,
        )
    if not path.exists() and path.name == str(model) and path.suffix != GGUF:
        need_model(load_spec(path.name))  # raises: a draft model, or no variant of this name
    if revision:
        raise InputError(f"--revision {revision} is for a model of the hub, and {model} is a path")
    return None, path


def _command(hub_id: str, revision: str | None) -> str:
    return f"hf download {hub_id}" + (f" --revision {revision}" if revision else "")


def hub_snapshot(hub_id: str, revision: str | None = None) -> Path | None:
    """Return the snapshot of `org/name` in the local cache; None if there is none, or weight files
    are missing in it."""
    snapshot = _snapshot(cache_folder(hub_id), revision or "main")
    return snapshot if snapshot and _has_weights(snapshot) else None


def cached_config(hub_id: str) -> Path | None:
    """Return the config.json of `org/name` (revision main) in the local cache, which may lack the
    weights; or None."""
    snapshot = _snapshot(cache_folder(hub_id))
    return snapshot / CONFIG if snapshot and (snapshot / CONFIG).is_file() else None


def _has_weights(snapshot: Path) -> bool:
    files = [p.name for p in snapshot.iterdir() if p.suffix in (GGUF, ".safetensors")]
    if files and (index := snapshot / INDEX).is_file():
        with suppress(ValueError, KeyError, AttributeError):  # opening the checkpoint raises it
            shards = json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()
            return {*shards} <= {*files}
    return bool(files)


def cache_folder(hub_id: str) -> Path:
    """Return the folder of `org/name` in the local cache; InputError for an invalid name."""
    if not re.fullmatch(r"[\w.-]+(/[\w.-]+)?", hub_id):
        raise InputError(f"hub id must look like org/name, found {quoted(hub_id)}")
    return hub_cache() / ("models--" + hub_id.replace("/", "--"))


def _snapshot(repo: Path, revision: str = "main") -> Path | None:
    reference, commit = repo / "refs" / revision, revision
    if reference.is_file():
        commit = reference.read_text(encoding="utf-8", errors="replace").strip()
    snapshot = repo / "snapshots" / commit
    return snapshot if re.fullmatch(r"[0-9A-Za-z]{1,64}", commit) and snapshot.is_dir() else None


def snapshot_of(spec: Spec, revision: str | None = None) -> Path | None:
    """Return the downloaded snapshot of a spec's weights, or None."""
    return hub_snapshot(spec.hub, revision) if spec.hub else None


def need_snapshot(
    spec: Spec,
    alternatives: str = "--checkpoint DIR or --random-weights SEED",
    revision: str | None = None,
) -> Path:
    """Return the snapshot of a spec's weights; if it is absent, InputError with `alternatives`, the
    options that may be given instead, and the download command if the spec has a hub id."""
    snapshot = snapshot_of(spec, revision)
    if snapshot is not None:
        return snapshot
    if spec.hub is None:
        raise InputError(f"variant {spec.name} has no hub id: give {alternatives}")
    tensors = [*text_tensors(spec).values(), *tower_tensors(spec).values()]
    size = size_text(sum(map(math.prod, tensors)) * ITEMSIZE[spec.dtype])
    raise AbsentWeights(
        f"no complete weights of {spec.hub} in the local Hugging Face cache; download them (about "
        f"{size}) "
        f"with `{_command(spec.hub, revision)}`, or give {alternatives}",
        spec.hub,
        revision,
    )
