"""`g4ir specs`: the variants as data."""

from __future__ import annotations

import argparse
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

from g4ir.spec.parts import slug
from g4ir.spec.record import (
    DRAFTER,
    SUFFIXES,
    Spec,
    diff_specs,
    drafter_names,
    json_schema,
    load_spec,
    spec_names,
    specs_dir,
)
from g4ir.ui import console
from g4ir.ui.table import aligned

from .common import add_verb, emit


def add_specs(verbs: Any) -> None:
    parser = add_verb(verbs, "specs", _specs_list, "shipped variants and spec files")
    inner = parser.add_subparsers(metavar="list|show|validate|from-hf|to-hf|diff|schema")
    add_verb(inner, "list", _specs_list, "list the shipped variants (default)")
    p = add_verb(inner, "show", _specs_show, "print a variant as YAML")
    p.add_argument("name", metavar="NAME", help="a shipped variant, or the path of a YAML file")
    p = add_verb(inner, "validate", _specs_validate, "check a spec file")
    p.add_argument("file", metavar="FILE", help="a spec file (YAML)")
    p = add_verb(inner, "from-hf", _specs_from_hf, "print the spec of a checkpoint")
    p.add_argument(
        "source", metavar="CHECKPOINT", help="a checkpoint directory, config.json or GGUF file"
    )
    p.add_argument("--name", help="name of the spec (default: the directory's or the file's)")
    p = add_verb(
        inner, "to-hf", _specs_to_hf, "print a spec as Hugging Face config.json", json=False
    )
    p.add_argument("name", metavar="NAME", help="a shipped variant, or the path of a YAML file")
    p = add_verb(inner, "diff", _specs_diff, "compare two specs; exit 1 if they differ")
    p.add_argument("a", metavar="A", help="a variant, a YAML file, a checkpoint or config.json")
    p.add_argument("b", metavar="B", help="the same kinds of source")
    add_verb(
        inner,
        "schema",
        _specs_schema,
        "print the JSON Schema of spec files, for editors",
        json=False,
    )


def _specs_list(args: argparse.Namespace) -> int:
    rows = [_spec_row(name) for name in spec_names()]
    if args.json:
        emit(rows)
        return 0
    keys = [k for k in rows[0] if k != "file"]
    table = [keys, *([_cell(row[k]) for k in keys] for row in rows)]
    print(aligned(table, indent=0, left=len(keys)), end="")
    return 0


def _spec_row(name: str) -> dict[str, Any]:
    from g4ir.plan.count import counts

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


def _specs_show(args: argparse.Namespace) -> int:
    spec = load_spec(args.name)
    emit(spec.to_dict()) if args.json else print(spec.to_yaml(), end="")
    return 0


def _specs_validate(args: argparse.Namespace) -> int:
    from g4ir.plan.count import counts

    console.spec_warnings()
    spec = load_spec(Path(args.file))
    row = {"name": spec.name, "digest": spec.digest(), "text_parameters": counts(spec).text}
    if args.json:
        emit(row)
    else:
        print(
            f"{args.file}: ok: {spec.name}, {spec.text.num_hidden_layers} layers, "
            f"{row['text_parameters']:,} text parameters"
        )
    return 0


def _specs_from_hf(args: argparse.Namespace) -> int:
    console.spec_warnings()
    spec = _stated_spec(args.source)
    spec = replace(spec, name=slug(args.name)) if args.name else spec
    emit(spec.to_dict()) if args.json else print(spec.to_yaml(), end="")
    return 0


def _specs_to_hf(args: argparse.Namespace) -> int:
    emit(load_spec(args.name).to_hf(), indent=2)
    return 0


def _specs_diff(args: argparse.Namespace) -> int:
    """Print the fields that differ; exit 1 where there are any, like diff(1)."""
    rows = diff_specs(any_spec(args.a), any_spec(args.b))
    if args.json:
        emit([{"key": key, "a": a, "b": b} for key, a, b in rows])
    for key, a, b in () if args.json else rows:
        print(f"{key}: {json.dumps(a)} -> {json.dumps(b)}")
    return 1 if rows else 0


def _specs_schema(args: argparse.Namespace) -> int:
    emit(json_schema(), indent=2)
    return 0


def any_spec(source: str) -> Spec:
    """Read the spec of a shipped name, a YAML file, a config.json or a checkpoint."""
    path = Path(source)
    other = path.suffix not in ("", *SUFFIXES) and path.is_file()
    stated = other or path.suffix == ".json" or ("/" in source and path.is_dir())
    return _stated_spec(source) if stated else load_spec(source)


def _stated_spec(source: str) -> Spec:
    """Read what a checkpoint, or a config.json, says of itself."""
    path = Path(source)
    if path.suffix == ".json":
        return Spec.from_hf(source)
    from g4ir.weights.origin import find_origin

    return find_origin(path).spec()
