"""`g4ir inspect` and `trust`: where engines come from, and whose native code is run."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from g4ir.artefact import trust as decisions
from g4ir.artefact.directory import open_artefact
from g4ir.artefact.trust import provenance
from g4ir.errors import InputError
from g4ir.model.media import supported_media
from g4ir.ops.types import TORCH_NAMES
from g4ir.quant.rewrite import weights_of

from .common import output
from .models import Model, named_model
from .verb import Verb, argument


class Inspect(Verb):
    """Print the origin of an engine, or what another model says of itself.

    engine MODEL: {described}
    """

    json: bool = False
    engine: str = argument()

    def __call__(self) -> int:
        model = named_model(self.engine)
        facts = provenance(model.engine) if model.engine else _stated(self.engine, model)
        return _said(self.json, facts, width=14)


def _stated(word: str, model: Model) -> dict[str, str]:
    """Return the facts of a model that is no engine; plain text by name."""
    spec, held = model.spec, model.held
    schemes = held.schemes(weights_of(spec)).values() if held else ()
    forms = Counter(s.form for s in schemes)
    return {
        "model": word,
        "variant": f"{spec.name} ({spec.hub or 'no hub id'})",
        "digest": spec.digest(),
        "layers": str(spec.text.num_hidden_layers),
        "positions": str(spec.text.max_position_embeddings),
        "takes": ", ".join(("text", *supported_media(spec))),
        "dtype": TORCH_NAMES[spec.dtype],
        "quantised": ", ".join(f"{n} {form}" for form, n in forms.items()) or "none",
        "engine": "none: `run`, `chat` and `serve` build one on first use",
    }


class Trust(Verb):
    """Trust an engine, revoke that, or list the engines that are trusted.

    engine ENGINE: engine directory to trust: its compiled code runs as long as it is unchanged
    revoke DIGEST: revoke trust in an engine, as listed
    """

    json: bool = False
    engine: str | None = argument("?")
    revoke: str | None = None

    def __call__(self) -> int:
        if self.engine is not None and self.revoke is not None:
            raise InputError("give ENGINE or --revoke, not both")
        if self.engine is not None:
            found = open_artefact(Path(self.engine), check_weights=True)
            decisions.record(found.manifest.digest, decisions.TRUSTED, found.path)
            return _said(self.json, {"engine": found.manifest.digest})
        if self.revoke is not None:
            if not decisions.revoke(self.revoke):
                raise InputError(f"--revoke {self.revoke}: no such engine; `g4ir trust` lists them")
            return _said(self.json, {"revoked": self.revoke})
        engines = list(decisions.decisions())
        facts = {"engines": [{"digest": d, **asdict(x)} for d, x in engines]}
        text = "".join(f"engine {digest}  {x.why}, {x.when}, {x.path}\n" for digest, x in engines)
        return output(self.json, facts, text)


def _said(as_json: bool, values: Mapping[str, Any], width: int = 0) -> int:
    lines = [f"{key.replace('_', ' '):<{width}} {value}\n" for key, value in values.items()]
    return output(as_json, values, "".join(lines))
