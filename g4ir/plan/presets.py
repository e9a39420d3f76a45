"""Presets: options of a build by name (presets.yaml)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from g4ir.errors import InputError
from g4ir.spec.reader import did_you_mean
from g4ir.ui.files import read_table

from .options import flags_of


@dataclass(frozen=True)
class Preset:
    """A named set of build options: `options` maps fields of BuildOptions to values as on the
    command line; `about`: what it is for."""

    name: str
    about: str
    options: Mapping[str, Any]

    @property
    def flags(self) -> str:
        return " ".join(word for k, v in self.options.items() for word in flags_of({k: v}))


_ROWS = read_table(Path(__file__).with_suffix(".yaml"))
PRESETS = {name: Preset(name, **row) for name, row in _ROWS.items()}


def find_preset(name: str) -> Preset:
    """Return a preset; InputError lists the presets."""
    if name not in PRESETS:
        choices = f"expected one of {', '.join(PRESETS)}"
        raise InputError(f"--preset {name[:40]}: {choices}{did_you_mean(name, PRESETS)}")
    return PRESETS[name]
