"""`g4ir presets`: lists the named sets of build options."""

from __future__ import annotations

from dataclasses import asdict

from g4ir.plan.presets import PRESETS

from .common import output
from .verb import Verb, json_flag


class Presets(Verb):
    """List the presets."""

    json: bool = json_flag()

    def __call__(self) -> int:
        rows = [asdict(p) for p in PRESETS.values()]
        text = "".join(f"{p.name}: {p.about}\n  {p.flags}\n" for p in PRESETS.values())
        return output(self.json, rows, text)
