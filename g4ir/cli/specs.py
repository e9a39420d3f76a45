"""`g4ir specs`: the variants as data."""

from __future__ import annotations

import argparse
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

from g4ir.plan.count import counts
from g4ir.spec.parts import slug
from g4ir.spec.record import (
    DRAFTER,
    diff_specs,
    drafter_names,
    json_schema,
    load_spec,
    spec_names,
    specs_dir,
)
from g4ir.ui import console
from g4ir.ui.table import aligned

from .common import emit, output
from .models import any_spec


def list_specs(args: argparse.Namespace) -> int:
    """List the shipped variants."""
    rows = [_spec_row(name) for name in spec_names()]
    keys = [k for k in rows[0] if k != "file"]
    table = [keys, *([_cell(row[k]) for k in keys] for row in rows)]
    return output(args, rows, aligned(table, indent=0, left=len(keys)))


def _spec_row(name: str) -> dict[str, Any]:
    spec = load_spec(name)
    n = counts(spec)
    return {
        "name": name,
        "layers": spec.text.num_hidden_layers,
        "hidden": spec.text.hidden_size,
        "text": n.text,
        "active": n.active,
        "total": n.loaded,
        "dtype": spec.dtype,
        "drafter": own if (own := f"{name}{DRAFTER}") in drafter_names() else None,
        "hub": spec.hub,
        "file": str(specs_dir() / f"{name}.yaml"),
    }


def _cell(value: Any) -> str:
    if isinstance(value, int) and value >= 1_000_000:
        return f"{value / 1e9:.3f}B" if value >= 1_000_000_000 else f"{value / 1e6:.1f}M"
    return "-" if value is None else str(value)


def show_spec(args: argparse.Namespace) -> int:
    """Print a spec."""
    spec = load_spec(args.name)
    return output(args, spec.to_dict(), spec.to_yaml())


def validate(args: argparse.Namespace) -> int:
    """Check a spec file."""
    console.spec_warnings()
    spec = load_spec(Path(args.file))
    size, layers = counts(spec).text, spec.text.num_hidden_layers
    found = {"name": spec.name, "digest": spec.digest(), "text_parameters": size}
    text = f"{args.file}: ok: {spec.name}, {layers} layers, {size:,} text parameters\n"
    return output(args, found, text)


def from_hf(args: argparse.Namespace) -> int:
    """Print the spec of a checkpoint."""
    console.spec_warnings()
    spec = any_spec(args.source)
    spec = replace(spec, name=slug(args.name)) if args.name else spec
    return output(args, spec.to_dict(), spec.to_yaml())


def to_hf(args: argparse.Namespace) -> int:
    """Print a spec as a config.json."""
    emit(load_spec(args.name).to_hf(), indent=2)
    return 0


def diff(args: argparse.Namespace) -> int:
    """Print the fields that differ; exit 1 where there are any, like diff(1)."""
    rows = diff_specs(any_spec(args.a), any_spec(args.b))
    text = "".join(f"{key}: {json.dumps(a)} -> {json.dumps(b)}\n" for key, a, b in rows)
    output(args, [{"key": key, "a": a, "b": b} for key, a, b in rows], text)
    return 1 if rows else 0


def schema(args: argparse.Namespace) -> int:
    """Print the JSON Schema of spec files."""
    emit(json_schema(), indent=2)
    return 0
