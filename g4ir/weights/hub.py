"""Downloads from the Hugging Face hub into its local cache, by huggingface_hub, which obeys
HF_TOKEN, HF_ENDPOINT and HF_HUB_OFFLINE."""

from __future__ import annotations

import errno
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from g4ir.errors import G4Error, InputError, MissingError
from g4ir.ui.files import free_bytes
from g4ir.ui.paths import hub_cache
from g4ir.ui.units import size_text

from .checkpoint import CONFIG, GGUF
from .origin import cache_folder

#: small files of a checkpoint: downloaded before weights, so that a snapshot with all its weights
#: is complete
SMALL = re.compile(r"[^/]+\.(json|jinja|model)")
WEIGHTS = re.compile(r"[^/]+\.safetensors")
ROOM = "make room, or set HF_HUB_CACHE to a folder with more"


@dataclass(frozen=True)
class Download:
    """A model of the hub at one commit: its files in the order in which they are fetched, with
    their sizes in bytes; the URL of its page, and whether its licence must be accepted there."""

    hub_id: str
    revision: str
    commit: str
    files: dict[str, int]
    page: str
    gated: bool

    @property
    def absent(self) -> int:
        """Bytes of the files that the commit's snapshot in the local cache lacks."""
        at = self._snapshot
        return sum(size for name, size in self.files.items() if not (at / name).exists())

    @property
    def free(self) -> int:
        return free_bytes(hub_cache())

    @property
    def _snapshot(self) -> Path:
        return cache_folder(self.hub_id) / "snapshots" / self.commit

    def __str__(self) -> str:
        accept = ", to be accepted there first" if self.gated else ""
        return (
            f"{self.hub_id} ({self.revision}): {size_text(self.absent)} to download, "
            f"{size_text(self.free)} free in {hub_cache()}; licence: {self.page}{accept}"
        )

    def fetch(self) -> Path:
        """Download the files that are absent, with huggingface_hub's progress bars; return the
        snapshot's folder. MissingError if the disk has no room, or the download fails."""
        if self.absent > self.free:
            raise MissingError(f"{self}; {ROOM}")
        with _errors(self.hub_id, self.revision) as hub:
            api, where = hub.HfApi(), {"revision": self.commit, "cache_dir": hub_cache()}
            for name in self.files:
                api.hf_hub_download(self.hub_id, name, **where)
        ref = cache_folder(self.hub_id) / "refs" / self.revision
        ref.parent.mkdir(parents=True, exist_ok=True)
        ref.write_text(self.commit)  # last: a referenced snapshot is complete
        return self._snapshot


def look_up(hub_id: str, revision: str | None = None) -> Download:
    """Return a model of the hub at a branch, tag or commit (default: main). InputError if there is
    no such model or revision, or it is no checkpoint; MissingError if the hub is out of reach or
    refuses access, or huggingface_hub is not installed."""
    revision = revision or "main"
    with _errors(hub_id, revision) as hub:
        api = hub.HfApi()
        info = api.model_info(hub_id, revision=revision, files_metadata=True)
    page = f"{api.endpoint}/{hub_id}"
    sizes = {s.rfilename: s.size or 0 for s in info.siblings or ()}
    small = [n for n in sizes if SMALL.fullmatch(n)]
    weights = [n for n in sizes if WEIGHTS.fullmatch(n)]
    if CONFIG not in small or not weights:
        files = [n for n in sizes if n.endswith(GGUF)]
        fix = "give the id of a Hugging Face checkpoint"
        if files:
            fix = f"download a GGUF file of it with `hf download {hub_id} {files[0]}`, and give it"
        raise InputError(f"{page} has no {CONFIG} with safetensors: {fix}")
    ordered = {name: sizes[name] for name in (*small, *weights)}
    return Download(hub_id, revision, info.sha, ordered, page, bool(info.gated))


@contextmanager
def _errors(hub_id: str, revision: str) -> Iterator[Any]:
    """Context that yields huggingface_hub and converts errors to InputError or MissingError."""
    try:
        import huggingface_hub as hub
        from huggingface_hub import errors
    except ImportError:
        fix = "pip install huggingface_hub"
        raise MissingError(
            f"{hub_id}: a download needs the package huggingface_hub: {fix}"
        ) from None
    endpoint = hub.HfApi().endpoint
    page = f"{endpoint}/{hub_id}"
    token = "set HF_TOKEN, or run `hf auth login`"
    worded: dict[type[Exception], Callable[[], G4Error]] = {
        errors.GatedRepoError: lambda: MissingError(
            f"{hub_id} is gated: accept its licence at {page}, and {token}"
        ),
        errors.RepositoryNotFoundError: lambda: InputError(
            f"{hub_id}: no such model at {endpoint}; if it is private, {token}"
        ),
        errors.RevisionNotFoundError: lambda: InputError(
            f"--revision {revision}: {page} has no such branch, tag or commit"
        ),
        errors.OfflineModeIsEnabled: lambda: MissingError(
            f"{hub_id}: HF_HUB_OFFLINE forbids downloads: unset it"
        ),
    }
    try:
        yield hub
    except Exception as e:
        causes = [e, e.__cause__, e.__context__]
        for kind, error in worded.items():
            if any(isinstance(c, kind) for c in causes):
                raise error() from None
        if isinstance(e, OSError) and e.errno in (errno.ENOSPC, errno.EDQUOT):
            raise MissingError(f"{hub_id}: the disk of {hub_cache()} is full: {ROOM}") from None
        cause = e.__cause__ or e
        first = (str(cause).splitlines() or [type(cause).__name__])[0]
        fix = "try again: complete files are kept"
        problem = f"{hub_id}: request to {endpoint} failed ({first})"
        raise MissingError(f"{problem}; {fix}") from None
