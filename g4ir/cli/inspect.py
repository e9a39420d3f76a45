"""`g4ir inspect`: where an engine comes from, and whether this user trusts its code."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from .common import ENGINE_HELP, add_verb, emit


def add_inspect(verbs: Any) -> None:
    p = add_verb(verbs, "inspect", _inspect, "origin of an engine, and whether it is trusted")
    p.add_argument("engine", metavar="ENGINE", help=ENGINE_HELP)


def _inspect(args: argparse.Namespace) -> int:
    from g4ir.engine.artefact import open_artefact
    from g4ir.engine.trust import provenance

    found = provenance(open_artefact(Path(args.engine)))
    if args.json:
        emit(found)
        return 0
    for key, value in found.items():
        print(f"{key.replace('_', ' '):<14} {value}")
    return 0
