"""`g4ir specs`: the variants as data."""

from __future__ import annotations

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
from .verb import Verb, argument


class ListSpecs(Verb):
    """List the shipped variants."""

    json: bool = False

    def __call__(self) -> int:
        rows = [_spec_row(name) for name in spec_names()]
        keys = [k for k in rows[0] if k != "file"]
        table = [keys, *([_cell(row[k]) for k in keys] for row in rows)]
        return output(self.json, rows, aligned(table, indent=0, left=len(keys)))


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


class ShowSpec(Verb):
    """Print a spec.

    name VARIANT: a shipped variant, or the path of a YAML file
    """

    json: bool = False
    name: str = argument()

    def __call__(self) -> int:
        spec = load_spec(self.name)
        return output(self.json, spec.to_dict(), spec.to_yaml())


class Validate(Verb):
    """Check a spec file.

    file FILE: a spec file (YAML)
    """

    json: bool = False
    file: str = argument()

    def __call__(self) -> int:
        console.spec_warnings()
        spec = load_spec(Path(self.file))
        size, layers = counts(spec).text, spec.text.num_hidden_layers
        found = {"name": spec.name, "digest": spec.digest(), "text_parameters": size}
        text = f"{self.file}: ok: {spec.name}, {layers} layers, {size:,} text parameters\n"
        return output(self.json, found, text)


class FromHf(Verb):
    """Print the spec of a checkpoint.

    source CHECKPOINT: a checkpoint directory, config.json, GGUF file or Hugging Face id
    name: name of the spec (default: the directory's or the file's)
    """

    json: bool = False
    source: str = argument()
    name: str | None = None

    def __call__(self) -> int:
        console.spec_warnings()
        spec = any_spec(self.source)
        spec = replace(spec, name=slug(self.name)) if self.name else spec
        return output(self.json, spec.to_dict(), spec.to_yaml())


class ToHf(Verb):
    """Print a spec as a config.json.

    name VARIANT: a shipped variant, or the path of a YAML file
    """

    name: str = argument()

    def __call__(self) -> int:
        emit(load_spec(self.name).to_hf(), indent=2)
        return 0


class Diff(Verb):
    """Print the fields that differ; exit 1 if there are any, like diff(1).

    a A: a variant, a YAML file, a checkpoint or config.json
    b B: the same kinds of source
    """

    json: bool = False
    a: str = argument()
    b: str = argument()

    def __call__(self) -> int:
        rows = diff_specs(any_spec(self.a), any_spec(self.b))
        text = "".join(f"{key}: {json.dumps(a)} -> {json.dumps(b)}\n" for key, a, b in rows)
        output(self.json, [{"key": key, "a": a, "b": b} for key, a, b in rows], text)
        return 1 if rows else 0


class Schema(Verb):
    """Print the JSON Schema of spec files."""

    def __call__(self) -> int:
        emit(json_schema(), indent=2)
        return 0
