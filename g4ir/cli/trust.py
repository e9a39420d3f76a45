"""`g4ir trust`: allows an engine's native code to run."""

from __future__ import annotations

from pathlib import Path

from g4ir.artefact import trust as decisions
from g4ir.artefact.directory import open_artefact

from .common import print_facts
from .verb import Verb, argument, json_flag


class Trust(Verb):
    """Trust the native code of an engine, while it is unchanged."""

    engine: str = argument("engine directory", "ENGINE")
    json: bool = json_flag()

    def __call__(self) -> int:
        artefact = open_artefact(Path(self.engine), check_weights=True)
        digest = artefact.manifest.digest
        file = decisions.record(digest, decisions.TRUSTED, artefact.path)
        return print_facts(self.json, {"engine": digest, "decision": str(file)})
