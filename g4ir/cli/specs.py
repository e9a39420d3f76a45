"""`g4ir specs`: specs of the shipped variants, of files and of checkpoints."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

from g4ir.errors import InputError
from g4ir.plan.count import counts
from g4ir.spec.parts import slug
from g4ir.spec.record import DRAFTER, diff_specs, drafter_names, load_spec, spec_names, specs_dir
from g4ir.ui import console
from g4ir.ui.table import aligned, cells

from .common import emit, output
from .models import any_spec
from .verb import Verb, argument, flag, json_flag


class Specs(Verb):
    """List, print, check, convert or compare specs."""

    action: Literal["list", "show", "validate", "from-hf", "to-hf", "diff"] = argument(
        "list (default); show, to-hf: NAME; validate FILE; from-hf CHECKPOINT; diff A B",
        "ACTION",
        "?",
        "list",
    )
    sources: list[str] = argument("shipped variant, spec file or checkpoint", "NAME", "*")
    name: str | None = flag("with from-hf: name of the spec (default: the directory's or file's)")
    json: bool = json_flag()

    def __post_init__(self) -> None:
        operands = OPERANDS[self.action].split()
        if len(self.sources) < len(operands):
            problem = "the following arguments are required: "
            problem += ", ".join(operands[len(self.sources) :])
            raise InputError(f"{problem} (see g4ir specs --help)")
        if extra := " ".join(self.sources[len(operands) :]):
            raise InputError(f"unrecognized arguments: {extra} (see g4ir specs --help)")
        if self.name is not None and self.action != "from-hf":
            raise InputError("--name is for `g4ir specs from-hf`: leave it out")

    def __call__(self) -> int:
        action: Callable[..., int] = getattr(self, f"_{self.action.replace('-', '_')}")
        return action(*self.sources)

    def _list(self) -> int:
        rows = [_spec_row(name) for name in spec_names()]
        table = cells({k: (k, _cell) for k in rows[0] if k != "file"}, rows)
        return output(self.json, rows, aligned(table, indent=0, left=len(table[0])))

    def _show(self, name: str) -> int:
        spec = load_spec(name)
        return output(self.json, spec.to_dict(), spec.to_yaml())

    def _validate(self, file: str) -> int:
        console.spec_warnings()
        spec = load_spec(Path(file))
        size, layers = counts(spec).text, spec.text.num_hidden_layers
        facts = {"name": spec.name, "digest": spec.digest(), "text_parameters": size}
        text = f"{file}: ok: {spec.name}, {layers} layers, {size:,} text parameters\n"
        return output(self.json, facts, text)

    def _from_hf(self, source: str) -> int:
        console.spec_warnings()
        spec = any_spec(source)
        spec = replace(spec, name=slug(self.name)) if self.name else spec
        return output(self.json, spec.to_dict(), spec.to_yaml())

    def _to_hf(self, name: str) -> int:
        emit(load_spec(name).to_hf(), indent=2)
        return 0

    def _diff(self, a: str, b: str) -> int:
        rows = diff_specs(any_spec(a), any_spec(b))
        text = "".join(f"{key}: {json.dumps(x)} -> {json.dumps(y)}\n" for key, x, y in rows)
        output(self.json, [{"key": key, "a": x, "b": y} for key, x, y in rows], text)
        return 1 if rows else 0


#: action -> metavars of its arguments
OPERANDS = {"list": "", "show": "VARIANT", "validate": "FILE", "from-hf": "CHECKPOINT"}
OPERANDS |= {"to-hf": "VARIANT", "diff": "A B"}


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
        "drafter": drafter if (drafter := f"{name}{DRAFTER}") in drafter_names() else None,
        "hub": spec.hub,
        "file": str(specs_dir() / f"{name}.yaml"),
    }


def _cell(value: Any) -> str:
    if isinstance(value, int) and value >= 1_000_000:
        return f"{value / 1e9:.3f}B" if value >= 1_000_000_000 else f"{value / 1e6:.1f}M"
    return str(value)
