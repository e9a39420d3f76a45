"""Finds snapshots in the local cache of the Hugging Face hub."""

from __future__ import annotations

import re
from pathlib import Path

from g4ir.errors import InputError
from g4ir.ui.places import hub_cache

from .tensorfile import quoted


def hub_snapshot(hub_id: str, revision: str = "main") -> Path | None:
    """Return the downloaded snapshot of `org/name` in the local cache, or None."""
    if not re.fullmatch(r"[\w.-]+(/[\w.-]+)?", hub_id):
        raise InputError(f"hub id must look like org/name, found {quoted(hub_id)}")
    repo = hub_cache() / ("models--" + hub_id.replace("/", "--"))
    reference = repo / "refs" / revision
    if not reference.is_file():
        return None
    commit = reference.read_text(encoding="utf-8", errors="replace").strip()
    snapshot = repo / "snapshots" / commit
    return snapshot if re.fullmatch(r"[0-9A-Za-z]{1,64}", commit) and snapshot.is_dir() else None
