"""`g4ir show --ops`: every op of the IR, with all that is known of it, as one table."""

from __future__ import annotations

import argparse
from typing import Any

from g4ir.ops import OPS, Op
from g4ir.ui.table import aligned

from .common import emit

NOTE = """\
kind: the part of the model; `by name`: that of the first result's name
rounded, summed: how far two right computations may lie apart, in units of the dtype and in fp32
units of a sum"""


def show_ops(args: argparse.Namespace) -> int:
    """Print the ops; with --json all their facts."""
    if args.json:
        emit([_facts(o) for o in OPS.values()])
        return 0
    head = ("op", "kind", "rounded", "summed", "has", "meaning")
    print(aligned([head, *map(_line, OPS.values())], indent=0, left=len(head)), end="")
    print(NOTE)
    return 0


def _facts(o: Op) -> dict[str, Any]:
    """Return what the record says; `kind` is null where it follows from the first result's name."""
    return {
        "op": o.name,
        "meaning": _meaning(o),
        "operands": _operands(o),
        "attributes": dict(o.attrs),
        "kind": o.kind,
        "fused": o.expand is not None,
        "view": o.glue,
        "writes_caches": len(o.updates),
        "workspace": o.workspace is not None,
        "budget": vars(o.budget),
    }


def _operands(o: Op) -> list[str]:
    """Return `x`, `w`, `*rest`, in order; `?` after those that may be left out."""
    found = []
    for p in o.parameters:
        if p.kind is p.VAR_POSITIONAL:
            found.append(f"*{p.name}")
        elif p.kind is not p.KEYWORD_ONLY:
            found.append(p.name if p.default is p.empty else f"{p.name}?")
    return found


def _meaning(o: Op) -> str:
    """Return the first paragraph of its docstring."""
    return " ".join(o.doc.split("\n\n")[0].split())


def _line(o: Op) -> tuple[str, ...]:
    notes = {
        "expansion": o.expand is not None,
        "caches": bool(o.updates),
        "workspace": o.workspace is not None,
        "view": o.glue,
    }
    has = ", ".join(name for name, held in notes.items() if held)
    errors = (str(n) if n else "-" for n in (o.budget.rounded, o.budget.summed))
    return o.name, o.kind or "by name", *errors, has, _meaning(o)
