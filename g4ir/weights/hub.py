"""Finds snapshots in the local cache of the Hugging Face hub."""

from __future__ import annotations

import math
import re
from pathlib import Path

from g4ir.errors import InputError
from g4ir.model.tensors import text_tensors, tower_tensors
from g4ir.ops.types import ITEMSIZE
from g4ir.spec.record import Spec
from g4ir.ui.paths import hub_cache
from g4ir.ui.units import size_text

from .tensorfile import quoted


def hub_snapshot(hub_id: str, revision: str = "main") -> Path | None:
    """Return the downloaded snapshot of `org/name` in the local cache, or None."""
    if not re.fullmatch(r"[\w.-]+(/[\w.-]+)?", hub_id):
        raise InputError(f"hub id must look like org/name, found {quoted(hub_id)}")
    return _snapshot(hub_cache() / ("models--" + hub_id.replace("/", "--")), revision)


def _snapshot(repo: Path, revision: str = "main") -> Path | None:
    reference = repo / "refs" / revision
    if not reference.is_file():
        return None
    commit = reference.read_text(encoding="utf-8", errors="replace").strip()
    snapshot = repo / "snapshots" / commit
    return snapshot if re.fullmatch(r"[0-9A-Za-z]{1,64}", commit) and snapshot.is_dir() else None


def in_cache_folder(path: Path) -> Path:
    """Return the snapshot that a cache folder `models--org--name` stands for; any other path as it
    is. InputError where the folder has no snapshot, or several of which none is `main`."""
    folder = path / "snapshots"
    if not folder.is_dir():
        return path
    found = sorted(p for p in folder.iterdir() if p.is_dir())
    main = _snapshot(path) or (found[0] if len(found) == 1 else None)
    if main is None:
        names = ", ".join(p.name for p in found[:8])
        fix = f"give one of them: {names}" if found else "download the model again"
        raise InputError(
            f"{path}: a folder of the hub's cache with {len(found)} snapshots, of which none is "
            f"main; {fix}"
        )
    return main


def snapshot_of(spec: Spec) -> Path | None:
    """Return the downloaded snapshot of a spec's weights, or None."""
    return hub_snapshot(spec.hub) if spec.hub else None


def need_snapshot(spec: Spec, option: str = "--checkpoint") -> Path:
    """Return the snapshot of a spec's weights; InputError with the download command if absent."""
    found = snapshot_of(spec)
    if found is not None:
        return found
    given = f"{option} DIR"
    if option == "--checkpoint":
        given += " or --random-weights SEED"
    if spec.hub is None:
        raise InputError(f"variant {spec.name} has no hub id: give {given}")
    tensors = [*text_tensors(spec).values(), *tower_tensors(spec).values()]
    size = size_text(sum(map(math.prod, tensors)) * ITEMSIZE[spec.dtype])
    raise InputError(
        f"no weights of {spec.hub} in the local Hugging Face cache; download them (about {size}) "
        f"with `hf download {spec.hub}`, or give {given}"
    )
