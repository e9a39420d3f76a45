"""Finds what lies at a checkpoint's path, a Hugging Face directory or a GGUF file: its spec, the
files that an engine keeps, and its weights."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

from g4ir.errors import InputError
from g4ir.spec.record import Spec

from .adapter import Adapter, lies_in
from .checkpoint import (
    CONFIG,
    GGUF,
    Checkpoint,
    read_extractor,
    read_headers,
    read_side_files,
)
from .formats.base import plain_name
from .gguf.checkpoint import holds_towers, open_gguf, with_towers
from .gguf.container import Container, read_container
from .gguf.metadata import SPEC_ONLY, read_spec, side_files
from .hub import in_cache_folder

log = logging.getLogger(__name__)

#: how files of towers alone begin
MMPROJ = "mmproj"
#: ends of files that are one of a checkpoint's several
OF_DIRECTORY = (".safetensors", ".json")


@dataclass(frozen=True)
class Origin:
    """A checkpoint at a path, and what it says of itself."""

    path: Path
    #: fields that it cannot say: where only these differ, the spec is right
    spec_only: ClassVar[tuple[str, ...]] = ()
    #: whether its spec has its towers
    says_towers: ClassVar[bool] = False

    @property
    def stated(self) -> Path:
        """The file that says its spec."""
        return self.path

    def spec(self) -> Spec:
        """Return its spec; SpecError or WeightsError names the file and what is wrong there."""
        raise NotImplementedError

    def side_files(self) -> dict[str, bytes]:
        raise NotImplementedError

    def extractor(self) -> Mapping[str, Any] | None:
        return None

    def kinds(self, asked: str | Sequence[str], spec: Spec) -> str | Sequence[str]:
        """Return the kinds of media of a build; InputError for one that it has no tower of."""
        return asked

    def open(self, spec: Spec, kinds: Iterable[str], dtype: str) -> Checkpoint:
        """Open its weights, for an engine of this dtype; WeightsError where they do not fit."""
        raise NotImplementedError


def find_origin(path: Path | str) -> Origin:
    """Return what lies at a path; InputError where there is no such file, or one of a directory."""
    path = Path(path)
    if path.is_file():
        if path.name.endswith(OF_DIRECTORY):
            raise InputError(
                f"--checkpoint {path}: one file of a checkpoint; give its directory, {path.parent}"
            )
        return GgufFile(path)
    if path.suffix == GGUF and not path.is_dir():
        raise InputError(f"--checkpoint {path}: no such file")
    return CheckpointDirectory(in_cache_folder(path))


def existing_origin(path: Path | str, mmproj: Path | str | None = None) -> Origin:
    """Return what lies at a path, with the towers of a GGUF file; InputError where nothing does."""
    found = find_origin(path)
    if not found.path.exists():
        raise InputError(f"--checkpoint {path}: no such directory")
    if mmproj is None:
        return found
    if not isinstance(found, GgufFile):
        raise InputError(
            f"--mmproj {mmproj}: {path} is no GGUF file, and has its own towers; leave the option "
            f"out"
        )
    if found.whole:
        raise InputError(f"--mmproj {mmproj}: {path} holds its own towers; leave the option out")
    if not Path(mmproj).is_file():
        raise InputError(f"--mmproj {mmproj}: no such file")
    return replace(found, towers=Path(mmproj))


@dataclass(frozen=True)
class CheckpointDirectory(Origin):
    """A Hugging Face checkpoint."""

    spec_only = (
        "text.moe.layers",
        "text.attn_logit_softcapping",
        "text.sliding.k_eq_v",
    )
    says_towers = True

    @property
    def stated(self) -> Path:
        return self.path / CONFIG

    def spec(self) -> Spec:
        if not self.stated.is_file():
            if lies_in(self.path):
                raise InputError(
                    f"--checkpoint {self.path}: a LoRA adapter of {Adapter(self.path).base}, and "
                    f"no model; give --checkpoint with that model, and --adapter {self.path}"
                )
            found = sorted(self.path.glob(f"*{GGUF}"), key=lambda p: (p.name.startswith(MMPROJ), p))
            near = f"; give --checkpoint {found[0]}" if found else ""
            if found[1:]:
                near += f", or another of {', '.join(p.name for p in found[1:5])}"
            raise InputError(
                f"{self.path} has no {CONFIG}: not a Hugging Face checkpoint directory{near}"
            )
        return Spec.from_hf(self.stated)

    def published(self) -> bool:
        """Whether transformers loads these weights: it does not know other tools' names, and with
        PEFT it would load an adapter that lies here too."""
        names = (name for header in read_headers(self.path) for name in header.entries)
        return not lies_in(self.path) and all(name == plain_name(name) for name in names)

    def side_files(self) -> dict[str, bytes]:
        return read_side_files(self.path)

    def extractor(self) -> Mapping[str, Any] | None:
        return read_extractor(self.path)

    def open(self, spec: Spec, kinds: Iterable[str], dtype: str) -> Checkpoint:
        return Checkpoint.open(self.path, spec, kinds, dtype)


@dataclass(frozen=True)
class GgufFile(Origin):
    """A GGUF file: text model, tokenizer, chat template; `towers`: a file of its towers."""

    towers: Path | None = None
    spec_only = (*CheckpointDirectory.spec_only, *SPEC_ONLY)

    @cached_property
    def container(self) -> Container:
        return read_container(self.path)

    def spec(self) -> Spec:
        return read_spec(self.container)

    def side_files(self) -> dict[str, bytes]:
        return side_files(self.container)

    @cached_property
    def whole(self) -> bool:
        return holds_towers(self.container)

    def kinds(self, asked: str | Sequence[str], spec: Spec) -> str | Sequence[str]:
        described = spec.vision is not None or spec.audio is not None
        if self.towers or (self.whole and described):
            return asked
        words = asked.split(",") if isinstance(asked, str) else asked
        wanted = [w for w in words if w.strip() not in ("", "all", "none")]
        what, fix = "holds the text model alone", "give the file of its towers too, --mmproj FILE"
        if self.whole:
            what = "holds its towers, and not all of how they compute"
            fix = "give --variant or --spec too"
        if wanted:
            raise InputError(
                f"--media {','.join(wanted)[:80]}: {self.path} {what}; {fix}, or leave the option "
                f"out"
            )
        if self.whole and "none" not in words:
            log.warning("%s %s: they are left out; %s", self.path, what, fix)
        return "none"

    def open(self, spec: Spec, kinds: Iterable[str], dtype: str) -> Checkpoint:
        found, kinds = open_gguf(self.container, spec, dtype), tuple(kinds)
        if self.towers:
            return with_towers(found, read_container(self.towers), spec, kinds, dtype)
        if not kinds:
            return found
        return with_towers(found, self.container, spec, kinds, dtype, own=True)
