"""`g4ir trust`: the engines whose native code runs."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

from g4ir.artefact import trust as decisions
from g4ir.artefact.directory import open_artefact
from g4ir.errors import InputError

from .common import output, print_facts
from .verb import Verb, argument, flag, json_flag


class Trust(Verb):
    """Trust an engine, revoke that, or list the engines that are trusted."""

    engine: str | None = argument("engine directory, trusted while it is unchanged", "ENGINE", "?")
    revoke: str | None = flag("revoke trust in an engine, as listed", None, "DIGEST")
    json: bool = json_flag()

    def __call__(self) -> int:
        if self.engine is not None and self.revoke is not None:
            raise InputError("give ENGINE or --revoke, not both")
        if self.engine is not None:
            artefact = open_artefact(Path(self.engine), check_weights=True)
            decisions.record(artefact.manifest.digest, decisions.TRUSTED, artefact.path)
            return print_facts(self.json, {"engine": artefact.manifest.digest})
        if self.revoke is not None:
            if not decisions.revoke(self.revoke):
                raise InputError(f"--revoke {self.revoke}: no such engine; `g4ir trust` lists them")
            return print_facts(self.json, {"revoked": self.revoke})
        engines = list(decisions.decisions())
        facts = {"engines": [{"digest": d, **asdict(x)} for d, x in engines]}
        text = "".join(f"engine {digest}  {x.why}, {x.when}, {x.path}\n" for digest, x in engines)
        return output(self.json, facts, text)
